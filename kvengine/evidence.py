"""What a prompt's queries say of the tokens they see: the evidence that retentions and representations judge by."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine import answers
from kvengine.kernels.attention import attention
from kvengine.kernels.column_mass import column_mass, columns, masked
from kvengine.kernels.merge_states import merge_states, ongoing, received
from kvengine.kernels.span_attention import Band
from kvengine.policies.prefill import Prefill
from kvengine.policies.retention import Seen
from kvengine.recall import Recall
from kvengine.saliency import Saliency, running
from kvengine.session import Call
from kvengine.strays import strays
from kvengine.tokens import behind


class Evidence(Recall):
    """The part of a lane that listens to queries."""

    def banded(self) -> tuple[bool, Band | None]:
        """Whether slots tell which tokens a prompt's queries see, and the band that does; None: all up to their own."""
        prefill = self.stack.prefill
        band = answers.of_kind(prefill, "band", prefill.band(self.first), Band)
        return (self.whole and band is not None) or type(prefill).visible is Prefill.visible, band

    def visible(
        self, at: Int[Tensor, "query"], position: Int[Tensor, "row token"], prompt: bool
    ) -> Bool[Tensor, "row query token"]:
        if len(at) == 1 and not prompt:
            return (position >= 0)[:, None]  # the newest token comes after all others
        seen = (position >= 0)[:, None] & (position[:, None] <= at[:, None])
        allowed = answers.visible(self.stack.prefill, at, position, self.first) if prompt else None
        return seen if allowed is None else seen & (allowed | (at >= self.exact_from)[:, None])

    @property
    def exact_from(self) -> int:
        """Where the prompt's last queries begin, which read everything under any prefill method."""
        return max(self.seen, self.session.prompt_end or 0) - self.stack.prefill.whole

    def observe(
        self, q: Float[Tensor, "row group query dim"], call: Call, valid: Bool[Tensor, "row query"] | None = None
    ) -> None:
        """Keep of a prompt chunk what the retention will want at the prompt's end."""
        at = torch.arange(self.seen - q.shape[2], self.seen, device=q.device)
        real = torch.ones_like(at, dtype=torch.bool).expand(len(q), -1) if valid is None else valid
        place = torch.where(real, at - self.first[:, None], -1)
        answers.ask(self.retention, "watch", self.notes, q, place, self.session.rope)
        if wanted := self.retention.observes:
            found = q if self.window is None else behind(self.window, q, valid)
            # Not a view: it would hold all queries of the chunk for as long as other layers, or other chunks, are read.
            self.window = found if found.shape[2] <= wanted else found[:, :, -wanted:].clone()
        if self.retention.wants_mass:
            n, before = (1, None) if self.retention.last_mass else (q.shape[2], self.mass)
            mass = self.column_mass(q[:, :, -n:], at[-n:], real[:, -n:], call, before)
            alone = self.retention.last_mass and valid is not None
            if alone and self.mass is not None:  # this chunk may be all padding
                mass[:, :, : self.mass.shape[2]] += self.mass.masked_fill(real[:, -1, None, None], 0)
            self.mass = mass
        if self.weighs:
            self.probe(q, at, real, call)

    def probe(
        self,
        q: Float[Tensor, "row group query dim"],
        at: Int[Tensor, "query"],
        real: Bool[Tensor, "row query"],
        call: Call,
    ) -> None:
        """Add what this chunk's probes attend to."""
        found = self.saliency
        if found is None:
            end = self.seen if self.session.prompt_end is None else max(self.seen, self.session.prompt_end)
            found = self.saliency = Saliency(self.stack.representation.probes, int(at[0]), end)
        late, parts = self.first.new_zeros(1), self.session.parts
        if parts is not None:  # padding that is to come counts as if it had come before these
            late = parts.padding.to(at.device).repeat_interleave(self.heads)
        probes = found.probes(at + late[:, None], self.begin + late) & real
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
        (k, _), position = self.laid_out(values=False), self.position
        by_slot, band = self.banded()
        if by_slot:
            slots = at - (self.seen - k.shape[1])
            late = at >= self.exact_from if band is not None and self.stack.prefill.whole else None

            weigh = partial(column_mass, scale=call.scale, softcap=call.softcap, sinks=call.sinks)

            def count(some: Tensor | slice, band: Band | None) -> Tensor:
                return weigh(q[:, :, some], k, position, slots[some], real[:, some], band=band)

            if late is None or not bool(late.any()):
                mass = count(slice(None), band)
            else:
                mass = count(late, None) + (0 if bool(late.all()) else count(~late, band))
        else:
            mass = masked(
                q, k, lambda n: self.visible(at[n], position, prompt=True) & real[:, n, None], *call.constants
            )
        if before is not None:
            mass[:, :, : before.shape[2]] += before
        return mass

    def weighed(self, seen: Seen) -> Seen:
        """With the saliency of the tokens not yet sealed as their score, if the representation asks for it."""
        if self.saliency is None:
            return seen
        n = 0 if self.pages is None else len(self.pages)
        fresh, idle = self.saliency.mean(seen.position, self.begin)[:, n:], self.idle
        fresh = fresh if idle is None else torch.where(idle[:, None], seen.score[:, n:], fresh)
        self.saliency = None
        return replace(seen, score=torch.cat([seen.score[:, :n], fresh], 1))

    def weigh(self, q: Tensor, valid: Tensor | None, call: Call) -> None:
        """Go on with the saliency of the open tail, while decoding."""
        k, v, _, score = self.tail.held()
        position, at = self.open_positions(), self.newest(q.shape[2])
        if valid is None:
            one = q.shape[2] == 1
            part = attention(
                q, k, v[..., :1], None if one else self.visible(at, position, False), call.scale, softcap=call.softcap,
                position=position if one else None, want_probs=True, wait=True,
            )  # fmt: skip
            whole = merge_states([part], sinks=call.sinks)
            if one:
                self.tail.own_small()
                ongoing(part, whole, self.tail.score[:, self.tail.span], position, at, self.judged)
                return
            mass = received([part], whole).sum(1)
        else:  # padding says nothing
            visible = self.visible(at, position, False) & valid[..., None]
            mass = columns(q, k.float().transpose(1, 2), visible, call.scale, call.softcap, call.sinks).sum(1)
        self.tail.judge(running(score, mass, position, at, self.judged, valid), None)

    def open_positions(self) -> Int[Tensor, "row slot"]:
        """Of the tail's slots; -1 where a stray lies, which was sealed once and is not again."""
        position, others = self.tail.position[:, self.tail.span], strays(self)
        return position if others is None else position.masked_fill(others, -1)

    def newest(self, n: int) -> Int[Tensor, "query"]:
        if n == 1 and not self.first.is_cpu:
            return self.session.position(self.seen - 1, self.first.device)
        return torch.arange(self.seen - n, self.seen, device=self.first.device)
