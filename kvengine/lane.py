"""A lane: the heads of a layer that share a stack.

Tokens enter in one of two ways. A *prompt* is read in bulk, exactly, and judged once at its end, so that it does not
matter in which chunks it came. After it, tokens are *taken* as in decoding: attend, judge, seal, one after the other,
even when several come at once (a draft to verify, a question after `follow_up`), so that the order of events, and
with it the result, is that of decoding. While `recording`, a state is remembered before each step, to roll back to.

What it is to take a token is written in `step`; where one kernel can do all of that, `quick` does (`kvengine.quick`), and
whoever gets None from it calls `take`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine import answers, attending, named
from kvengine.errors import CacheError
from kvengine.gradients import live, watched
from kvengine.kernels.attention import attention
from kvengine.kernels.column_mass import blocks
from kvengine.kernels.merge_states import merge_states, received
from kvengine.kernels.paged_attention import paged_attention
from kvengine.kernels.span_attention import Band, band_spans, pairs
from kvengine.kernels.state import Into, State
from kvengine.pages import Pages
from kvengine.policies.retention import Retention
from kvengine.quick import Quick
from kvengine.session import Call
from kvengine.tokens import breaks, narrowed

Steps = list[tuple[int, "Lane"]]
"""Tokens taken together, and the lane as it was when their queries asked."""


class Lane(Quick):
    """What the heads of a lane hold, and how queries read it."""

    whole_tail: ClassVar[bool] = True  # a tail that is all there is may be read without a state to join
    into: Into | None = None  # where a step's answers are written, beside those of other lanes

    def enter(
        self,
        k: Tensor,
        v: Tensor,
        valid: Bool[Tensor, "row token"] | None,
        moved: bool = False,
        resumed: Bool[Tensor, "row"] | None = None,
    ) -> None:
        """Add a chunk of the prompt. `moved`: its tokens are not in the order in which they came."""
        n = k.shape[1]
        self.check_end(n)
        if not self.reading:
            if self.filling:
                self.tail.sort()
            self.reading, self.former, self.begin = True, self.begin, torch.full_like(self.first, self.seen)
            self.turn, self.past = self.seen, dict(self.notes)
            self.beside.forget(self.tail)
        if valid is not None:
            self.check_padding(valid)
            self.pad(valid, resumed)
        if moved:
            self.whole, self.moved = False, True
        if not live(k, v):  # a pass to come would write beside what gradients are to go back through
            # Chunks to come need not move these, nor need the first token of an answer.
            more = max(n, (self.session.prompt_end or 0) - self.seen)
            self.tail.reserve(more, spare=self.plain and self.session.generating)
        self.tail.append(k, v, self.positions(n, valid), valid is None)
        self.prompt_length = self.prompt_length + (n if valid is None else valid.sum(1))
        self.seen += n
        self.firm = self.seen

    def read(self, q: Float[Tensor, "row group query dim"], call: Call) -> Float[Tensor, "row group query dim_v"]:
        """A prompt chunk's queries over all that is held, causally and as the prefill method allows."""
        by_slot, band = self.banded()
        if by_slot and call.named is None:
            return watched(self.read_spans(q, call, band), self.tail, self.pages)
        (k, v), position = self.laid_out(), self.position
        k = self.turned(k, self.shift())
        at = torch.arange(self.seen - q.shape[2], self.seen, device=q.device)
        out = []
        for span in blocks(q, k.shape[1]):
            visible = self.visible(at[span], position, prompt=True)
            if call.named is not None:
                visible = visible & named.among(call.named[:, span], position, self.seen)
            sees = (position >= 0)[:, None] & (position[:, None] <= at[span, None])
            self.tally.every, self.tally.computed = (
                x + float(y.sum()) for x, y in ((self.tally.every, sees), (self.tally.computed, visible))
            )
            state = attention(q[:, :, span], k, v, visible, call.scale, softcap=call.softcap)
            out.append(merge_states([state], sinks=call.sinks).out)
        return watched(torch.cat(out, 2).to(q.dtype), self.tail, self.pages)

    def read_spans(self, q: Tensor, call: Call, band: Band | None) -> Float[Tensor, "row group query dim_v"]:
        """The same where slots tell who sees whom: what the prefill method leaves out is not touched.

        The chunk lies in the last slots.
        """
        shift, position = self.shift(), self.position
        k, v = self.laid_out(q.dtype if shift is None and not torch.is_grad_enabled() else None)
        k, v = narrowed(self.turned(k, shift), q.dtype), narrowed(v, q.dtype)
        some, n = max(0, min(q.shape[2], self.exact_from - self.seen + q.shape[2])), q.shape[2]
        if self.stack.prefill.chooses:
            return attending.chosen(q, k, v, position, self.clean, self.stack.prefill, n - some, call, self.tally)
        if band is not None:
            held = k.shape[1] - (n - some)
            self.tally.add(len(q), held - some, held, pairs(band_spans(some, held, band), some, held) if some else None)
            self.tally.add(len(q), held, k.shape[1])
        if band is None or some in (0, n):
            return attending.by_slot(q, k, v, position, self.clean, *call.constants, band if some else None)
        first = attending.by_slot(
            q[:, :, :some], k[:, :held], v[:, :held], position[:, :held], self.clean, *call.constants, band
        )
        return torch.cat([first, attending.by_slot(q[:, :, some:], k, v, position, self.clean, *call.constants)], 2)

    def resume(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Bool[Tensor, "row"],
        at: Int[Tensor, "row"],
        call: Call,
        steps: Steps | None = None,
    ) -> Float[Tensor, "row group 1 dim_v"]:
        """These rows take their only token of a turn, which is the turn's token `at`."""
        self.ahead = None if self.placing else at
        out = self.take(q, k, v, rows[:, None], call, steps)
        self.ahead = None
        self.unpad(rows)
        return out

    def take(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        valid: Tensor | None,
        call: Call,
        steps: Steps | None = None,
    ) -> Float[Tensor, "row group query dim_v"]:
        """Take tokens as decoding does, in as large steps as give the same result, which are added to `steps`."""
        if call.bare and q.shape[2] == 1 and valid is None and steps is None:
            one = self.quick(q.contiguous(), k.contiguous(), v.contiguous(), call.scale)
            if one is not None:
                return one.transpose(1, 2)
        out, i = [], 0
        self.since = self.seen
        if q.shape[2] == 1:
            return self.step(q, k, v, valid, call, steps)
        ends = [] if valid is None or not self.placing else breaks(valid)
        while i < q.shape[2]:
            most = 1 if call.named is not None and self.stack.paged else self.stride()  # each reads other pages
            m = min([q.shape[2] - i, most, *(end - i for end in ends if end > i)])
            part = None if valid is None else valid[:, i : i + m]
            mine = call.of(slice(i, i + m))
            out.append(self.step(q[:, :, i : i + m], k[:, i : i + m], v[:, i : i + m], part, mine, steps))
            i += m
        return out[0] if len(out) == 1 else torch.cat(out, 2)

    def stride(self) -> int:
        """Tokens that may be taken together: up to the next one after which something changes."""
        selects = self.stack.selects and not self.session.dense
        if (self.retention.decodes and not self.waits) or selects or (self.weighs and self.session.recording):
            return 1
        most = self.patience() if self.waits else 1 << 30
        if self.stack.paged and not self.stack.representation.joint:
            return min(most, max(1, self.stack.room + self.stack.page - max(n for n, _ in self.lengths)))
        return most

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, valid: Tensor | None, call: Call, steps: Steps | None = None
    ) -> Float[Tensor, "row group query dim_v"]:
        if self.session.recording:
            self.remember(k, v, valid)
        once = k.is_cpu and (self.rolls or self.pays) and call.bare
        if once and q.shape[2] == 1 and valid is None and steps is None:
            one = self.at_once(q.contiguous(), k.contiguous(), v.contiguous(), call.scale)
            if one is not None:
                return one.transpose(1, 2)
        self.add(k, v, valid)
        out, mass = self.attend(q, call, self.retention.counts)
        if steps is not None:
            steps.append((q.shape[2], self if self.plain and valid is None else self.still()))
        if self.retention.decodes and not self.waits:
            self.judge_step(q, valid, mass, call)
        if self.weighs:
            self.weigh(q, valid, call)
        if self.waits:  # behind what all of these tokens paid: a recording judges between two steps
            self.judge_step(q, valid, mass, call)
        self.seal()
        return out

    def attend(self, q: Tensor, call: Call, mass: bool) -> tuple[Tensor, Float[Tensor, "row group token"] | None]:
        k, v = self.open_slots()
        stored = self.stored
        told = q.is_cuda and q.shape[2] == 1 and not self.tail.clean  # whom it sees, by positions: no mask is made
        if stored is None and not mass and call.bare and self.whole_tail and not told:
            ordered = self.tail.clean and not self.retention.decodes  # slots are, as their tokens
            if ordered and attending.causal_pays(q, k, v):
                out = attending.causal(q, k, v, call.scale)
            else:
                out = attending.whole(q, k, v, self.sees(q), call.scale, self.tail.clean)
            return watched(out, self.tail), None
        far = None if stored is None else self.attend_pages(stored, q, call, mass)
        parts = [self.near(q, k, v, call, mass)]
        if far is not None:
            parts.insert(0, far())
        whole = merge_states(parts, sinks=call.sinks, dtype=q.dtype, into=self.into)
        paid = received(parts, whole) if mass else None
        return watched(whole.out.to(q.dtype), self.tail, self.pages), paid

    def sees(self, q: Tensor) -> Bool[Tensor, "row query token"] | None:
        if self.tail.clean and q.shape[2] == 1:
            return None
        return self.visible(self.newest(q.shape[2]), self.tail.position[:, self.tail.span], False)

    def near(self, q: Tensor, k: Tensor, v: Tensor, call: Call, mass: bool) -> State:
        """Attention over the open tail."""
        if call.named is not None:
            return self.near_named(q, k, v, call, call.named)
        options = {"softcap": call.softcap, "want_probs": mass, "wait": True}
        if self.tail.clean or q.shape[2] > 1:
            return attention(q, k, v, self.sees(q), call.scale, **options)  # type: ignore[arg-type]
        return attention(q, k, v, None, call.scale, position=self.tail.position[:, self.tail.span], **options)  # type: ignore[arg-type]

    def shift(self) -> Int[Tensor, "row token"] | None:
        """By how many positions the retention wants each slot's key turned when it is read, sealed slots first."""
        r = self.retention
        if self.whole or type(r).shift is Retention.shift or not r.needs_rope:
            return None
        return answers.shift(r, self.position, self.first)

    def open_slots(self) -> tuple[Tensor, Tensor]:
        """The tail's keys as they are to be read, and its values."""
        span, shift = self.tail.span, self.shift()
        k, v = self.tail.k[:, span], self.tail.v[:, span]
        return (k if shift is None else self.turned(k, shift[:, shift.shape[1] - k.shape[1] :])), v

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
        return merge_states([held, block], sinks=call.sinks, dtype=q.dtype).out.to(q.dtype)

    def glance(self, q: Tensor, call: Call) -> State:
        """Attention over what is held."""
        k, v = self.open_slots()
        tail = self.tail
        visible = None if tail.clean else (tail.position[:, None, tail.span] >= 0).expand(-1, q.shape[2], -1)
        parts = [attention(q, k, v, visible, call.scale, softcap=call.softcap)] if len(tail) else []
        if (stored := self.stored) is not None:
            parts.append(self.attend_pages(stored, q, call, False)())
        return merge_states(parts)

    def attend_pages(self, pages: Pages, q: Tensor, call: Call, mass: bool) -> Callable[[], State]:
        """Choose what to read and, where it is not on the device, have it fetched; the result attends to it."""
        pages.coarse = self.session.coarse
        self.units, self.saw = self.select(pages, q, call), None
        shift, scanned, self.scanned = self.shift(), self.scanned, None
        if scanned is not None and self.units is None and shift is None and not mass:
            return lambda: scanned
        fields = pages.readable(self.units) if shift is None else None
        if fields is not None:
            return partial(
                paged_attention, q, fields, pages.table, pages.position, page=pages.page, scale=call.scale,
                units=self.units, unit=None if self.units is None else self.stack.selection.unit, codec=pages.codec,
                dim_v=self.tail.v.shape[-1], softcap=call.softcap, want_probs=mass, wait=True,
            )  # fmt: skip
        unit, joint = None if self.units is None else self.stack.selection.unit, pages.joint
        rebuilt = joint is not None and shift is None and call.softcap is None
        options = {"scale": call.scale, "want_probs": mass, "wait": True}
        stored = pages.resident(self.units) if rebuilt else None
        if stored is not None and joint is not None:
            where = {"page": pages.page, "units": self.units, "unit": unit, **options}
            if (run := joint.attend(q, stored["v"], pages.table, pages.position, **where)) is not None:
                return run
        if self.units is None or unit is None:
            every, every_position = pages.decoding(), pages.position

            def all_of_them() -> State:
                k, v = every()
                k = self.turned(k, shift if shift is None else shift[:, : k.shape[1]])
                return self.attend_to(k, v, every_position, q, call, mass, pages.clean)

            return all_of_them
        chosen = pages.choosing(self.units)

        def those() -> State:
            k, v, position = chosen()
            if joint is not None:
                own = v.unflatten(1, (-1, unit)).flatten(0, 1)
                run = joint.attend(q, own, None, position, page=unit, **options) if rebuilt else None
                if run is not None:
                    return run()
                k = joint.keys(position)
            return self.attend_to(k, v, position, q, call, mass, False)

        return those

    def attend_to(
        self, k: Tensor, v: Tensor, position: Tensor, q: Tensor, call: Call, mass: bool, clean: bool
    ) -> State:
        one = q.shape[2] == 1  # whom it sees is told by positions
        visible = None if clean or one else (position >= 0)[:, None].expand(-1, q.shape[2], -1)
        return attention(
            q, k, v, visible, call.scale, softcap=call.softcap, want_probs=mass, wait=True,
            position=None if clean or not one else position,
        )  # fmt: skip
