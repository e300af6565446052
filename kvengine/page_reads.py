"""How sealed pages are read: where they lie, if a kernel can, or decoded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvengine import page_answers
from kvengine.joint import Joint
from kvengine.kernels import key_logits
from kvengine.kernels.state import State
from kvengine.kernels.unit_places import unit_places
from kvengine.policies.representation import Representation
from kvengine.policies.selection import Selection
from kvengine.pool import Pool, User
from kvengine.tokens import narrowed

ALL = slice(None)
LAID = 1 << 14
"""Slots of all rows that are decoded at a time where all are laid out."""


class Readable(User):
    """The part of a table of pages that reads them; the attributes are those of `Pages`."""

    pool: Pool
    page: int
    representation: Representation
    selection: Selection
    joint: Joint | None
    inner: int | None
    coarse: bool
    columns: int
    _table: Int[Tensor, "row column"]
    _position: Int[Tensor, "row token"]

    def __len__(self) -> int:
        """Slots of a row."""
        return self.columns * self.page

    @property
    def units(self) -> int:
        return len(self) // self.selection.unit

    @property
    def table(self) -> Int[Tensor, "row column"]:
        return self._table[:, : self.columns]

    @property
    def position(self) -> Int[Tensor, "row token"]:
        return self._position[:, : len(self)]

    def readable(self, units: Tensor | None) -> dict[str, Tensor] | None:
        """The pool's fields, if a kernel can read these units (None: all) where they are."""
        if not self.codec or self.joint is not None:
            return None
        found = self.resident(units)
        return None if found is None else self.whole(found)

    def resident(self, units: Tensor | None) -> dict[str, Tensor] | None:
        return self.pool.resident(self.table, units)

    def whole(self, fields: dict[str, Tensor]) -> dict[str, Tensor]:
        """These fields, and what is a part of them."""
        return fields if self.inner is None else fields | {"v": fields["k"][..., : self.inner]}

    @property
    def codec(self) -> str:
        """The layout of what is to be read."""
        return self.representation.read_as(self.coarse)

    @property
    def without(self) -> tuple[str, ...]:
        """Fields that are not read now."""
        return self.representation.fine if self.coarse else ()

    def decoded(self, columns: slice = ALL) -> tuple[Float[Tensor, "row token dim"], Float[Tensor, "row token dim_v"]]:
        """Keys and values of all slots; anything where a row has no page."""
        return self.decoding(columns)()

    def arriving(self, columns: slice = ALL) -> Callable[[], dict[str, Tensor]]:
        """The fields of these columns' pages: what is elsewhere is on its way at once, and the rest comes when this is called."""
        begun = self.pool.start(self.pool.pieces(self.table[:, columns].clamp(min=0).flatten().long()), self.without)
        return lambda: self.pool.joined(begun())

    def decoding(
        self, columns: slice = ALL, arriving: Callable[[], dict[str, Tensor]] | None = None
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """`decoded`, as `arriving` (None: that of these columns)."""
        fields, shape = arriving or self.arriving(columns), (len(self.table), -1)

        def finish() -> tuple[Tensor, Tensor]:
            k, v = page_answers.decoded(self.representation, self.whole(fields()))
            keys = k.flatten(0, 1).unflatten(0, shape) if self.joint is None else self.joint.keys(self.span(columns))
            return keys, v.flatten(0, 1).unflatten(0, shape)

        return finish

    def keys(self, columns: slice = ALL) -> Float[Tensor, "row token dim"]:
        """`decoded`, the keys alone."""
        if self.joint is not None:
            return self.joint.keys(self.span(columns))
        if self.codec != "dense":
            return self.decoded(columns)[0]
        table = self.table[:, columns]
        read = self.pool.read(table.clamp(min=0).flatten().long(), ("v",))
        return read["k"].flatten(0, 1).unflatten(0, (len(table), -1))

    def logits(
        self, q: Float[Tensor, "row group dim"], scale: float, dim_v: int
    ) -> Float[Tensor, "row group token"] | None:
        """Of every key, whatever where there is none; None if no kernel reads them where they are."""
        if (fields := self.readable(None)) is None:
            return None
        where = self.table, self.position
        return key_logits.key_logits(q, fields, *where, page=self.page, scale=scale, codec=self.codec, dim_v=dim_v)

    def scan(
        self, q: Float[Tensor, "row group dim"], scale: float, dim_v: int
    ) -> tuple[State, Float[Tensor, "row group token"]] | None:
        """Attention to all of them and the same logits, if one reading of the keys can give both."""
        if (fields := self.readable(None)) is None:
            return None
        where = self.table, self.position
        return key_logits.scan(q, fields, *where, page=self.page, scale=scale, codec=self.codec, dim_v=dim_v)

    def in_front_of(
        self, k: Float[Tensor, "row slot dim"], v: Float[Tensor, "row slot dim_v"], dtype: torch.dtype | None = None
    ) -> tuple[Float[Tensor, "row all dim"], Float[Tensor, "row all dim_v"]]:
        """Keys and values of all slots, and these behind them: some columns at a time, the next ones on their way.

        `dtype`: what becomes of them; None: the least that holds what is decoded and these. Of values given without
        channels there come none.
        """
        spans, out = self.parts(), list[Tensor]()
        # Where tiers keep what was read last, all is read at once: parts would drive each other out.
        fields = self.arriving()() if self.pool.recalls else None

        def decoding(span: slice) -> Callable[[], tuple[Tensor, Tensor]]:
            return self.decoding(span, None if fields is None else partial(self.among, fields, span))

        coming = [decoding(span) for span in spans[:1]]
        for i, span in enumerate(spans):
            coming += [decoding(next_one) for next_one in spans[i + 1 : i + 2]]
            at = slice(span.start * self.page, span.stop * self.page)
            for n, (some, x) in enumerate(zip(coming.pop(0)(), (k, v), strict=True)):
                if not i:
                    wide = dtype or torch.promote_types(some.dtype, x.dtype)
                    out.append(x.new_empty(len(x), len(self) + x.shape[1], x.shape[2], dtype=wide))
                    out[n][:, len(self) :] = x
                out[n][:, at] = narrowed(some[..., : x.shape[2]], out[n].dtype)
        return out[0], out[1]

    def parts(self) -> list[slice]:
        """All columns, some at a time."""
        each = max(1, LAID // (len(self.table) * self.page))
        return [slice(i, min(i + each, self.columns)) for i in range(0, self.columns, each)]

    def among(self, fields: dict[str, Tensor], columns: slice) -> dict[str, Tensor]:
        """Of the fields of all columns' pages, those of these columns'."""
        return {n: x.unflatten(0, (len(self.table), -1))[:, columns].flatten(0, 1) for n, x in fields.items()}

    def span(self, columns: slice) -> Int[Tensor, "row token"]:
        """The positions in these columns."""
        return self.position.unflatten(1, (-1, self.page))[:, columns].flatten(1)

    def choosing(self, units: Int[Tensor, "row chosen"]) -> Callable[[], tuple[Tensor, Tensor, Tensor]]:
        """Keys, values and positions of the chosen units, -1 where there is nothing. `joint` keys are not among them.

        What is elsewhere is on its way at once, and the rest comes when the result is called.
        """
        unit = self.selection.unit
        per = self.page // unit
        piece, position = unit_places(units, self.table, self.position, page=self.page, unit=unit)
        whole, which = self.pool.per != per, None
        if whole:
            wanted, which = (piece // per).unique(return_inverse=True) if self.pool.once else (piece // per, None)
        arriving = self.pool.start(self.pool.pieces(wanted) if whole else piece, self.without)

        def finish() -> tuple[Tensor, Tensor, Tensor]:
            fields = arriving()
            k, v = page_answers.decoded(self.representation, self.whole(self.pool.joined(fields) if whole else fields))
            if whole:
                of = torch.arange(len(piece), device=piece.device) if which is None else which
                k, v = (x.unflatten(1, (per, unit))[of, piece % per] for x in (k, v))
            return k.unflatten(0, units.shape).flatten(1, 2), v.unflatten(0, units.shape).flatten(1, 2), position

        return finish
