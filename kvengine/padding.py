"""Tokens that are none: what a lane does about the padding of its rows.

A row's tokens are to be where they are when it is alone. Padding before its first token is told by `first`; padding that
comes later counts as if it had come before them too, so that they stay one after the other, by position and in the slots.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvengine.errors import CacheError
from kvengine.pages import Pages
from kvengine.policies.retention import Notes, Retention
from kvengine.saliency import Saliency
from kvengine.session import Session
from kvengine.stack import Stack
from kvengine.tail import Tail
from kvengine.tokens import padding_first


class Padded:
    """The part of a lane that knows of padding; the attributes are `Holding`'s."""

    stack: Stack
    session: Session
    retention: Retention
    tail: Tail
    lengths: list[tuple[int, Tensor | None]]
    pages: Pages | None
    seen: int
    first: Int[Tensor, "row"]
    begin: Int[Tensor, "row"]
    former: Int[Tensor, "row"]
    judged: int | Tensor
    whole: bool
    reading: bool
    turn: int
    past: Notes
    ahead: Int[Tensor, "row"] | None
    saliency: Saliency | None
    notes: Notes
    padded: bool
    moved: bool

    @property
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

    @property
    def idle(self) -> Bool[Tensor, "row"] | None:
        """At the end of a prompt: the rows that had no token in it, which it leaves as they are; None if all had some."""
        if not self.padded:
            return None
        found = self.begin == self.seen
        return found if bool(found.any()) else None

    def open(self) -> Int[Tensor, "row"] | int:
        """Slots of each row's tail."""
        if len(self.lengths) == 1:
            return self.lengths[0][0]
        out = torch.empty_like(self.first)
        for n, rows in self.lengths:
            out.index_fill_(0, torch.arange(len(out), device=out.device) if rows is None else rows, n)
        return out

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

    def gone(self, hidden: Bool[Tensor, "row earlier"]) -> Bool[Tensor, "row slot"] | None:
        """Which of what is held are those of the tokens seen that are `hidden`; None if none are. Padding is hidden anyway.

        Raises:
            CacheError: it is not known any more which these are.
        """
        tail, pages = self.tail, self.pages
        position = tail.position[:, tail.span]
        position = position if pages is None else torch.cat([pages.position, position], 1)
        gone = (position >= 0) & hidden.gather(1, position.clamp(min=0).long())
        judged = self.judged if isinstance(self.judged, int) else int(self.judged.max())
        if self.moved:
            unknown = bool((hidden.shape[1] - hidden.sum(1) < self.seen - self.first).any())
        else:
            unknown = not tail.exact and bool(hidden[:, :judged].any())
        if unknown:
            raise CacheError(
                f"attention_mask hides tokens that this cache has seen, and '{self.stack}' no longer knows which of those that "
                "it holds they are. Keep ones in the mask for what was seen, or call cache.reset() and give the text anew"
            )
        return None if self.moved or not bool(gone.any()) else gone

    def hide(self, gone: Bool[Tensor, "row slot"]) -> None:
        """Drop these of what is held."""
        n = 0 if self.pages is None else len(self.pages)
        if self.pages is not None and n:
            self.pages.judge(self.pages.score, ~gone[:, :n])
        self.tail.judge(self.tail.scores(self.tail.span), ~gone[:, n:])
        self.padded = True

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
