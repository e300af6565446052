"""How a sample is asked: where the question stands relative to compression, and what stays in the cache between turns.

Two modes, both as in SCBench; a task with one turn is the same thing with a list of one.

* **multi-turn**, query-aware: context and first question are the prompt, so compression sees that question. Generated
  tokens are thrown away; the golden answer and the next question are read on top of what was kept.
* **multi-request**, query-agnostic: the context alone is the prompt. Every question is read and answered on a copy of
  the context's cache, so all of them meet the same one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvengine.evals.engine import Session, Usage
from kvengine.evals.prompt import Prompter, middle_cut
from kvengine.evals.tasks import Sample, Turn


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One turn's result. Seconds; `ttft` runs from the first unread token of this turn to the first new token."""

    text: str
    tokens: int
    finish: str  # "stop", "length" or "forced"
    prompt_tokens: int
    truncated: bool
    ttft: float | None  # None: not measured, the sample was not asked alone
    decode: float | None
    usage: Usage
    nll: float | None = None
    first: bool = False  # nothing was read between the prompt and the answer

    @property
    def tells_reads(self) -> bool:
        """Whether the last pass was one under the selection. A prompt's own, whose attention is exact, says nothing of what a
        decoded token reads."""
        return not self.first or self.tokens > (self.finish != "stop")  # what ends an answer at its length is not read


def alone(sample: Sample) -> list[Sample]:
    """A sample with several questions as samples with one."""
    if len(sample.turns) == 1:
        return [sample]
    return [replace(sample, turns=(turn,), opening=None) for turn in sample.turns]


@dataclass(frozen=True)
class Asked:
    """What was read for a turn: tokens, whether the middle was cut out, seconds until the first new token was known, and
    whether it was the prompt alone."""

    tokens: int
    truncated: bool
    ttft: float
    first: bool


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """`limit`: most tokens of the first prompt; longer ones lose their middle. `stop`: ids that end an answer."""

    prompter: Prompter
    mode: str
    stop: frozenset[int]
    limit: int | None = None
    golden: bool = True  # the history holds the golden answers, not the model's own

    def play(self, session: Session, sample: Sample) -> Iterator[Answer]:
        """Ask every turn of the sample in an empty session."""
        asking = replace(self, prompter=self.prompter.of(sample))
        return asking._turns(session, sample) if self.mode == "multi-turn" else asking._requests(session, sample)

    def _turns(self, session: Session, sample: Sample) -> Iterator[Answer]:
        start = time.perf_counter()
        whole = self.prompter.whole(sample)
        ids, before, most = self.cut(whole), "", None
        for index, turn in enumerate(sample.turns):
            if index:
                start = time.perf_counter()
                ids = self.prompter.follow(before, turn, most)
            logits = session.read(ids)
            session.follow_up()
            asked = Asked(len(ids), not index and len(ids) < len(whole), known(logits) - start, not index)
            last = index == len(sample.turns) - 1
            answer = self._answer(session if last else session.branch(), logits, turn, asked)
            before, most = (turn.answers[0], None) if self.golden else (answer.text, turn.max_new_tokens)
            yield answer

    def _requests(self, session: Session, sample: Sample) -> Iterator[Answer]:
        start = time.perf_counter()
        whole = self.prompter.context(sample)
        context = self.cut(whole)
        logits = session.read(context)
        session.follow_up()
        prefill = known(logits) - start  # each request is charged the context it needs
        for index, turn in enumerate(sample.turns):
            branch = session if index == len(sample.turns) - 1 else session.branch()
            start = time.perf_counter()
            ids = self.prompter.asked(turn)
            found = branch.read(ids) if ids else logits
            ttft = prefill + (known(found) - start if ids else 0.0)
            asked = Asked(len(context) + len(ids), len(context) < len(whole), ttft, not ids)
            yield self._answer(branch, found, turn, asked)

    def cut(self, ids: list[int]) -> list[int]:
        """A first prompt without what does not fit of its middle."""
        return ids if self.limit is None else middle_cut(ids, self.limit)

    def _answer(self, session: Session, logits: Tensor, turn: Turn, asked: Asked) -> Answer:
        if turn.forced:
            return self._forced(session, logits, turn, asked)
        new, decode = greedy(session, logits, self.stop, turn.max_new_tokens)
        return Answer(
            text=self.prompter.text(new),
            tokens=len(new),
            finish="length" if len(new) == turn.max_new_tokens else "stop",
            prompt_tokens=asked.tokens,
            truncated=asked.truncated,
            ttft=asked.ttft,
            decode=decode,
            usage=session.usage(),
            first=asked.first,
        )

    def _forced(self, session: Session, logits: Tensor, turn: Turn, asked: Asked) -> Answer:
        ids = self.prompter.ids(turn.answers[0])[: turn.max_new_tokens]
        start = time.perf_counter()
        every = torch.cat([logits[-1:], session.read(ids[:-1], every=True)]) if len(ids) > 1 else logits[-1:]
        nll = torch.nn.functional.cross_entropy(every, torch.tensor(ids, device=every.device))
        return Answer(
            text="",
            tokens=len(ids),
            finish="forced",
            prompt_tokens=asked.tokens,
            truncated=asked.truncated,
            ttft=asked.ttft,
            decode=time.perf_counter() - start,
            usage=session.usage(),
            nll=float(nll),
            first=asked.first,
        )


def known(logits: Tensor) -> float:
    """The time, once the token that these logits say is known: until then a GPU may still compute."""
    logits[-1].argmax().item()
    return time.perf_counter()


def greedy(session: Session, logits: Tensor, stop: frozenset[int], most: int) -> tuple[list[int], float]:
    """New tokens, and the seconds of decoding after the first one."""
    token = int(logits[-1].argmax())
    start = time.perf_counter()
    new: list[int] = []
    while token not in stop:
        new.append(token)
        if len(new) == most:
            break
        token = int(session.read([token])[-1].argmax())
    return new, time.perf_counter() - start
