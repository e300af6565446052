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
from kvengine.pages import Pages
from kvengine.policies._budget import tokens, tokens_by_row
from kvengine.policies.retention import Retention, Seen
from kvengine.policies.selection import Where
from kvengine.pool import Pool
from kvengine.rope import Rope
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
    rope: Rope | None = None
    memo: dict[Any, Any] = field(default_factory=dict)  # what a selection leaves for later layers, per pass


@dataclass
class Mark:
    """The state before some tokens were taken, and those tokens."""

    seen: int
    tail: Tail
    pages: Pages | None
    k: Tensor
    v: Tensor
    valid: Bool[Tensor, "row token"] | None


class Lane:
    def __init__(self, stack: Stack, retention: Retention, layer: int, layers: int, number: int, session: Session, k: Tensor, v: Tensor):
        """`k` [row, token, dim] and `v` [row, token, dim_v] say the shapes, dtypes and device to come."""
        self.stack, self.retention = stack, retention.at(layer, layers)
        self.layer, self.layers, self.number, self.session = layer, layers, number, session
        self.tail = Tail(k, v)
        self.pages: Pages | None = None
        self.pool: Pool | None = None
        self.seen = 0
        self.whole = True  # the tail holds every token seen, each at its position
        self.limit: int | None = None
        self.marks: list[Mark] = []
        self.first = torch.zeros(len(k), dtype=torch.long, device=k.device)
        self.prompt_length = torch.zeros(len(k), dtype=torch.long, device=k.device)
        self.prompt_most = 0  # the longest row's prompt
        self.window: Tensor | None = None  # the prompt's last queries
        self.mass: Tensor | None = None  # attention received so far in this prompt
        self.units: Tensor | None = None  # what the last query read; None: everything

    @property
    def judges(self) -> bool:
        return type(self.retention).keep is not Retention.keep

    # ---- the prompt -------------------------------------------------------------------------------------------------

    def enter(self, k: Tensor, v: Tensor, valid: Bool[Tensor, "row token"] | None) -> None:
        """Add a chunk of the prompt."""
        n = k.shape[1]
        self.tail.append(k, v, self.positions(n, valid), valid is None)
        if valid is not None:
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
        at = torch.arange(self.seen - q.shape[2], self.seen, device=q.device)
        out = []
        for span in ops.blocks(q, k.shape[1]):
            visible = self.visible(at[span], position, prompt=True)
            state = ops.attention(q[:, :, span], k, v, visible, call.scale, call.softcap)
            out.append(self.with_sinks([state], call).out)
        return torch.cat(out, 2).to(q.dtype)

    def visible(self, at: Int[Tensor, "query"], position: Int[Tensor, "row token"], prompt: bool) -> Bool[Tensor, "row query token"]:
        seen = (position >= 0)[:, None] & (position[:, None] <= at[:, None])
        allowed = self.stack.prefill.visible(at, position, self.first) if prompt else None
        return seen if allowed is None else seen & allowed

    def observe(self, q: Float[Tensor, "row group query dim"], call: Call) -> None:
        """Keep of a prompt chunk what the retention will want at the prompt's end."""
        if wanted := self.retention.observes:
            part = q[:, :, -wanted:]
            self.window = part if self.window is None else torch.cat([self.window, part], 2)[:, :, -wanted:]
        if self.retention.wants_mass:
            self.mass = self.column_mass(q, call)

    def column_mass(self, q: Float[Tensor, "row group query dim"], call: Call) -> Float[Tensor, "row group token"]:
        k, v, position, _ = self.everything()
        at = torch.arange(self.seen - q.shape[2], self.seen, device=q.device)
        mass = torch.zeros(*q.shape[:2], k.shape[1], device=q.device)
        if self.mass is not None:
            mass[:, :, : self.mass.shape[2]] = self.mass
        for span in ops.blocks(q, k.shape[1]):
            real = (at[span] >= self.first[:, None])[..., None]  # padding's queries say nothing
            visible = self.visible(at[span], position, prompt=True) & real
            state = ops.attention(q[:, :, span], k, v[..., :1], visible, call.scale, call.softcap, want_probs=True)
            mass += ops.spread(state, self.with_sinks([state], call).lse).nan_to_num(0.0).sum(2)
        return mass

    def finish(self, q: Float[Tensor, "row group query dim"], call: Call) -> None:
        """The prompt has ended: judge it, and seal what overflows the tail."""
        self.prompt_most = int(self.prompt_length.max())
        self.limit = self.retention.limit(self.prompt_most)
        keep = None
        if self.judges:
            window = self.window if self.window is not None else q[:, :, -1:]
            seen = self.show(window, self.mass, call.scale, prompt=True)
            seen = replace(seen, score=self.retention.score(seen))
            keep = self.retention.keep(seen)
            self.settle(seen, keep)
        elif self.stack.paged:
            self.settle(self.show(q, None, call.scale, prompt=True), None)
        self.window = self.mass = None

    def show(self, queries: Tensor, mass: Tensor | None, scale: float, prompt: bool) -> Seen:
        tail = self.tail
        position, score = tail.position[:, tail.span], tail.score[:, tail.span]
        if self.pages is not None:
            position = torch.cat([self.pages.position, position], 1)
            score = torch.cat([self.pages.score, score], 1)
        return Seen(
            position=position, score=score, first=self.first, newest=self.seen - 1, prompt=prompt,
            prompt_length=self.prompt_length, mass=mass, queries=queries, scale=scale,
            read=lambda: self.everything()[:2], rope=self.session.rope,
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
        if self.pages is None or (keep is not None and self.stack.representation.lossless):
            k, v, position, _ = self.everything()
            if keep is not None and self.retention.merges:
                k, v = self.retention.fold(seen, keep)
            self.rebuild(k, v, position, seen.score, keep)
        else:
            self.judge(seen, keep)
            if keep is not None:
                self.pages.release()
            self.rebuild_tail(*self.tail.held())

    def rebuild(self, k: Tensor, v: Tensor, position: Tensor, score: Tensor, keep: Tensor | None) -> None:
        """Hold exactly these tokens, compactly."""
        clean = self.tail.clean and (self.pages is None or self.pages.clean)
        self.pages = self.pool = None
        if not clean or keep is not None:
            valid = position >= 0
            index = pack(valid if keep is None else valid & keep)
            clean = not bool((index < 0).any())
            if clean and index.shape[1] == position.shape[1] and not self.stack.paged:
                self.tail.judge(score, None)
                return
            k, v, score = take(k, index), take(v, index), take(score, index)
            position = take(position, index, -1)
        self.whole = self.whole and keep is None and not self.stack.paged
        if self.stack.paged:
            self.pack_pages(k, v, position, score, clean)
        else:
            self.tail.replace(k, v, position, score, clean, self.slots(k.shape[1]))

    def slots(self, held: int) -> int:
        """How many slots to keep for that many tokens."""
        return held + 64 if self.limit is None else min(self.limit + 1, held + 64)

    def rebuild_tail(self, k: Tensor, v: Tensor, position: Tensor, score: Tensor) -> None:
        index = pack(position >= 0)
        clean = not bool((index < 0).any())
        self.pack_pages(take(k, index), take(v, index), take(position, index, -1), take(score, index), clean)

    def pack_pages(self, k: Tensor, v: Tensor, position: Tensor, score: Tensor, clean: bool) -> None:
        """Seal all whole pages beyond the tail's room; the rest becomes the tail."""
        page, room = self.stack.page, self.stack.room
        spill = max(0, (k.shape[1] - room) // page * page)
        if spill:
            self.sealed().seal(k[:, :spill], v[:, :spill], position[:, :spill], score[:, :spill], clean)
            self.whole = False
        rest = [x[:, spill:] for x in (k, v, position, score)]
        self.tail.replace(*rest, clean, room + 2 * page)

    def sealed(self) -> Pages:
        if self.pages is None:
            self.pool = Pool(self.stack.placement)
            s = self.stack
            self.pages = Pages(self.pool, len(self.first), s.page, s.representation, s.selection, self.first.device)
        return self.pages

    def judge(self, seen: Seen, keep: Bool[Tensor, "row token"] | None) -> None:
        """Write scores and drop what is not kept, in place."""
        n = 0
        if self.pages is not None and (n := len(self.pages)):
            self.pages.judge(seen.score[:, :n], None if keep is None else keep[:, :n])
        self.tail.judge(seen.score[:, n:], None if keep is None else keep[:, n:])
        self.whole &= keep is None

    # ---- decoding ---------------------------------------------------------------------------------------------------

    def take(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, call: Call) -> Float[Tensor, "row group query dim_v"]:
        """Take tokens as decoding does, in as large steps as give the same result."""
        out, i = [], 0
        while i < q.shape[2]:
            m = min(q.shape[2] - i, self.stride())
            part = None if valid is None else valid[:, i : i + m]
            out.append(self.step(q[:, :, i : i + m], k[:, i : i + m], v[:, i : i + m], part, call))
            i += m
        return out[0] if len(out) == 1 else torch.cat(out, 2)

    def stride(self) -> int:
        """Tokens that may be taken together: up to the next one after which something changes."""
        if self.retention.decodes or self.stack.selects:
            return 1
        if self.stack.paged:
            return max(1, self.stack.room + self.stack.page - len(self.tail))
        return 1 << 30

    def step(self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, call: Call) -> Float[Tensor, "row group query dim_v"]:
        if self.session.recording:
            self.remember(k, v, valid)
        self.add(k, v, valid)
        if not self.retention.decodes:
            out, _ = self.attend(q, call, mass=False)
        else:
            out, mass = self.attend(q, call, self.retention.wants_mass)
            seen = self.show(q, mass, call.scale, prompt=False)
            seen = replace(seen, score=self.retention.score(seen))
            keep = self.retention.keep(seen)
            if keep is not None and self.retention.merges:
                self.tail.rewrite(*self.retention.fold(seen, keep))
            self.judge(seen, keep)
        self.seal()
        return out

    def add(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        position = self.positions(k.shape[1], valid)
        if self.limit is not None and not self.stack.paged and len(self.tail) > self.limit:
            self.tail.fill(k, v, position)
        else:
            self.tail.append(k, v, position, valid is None)
        self.seen += k.shape[1]

    def attend(self, q: Tensor, call: Call, mass: bool) -> tuple[Tensor, Float[Tensor, "row group token"] | None]:
        k, v, position, _ = self.tail.held()
        visible = None if self.tail.clean and q.shape[2] == 1 else self.visible(self.newest(q.shape[2]), position, False)
        stored = self.pages if self.pages is not None and len(self.pages) else None
        if stored is None and not mass and call.softcap is None and call.sinks is None:
            return ops.quick(q, k, v, visible, call.scale), None
        parts = [ops.attention(q, k, v, visible, call.scale, call.softcap, mass)]
        if stored is not None:
            parts.insert(0, self.attend_pages(stored, q, call, mass))
        whole = self.with_sinks(parts, call)
        received = torch.cat([ops.spread(p, whole.lse) for p in parts], 3).sum(2) if mass else None
        return whole.out.to(q.dtype), received

    def newest(self, n: int) -> Int[Tensor, "query"]:
        return torch.arange(self.seen - n, self.seen, device=self.first.device)

    def with_sinks(self, parts: list[ops.State], call: Call) -> ops.State:
        if call.sinks is None:
            return ops.merge(parts)
        some = parts[0]
        lse = call.sinks.float()[..., None].expand_as(some.lse)
        return ops.merge([*parts, ops.State(torch.zeros_like(some.out), lse)])

    def attend_pages(self, pages: Pages, q: Tensor, call: Call, mass: bool) -> ops.State:
        self.units = self.select(pages, q, call)
        if self.units is None:
            k, v = pages.decoded()
            position = pages.position
        else:
            k, v, position = pages.chosen(self.units)
        visible = None if pages.clean and self.units is None else (position >= 0)[:, None].expand(-1, q.shape[2], -1)
        return ops.attention(q, k, v, visible, call.scale, call.softcap, mass)

    def select(self, pages: Pages, q: Tensor, call: Call) -> Int[Tensor, "row chosen"] | None:
        selection = self.stack.selection
        if selection.reads is None:
            return None
        most = (tokens(selection.reads, self.prompt_most) - len(self.tail)) // selection.unit
        if most >= pages.units:
            return None
        count = (tokens_by_row(selection.reads, self.prompt_length) - len(self.tail)) // selection.unit
        where = Where(
            layer=self.layer, layers=self.layers, count=count.clamp(min=1), most=max(1, most), scale=call.scale,
            keys=lambda: pages.decoded()[0], token=self.seen - 1, lane=self.number, memo=self.session.memo,
        )  # fmt: skip
        return selection.select(q[:, :, 0], pages.summary, pages.alive, where)

    def seal(self) -> None:
        page = self.stack.page
        if not self.stack.paged or len(self.tail) < self.stack.room + page:
            return
        k, v, position, score = (x[:, :page] for x in self.tail.held())
        self.sealed().seal(k, v, position, score, self.tail.clean)
        self.tail.start += page
        self.whole = False
        if self.retention.decodes and not self.marks:
            self.tidy()

    def tidy(self) -> None:
        """Give back empty pages; pack the rest anew once most of it is holes and nothing is lost by it."""
        pages = self.sealed()
        pages.release()
        if self.stack.representation.lossless and len(pages) and float((pages.position >= 0).float().mean()) < 0.5:
            self.rebuild(*self.everything(), keep=None)

    # ---- remembering ------------------------------------------------------------------------------------------------

    def remember(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        self.marks.append(Mark(self.seen, copy.copy(self.tail), copy.copy(self.pages), k, v, valid))
        self.tail.shared = True

    def rollback(self, n: int) -> None:
        """Forget the last `n` tokens, and all that they changed."""
        goal = self.seen - n
        while self.marks and self.marks[-1].seen > goal:
            self.marks.pop()
        if n and not self.marks:
            self.shorten(goal)
        elif n:
            mark = self.marks.pop()
            self.tail, self.pages, self.seen = mark.tail, mark.pages, mark.seen
            self.tail.shared = bool(self.marks)
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
                f"cannot go back from {self.seen} to {goal} tokens: the policy has dropped or sealed some of them since. "
                "Call cache.activate_past_recording() before the tokens that may have to be taken back"
            )
        self.tail.end -= self.seen - goal
        self.seen = goal

    def commit(self) -> None:
        """What was taken is now history."""
        self.marks.clear()
        self.tail.shared = False
        if self.retention.decodes and self.pages is not None and len(self.pages):
            self.pages.release()

    def rows(self, index: Int[Tensor, "chosen"]) -> None:
        """Become the given rows (beam search, batch selection)."""
        if self.marks:
            raise CacheError("rows cannot be reordered while a draft is pending; commit or roll back first")
        self.tail.rows(index)
        if self.pages is not None:
            self.pages.rows(index)
        self.first, self.prompt_length = self.first[index], self.prompt_length[index]
