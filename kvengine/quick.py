"""A decoded token in one call of the kernels.

Most of a short step is Python between its parts. Where none of them has to wait for another's answer, one kernel does them
all: `at_once` if the tail is everything, `quick_paged` if pages are beside it.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from kvengine.choosing import Choosing
from kvengine.kernels.gpu.fetched import Fetched
from kvengine.kernels.gpu.step import Far
from kvengine.pages import Pages
from kvengine.session import Call


class Quick(Choosing):
    """The part of a lane that takes a token without `Lane.step`."""

    def quick(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Float[Tensor, "seq 1 q_head dim_v"] | None:
        """`take` for one token of a lane that is `plain`, `rolls` or `pays`, in one call; None if that cannot be.

        Heads may be rows, or there may be several in a row, [seq, head, 1, dim].
        """
        if self.reads:
            return self.quick_paged(q, k, v, Call(scale))
        once = self.rolls or self.pays or self.still_waits
        if self.marks or not (self.plain or (once and not self.session.recording)):
            return None
        return self.at_once(q, k, v, scale)

    def at_once(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Float[Tensor, "seq 1 q_head dim_v"] | None:
        """`step` as one call, of a token of a lane without pages; None, and nothing done, where no kernel can."""
        full = self.filling
        if self.pays and not k.is_cpu and (not full or self.tail.slots() is None):  # nor is a rule made then
            return None
        rule = self.rule() if self.rolls or self.pays else None
        if self.pays and rule is None:
            return None
        out = self.tail.step(q, k, v, self.session.place_of(self.seen, k), scale, full, rule)
        if out is not None:
            if self.waits:
                self.ask(q.reshape(len(self.first), -1, 1, q.shape[-1]), None)
            self.whole &= self.plain
            self.seen += 1
            self.lengths = [(n + 1, rows) for n, rows in self.lengths]
        return out

    def quick_paged(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor | None:
        """The same for a lane that `reads` pages too, or on a GPU has none yet. It may seal some of its tail then."""
        stored, tail = self.stored, self.tail
        if self.marks or self.session.recording or self.beside.refused or (stored is None and k.is_cpu):
            return None
        if self.scans(stored) or self.beside.refuses(stored) or not tail.takes(q, k, v):
            return None
        before, self.since = self.lengths, self.seen
        self.seen, self.lengths = self.seen + 1, [(n + 1, rows) for n, rows in before]
        far = None if stored is None else self.chosen(stored, q, k, v, call)
        judged, at = None if k.is_cpu or not self.weighs else self.judged, self.session.place_of(self.since, k)
        out = None
        if far is not None or stored is None:
            out = tail.step(q, k, v, at, call.scale, False, self.paged_rule(stored), far, judged)
        if out is None:
            self.seen, self.lengths = self.since, before
            return None
        if self.thins:
            self.whole = False
            if stored is not None:
                stored.clean = False
        if self.weighs and judged is None:
            self.weigh(q.reshape(len(self.first), -1, 1, q.shape[-1]), None, call)
        self.seal()
        return out

    def chosen(self, pages: Pages, q: Tensor, k: Tensor, v: Tensor, call: Call) -> int | Far | Fetched | None:
        """What this token reads of the pages, as `Tail.step` takes it."""
        pages.coarse = self.session.coarse
        self.units, self.saw = self.select(pages, q, call), None
        if self.thins:
            pages.own()
        return self.beside.reading(pages, self.units, k.shape[-1], v.shape[-1])
