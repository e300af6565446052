"""How a lane goes back: while recording, a state is remembered before each step.

A state is a shallow copy of the tail and the pages: what is written later goes where it does not look. Where tokens that
come after a prompt are added to the tail and that is all (`plain`), nothing is remembered: the tail is shortened again.

What becomes of a decoded token, by stack; one of these at most holds of a lane, and none where tokens go the general way:

    plain    it is added to the tail                              full, snapkv
    rolls    it takes the place of one that leaves the newest     streaming
    pays     it takes the place of one by a rule that C knows     h2o, tova, d2o, elastic
    waits    it is added, and a row is judged when it is full     rkv                     (`kvengine.verdicts`)
    reads    it is added, pages are read too, and may be sealed   quest, kivi, snapkv + kivi
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from jaxtyping import Bool, Int
from torch import Tensor

from kvengine import policies
from kvengine.errors import CacheError
from kvengine.pages import Pages
from kvengine.policies.retention import Notes, Retention
from kvengine.sealing import Sealing
from kvengine.tail import Tail

Lane = TypeVar("Lane", bound="Recall")  # `Self` is more than what checks signatures at run time knows


@dataclass
class Mark:
    """The state before some tokens were taken, and those tokens."""

    seen: int
    tail: Tail
    pages: Pages | None
    notes: Notes
    lengths: list[tuple[int, Tensor | None]]
    first: Tensor
    begin: Tensor
    judged: int | Tensor
    k: Tensor
    v: Tensor
    valid: Bool[Tensor, "row token"] | None
    firm: int


class Recall(Sealing):
    """What a lane holds, and the states that it can go back to."""

    @cached_property
    def plain(self) -> bool:
        """Whether a decoded token is added to the tail and reads all of it, and that is all that happens."""
        r = self.retention
        turns = type(r).shift is not Retention.shift and r.needs_rope
        return not (self.stack.paged or r.decodes or r.remembers or turns)

    @cached_property
    def reads(self) -> bool:
        """Whether a decoded token is added to the tail and reads that and pages, and some of the tail may be sealed then."""
        r, form = self.retention, self.stack.representation
        turns = type(r).shift is not Retention.shift and r.needs_rope
        lasts = not r.decodes or self.thins
        return self.stack.paged and lasts and not (turns or (form.joint and self.first.is_cpu))

    @cached_property
    def launched(self) -> bool:
        """Whether a GPU's kernels choose what is read, by what lies there alone."""
        selection = self.stack.selection
        return selection.launched and policies.ours(type(selection).__module__) and not self.first.is_cpu

    @cached_property
    def thins(self) -> bool:
        """Whether tokens that leave the newest are dropped, from pages too, and that is all that the retention does."""
        r = self.retention
        return self.stack.paged and r.decodes and r.ends is not None and not (r.counts or r.remembers)

    @cached_property
    def rolls(self) -> bool:
        """Whether a decoded token takes the place of one that leaves the newest tokens, and that is all that happens."""
        r = self.retention
        return r.decodes and r.ends is not None and not self.stack.paged

    @cached_property
    def pays(self) -> bool:
        """Whether a decoded token takes the place of one by a rule that C may know, and that is all that happens."""
        r = self.retention
        return r.decodes and type(r).rule is not Retention.rule and not self.stack.paged

    @cached_property
    def marks(self) -> list[Mark]:
        return []

    def remember(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        if self.plain and valid is None and not self.marks:
            return
        state = copy.copy(self.tail), copy.copy(self.pages), dict(self.notes), self.lengths
        self.marks.append(Mark(self.seen, *state, self.first, self.begin, self.judged, k, v, valid, self.firm))
        self.share(True)

    def still(self: Lane) -> Lane:
        """The lane as it is now, to be read while this one goes on."""
        twin = copy.copy(self)
        twin.tail, twin.pages = copy.copy(self.tail), copy.copy(self.pages)
        self.share(True)
        return twin

    def share(self, shared: bool) -> None:
        self.tail.shared = shared
        if self.pages is not None:
            self.pages.shared = shared

    def rollback(self, n: int) -> None:
        """Forget the last `n` tokens, and all that they changed; `check_back` was asked before, of all heads."""
        goal, mark = self.seen - n, None
        while self.marks and self.marks[-1].seen > goal:
            mark = self.marks.pop()
        if n and self.marks:
            mark = self.marks.pop()
        if mark is not None:
            self.tail, self.pages, self.lengths, self.seen = mark.tail, mark.pages, mark.lengths, mark.seen
            self.notes, self.first, self.begin = mark.notes, mark.first, mark.begin
            self.judged, self.firm = mark.judged, mark.firm
            self.saw, self.due = None, 0
            self.share(bool(self.marks))
        if mark is not None and goal > self.seen:
            self.retake(mark, goal - mark.seen)
        elif goal < self.seen:
            self.unread(goal)
            if self.padded:  # rows of which nothing is left have yet to begin
                self.first, self.begin = self.first.clamp(max=goal), self.begin.clamp(max=goal)
            self.tail.shorten(self.seen - goal)
            self.lengths = [(max(0, m - self.seen + goal), rows) for m, rows in self.lengths]
            self.seen = goal

    def check_back(self, n: int) -> None:
        """Refuse to forget the last `n` tokens, and change nothing.

        Raises:
            CacheError: they were not remembered, and the policy has acted on them.
        """
        goal = self.seen - n
        if n and (not self.marks or self.marks[0].seen > goal):
            self.check_shortening(goal, self.marks[0].firm if self.marks else self.firm)

    def unread(self, goal: int) -> None:
        """The tokens from there on are taken back: what was counted of a prompt whose end is still to come."""
        if not self.reading:
            return
        gone = self.tail.position[:, self.tail.span][:, max(goal, self.turn) - self.seen :] >= 0
        self.prompt_length = self.prompt_length - gone.sum(1)
        if goal <= self.turn:
            self.reading, self.notes, self.begin = False, dict(self.past), self.former
            self.window = self.mass = self.saliency = None

    @property
    def heard(self) -> int:
        """Tokens of which none can be taken back by shortening the tail, as what their queries looked at has been noted."""
        r = self.retention
        listens = r.wants_mass or r.watches or r.observes > 0 or self.stack.representation.probes > 0
        if self.reading and listens:
            return self.seen
        judged = self.judged if isinstance(self.judged, int) else int(self.judged.max())
        return judged if r.wants_mass and r.remembers else 0

    def retake(self, mark: Mark, count: int) -> None:
        """Take back the first `count` of the tokens that came after a mark (nothing changed between them)."""
        if count:
            valid = None if mark.valid is None else mark.valid[:, :count]
            self.remember(mark.k[:, :count], mark.v[:, :count], valid)
            self.add(mark.k[:, :count], mark.v[:, :count], valid)

    def check_shortening(self, goal: int, firm: int) -> None:
        if self.heard > goal and not (self.reading and goal == self.turn):
            raise CacheError(
                f"cannot go back from {self.seen} to {goal} tokens: those between belong to a prompt, and '{self.stack}' has "
                "noted what their queries look at. Call cache.reset() and give the text anew"
            )
        if goal < 0 or not (self.whole or (self.plain and goal >= firm)):
            raise CacheError(
                f"cannot go back from {self.seen} to {goal} tokens: the policy has dropped or sealed some of them "
                "since. Call cache.activate_past_recording() before the tokens that may have to be taken back"
            )

    def commit(self) -> None:
        """What was taken is now history."""
        self.marks.clear()
        self.share(False)

    def check_settled(self) -> None:
        if self.marks:
            raise CacheError("rows cannot be reordered while a draft is pending; commit or roll back first")

    def rows(self, index: Int[Tensor, "chosen"]) -> None:
        self.check_settled()
        super().rows(index)
