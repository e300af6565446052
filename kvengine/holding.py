"""What a lane holds, and how that changes: dropped, merged, sealed.

The newest tokens are in the open tail; what a stack wants in pages is sealed from there, oldest first, once the tail
overflows.
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine import answers
from kvengine.attending import Tally
from kvengine.beside import Beside
from kvengine.compaction import fill_up, shed
from kvengine.joint import join
from kvengine.kernels.step import Rule
from kvengine.nested import Nested
from kvengine.offload.placement import Site
from kvengine.padding import Padded, over
from kvengine.pages import Pages
from kvengine.policies.retention import Notes, Retention, Seen
from kvengine.pool import Pool
from kvengine.reach import Reach, reached
from kvengine.saliency import Saliency
from kvengine.session import Call, Session, weakly
from kvengine.stack import Stack
from kvengine.strays import bring_in, stand_before, strays
from kvengine.tail import GROWTH, Tail
from kvengine.tokens import grouped, narrowed, pack, part, take, taken


class Holding(Padded):
    def __init__(
        self,
        stack: Stack,
        retention: Retention,
        layer: int,
        layers: int,
        number: int,
        session: Session,
        k: Tensor,
        v: Tensor,
        heads: int = 1,
        part: float = 1.0,
        inner: int | None = None,
    ):
        """`k` [row, token, dim] and `v` [row, token, dim_v] say the shapes, dtypes and device to come. `inner`: the values
        are so many first channels of the keys (latents), and are held once where they stay as they are."""
        self.heads = heads  # rows of a sequence
        self.part = part  # of the layer's heads
        self.stack, self.retention = stack, retention.at(layer, layers)
        self.layer, self.layers, self.number, self.session = layer, layers, number, session
        self.inner = inner
        scored = self.retention.remembers or stack.representation.probes > 0
        tail = Tail if inner is None else partial(Nested, inner)
        self.tail: Tail = tail(k, v, scored, placed=False)
        self.pages: Pages | None = None
        self.seen = self.since = 0  # tokens seen, and those before the current pass
        self.firm = 0  # tokens that shortening the tail does not take back: what came as a prompt, or with padding
        self.whole = True  # the tail holds every token seen, each at its position
        self.limit: int | None = None
        self.tally = Tally()  # of prompts, if a prefill method leaves something out
        self.due = 0  # tokens seen before which no row is full, if the retention waits for that
        self.notes: Notes = {}  # the retention's
        self.lengths: list[tuple[int, Tensor | None]] = [(0, None)]  # tokens in the tail, and their rows
        self.first = torch.zeros(len(k), dtype=torch.long, device=k.device)
        self.prompt_length = torch.zeros(len(k), dtype=torch.long, device=k.device)
        self.begin = self.first  # position of each row's first token of the last prompt
        self.former = self.first  # and of the one before, while that is read
        self.reading = False  # a prompt, whose end is still to come
        self.turn = 0  # tokens seen before the last prompt
        self.past: Notes = {}  # the retention's notes before it
        self.ahead: Tensor | None = None  # by how many positions the tokens that come are later than their number
        self.padded = False  # rows may have seen different numbers of tokens
        self.moved = False  # positions are no longer the tokens' numbers in the text with its padding
        self.prompt_most = 0  # the longest row's prompt
        self.window: Tensor | None = None  # the prompt's last queries
        self.mass: Tensor | None = None  # attention received so far in this prompt
        self.repeated: Tensor | None = None  # the most that a replay has paid to each slot, while there is one
        self.saliency: Saliency | None = None  # of this prompt's tokens, for a representation that asks
        self.judged: int | Tensor = 0  # tokens at the end of the last prompt; [row, 1] where rows differ
        self.units: Tensor | None = None  # what the last query read; None: everything
        self.asked: Tensor | None = None  # what the model named for it to read (`kvengine.named`)
        self.cached_rule: tuple[Tensor, Tensor, Rule | None] | None = None  # `Lane.rule`, and what it was made from
        self.beside = Beside()
        self.saw: Reach | None = None  # that as it was, where some of it has been sealed since

    def everything(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values, positions and scores of all slots, sealed ones first."""
        return (*self.laid_out(), self.position, self.score)

    def laid_out(self, dtype: torch.dtype | None = None, values: bool = True) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots, sealed ones first; without `values`, none of these.

        `dtype`: what codes become, which are decoded in more than the model has and are not all there at once; None: the least
        that holds them.
        """
        k, v = self.tail.k[:, self.tail.span], self.tail.v[:, self.tail.span]
        pages, v = self.stored, v if values else v[..., :0]
        return (k, v) if pages is None else pages.in_front_of(k, v, dtype)

    @property
    def score(self) -> Float[Tensor, "row token"]:
        """Of all slots, sealed ones first."""
        score, pages = self.tail.scores(self.tail.span), self.stored
        return score if pages is None else torch.cat([pages.score, score], 1)

    def show(self, queries: Tensor, mass: Tensor | None, call: Call, prompt: bool) -> Seen:
        return Seen(
            position=self.position, score=self.score, first=self.first, begin=self.begin, newest=self.seen - 1, prompt=prompt,
            prompt_length=self.prompt_length, queries=queries, scale=call.scale,
            jumbled=(self.filling and not prompt) or self.tail.strays,
            read=weakly(self.laid_out), rope=self.session.rope, softcap=call.softcap, sink_logits=call.sinks,
            heads=self.heads, mass=mass, notes=self.notes, place=self.session.place(self.layer, self.layers),
        )  # fmt: skip

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
        clean = self.tail.clean and (self.pages is None or self.pages.clean)
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
        even = bool((rest == back.shape[1]).all())
        kept = take(k, back), take(v, back), take(position, back, -1), take(score, back)
        # A tail that stays may have holes, and one with strays is never taken for clean (`stand_before`).
        clean = even and old is None and (idle is None or bool((kept[2] >= 0).all()))
        self.tail.replace(*kept, clean, room + 2 * page)
        open_slots = rest if old is None else rest - (old & alive).sum(1)
        self.lengths = [(back.shape[1], None)] if even and old is None else grouped(open_slots)
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
            s, rope = self.stack, self.session.rope
            joined = None
            if s.representation.joint and k is not None and position is not None:
                joined = join(s.representation, rope, self.heads, k, position, self.seen)
            rows, device = len(self.first), self.first.device
            scored = self.retention.remembers
            self.pages = Pages(
                self.new_pool(), rows, s.page, s.representation, s.selection, device, joined, scored, self.inner
            )
        elif self.pages.joint is not None and k is not None and position is not None and new is not None:
            mine = k[new], position[new]
            more = join(self.stack.representation, self.session.rope, self.heads, *mine, self.seen)
            self.pages.joint = self.pages.joint.joined(more, new[:: self.heads])
        return self.pages

    def new_pool(self) -> Pool:
        """A pool for this lane's pages, read by units where that saves bytes."""
        s, session = self.stack, self.session
        whole = not (s.placement.fine and (s.representation.lossless or s.representation.joint))
        per = 1 if whole else s.page // s.selection.unit
        share = self.part / session.place(self.layer, self.layers)[1]
        most = int(self.prompt_length.max())
        site = Site(self.layer, self.number, len(self.first), most, s.page // per, share, session.ahead)
        return Pool(s.placement, site, per)

    def judge(self, seen: Seen, keep: Bool[Tensor, "row token"] | None) -> None:
        """Write scores and drop what is not kept, in place."""
        n = 0
        if self.pages is not None and (n := len(self.pages)):
            self.pages.judge(seen.score[:, :n], None if keep is None else keep[:, :n])
        self.tail.judge(seen.score[:, n:], None if keep is None else keep[:, n:])
        self.whole &= keep is None

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

    @property
    def filling(self) -> bool:
        """Whether the next token takes a slot that became free: slots do not lie by age any more."""
        return self.limit is not None and not self.stack.paged and len(self.tail) > self.limit

    def reach(self) -> Int[Tensor, "row token"]:
        """The positions of what the last query read and is still held; -1 for none."""
        return (self.saw or reached(self.units, self.stored, self.tail)).positions()

    def note_reach(self, position: Int[Tensor, "row slot"] | None = None) -> None:
        """Before tokens move from the tail, whose `position` may be at hand, to pages: remember which the last query read."""
        if self.units is not None and self.saw is None:
            self.saw = reached(self.units, self.stored, self.tail, position)

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

    def rows(self, index: Int[Tensor, "chosen"]) -> None:
        """Become the given rows (beam search, batch selection)."""
        self.due = 0
        self.beside.forget(self.tail)
        self.tail.rows(index)
        count = self.open()
        if isinstance(count, Tensor):
            self.lengths = grouped(count[index])
        if self.pages is not None:
            self.pages.rows(index)
        self.first, self.prompt_length = self.first[index], self.prompt_length[index]
        self.begin, self.former = self.begin[index], self.former[index]
        self.judged = self.judged[index] if isinstance(self.judged, Tensor) else self.judged
        self.notes, self.past = ({name: x[index] for name, x in some.items()} for some in (self.notes, self.past))
        self.window, self.mass, self.units, self.asked = (
            None if x is None else x[index] for x in (self.window, self.mass, self.units, self.asked)
        )
        self.saw = None if self.saw is None else self.saw.told(index)
        if self.saliency is not None and self.saliency.mass is not None:
            self.saliency.mass = self.saliency.mass[index]
