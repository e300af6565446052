"""The Triton kernel: a program takes some units of a row."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels.gpu import cdiv, lined, next_power_of_2
from kvengine.kernels.gpu.again import launched_again
from kvengine.kernels.gpu.chain import chained, in_turn

MOST = 1024
"""Tokens of a program."""


@launched_again
@triton.jit(do_not_specialize=["chosen", "per", "table_row", "position_row"])
def places_kernel(
    units, table, position, pieces, places, chosen, per, table_row, position_row,
    UNIT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, n, t = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDE)
    here = n < chosen
    in_turn(PDL)
    unit = tl.load(units + row * chosen + n, mask=here, other=-1).to(tl.int64)
    at = tl.maximum(unit, 0)
    page = tl.maximum(tl.load(table + row * table_row + at // per, mask=here, other=0), 0).to(tl.int64)
    tl.store(pieces + row * chosen + n, page * per + at % per, mask=here)
    each = here[:, None] & (t < UNIT)[None, :]
    held = position + row * position_row + (at * UNIT)[:, None] + t[None, :]
    place = tl.load(held, mask=each & (unit >= 0)[:, None], other=-1)
    tl.store(places + (row * chosen + n)[:, None] * UNIT + t[None, :], place, mask=each)


def unit_places(units: Tensor, table: Tensor, position: Tensor, per: int, unit: int) -> tuple[Tensor, Tensor]:
    """See `kvengine.kernels.unit_places`. `per`: units of a page."""
    units, (rows, chosen) = units.contiguous(), units.shape
    table, position = lined(table), lined(position)
    pieces = torch.empty(rows * chosen, dtype=torch.int64, device=units.device)
    places = torch.empty(rows, chosen * unit, dtype=position.dtype, device=units.device)
    wide = next_power_of_2(unit)
    block = max(1, MOST // wide)
    if pieces.numel():
        places_kernel[(rows, cdiv(chosen, block))](
            units, table, position, pieces, places, chosen, per, table.stride(0), position.stride(0), UNIT=unit, WIDE=wide,
            BLOCK=block, **chained(units.device),
        )  # fmt: skip
    return pieces, places
