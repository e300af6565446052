"""The launches that choose units on a GPU, made again for the next token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kvengine.kernels.gpu import Notes, cdiv, next_power_of_2, noted
from kvengine.kernels.page_scores.reference import ALIKE, parts_of

if TYPE_CHECKING:
    from kvengine.kernels.gpu.launches import Launches

MOST = 8
"""Kinds that are noted though none comes again, and that are remembered at once."""
UNITS = "units", "candidates"
"""What kernels call the number of units that they look at."""
COUNTS = "count", "most"
"""And that of those that they choose."""


class Known(NamedTuple):
    """How queries of a kind are launched that choose so many units from so many: more than the first number, up to the second."""

    kind: tuple[Any, ...]
    units: tuple[int, int]
    counts: tuple[int, int]
    launches: Launches | None

    def holds(self, kind: tuple[Any, ...], units: int, count: int) -> bool:
        if kind != self.kind:
            return False
        return self.units[0] < units <= self.units[1] and self.counts[0] < count <= min(self.counts[1], units)


class Remembered:
    """They are the same for as long as queries are of one kind, what else they read lies where it lay, and the numbers of units
    and of those chosen take as many blocks."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Let go of the tensors."""
        self.known: list[Known] = []
        self.of: Sequence[Tensor] = ()
        self.missed = 0  # kinds in a row that did not come again

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A copy has bounds of its own."""
        return type(self), ()

    def top(
        self, q: Tensor, of: Sequence[Tensor], units: int, count: int, kind: tuple[Any, ...],
        choose: Callable[[], Tensor | None],
    ) -> Tensor | None:  # fmt: skip
        """What `choose` gives: of the first `units` of these tensors the `count` that queries want most, as else the `kind`
        tells."""
        if len(of) != len(self.of) or any([a is not b for a, b in zip(of, self.of, strict=True)]):
            self.known, self.of = [], of
        kind = (q.shape, q.stride(), q.dtype, *kind)
        known = next((x for x in self.known if x.holds(kind, units, count)), None)
        if known is not None and known.launches is not None:
            ids = q.new_empty((len(q), count), dtype=torch.int64)
            if known.launches.again((q, ids), (units, count)):
                self.missed = 0
                return ids
        with noted() as notes:
            found = choose()
        if known is None and self.missed < MOST:
            self.missed += 1
            self.known = [*self.known[-MOST + 1 :], self.remember(kind, notes, q, found, units, count)]
        return found

    def remember(
        self, kind: tuple[Any, ...], notes: Notes, q: Tensor, found: Tensor | None, units: int, count: int
    ) -> Known:
        """How to launch these again, if they are all that was done."""
        if found is None or found.dtype != torch.int64 or len(notes) != 2 or found.shape != (len(q), count):
            return Known(kind, (units - 1, units), (count - 1, count), None)
        from kvengine.kernels.gpu.launches import remembered  # which needs Triton

        names = [(x, 0) for x in UNITS] + [(x, 1) for x in COUNTS]
        numbers = [(i, x, j) for i, note in enumerate(notes) for x, j in names if x in note.kernel.arg_names]
        wide = next_power_of_2(units)
        least, most = (wide // 2, wide) if wide <= ALIKE else ((units - 1) // ALIKE * ALIKE, cdiv(units, ALIKE) * ALIKE)
        few, many = count - 1, next_power_of_2(count)
        told = [(note.given, note.kernel.arg_names) for note in notes]
        outliers = [given[names.index("outliers")] for given, names in told if "outliers" in names]
        while few > many // 2 and all(parts_of(few, x) == parts_of(count, x) for x in outliers):
            few -= 1
        while many > count and any(parts_of(many, x) != parts_of(count, x) for x in outliers):
            many -= 1
        return Known(kind, (least, most), (few, many), remembered(notes, (q, found), self.of, numbers))
