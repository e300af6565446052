"""The Triton kernel: every survivor's bytes are read once and written once."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels.compact.reference import plan
from kvengine.kernels.gpu import FUSED, cdiv, next_power_of_2


@triton.jit(do_not_specialize=["slots"])
def move_kernel(field, source, target, slots, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BLOCK_W: tl.constexpr):
    """Copy slots `source` of a pool to `target` (-1: leave)."""
    s = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    to = tl.load(target + s, mask=s < slots, other=-1)
    at = tl.load(source + s, mask=s < slots, other=0)
    mask = (to >= 0)[:, None] & (w < WIDTH)[None, :]
    x = tl.load(field + at[:, None] * WIDTH + w[None, :], mask=mask)
    tl.store(field + to[:, None] * WIDTH + w[None, :], x, mask=mask)


def compact(fields: Mapping[str, Tensor], table: Tensor, position: Tensor, into: Tensor, page: int) -> Tensor:
    """See `kvengine.kernels.compact`."""
    source, target, moved = (x.contiguous() for x in plan(table, position, into, page))
    for field in fields.values():
        width = field[0, 0].numel() if field.numel() else 0
        block_w = min(256, next_power_of_2(max(width, 1)))
        if width and source.numel():
            move_kernel[(cdiv(source.numel(), 16), cdiv(width, block_w))](
                field, source, target, source.numel(), WIDTH=width, BLOCK=16, BLOCK_W=block_w, **FUSED
            )
    return moved
