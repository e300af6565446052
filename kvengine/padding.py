"""Tokens that are none: what a lane does about the padding of its rows.

A row's tokens are to be where they are when it is alone. Padding before its first token is told by `first`; padding that
comes later counts as if it had come before them too, so that they stay one after the other, by position and in the slots.
"""

from __future__ import annotations

from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvengine.errors import CacheError
from kvengine.holding import Holding
from kvengine.policies.retention import Notes, Retention
from kvengine.tokens import padding_first


class Padded(Holding):
    """The part of a lane that knows of padding."""

    @cached_property
    def weighs(self) -> bool:
        """Whether the representation asks for saliency, and the retention has no evidence of that kind itself."""
        r = self.retention
        return self.stack.representation.probes > 0 and not r.counts and r.replay is None

    def positions(self, n: int, valid: Bool[Tensor, "row token"] | None) -> Int[Tensor, "row token"]:
        if n == 1:
            at = self.session.position(self.seen, self.first.device)
        else:
            at = torch.arange(self.seen, self.seen + n, dtype=torch.int32, device=self.first.device)
        rows = at.expand(len(self.first), n) if self.ahead is None else at + self.ahead[:, None].to(at.dtype)
        return rows if valid is None else rows.masked_fill(~valid, -1)

    @property
    def placing(self) -> bool:
        """Whether it matters at which positions tokens are, beside their order."""
        judges, form = type(self.retention).keep is not Retention.keep, self.stack.representation
        return judges or not self.stack.prefill.exact or form.probes > 0 or form.joint

    def pad(self, valid: Bool[Tensor, "row token"], resumed: Bool[Tensor, "row"] | None = None) -> None:
        """Padding is about to come, before tokens: where others of its row are there, it counts as if it had come before them.

        So a row's tokens stay one after the other by position, and distances are those that the row has alone. Of a row
        that has `resumed`, one token is there already.
        """
        self.padded = True
        leading, late = (~valid).long().cumprod(1).sum(1), self.first < self.seen
        by = (leading if resumed is None else leading - resumed.long()) * late
        silent = self.begin == self.seen if self.reading else ~late  # whose next token is the first that `begin` tells
        begin = torch.where(silent, self.begin + leading, self.begin)
        if self.placing and bool(by.any()):
            self.move(by)
            begin = torch.where(silent, begin, self.begin)
        self.first, self.begin = torch.where(late, self.first, self.first + leading), begin
        self.former = torch.where(late, self.former, self.first)

    def shifts(self, valid: Bool[Tensor, "row token"] | None) -> bool:
        """Whether such padding will have tokens that are there count as later ones."""
        if valid is None or not self.seen or not self.placing:
            return False
        return bool((~valid[:, 0] & (self.first < self.seen)).any())

    @property
    def idle(self) -> Bool[Tensor, "row"] | None:
        """At the end of a prompt: the rows that had no token in it, which it leaves as they are; None if all had some."""
        if not self.padded:
            return None
        found = self.begin == self.seen
        return found if bool(found.any()) else None

    def earlier(self, slots: int) -> Bool[Tensor, "row slot"]:
        """Which of the last slots were a row's tail before the prompt."""
        at = torch.arange(slots, device=self.first.device)[None]
        end, open_slots = slots - (self.seen - self.turn), self.open()
        start = end - (open_slots[:, None] if isinstance(open_slots, Tensor) else open_slots)
        return ((at >= start) & (at < end)).expand(len(self.first), -1)

    def restore(self, idle: Bool[Tensor, "row"] | None, before: Notes) -> None:
        """The retention's notes of these rows are those that were before."""
        if idle is not None:
            for name, x in before.items():
                if name in self.notes and self.notes[name] is not x:
                    self.notes[name] = torch.where(over(idle, x), x, self.notes[name])

    def end_judged(self, idle: Bool[Tensor, "row"] | None) -> None:
        """The prompt that ends here is the last one, but of rows that had no token in it."""
        self.judged = self.seen if idle is None else torch.where(idle[:, None], self.judged, self.seen)

    def move(self, by: Int[Tensor, "row"]) -> None:
        """Count each row's tokens as that many positions later."""
        self.first, self.begin, self.former = self.first + by, self.begin + by, self.former + by
        if torch.is_tensor(self.judged) or self.judged:
            self.judged = self.judged + by[:, None]
        self.tail.move(by)
        if self.pages is not None:
            self.pages.move(by)
        self.whole, self.moved = False, True

    def end_begun(self, idle: Bool[Tensor, "row"] | None) -> None:
        """The prompt that has been judged is the last one of the rows that had a token in it."""
        if idle is not None:
            self.begin = torch.where(idle, self.former, self.begin)

    def unpad(self, rows: Bool[Tensor, "row"]) -> None:
        """The one token that was taken was of these rows: to the others it is as if there had been none."""
        others, late = (~rows).long(), self.first < self.seen
        if self.placing:
            self.move(-others * late)
        self.first, self.begin = (torch.where(late, x, x - others) for x in (self.first, self.begin))
        self.seen, self.whole, self.due = self.seen - 1, False, 0

    def order_for(self, valid: Bool[Tensor, "row token"] | None) -> Int[Tensor, "row token"] | None:
        """The order in which to `enter` such a chunk, so that a row's tokens stay one after the other."""
        return padding_first(valid) if valid is not None and self.placing else None

    def check_end(self, n: int) -> None:
        """Refuse `n` tokens of a prompt by which it ends elsewhere than was announced, if some of its queries were probes."""
        known, end = self.saliency, max(self.seen + n, self.session.prompt_end or 0)
        if known is not None and known.end != end:
            raise CacheError(
                f"this prompt was to end at {known.end} tokens, by which '{self.stack}' has chosen some of its queries, and now "
                f"it is to end at {end}. Call cache.reset(), announce all of it and give it anew, or in one pass"
            )

    def check_padding(self, valid: Bool[Tensor, "row token"]) -> None:
        """Refuse padding behind a row's tokens that came with an earlier chunk, if some of its queries were probes."""
        parts = self.session.parts  # of one pass know of each other's padding
        start = self.seen if parts is None else parts.start
        if self.weighs and bool(((self.begin < start) & ~valid[:, 0]).any()):
            raise CacheError(
                f"padding follows tokens of a prompt that came in an earlier chunk, but '{self.stack}' has chosen some of their "
                "queries by how many are to come. Give such a prompt in one pass (without prefill_chunk_size)"
            )


def over(rows: Bool[Tensor, "row"], x: Tensor) -> Tensor:
    """With as many axes as `x` has."""
    return rows.view(-1, *[1] * (x.ndim - 1))
