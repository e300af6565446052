"""How what a lane holds becomes pages.

The newest tokens are in the open tail; what a stack wants in pages is sealed from there, oldest first: at a prompt's end, and
while decoding, once the tail overflows.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvengine import answers
from kvengine.compaction import fill_up, shed
from kvengine.joint import Joint, join
from kvengine.offload.placement import Site
from kvengine.padding import Padded, over
from kvengine.pages import Pages
from kvengine.policies.retention import Seen
from kvengine.pool import Pool
from kvengine.strays import bring_in, stand_before, strays
from kvengine.tail import GROWTH
from kvengine.tokens import grouped, narrowed, pack, part, take, taken


class Sealing(Padded):
    """The part of a lane that compacts, seals, and closes holes."""

    def settle(self, seen: Seen, keep: Bool[Tensor, "row token"] | None) -> None:
        """After a prompt: drop what is not kept, merge, compact, seal."""
        anew, idle = self.stack.representation.lossless or self.retention.merges, self.idle
        if self.pages is None or (keep is not None and anew):
            k, v = self.laid_out()
            if keep is not None and self.retention.merges:
                folded = answers.folded(self.retention, seen, keep, (k.shape[2], v.shape[2]))
                k, v = folded if idle is None else (
                    torch.where(over(idle, x), x, y) for x, y in zip((k, v), folded, strict=True)
                )  # fmt: skip
            own = self.tail.k.dtype  # codes are decoded in more than the model has
            self.rebuild(narrowed(k, own), narrowed(v, own), self.position, seen.score, keep, idle)
        else:
            self.judge(seen, keep)
            if keep is not None:
                self.pages.release()
            self.pack_pages(*self.tail.held(), None, self.tail.clean, idle)
            if keep is not None and not self.stack.representation.joint:
                self.tidy()

    def rebuild(
        self,
        k: Tensor,
        v: Tensor,
        position: Tensor,
        score: Tensor,
        keep: Tensor | None,
        idle: Bool[Tensor, "row"] | None = None,
    ) -> None:
        """Hold exactly these tokens, compactly. Pages of `idle` rows stay as they are."""
        clean = self.clean
        if self.pages is None or idle is None:
            self.pages = None
        else:
            self.pages.clear(~idle)
        if self.stack.paged:
            self.whole = False
            self.pack_pages(k, v, position, score, keep, clean, idle)
        elif keep is not None:
            index = pack((position >= 0) & keep)
            clean = not bool((index < 0).any())
            if clean and index.shape[1] == position.shape[1]:
                self.tail.judge(score, None)
                return
            self.whole = False
            wanted = [(k, 0), (v, 0), (position, -1), *([(score, 0)] if self.tail.scored else [])]
            k, v, places, *scores = taken(index, *wanted)
            lead = self.lead(places) if clean and not self.padded else None
            kept = k, v, None if lead is not None else places, scores[0] if scores else score
            self.tail.replace(*kept, clean, self.slots(index.shape[1]), lead or 0)

    def lead(self, position: Int[Tensor, "row token"]) -> int | None:
        """How many of these are first tokens that the retention tells apart, if order tells it the rest; else None."""
        if (order := self.order) is None:
            return None
        found = (position < order).sum(1)
        return int(found[0]) if bool((found == found[0]).all()) else None

    @property
    def order(self) -> int | None:
        """How many first tokens the retention tells apart, if nobody asks for other positions of what stays; else None."""
        s, r = self.stack, self.retention
        asked = self.session.positions or s.paged or r.decodes or not s.prefill.exact
        return None if asked else r.order

    def slots(self, held: int) -> int:
        """How many slots to keep for that many tokens."""
        return held if self.limit is None else min(self.limit + 1, held + GROWTH)

    def pack_pages(
        self, k: Tensor, v: Tensor, position: Tensor, score: Tensor, keep: Tensor | None, clean: bool,
        idle: Bool[Tensor, "row"] | None,
    ) -> None:  # fmt: skip
        """Seal each row's whole pages beyond the tail's room, from its first token on; the rest becomes the tail.

        A row's pages begin at its own first token, so that they are the same whatever it is batched with. Rows that are
        `idle` have the tail that they had before the prompt.
        """
        page, room = self.stack.page, self.stack.room
        free = self.free_rows(idle)
        alone, old = self.left_exact(k, position, free), strays(self, self.seen - self.turn)
        alone = old if alone is None else alone
        if clean and keep is None and alone is None and free is None:
            n = k.shape[1]
            spill = max(0, (n - room) // page * page)
            if spill:
                self.sealed(k, position).seal(k[:, :spill], v[:, :spill], position[:, :spill], score[:, :spill], True)
            self.tail.replace(k[:, spill:], v[:, spill:], position[:, spill:], score[:, spill:], True, room + 2 * page)
            self.lengths = [(n - spill, None)]
            self.tail.paged_slots = self.alongside()
            return
        alive = position >= 0 if keep is None else (position >= 0) & keep
        if idle is not None:
            mine = self.earlier(position.shape[1])
            alive = torch.where(idle[:, None], mine if old is None else mine | old, alive)
        parts = part(alive, room, page, alone, free)
        if parts.front is not None:
            self.sealed(k, position, parts.pages > 0).seal_chosen((k, v, position, score), parts.front, parts.pages)
        back = parts.back
        rest = (back >= 0).sum(1)
        kept = take(k, back), take(v, back), take(position, back, -1), take(score, back)
        # A tail that stays may have holes, and one with strays is never taken for clean (`stand_before`).
        self.tail.replace(*kept, old is None and bool((kept[2] >= 0).all()), room + 2 * page)
        self.lengths = grouped(rest if old is None else rest - (old & alive).sum(1))
        self.tail.paged_slots = self.alongside()

    def alongside(self) -> int:
        """Slots of the pages that a tail grows beside: those of keys kept jointly, which get no more."""
        return len(self.pages) if self.pages is not None and self.pages.joint is not None else 0

    def free_rows(self, idle: Bool[Tensor, "row"] | None) -> Bool[Tensor, "row"] | None:
        """The rows that may seal tokens, if not all: keys kept jointly are those of the first prompt that fills a page."""
        if self.pages is None or self.pages.joint is None:
            return None if idle is None else ~idle
        free = self.pages.filled == 0
        return free if idle is None else free & ~idle

    def left_exact(
        self, k: Tensor, position: Int[Tensor, "row token"], free: Bool[Tensor, "row"] | None
    ) -> Bool[Tensor, "row token"] | None:
        """Tokens of a prompt that the selection wants left alone, exact and always read."""
        if not self.stack.representation.joint or (free is not None and not bool(free.any())):
            return None
        found = answers.exact(self.stack.selection, k, position, self.prompt_length)
        return found if found is None or free is None else found & free[:, None]

    def sealed(self, k: Tensor | None = None, position: Tensor | None = None, new: Tensor | None = None) -> Pages:
        """The pages; made, if there are none yet, for a prompt of these tokens, of which the `new` rows seal some."""
        if self.pages is None or k is not None or not self.pages.roomy:
            self.beside.forget(self.tail)
            self.saw = None if self.saw is None else self.saw.told()  # it would keep what is replaced
        if self.pages is None:
            form, joined = self.stack.representation, None
            if form.joint and k is not None and position is not None:
                joined = join(form, self.session.rope, self.heads, k, position, self.seen)
            self.pages = self.new_pages(joined)
        elif self.pages.joint is not None and k is not None and position is not None and new is not None:
            mine = k[new], position[new]
            more = join(self.stack.representation, self.session.rope, self.heads, *mine, self.seen)
            self.pages.joint = self.pages.joint.joined(more, new[:: self.heads])
        return self.pages

    def new_pages(self, joined: Joint | None) -> Pages:
        """Pages of this lane, in which nothing is yet but the keys that are kept jointly."""
        s, rows = self.stack, len(self.first)
        kinds = s.page, s.representation, s.selection, self.first.device
        return Pages(self.new_pool(), rows, *kinds, joined, self.retention.remembers, self.inner)

    def new_pool(self) -> Pool:
        """A pool for this lane's pages, read by units where that saves bytes."""
        s, session = self.stack, self.session
        whole = not (s.placement.fine and (s.representation.lossless or s.representation.joint))
        per = 1 if whole else s.page // s.selection.unit
        share = self.part / session.place(self.layer, self.layers)[1]
        most = int(self.prompt_length.max())
        site = Site(self.layer, self.number, len(self.first), most, s.page // per, share, session.ahead)
        return Pool(s.placement, site, per)

    def add(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        if valid is not None:
            self.pad(valid)
        position = self.positions(k.shape[1], valid)
        if self.filling:
            self.tail.fill(k, v, position)
        else:
            self.tail.append(k, v, position, valid is None)
        self.seen += k.shape[1]
        self.firm = self.firm if valid is None else self.seen
        if valid is None or not self.stack.paged:
            self.lengths = [(n + k.shape[1], rows) for n, rows in self.lengths]
        else:
            self.tail.line_up(~valid)
            self.lengths = grouped(self.open() + valid.sum(1))

    def seal(self) -> None:
        """Seal the oldest page of the rows whose tail overflows."""
        page, most = self.stack.page, self.stack.room + self.stack.page
        if not self.stack.paged or self.stack.representation.joint or all(n < most for n, _ in self.lengths):
            return
        position, mine = self.tail.position, strays(self)
        self.note_reach(position)
        for n, rows in self.lengths:
            if n >= most:
                self.seal_rows(n, rows, position)
        self.lengths = [(n - page if n >= most else n, rows) for n, rows in self.lengths]
        if mine is None:
            self.tail.start = self.tail.end - max(n for n, _ in self.lengths)
        else:
            stand_before(self, mine)
        self.whole = False
        if self.retention.decodes:
            self.tidy()

    def seal_rows(self, length: int, rows: Int[Tensor, "row"] | None, position: Int[Tensor, "held slot"]) -> None:
        start = self.tail.end - length
        span = slice(start, start + self.stack.page)
        tail = self.tail
        held = (tail.k[:, span], tail.v[:, span], position[:, span], tail.scores(span))
        if rows is None:
            self.sealed().seal(*held, self.tail.clean)
            return
        k, v, where, score = (x[rows] for x in held)
        self.sealed().seal(k, v, where, score, False, rows)
        self.tail.place()
        self.tail.own_small()
        self.tail.position[rows, span] = -1

    def tidy(self) -> None:
        """Give back empty pages; pack the rest anew once most of it is holes, where nothing depends on where it lies.

        Something does where a selection reads some pages and the whole tail: what is read must not depend on when this
        is called, nor on what else is in the batch.
        """
        if (pages := self.pages) is None:
            return
        table, self.beside.refused = pages._table, False
        pages.release()
        if not self.stack.selects and len(pages):
            if not self.stack.representation.lossless:
                fill_up(pages)
                bring_in(self)
            elif float((pages.position >= 0).float().mean()) < 0.5:
                self.rebuild(*self.everything(), keep=None)
        if self.pages is pages:
            shed(pages, self.new_pool)
        if pages._table is not table or not pages.columns:
            self.beside.forget(self.tail)
