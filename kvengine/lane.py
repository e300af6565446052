"""A lane: the heads of a layer that share a stack.

Tokens enter in one of two ways. A *prompt* is read in bulk, exactly, and judged once at its end, so that it does not
matter in which chunks it came. After it, tokens are *taken* as in decoding: attend, judge, seal, one after the other,
even when several come at once (a draft to verify, a question after `follow_up`), so that the order of events, and
with it the result, is that of decoding. While `recording`, a state is remembered before each step, to roll back to.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine import _ops as ops
from kvengine.errors import CacheError
from kvengine.joint import join
from kvengine.kernels.attention import attention
from kvengine.kernels.merge_states import merge_states
from kvengine.kernels.paged_attention import paged_attention
from kvengine.kernels.state import State
from kvengine.pages import Pages
from kvengine.policies._budget import tokens, tokens_by_row
from kvengine.policies.retention import Notes, Retention, Seen
from kvengine.policies.selection import Where
from kvengine.pool import Pool
from kvengine.rope import Rope
from kvengine.saliency import Saliency, running
from kvengine.stack import Stack
from kvengine.tail import Tail
from kvengine.tokens import pack, take


@dataclass(frozen=True)
class Call:
    """One attention call's constants."""

    scale: float
    softcap: float | None = None
    sinks: Float[Tensor, "row group"] | None = None  # a logit that takes part in the softmax, without a value

    def of(self, rows: Int[Tensor, "chosen"] | None) -> Call:
        return self if rows is None or self.sinks is None else replace(self, sinks=self.sinks[rows])


@dataclass
class Session:
    """What the layers of one cache share."""

    prompt_end: int | None = None  # tokens after which the announced prompt ends
    following: bool = False  # tokens are taken one by one, not judged as a prompt
    recording: bool = False  # states are remembered, to roll back to
    dense: bool = False  # queries read everything, whatever the selection
    rope: Rope | None = None
    last: int | None = None  # the last layer that the engine serves; None: each layer is alone
    waiting: list[tuple[Lane, Seen, Tensor]] = field(
        default_factory=list
    )  # prompts judged once all layers have read them
    tree: Bool[Tensor, "node node"] | None = None  # the last tokens of a pass only look, each at these of the others
    memo: dict[Any, Any] = field(default_factory=dict)  # what a selection leaves for later layers, per pass


@dataclass
class Mark:
    """The state before some tokens were taken, and those tokens."""

    seen: int
    tail: Tail
    pages: Pages | None
    notes: Notes
    lengths: list[tuple[int, Tensor | None]]
    k: Tensor
    v: Tensor
    valid: Bool[Tensor, "row token"] | None


def judge_together(session: Session) -> None:
    """All layers have read the prompt: judge those that waited to see the others' measures."""
    waiting, session.waiting = session.waiting, []
    for i, (lane, seen, _) in enumerate(waiting):
        lane.conclude(replace(seen, peers=(torch.stack([m.to(seen.first.device) for _, _, m in waiting]), i)))


class Lane:
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
    ):
        """`k` [row, token, dim] and `v` [row, token, dim_v] say the shapes, dtypes and device to come."""
        self.heads = heads  # rows of a sequence
        self.stack, self.retention = stack, retention.at(layer, layers)
        self.layer, self.layers, self.number, self.session = layer, layers, number, session
        self.tail = Tail(k, v)
        self.pages: Pages | None = None
        self.pool: Pool | None = None
        self.seen = self.since = 0  # tokens seen, and those before the current pass
        self.whole = True  # the tail holds every token seen, each at its position
        self.limit: int | None = None
        self.notes: Notes = {}  # the retention's
        self.lengths: list[tuple[int, Tensor | None]] = [
            (0, None)
        ]  # tokens in the tail, and the rows that have so many
        self.marks: list[Mark] = []
        self.first = torch.zeros(len(k), dtype=torch.long, device=k.device)
        self.prompt_length = torch.zeros(len(k), dtype=torch.long, device=k.device)
        self.padded = False  # rows may have seen different numbers of tokens
        self.prompt_most = 0  # the longest row's prompt
        self.window: Tensor | None = None  # the prompt's last queries
        self.mass: Tensor | None = None  # attention received so far in this prompt
        self.saliency: Saliency | None = None  # of this prompt's tokens, for a representation that asks
        self.judged = 0  # tokens at the end of the last prompt
        self.units: Tensor | None = None  # what the last query read; None: everything

    @property
    def judges(self) -> bool:
        return type(self.retention).keep is not Retention.keep

    @property
    def weighs(self) -> bool:
        """Whether the representation asks for saliency, and the retention has no evidence of that kind itself."""
        r = self.retention
        return self.stack.representation.probes > 0 and not r.counts

    # ---- the prompt -------------------------------------------------------------------------------------------------

    def enter(self, k: Tensor, v: Tensor, valid: Bool[Tensor, "row token"] | None) -> None:
        """Add a chunk of the prompt."""
        n = k.shape[1]
        self.tail.append(k, v, self.positions(n, valid), valid is None)
        if valid is not None:
            self.padded = True
            leading = (~valid).long().cumprod(1).sum(1)
            self.first = torch.where(self.first == self.seen, self.first + leading, self.first)
        self.prompt_length = self.prompt_length + (n if valid is None else valid.sum(1))
        self.seen += n

    def positions(self, n: int, valid: Bool[Tensor, "row token"] | None) -> Int[Tensor, "row token"]:
        at = torch.arange(self.seen, self.seen + n, dtype=torch.int32, device=self.first.device)
        rows = at.expand(len(self.first), n)
        return rows if valid is None else rows.masked_fill(~valid, -1)

    def read(self, q: Float[Tensor, "row group query dim"], call: Call) -> Float[Tensor, "row group query dim_v"]:
        """A prompt chunk's queries over all that is held, causally and as the prefill method allows."""
        k, v, position, _ = self.everything()
        k = self.turned(k, self.shift())
        at = torch.arange(self.seen - q.shape[2], self.seen, device=q.device)
        out = []
        for span in ops.blocks(q, k.shape[1]):
            visible = self.visible(at[span], position, prompt=True)
            state = attention(q[:, :, span], k, v, visible, call.scale, softcap=call.softcap)
            out.append(self.with_sinks([state], call).out)
        return torch.cat(out, 2).to(q.dtype)

    def visible(
        self, at: Int[Tensor, "query"], position: Int[Tensor, "row token"], prompt: bool
    ) -> Bool[Tensor, "row query token"]:
        seen = (position >= 0)[:, None] & (position[:, None] <= at[:, None])
        allowed = self.stack.prefill.visible(at, position, self.first) if prompt else None
        return seen if allowed is None else seen & allowed

    def observe(self, q: Float[Tensor, "row group query dim"], call: Call) -> None:
        """Keep of a prompt chunk what the retention will want at the prompt's end."""
        at = torch.arange(self.seen - q.shape[2], self.seen, device=q.device)
        self.retention.watch(self.notes, q, at - self.first[:, None], self.session.rope)
        if wanted := self.retention.observes:
            part = q[:, :, -wanted:]
            self.window = part if self.window is None else torch.cat([self.window, part], 2)[:, :, -wanted:]
        if self.retention.wants_mass:
            n = 1 if self.retention.last_mass else q.shape[2]
            before = None if self.retention.last_mass else self.mass
            self.mass = self.column_mass(q[:, :, -n:], at[-n:], at[-n:] >= self.first[:, None], call, before)
        if self.weighs:
            self.probe(q, at, call)

    def probe(self, q: Float[Tensor, "row group query dim"], at: Int[Tensor, "query"], call: Call) -> None:
        """Add what this chunk's probes attend to."""
        found = self.saliency
        if found is None:
            end = self.seen if self.session.prompt_end is None else max(self.seen, self.session.prompt_end)
            found = self.saliency = Saliency(self.stack.representation.probes, int(at[0]), end)
        probes = found.probes(at, self.first)
        some = probes.any(0)
        found.mass = self.column_mass(q[:, :, some], at[some], probes[:, some], call, found.mass)

    def column_mass(
        self,
        q: Float[Tensor, "row group query dim"],
        at: Int[Tensor, "query"],
        real: Bool[Tensor, "row query"],
        call: Call,
        before: Float[Tensor, "row group earlier"] | None,
    ) -> Float[Tensor, "row group token"]:
        """Attention that each token receives from those of the queries that are `real` (padding's say nothing)."""
        k, v, position, _ = self.everything()
        mass = torch.zeros(*q.shape[:2], k.shape[1], device=q.device)
        if before is not None:
            mass[:, :, : before.shape[2]] = before
        for span in ops.blocks(q, k.shape[1]):
            visible = self.visible(at[span], position, prompt=True) & real[:, span, None]
            state = attention(q[:, :, span], k, v[..., :1], visible, call.scale, softcap=call.softcap, want_probs=True)
            mass += ops.received([state], self.with_sinks([state], call))
        return mass

    def finish(self, q: Float[Tensor, "row group query dim"], call: Call) -> None:
        """The prompt has ended: judge it, and seal what overflows the tail."""
        self.prompt_most = int(self.prompt_length.max())
        if self.judges:
            window = self.window if self.window is not None else q[:, :, -1:]
            seen = self.show(window, self.mass, call, prompt=True)
            seen = replace(seen, score=self.retention.score(seen))
            measure = self.retention.measure(seen)
            if measure is None:
                self.conclude(seen)
            else:
                self.session.waiting.append((self, seen, measure))
        elif self.stack.paged:
            self.settle(self.weighed(self.show(q, None, call, prompt=True)), None)
        self.window = self.mass = None
        self.judged = self.seen

    def weighed(self, seen: Seen) -> Seen:
        """With the saliency of the tokens not yet sealed as their score, if the representation asks for it."""
        if self.saliency is None:
            return seen
        n = 0 if self.pages is None else len(self.pages)
        fresh = self.saliency.mean(seen.position, self.first)[:, n:]
        self.saliency = None
        return replace(seen, score=torch.cat([seen.score[:, :n], fresh], 1))

    def weigh(self, q: Tensor, call: Call) -> None:
        """Go on with the saliency of the open tail, while decoding."""
        k, v, position, score = self.tail.held()
        at = self.newest(q.shape[2])
        visible = self.visible(at, position, False)
        state = attention(q, k, v[..., :1], visible, call.scale, softcap=call.softcap, want_probs=True)
        mass = ops.received([state], state).sum(1)
        self.tail.judge(running(score, mass, position, at, self.judged), None)

    def conclude(self, seen: Seen) -> None:
        keep = self.retention.keep(seen)
        self.limit = self.retention.limit(seen)
        self.settle(self.weighed(seen), keep)

    def show(self, queries: Tensor, mass: Tensor | None, call: Call, prompt: bool) -> Seen:
        tail = self.tail
        position, score = tail.position[:, tail.span], tail.score[:, tail.span]
        if self.pages is not None:
            position = torch.cat([self.pages.position, position], 1)
            score = torch.cat([self.pages.score, score], 1)
        return Seen(
            position=position, score=score, first=self.first, newest=self.seen - 1, prompt=prompt,
            prompt_length=self.prompt_length, mass=mass, queries=queries, scale=call.scale,
            read=lambda: self.everything()[:2], rope=self.session.rope, softcap=call.softcap, heads=self.heads,
            notes=self.notes,
        )  # fmt: skip

    def everything(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values, positions and scores of all slots, sealed ones first."""
        tail = self.tail.held()
        if self.pages is None or not len(self.pages):
            return tail
        pages = (*self.pages.decoded(), self.pages.position, self.pages.score)
        return tuple(torch.cat([a, b], 1) for a, b in zip(pages, tail, strict=True))  # type: ignore[return-value]

    # ---- what is kept -----------------------------------------------------------------------------------------------

    def settle(self, seen: Seen, keep: Bool[Tensor, "row token"] | None) -> None:
        """After a prompt: drop what is not kept, merge, compact, seal."""
        anew = self.stack.representation.lossless or self.retention.merges
        if self.pages is None or (keep is not None and anew):
            k, v, position, _ = self.everything()
            if keep is not None and self.retention.merges:
                k, v = self.retention.fold(seen, keep)
            self.rebuild(k, v, position, seen.score, keep)
        else:
            self.judge(seen, keep)
            if keep is not None:
                self.pages.release()
            self.pack_pages(*self.tail.held(), None, self.tail.clean)

    def rebuild(self, k: Tensor, v: Tensor, position: Tensor, score: Tensor, keep: Tensor | None) -> None:
        """Hold exactly these tokens, compactly."""
        clean = self.tail.clean and (self.pages is None or self.pages.clean)
        self.pages = self.pool = None
        if self.stack.paged:
            self.whole = False
            self.pack_pages(k, v, position, score, keep, clean)
        elif keep is not None:
            index = pack((position >= 0) & keep)
            clean = not bool((index < 0).any())
            if clean and index.shape[1] == position.shape[1]:
                self.tail.judge(score, None)
                return
            self.whole = False
            kept = take(k, index), take(v, index), take(position, index, -1), take(score, index)
            self.tail.replace(*kept, clean, self.slots(index.shape[1]))

    def slots(self, held: int) -> int:
        """How many slots to keep for that many tokens."""
        return held + 64 if self.limit is None else min(self.limit + 1, held + 64)

    def pack_pages(
        self, k: Tensor, v: Tensor, position: Tensor, score: Tensor, keep: Tensor | None, clean: bool
    ) -> None:
        """Seal each row's whole pages beyond the tail's room, from its first token on; the rest becomes the tail.

        A row's pages begin at its own first token, so that they are the same whatever it is batched with.
        """
        page, room = self.stack.page, self.stack.room
        alone = self.exact(k, position)
        if clean and keep is None and alone is None:
            n = k.shape[1]
            spill = max(0, (n - room) // page * page) if self.seals else 0
            if spill:
                self.sealed(k, position).seal(k[:, :spill], v[:, :spill], position[:, :spill], score[:, :spill], True)
            self.tail.replace(k[:, spill:], v[:, spill:], position[:, spill:], score[:, spill:], True, room + 2 * page)
            self.lengths = [(n - spill, None)]
            return
        alive = position >= 0 if keep is None else (position >= 0) & keep
        index = pack(alive if alone is None else alive & ~alone)
        count = (index >= 0).sum(1)
        pages = ((count - room) // page).clamp(min=0) if self.seals else torch.zeros_like(count)
        gone = alive.new_zeros(len(alive), alive.shape[1] + 1)
        if most := int(pages.max()):
            at = (index.shape[1] - count)[:, None] + torch.arange(most * page, device=k.device)
            front = index.gather(1, at.clamp(max=index.shape[1] - 1))
            front = front.masked_fill(torch.arange(most * page, device=k.device) >= pages[:, None] * page, -1)
            taken = take(k, front), take(v, front), take(position, front, -1), take(score, front)
            counts = None if bool((pages == most).all()) else pages
            self.sealed(k, position).seal(*taken, True, counts=counts)
            gone.scatter_(1, front.masked_fill(front < 0, alive.shape[1]), True)
        back = pack(alive & ~gone[:, :-1])
        rest, width = (back >= 0).sum(1), back.shape[1]
        even = bool((rest == width).all())
        kept = take(k, back), take(v, back), take(position, back, -1), take(score, back)
        self.tail.replace(*kept, even, room + 2 * page)
        self.lengths = (
            [(width, None)] if even else [(n, (rest == n).nonzero()[:, 0]) for n in sorted(set(rest.tolist()))]
        )

    @property
    def seals(self) -> bool:
        """Whether more tokens may be sealed: keys kept jointly are those of one prompt."""
        return self.pages is None or self.pages.joint is None

    def exact(self, k: Tensor, position: Int[Tensor, "row token"]) -> Bool[Tensor, "row token"] | None:
        """Tokens of a prompt that the selection wants left alone, exact and always read."""
        if not (self.stack.representation.joint and self.seals):
            return None
        return self.stack.selection.exact(k, position, self.prompt_length)

    def sealed(self, k: Tensor | None = None, position: Tensor | None = None) -> Pages:
        """The pages; made, if there are none yet, for a prompt of these tokens."""
        if self.pages is None:
            self.pool = Pool(self.stack.placement)
            s, rope = self.stack, self.session.rope
            joined = None
            if s.representation.joint and k is not None and position is not None:
                joined = join(s.representation, rope, self.heads, k, position, self.seen)
            rows, device = len(self.first), self.first.device
            self.pages = Pages(self.pool, rows, s.page, s.representation, s.selection, device, joined)
        return self.pages

    def judge(self, seen: Seen, keep: Bool[Tensor, "row token"] | None) -> None:
        """Write scores and drop what is not kept, in place."""
        n = 0
        if self.pages is not None and (n := len(self.pages)):
            self.pages.judge(seen.score[:, :n], None if keep is None else keep[:, :n])
        self.tail.judge(seen.score[:, n:], None if keep is None else keep[:, n:])
        self.whole &= keep is None

    # ---- decoding ---------------------------------------------------------------------------------------------------

    def take(
        self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, call: Call
    ) -> Float[Tensor, "row group query dim_v"]:
        """Take tokens as decoding does, in as large steps as give the same result."""
        out, i = [], 0
        self.since = self.seen
        while i < q.shape[2]:
            m = min(q.shape[2] - i, self.stride())
            part = None if valid is None else valid[:, i : i + m]
            out.append(self.step(q[:, :, i : i + m], k[:, i : i + m], v[:, i : i + m], part, call))
            i += m
        return out[0] if len(out) == 1 else torch.cat(out, 2)

    def stride(self) -> int:
        """Tokens that may be taken together: up to the next one after which something changes."""
        selects = self.stack.selects and not self.session.dense
        if self.retention.decodes or selects or (self.weighs and self.session.recording):
            return 1
        if self.stack.paged and not self.stack.representation.joint:
            return max(1, self.stack.room + self.stack.page - max(n for n, _ in self.lengths))
        return 1 << 30

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, call: Call
    ) -> Float[Tensor, "row group query dim_v"]:
        if self.session.recording:
            self.remember(k, v, valid)
        self.add(k, v, valid)
        if not self.retention.decodes:
            out, _ = self.attend(q, call, mass=False)
        else:
            out, mass = self.attend(q, call, self.retention.counts)
            seen = self.show(q, mass, call, prompt=False)
            seen = replace(seen, score=self.retention.score(seen))
            keep = self.retention.keep(seen)
            if keep is not None and self.retention.remerges:
                self.tail.rewrite(*self.retention.fold(seen, keep))
            self.judge(seen, keep)
        if self.weighs:
            self.weigh(q, call)
        self.seal()
        return out

    def add(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        position = self.positions(k.shape[1], valid)
        if self.limit is not None and not self.stack.paged and len(self.tail) > self.limit:
            self.tail.fill(k, v, position)
        else:
            self.tail.append(k, v, position, valid is None)
        self.seen += k.shape[1]
        self.lengths = [(n + k.shape[1], rows) for n, rows in self.lengths]

    def attend(self, q: Tensor, call: Call, mass: bool) -> tuple[Tensor, Float[Tensor, "row group token"] | None]:
        k, v, position = self.open_slots()
        visible = (
            None if self.tail.clean and q.shape[2] == 1 else self.visible(self.newest(q.shape[2]), position, False)
        )
        stored = self.pages if self.pages is not None and len(self.pages) else None
        if stored is None and not mass and call.softcap is None and call.sinks is None:
            return ops.whole(q, k, v, visible, call.scale), None
        parts = [attention(q, k, v, visible, call.scale, softcap=call.softcap, want_probs=mass)]
        if stored is not None:
            parts.insert(0, self.attend_pages(stored, q, call, mass))
        whole = self.with_sinks(parts, call)
        received = ops.received(parts, whole) if mass else None
        return whole.out.to(q.dtype), received

    def shift(self) -> Int[Tensor, "row token"] | None:
        """By how many positions the retention wants each slot's key turned when it is read, sealed slots first."""
        if self.whole or type(self.retention).shift is Retention.shift:
            return None
        position = self.tail.position[:, self.tail.span]
        if self.pages is not None:
            position = torch.cat([self.pages.position, position], 1)
        return self.retention.shift(position, self.first)

    def open_slots(self) -> tuple[Tensor, Tensor, Int[Tensor, "row token"]]:
        """Keys as they are to be read, values and positions of the tail."""
        k, v, position, _ = self.tail.held()
        shift = self.shift()
        return self.turned(k, shift if shift is None else shift[:, shift.shape[1] - k.shape[1] :]), v, position

    def turned(self, k: Float[Tensor, "row token dim"], shift: Int[Tensor, "row token"] | None) -> Tensor:
        if shift is None:
            return k
        if self.session.rope is None:
            raise CacheError("the retention turns keys when they are read, but the session knows no rotation")
        return self.session.rope.turn(k, shift)

    def look(self, q: Tensor, k: Tensor, v: Tensor, sees: Tensor, call: Call) -> Float[Tensor, "row group query dim_v"]:
        """Attend from tokens that are not added: to what is held, and to those among them that `sees` allows."""
        parts = [self.glance(some, call) for some in q.split(1 if self.stack.selects else q.shape[2], 2)]
        held = State(torch.cat([p.out for p in parts], 2), torch.cat([p.lse for p in parts], 2))
        block = attention(q, k, v, sees.expand(len(q), -1, -1), call.scale, softcap=call.softcap)
        return self.with_sinks([held, block], call).out.to(q.dtype)

    def glance(self, q: Tensor, call: Call) -> State:
        """Attention over what is held."""
        k, v, position = self.open_slots()
        visible = None if self.tail.clean else (position >= 0)[:, None].expand(-1, q.shape[2], -1)
        parts = [attention(q, k, v, visible, call.scale, softcap=call.softcap)] if len(self.tail) else []
        if self.pages is not None and len(self.pages):
            parts.append(self.attend_pages(self.pages, q, call, False))
        return merge_states(parts)

    def newest(self, n: int) -> Int[Tensor, "query"]:
        return torch.arange(self.seen - n, self.seen, device=self.first.device)

    def with_sinks(self, parts: list[State], call: Call) -> State:
        if call.sinks is None:
            return merge_states(parts)
        some = parts[0]
        lse = call.sinks.float()[..., None].expand_as(some.lse)
        return merge_states([*parts, State(torch.zeros_like(some.out), lse)])

    def attend_pages(self, pages: Pages, q: Tensor, call: Call, mass: bool) -> State:
        self.units = self.select(pages, q, call)
        shift = self.shift()
        fields = pages.readable() if shift is None else None
        if fields is not None:
            return paged_attention(
                q, fields, pages.table, pages.position, page=pages.page, scale=call.scale, units=self.units,
                unit=None if self.units is None else self.stack.selection.unit, codec=pages.representation.codec,
                dim_v=self.tail.v.shape[-1], softcap=call.softcap, want_probs=mass,
            )  # fmt: skip
        if self.units is None:
            k, v = pages.decoded()
            position = pages.position
            k = self.turned(k, shift if shift is None else shift[:, : k.shape[1]])
        else:
            k, v, position = pages.chosen(self.units)
        visible = None if pages.clean and self.units is None else (position >= 0)[:, None].expand(-1, q.shape[2], -1)
        return attention(q, k, v, visible, call.scale, softcap=call.softcap, want_probs=mass)

    def select(self, pages: Pages, q: Tensor, call: Call) -> Int[Tensor, "row chosen"] | None:
        selection = self.stack.selection
        if selection.reads is None or self.session.dense:
            return None
        budget, lengths = tokens(selection.reads, self.prompt_most), [n for n, _ in self.lengths]
        same = isinstance(selection.reads, int) or not self.padded  # every row has that budget
        if same and (budget - max(lengths)) // selection.unit >= pages.units:
            return None
        most = (budget - min(lengths)) // selection.unit
        count = (tokens_by_row(selection.reads, self.prompt_length) - self.open()) // selection.unit
        where = Where(
            layer=self.layer, layers=self.layers, count=count.clamp(min=1), most=max(1, most), scale=call.scale,
            keys=lambda: pages.decoded()[0], token=self.seen - 1, lane=self.number, memo=self.session.memo,
            since=self.since, joint=pages.joint is not None,
        )  # fmt: skip
        return selection.select(q[:, :, 0], pages.summary, pages.alive, where)

    def open(self) -> Int[Tensor, "row"] | int:
        """Slots of each row's tail."""
        if len(self.lengths) == 1:
            return self.lengths[0][0]
        out = torch.empty_like(self.first)
        for n, rows in self.lengths:
            out[rows] = n
        return out

    def seal(self) -> None:
        """Seal the oldest page of the rows whose tail overflows."""
        page, most = self.stack.page, self.stack.room + self.stack.page
        if not self.stack.paged or self.stack.representation.joint or all(n < most for n, _ in self.lengths):
            return
        for n, rows in self.lengths:
            if n >= most:
                self.seal_rows(n, rows)
        self.lengths = [(n - page if n >= most else n, rows) for n, rows in self.lengths]
        self.tail.start = self.tail.end - max(n for n, _ in self.lengths)
        self.whole = False
        if self.retention.decodes:
            self.tidy()

    def seal_rows(self, length: int, rows: Int[Tensor, "row"] | None) -> None:
        start = self.tail.end - length
        span = slice(start, start + self.stack.page)
        held = (self.tail.k, self.tail.v, self.tail.position, self.tail.score)
        if rows is None:
            k, v, position, score = (x[:, span] for x in held)
            self.sealed().seal(k, v, position, score, self.tail.clean)
            return
        k, v, position, score = (x[rows, span] for x in held)
        self.sealed().seal(k, v, position, score, False, rows)
        self.tail.own_small()
        self.tail.position[rows, span] = -1

    def tidy(self) -> None:
        """Give back empty pages; pack the rest anew once most of it is holes and nothing is lost by it."""
        pages = self.sealed()
        pages.release()
        if self.stack.representation.lossless and len(pages) and float((pages.position >= 0).float().mean()) < 0.5:
            self.rebuild(*self.everything(), keep=None)

    # ---- remembering ------------------------------------------------------------------------------------------------

    def remember(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        state = copy.copy(self.tail), copy.copy(self.pages), dict(self.notes), self.lengths
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
            self.notes = mark.notes
            self.pool = None if self.pages is None else self.pages.pool
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
        self.tail.end -= self.seen - goal
        self.lengths = [(n - self.seen + goal, rows) for n, rows in self.lengths]
        self.seen = goal

    def commit(self) -> None:
        """What was taken is now history."""
        self.marks.clear()
        self.share(False)

    def rows(self, index: Int[Tensor, "chosen"]) -> None:
        """Become the given rows (beam search, batch selection)."""
        if self.marks:
            raise CacheError("rows cannot be reordered while a draft is pending; commit or roll back first")
        self.tail.rows(index)
        self.lengths = [
            (n, rows if rows is None else torch.isin(index, rows).nonzero()[:, 0]) for n, rows in self.lengths
        ]
        if self.pages is not None:
            self.pages.rows(index)
        self.first, self.prompt_length = self.first[index], self.prompt_length[index]
        self.notes = {name: x[index] for name, x in self.notes.items()}
