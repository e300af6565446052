"""Several samples at once under one policy: reading and saying a token costs little more for twenty than for one.

Only samples are taken together whose texts have equal numbers of tokens. So nothing is padded, and each is treated as it
would be alone: policies judge and select by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kvengine.evals.engine import Usage
from kvengine.evals.protocol import Answer
from kvengine.evals.protocol import Protocol as Asking
from kvengine.evals.tasks import Sample


@runtime_checkable
class Rows(Protocol):
    """Conversations of equal length, side by side."""

    def rows(self, tokens: Tensor) -> Tensor:
        """Logits [sequence vocabulary] after the last of these tokens [sequence token]."""

    def follow_up(self) -> None: ...

    def branch(self) -> Rows: ...

    def usages(self) -> list[Usage]: ...


@dataclass(frozen=True)
class Script:
    """The token ids that are read for a sample, whatever its answers: the first prompt, then a text per further turn.

    `context` is what different policies and questions share of the first prompt.
    """

    context: list[int]
    first: list[int]
    later: list[list[int]]
    most: tuple[int, ...]
    truncated: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Samples with equal shapes can be asked together."""
        return len(self.context), len(self.first), common(self.first, self.context), *map(len, self.later), *self.most


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens at the start are the same.

    >>> common([1, 2, 3], [1, 2, 9, 3])
    2
    """
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def script(asking: Asking, sample: Sample) -> Script | None:
    """What is read for this sample; None if it depends on the answers, or if answers are forced."""
    aware, prompter = asking.mode == "multi-turn", asking.prompter.of(sample)
    if any(turn.forced for turn in sample.turns) or (aware and not asking.golden and len(sample.turns) > 1):
        return None
    context = prompter.context(sample)
    whole = prompter.whole(sample) if aware else context
    if aware:
        pairs = zip(sample.turns, sample.turns[1:], strict=False)
        later = [prompter.follow(before.answers[0], turn) for before, turn in pairs]
    else:
        later = [prompter.asked(turn) for turn in sample.turns]
    first, most = asking.cut(whole), tuple(turn.max_new_tokens for turn in sample.turns)
    return Script(asking.cut(context), first, later, most, len(first) < len(whole))


def play(asking: Asking, session: Rows, scripts: list[Script]) -> Iterator[list[Answer]]:
    """Ask every turn of samples of one shape, in empty sessions: the answers of each turn, by sample."""
    aware, turns = asking.mode == "multi-turn", len(scripts[0].most)
    logits = session.rows(torch.tensor([one.first for one in scripts]))
    session.follow_up()
    for index, most in enumerate(scripts[0].most):
        last = index == turns - 1
        asked = [one.later[index - aware] if index or not aware else [] for one in scripts]
        speaker = session if last or aware else session.branch()
        found = speaker.rows(torch.tensor(asked)) if asked[0] else logits
        said = speak(session.branch() if aware and not last else speaker, found, asking.stop, most)
        opening = not aware or not index  # this turn reads the first prompt
        yield [
            Answer(
                text=asking.prompter.text(new),
                tokens=len(new),
                finish="length" if len(new) == most else "stop",
                prompt_tokens=len(ids) + opening * len(one.first),
                truncated=opening and one.truncated,
                ttft=None,
                decode=None,
                usage=usage,
                first=not ids,
            )
            for (new, usage), ids, one in zip(said, asked, scripts, strict=True)
        ]


def speak(session: Rows, logits: Tensor, stop: frozenset[int], most: int) -> list[tuple[list[int], Usage]]:
    """Greedy answers, and what each cache held when its answer ended. Those that have ended wait for the others."""
    new: list[list[int]] = [[] for _ in logits]
    ended: dict[int, Usage] = {}
    while True:
        tokens, done = logits.argmax(-1), []
        for i, token in enumerate(tokens.tolist()):
            if i in ended:
                continue
            if token not in stop:
                new[i].append(token)
            if token in stop or len(new[i]) == most:
                done.append(i)
        if done:
            usages = session.usages()
            ended |= {i: usages[i] for i in done}
        if len(ended) == len(new):
            return [(ids, ended[i]) for i, ids in enumerate(new)]
        logits = session.rows(tokens[:, None])
