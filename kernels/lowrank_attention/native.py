"""The C kernel on the CPU (`kvengine/kernels/cpu/attention.c`): keys are rebuilt tile by tile."""

from __future__ import annotations

import torch
from torch import Tensor

from kvengine.kernels.cpu import call
from kvengine.kernels.state import State


def lowrank_attention(
    q: Tensor,
    u: Tensor,
    v: Tensor,
    basis: Tensor,
    inv_freq: Tensor,
    table: Tensor,
    position: Tensor,
    page: int,
    scale: float,
    units: Tensor | None,
    unit: int,
    rope_scaling: float,
    want_probs: bool,
) -> State:
    """See `kvengine.kernels.lowrank_attention`."""
    table, position = call.int32(table), call.int32(position)
    units = None if units is None else call.int32(units).contiguous()
    inv_freq = inv_freq.to(torch.float32).contiguous()
    columns = table.shape[1] * page if units is None else units.shape[1] * unit
    keys = call.Field(
        layout=call.LOWRANK, dim=q.shape[-1], dtype=call.DTYPES[u.dtype], row_stride=u.shape[1] * u.shape[2],
        token_stride=u.shape[2], group=len(q) // len(u), bits=inv_freq.shape[0], page=call.DTYPES[basis.dtype], data=u.data_ptr(),
        scale=basis.data_ptr(), zero=inv_freq.data_ptr(), factor=rope_scaling,
    )  # fmt: skip
    return call.run(
        q, keys, call.paged("dense", {"v": v}, "v", v.shape[-1], page), columns, scale, None, None, want_probs,
        table=table.data_ptr(), position=position.data_ptr(), units=call.address(units), table_row=table.stride(0),
        position_row=position.stride(0), page=page, unit=unit, chosen=0 if units is None else units.shape[1],
    )  # fmt: skip
