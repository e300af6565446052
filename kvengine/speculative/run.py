"""One sequence from its prompt to its end, and rows of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from kvengine.errors import ModelError
from kvengine.hf.rope import DYNAMIC, LONG, turning_point
from kvengine.speculative.clock import Clock, Watch
from kvengine.speculative.law import Text, known
from kvengine.speculative.report import Report
from kvengine.speculative.session import Asks
from kvengine.speculative.tier import Drafter, Tier
from kvengine.speculative.turning import reads_anew

ALIKE = {"EosTokenCriteria", "MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria"}
"""Criteria of transformers that end all rows by one rule: a row may be given to them alone."""


class Run:
    """One sequence, from its prompt to its end."""

    def __init__(self, begin: Callable[[], Tier], ended: Callable[[Tensor], bool], limit: int, watch: Watch) -> None:
        """begin: tiers that have read nothing yet; ended: whether a text, padding included, has; limit: tokens of the
        longest, padding included; watch: this row's time."""
        self.begin, self.top, self.ended, self.limit, self.watch = begin, begin(), ended, limit, watch
        self.turn, self.fixed = (turning_point(self.top.session.model, kind) for kind in (LONG, DYNAMIC))
        self.report = Report()

    def going(self, text: Text, put: Callable[[Tensor], None] | None) -> Asks[list[int]]:
        """The text to its end, padding included, in steps; `put` gets the new tokens of each round."""
        prompt, clock = len(text), Clock(self.watch)
        new = [self._first(text)]
        prefill = clock.lap()
        while not self._append(text, new, put):
            if self._outgrown(text):
                new = [self._anew(text)]
            else:
                new = (yield from self.top.stepping(text, (), self._room(text)))[0].tokens
        before, self.report = self.report, Report.of(self.top, prompt, len(text) - prompt, prefill, clock.lap())
        self.report.go_on(before)
        return [*text.padding, *text.tokens]

    def _room(self, text: Text) -> int:
        """Tokens that may be drafted: up to the end, and not over to another rotation, of which each length may have one."""
        known, room = len(text), self.limit - len(text.padding) - len(text) - 1
        if self.turn is not None and known <= self.turn:
            room = min(room, self.turn - known)
        return room if self.fixed is None else max(0, min(room, self.fixed - known))

    def _outgrown(self, text: Text) -> bool:
        """Whether the text has just outgrown the rotation that it was read with, and the model has it read anew."""
        session = self.top.session
        if self.turn is None or not session.settled <= self.turn < len(text):
            return False
        return reads_anew(session.model, text, session.cache)

    def _anew(self, text: Text) -> int:
        """Read all of it with tiers that have read nothing, and draw the next token."""
        self.report = Report.of(self.top, 0, 0, (0.0, 0.0), (0.0, 0.0))
        self.top = self.begin()
        return self._first(text)

    def _first(self, text: Text) -> int:
        """Read the prompt with every model, and draw the first token."""
        self.top.ahead.begin(len(text))
        logits = self.top.session.prefill(text.tokens)
        prefill(self.top.below, text.tokens)
        law = self.top.law(text, [()], logits)[0]
        return self.top.rule.judge(law, None, (), len(text))[1]

    def _append(self, text: Text, new: Sequence[int], put: Callable[[Tensor], None] | None) -> bool:
        """Add tokens up to where the text ends; whether it does."""
        begin, done = len(text), False
        for token in new:
            text.tokens.append(token)
            done = self._ends(text)
            if done:
                break
        if put is not None:
            put(text.ids()[0, len(text.padding) + begin :].clone())
        if not done:
            self.top.settle(text)
        return done

    def _ends(self, text: Text) -> bool:
        return len(text.padding) + len(text) >= self.limit or self.ended(text.ids())


def prefill(drafter: Drafter | None, prompt: Sequence[int]) -> None:
    """Let every model below the top read the prompt, the uppermost first."""
    session = getattr(drafter, "session", None)
    if session is not None:
        session.prefill(prompt)
    if isinstance(drafter, Tier):
        drafter.ahead.begin(len(prompt))
        prefill(drafter.below, prompt)


def ended(criteria: Any, row: int, rows: int, ids: Int64[Tensor, "1 token"]) -> bool:
    """Whether a batch's criteria end this row: where some may tell rows apart, it is shown at its place among others, which
    count for nothing."""
    if criteria is None:
        return False
    if rows == 1 or all(known(one, ALIKE) for one in criteria):
        return bool(criteria(ids, None).all())
    return bool(criteria(ids.repeat(rows, 1), None)[row])


def texts(ids: Int64[Tensor, "row token"], mask: Shaped[Tensor, "row token"] | None) -> Iterator[Text]:
    """The rows without their left padding. `mask`: of any dtype, 0 is padding."""
    for row, line in enumerate(ids.tolist()):
        pad = 0 if mask is None else int((mask[row] == 0).sum())
        if pad and bool((mask[row, :pad] != 0).any()):  # type: ignore[index]
            raise ModelError("a batch for generation is padded on the left; set tokenizer.padding_side = 'left'")
        if pad == len(line):
            raise ModelError(f"row {row} of the batch has no token that is not padding")
        yield Text(line[pad:], line[:pad])


def padded(rows: list[list[int]], config: Any, device: torch.device) -> Int64[Tensor, "row token"]:
    """Rows as one tensor, the shorter ones continued by the padding token (or the end token, if there is none)."""
    pad = config.pad_token_id
    if pad is None:
        pad = next(iter(end_tokens(config)), 0)
    longest = max(map(len, rows))
    return torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=device)


def end_tokens(config: Any) -> list[int]:
    ends = config.eos_token_id
    return [] if ends is None else torch.as_tensor(ends).flatten().tolist()
