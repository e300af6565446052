"""The launches that choose units on a GPU, made again for the next token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kvengine.kernels.gpu import Notes, cdiv, next_power_of_2, noted
from kvengine.kernels.page_scores.reference import ALIKE

if TYPE_CHECKING:
    from kvengine.kernels.gpu.launches import Launches

MOST = 8
"""Kinds that are noted though none comes again, and that are remembered at once."""
UNITS = "units", "candidates"
"""What kernels call the number of units that they look at."""


class Known(NamedTuple):
    """How queries of a kind are launched that choose from more than `least` units, and up to `most`."""

    least: int
    most: int
    shape: tuple[int, ...]
    """Of what is chosen."""
    launches: Launches | None


class Remembered:
    """They are the same for as long as queries are of one kind, what else they read lies where it lay, and the number of units
    takes as many blocks."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Let go of the tensors."""
        self.known: dict[tuple[Any, ...], Known] = {}
        self.of: Sequence[Tensor] = ()
        self.missed = 0  # kinds in a row that did not come again

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A copy has bounds of its own."""
        return type(self), ()

    def top(
        self, q: Tensor, of: Sequence[Tensor], units: int, kind: tuple[Any, ...], choose: Callable[[], Tensor | None]
    ) -> Tensor | None:
        """What `choose` gives: of the first `units` of these tensors, or of what else the `kind` tells, those that queries want
        most."""
        if len(of) != len(self.of) or any([a is not b for a, b in zip(of, self.of, strict=True)]):
            self.known, self.of = {}, of
        kind = (q.shape, q.stride(), q.dtype, *kind)
        known = self.known.get(kind)
        new = known is None or not known.least < units <= known.most
        if known is not None and not new and known.launches is not None:
            ids = q.new_empty(known.shape, dtype=torch.int64)
            if known.launches.again((q, ids), (units,)):
                self.missed = 0
                return ids
        with noted() as notes:
            found = choose()
        if new and self.missed < MOST:
            self.missed += 1
            if len(self.known) >= MOST:
                self.known.clear()
            self.known[kind] = self.remember(notes, q, found, units)
        return found

    def remember(self, notes: Notes, q: Tensor, found: Tensor | None, units: int) -> Known:
        """How to launch these again, if they are all that was done."""
        if found is None or found.dtype != torch.int64 or len(notes) != 2:
            return Known(units - 1, units, (), None)
        from kvengine.kernels.gpu.launches import remembered  # which needs Triton

        numbers = [(i, x, 0) for i, note in enumerate(notes) for x in UNITS if x in note.kernel.arg_names]
        wide = next_power_of_2(units)
        least, most = (wide // 2, wide) if wide <= ALIKE else ((units - 1) // ALIKE * ALIKE, cdiv(units, ALIKE) * ALIKE)
        return Known(least, most, tuple(found.shape), remembered(notes, (q, found), self.of, numbers))
