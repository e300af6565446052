"""How a lane goes back: while recording, a state is remembered before each step.

A state is a shallow copy of the tail and the pages: what is written later goes where it does not look.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Bool, Int
from torch import Tensor

from kvengine.errors import CacheError
from kvengine.holding import Holding
from kvengine.pages import Pages
from kvengine.policies.retention import Notes
from kvengine.tail import Tail


@dataclass
class Mark:
    """The state before some tokens were taken, and those tokens."""

    seen: int
    tail: Tail
    pages: Pages | None
    notes: Notes
    lengths: list[tuple[int, Tensor | None]]
    first: Tensor
    judged: int | Tensor
    k: Tensor
    v: Tensor
    valid: Bool[Tensor, "row token"] | None


class Recall(Holding):
    """What a lane holds, and the states that it can go back to."""

    @cached_property
    def marks(self) -> list[Mark]:
        return []

    def remember(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        state = copy.copy(self.tail), copy.copy(self.pages), dict(self.notes), self.lengths, self.first, self.judged
        self.marks.append(Mark(self.seen, *state, k, v, valid))
        self.share(True)

    def share(self, shared: bool) -> None:
        self.tail.shared = shared
        if self.pages is not None:
            self.pages.shared = shared

    def rollback(self, n: int) -> None:
        """Forget the last `n` tokens, and all that they changed."""
        goal = self.seen - n
        while self.marks and self.marks[-1].seen > goal:
            self.marks.pop()
        if n and not self.marks:
            self.shorten(goal)
        elif n:
            mark = self.marks.pop()
            self.tail, self.pages, self.lengths, self.seen = mark.tail, mark.pages, mark.lengths, mark.seen
            self.notes, self.first, self.judged = mark.notes, mark.first, mark.judged
            self.pool = None if self.pages is None else self.pages.pool
            self.saw = None
            self.share(bool(self.marks))
            self.again(mark, goal - mark.seen)

    def again(self, mark: Mark, count: int) -> None:
        """Take back the first `count` of the tokens that came after a mark (nothing changed between them)."""
        if count:
            valid = None if mark.valid is None else mark.valid[:, :count]
            self.remember(mark.k[:, :count], mark.v[:, :count], valid)
            self.add(mark.k[:, :count], mark.v[:, :count], valid)

    def shorten(self, goal: int) -> None:
        if not self.whole or goal < 0:
            raise CacheError(
                f"cannot go back from {self.seen} to {goal} tokens: the policy has dropped or sealed some of them "
                "since. Call cache.activate_past_recording() before the tokens that may have to be taken back"
            )
        self.tail.shorten(self.seen - goal)
        self.lengths = [(n - self.seen + goal, rows) for n, rows in self.lengths]
        self.seen = goal

    def commit(self) -> None:
        """What was taken is now history."""
        self.marks.clear()
        self.share(False)

    def rows(self, index: Int[Tensor, "chosen"]) -> None:
        if self.marks:
            raise CacheError("rows cannot be reordered while a draft is pending; commit or roll back first")
        super().rows(index)
