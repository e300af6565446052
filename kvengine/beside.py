"""Sealed pages that a decoded token reads together with the tail: in one call of the C kernels, or in a GPU's launches."""

from __future__ import annotations

from torch import Tensor

from kvengine.joint import Joint
from kvengine.kernels.gpu.fetched import Fetched
from kvengine.kernels.gpu.step import Far
from kvengine.kernels.paged_attention import Described, described
from kvengine.offload.placement import Flat
from kvengine.offload.placement.host import Fetched as OnHost
from kvengine.pages import Pages
from kvengine.pool import Pool
from kvengine.tail import Tail


class Beside:
    """A lane's pages, described for as long as their tensors are the same.

    Attributes:
        refused: they cannot be read where they are.
    """

    def __init__(self) -> None:
        self.refused, self.columns, self.codec = False, 0, ""
        self.made: Described | Far | Fetched | None = None
        self.joint: Joint | None = None
        self.of: list[Tensor] = []
        self.pool: tuple[Pool, int] | None = None  # and its pages, if nothing else can put their fields elsewhere

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A copy describes pages of its own."""
        return type(self), ()

    def forget(self, tail: Tail) -> None:
        """Let go of the tensors, which are about to be replaced by others; so does the tail, whose launches name them."""
        self.made, self.of, self.pool, tail.ready = None, [], None, None
        self.refused = False  # what comes may be read where what went could not

    def refuses(self, pages: Pages | None) -> bool:
        """Whether they cannot be read where they are, as far as that is known before units are chosen: not so on a GPU."""
        if pages is not None and self.made is None and pages._table.is_cpu:
            self.refused = pages.readable(pages.table[:, :0]) is None
        return self.refused

    def reading(self, pages: Pages, units: Tensor | None, dim: int, dim_v: int) -> int | Far | Fetched | None:
        """Where the description of these units lies (None: of all pages), on a GPU itself; None, from then on too, if there can
        be none."""
        made = self.made if self.same(pages) else self.describe(pages, units, dim, dim_v)
        if made is None:
            self.refused = True
            return None
        if isinstance(made, Fetched) and units is not None:
            return made.reading(pages.choosing(units), tuple(units.shape))
        if isinstance(made, Far):
            return made.reading(pages.columns, units, pages.selection.unit)
        return made.reading(units, pages.selection.unit)  # type: ignore[union-attr, arg-type, return-value]

    def fetching(self, pages: Pages, units: Tensor | None) -> Fetched | None:
        """Units that a GPU fetches from host memory, alone and as they are."""
        moved, per = [x for x in pages.pool.shelves if type(x) is not Flat], pages.page // pages.selection.unit
        alone = pages.pool.per == per and not pages._table.is_cpu
        plain = alone and bool(moved) and all(isinstance(x, OnHost) for x in moved)
        joint, reader = pages.joint, None if pages.joint is None else pages.joint.reader()
        known = pages.representation.lossless if joint is None else reader is not None
        if units is None or not plain or not known or pages.inner is not None:
            return None
        if not isinstance(self.made, Fetched) or self.joint is not joint:
            self.joint = joint
            self.made = Fetched(pages.selection.unit, None if reader is None else (reader[0], list(reader[1].values())))
        return self.made

    def same(self, pages: Pages) -> bool:
        """Whether what was described last is there still, and nobody need look at each field."""
        alike = pages.columns == self.columns or isinstance(self.made, Far)
        return (
            alike and self.pool is not None and pages.pool is self.pool[0] and pages.pool.pages == self.pool[1]
            and pages.codec == self.codec and pages._table is self.of[0] and pages._position is self.of[1]
        )  # fmt: skip

    def describe(self, pages: Pages, units: Tensor | None, dim: int, dim_v: int) -> Described | Far | Fetched | None:
        joint = pages.joint
        steady = pages.pool.per == 1 and pages.pool.on_device
        fields, rebuilt = pages.readable(units) if joint is None else pages.resident(units) if steady else None, None
        if fields is not None and joint is not None:
            if (reader := joint.reader()) is None:
                return None
            rebuilt, fields = reader[0], reader[1] | {"v": fields["v"]}
        if fields is None:
            return self.fetching(pages, units)
        of = [pages._table, pages._position, *fields.values()]
        same = pages.columns == self.columns and pages.codec == self.codec and len(of) == len(self.of)
        if self.made is None or not same or not all([a is b for a, b in zip(of, self.of, strict=True)]):
            self.columns, self.codec, self.of = pages.columns, pages.codec, of
            page, codec = pages.page, pages.codec
            if pages._table.is_cpu:
                where = pages.table, pages.position
                self.made = described(fields, *where, page=page, codec=codec, dim=dim, dim_v=dim_v)
            else:
                self.made = Far(fields, pages._table, pages._position, page, codec, dim_v, rebuilt)
        self.pool = (pages.pool, pages.pool.pages) if steady and pages.inner is None else None
        return self.made
