"""Sealed pages that a decoded token reads together with the tail, in one call of the C kernels."""

from __future__ import annotations

from torch import Tensor

from kvengine.kernels.paged_attention import Described, described
from kvengine.pages import Pages


class Beside:
    """A lane's pages, described to C for as long as their tensors are the same.

    Attributes:
        refused: the C kernels cannot read them where they are.
    """

    def __init__(self) -> None:
        self.refused, self.columns, self.codec = False, 0, ""
        self.made: Described | None = None
        self.of: list[Tensor] = []

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A copy describes pages of its own."""
        return type(self), ()

    def forget(self) -> None:
        """Let go of the tensors, which are about to be replaced by others."""
        self.made, self.of = None, []

    def reading(self, pages: Pages, units: Tensor | None, dim: int, dim_v: int) -> int | None:
        """Where the description of these units lies (None: of all pages); None, from then on too, if there can be none."""
        fields, made = pages.readable(units), self.made
        if fields is not None:
            of = [pages._table, pages._position, *fields.values()]
            same = pages.columns == self.columns and pages.codec == self.codec and len(of) == len(self.of)
            if made is None or not same or not all([a is b for a, b in zip(of, self.of, strict=True)]):
                self.columns, self.codec, self.of = pages.columns, pages.codec, of
                made = self.made = described(
                    fields, pages.table, pages.position, page=pages.page, codec=pages.codec, dim=dim, dim_v=dim_v
                )
        if fields is None or made is None:
            self.refused = True
            return None
        return made.reading(units, pages.selection.unit)
