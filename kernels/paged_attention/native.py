"""The C kernel on the CPU (`kvengine/kernels/cpu/attention.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

from torch import Tensor

from kvengine.kernels.cpu import call
from kvengine.kernels.state import State


def paged_attention(
    q: Tensor,
    fields: Mapping[str, Tensor],
    table: Tensor,
    position: Tensor,
    page: int,
    scale: float,
    units: Tensor | None,
    unit: int,
    codec: str,
    dim_v: int,
    query_position: Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    want_probs: bool,
) -> State:
    """See `kvengine.kernels.paged_attention`."""
    dim = q.shape[-1]
    table, position = call.int32(table), call.int32(position)
    units, query_position = (None if x is None else whole(x) for x in (units, query_position))
    columns = table.shape[1] * page if units is None else units.shape[1] * unit
    return call.run(
        q, call.paged(codec, fields, "k", dim, page), call.paged(codec, fields, "v", dim_v, page), columns, scale,
        softcap, sinks, want_probs, table=table.data_ptr(), position=position.data_ptr(), units=call.address(units),
        query_position=call.address(query_position), table_row=table.stride(0),
        position_row=position.stride(0), page=page, unit=unit,
        chosen=0 if units is None else units.shape[1], window=window or 0,
    )  # fmt: skip


def whole(x: Tensor) -> Tensor:
    """As int32, contiguous."""
    x = call.int32(x)
    return x if x.is_contiguous() else x.contiguous()


class Described:
    """Pages described to C once, to be read by one token after the other for as long as these tensors are the same."""

    def __init__(
        self, codec: str, fields: Mapping[str, Tensor], table: Tensor, position: Tensor, page: int, dim: int, dim_v: int
    ) -> None:
        self.fields, self.page, self.units = fields, page, table
        self.table, self.position = call.int32(table), call.int32(position)
        self.call = call.Attention(
            k=call.paged(codec, fields, "k", dim, page), v=call.paged(codec, fields, "v", dim_v, page), page=page,
            table=self.table.data_ptr(), position=self.position.data_ptr(), table_row=self.table.stride(0),
            position_row=self.position.stride(0),
        )  # fmt: skip

    def reading(self, units: Tensor | None, unit: int) -> int:
        """Where the description of these units [row, chosen] lies (None: of all pages); they are kept until the next call."""
        about = self.call
        if units is None:
            about.units, about.unit, about.chosen, about.columns = None, self.page, 0, self.table.shape[1] * self.page
        else:
            self.units = units = whole(units)
            about.units, about.unit, about.chosen = units.data_ptr(), unit, units.shape[1]
            about.columns = about.chosen * unit
        return ctypes.addressof(about)
