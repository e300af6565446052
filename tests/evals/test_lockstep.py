"""Samples in lockstep, with sessions made by hand: who has ended waits, and each answer is counted by itself."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch

from kvengine.evals import lockstep
from kvengine.evals.engine import Usage
from kvengine.evals.prompt import Prompter
from kvengine.evals.protocol import Protocol


@dataclass
class Saying:
    """Conversations that say these tokens after their prompts of 3, and whose caches hold as many as were read."""

    words: list[list[int]]
    read: int = 0

    def rows(self, tokens: torch.Tensor) -> torch.Tensor:
        self.read += tokens.shape[1]
        said = torch.tensor([(some + [9] * 9)[self.read - 3] for some in self.words])
        return torch.nn.functional.one_hot(said, 10).float()

    def follow_up(self) -> None: ...

    def branch(self) -> Saying:
        raise NotImplementedError  # nobody asks these a second question

    def usages(self) -> list[Usage]:
        return [Usage(held=self.read + row / 10, attended=0, bytes_held=0, read_per_token=0) for row in range(4)]


def test_rows_that_have_ended_wait_and_say_nothing_more() -> None:
    """An answer is cut before the token that ends it, or at the most; its cache is looked at when it ends."""
    digits = SimpleNamespace(decode=lambda ids, **how: "".join(map(str, ids)))
    asking = Protocol(prompter=Prompter(digits), mode="multi-request", stop=frozenset({0}))
    session = Saying([[5, 0], [5, 6, 7, 8, 5], [0], [1, 2, 3, 0]])
    scripts = [lockstep.Script([1], [1, 2], [[3]], (4,), row == 2) for row in range(4)]
    (answers,) = lockstep.play(asking, session, scripts)
    assert [(answer.text, answer.finish, answer.usage.held) for answer in answers] == [
        ("5", "stop", 4.0), ("5678", "length", 6.1), ("", "stop", 3.2), ("123", "stop", 6.3),
    ]  # fmt: skip
    assert [answer.tokens for answer in answers] == [1, 4, 0, 3] and session.read == 6
    assert [answer.prompt_tokens for answer in answers] == [3] * 4
    assert [answer.truncated for answer in answers] == [False, False, True, False]


def test_shapes_keep_apart_what_has_other_sizes() -> None:
    one = lockstep.Script([1, 2], [1, 2, 3], [[4]], (8,), False)
    assert (
        one.shape != lockstep.Script([1, 2], [1, 9, 3], [[4]], (8,), False).shape
    )  # the prompt leaves the context earlier
    assert one.shape == lockstep.Script([5, 6], [5, 6, 7], [[8]], (8,), False).shape
