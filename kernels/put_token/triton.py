"""The Triton kernel: one program per row."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels.gpu import FUSED
from kvengine.kernels.put_token import Limit


@triton.jit(do_not_specialize=["origin", "ring", "slots", "position_row", "score_row"])
def put_kernel(
    k, v, keys, values, position, score, counts, now, reads, units, k_row, v_row, keys_row, keys_slot, values_row,
    values_slot, position_row, score_row, slots, origin, ring,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, DIM_V: tl.constexpr, BLOCK_V: tl.constexpr, FREE: tl.constexpr,
    SCORED: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(now)
    if FREE:
        slot = tl.full([], 0, tl.int32) + slots
        for begin in range(0, slots, BLOCK):
            s = begin + tl.arange(0, BLOCK)
            held = tl.load(position + row * position_row + s, mask=s < slots, other=0)
            slot = tl.minimum(slot, tl.min(tl.where(held < 0, s, slots), 0))
        slot = slot.to(tl.int64)
    else:
        slot = place - origin
        slot = tl.where(ring > 0, slot % tl.maximum(ring, 1), slot)
    there = (slot >= 0) & (slot < slots)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    key = tl.load(k + row * k_row + d, mask=d < DIM, other=0.0)
    value = tl.load(v + row * v_row + e, mask=e < DIM_V, other=0.0)
    tl.store(keys + row * keys_row + slot * keys_slot + d, key, mask=(d < DIM) & there)
    tl.store(values + row * values_row + slot * values_slot + e, value, mask=(e < DIM_V) & there)
    tl.store(position + row * position_row + slot, place.to(tl.int32), mask=there)
    if SCORED:
        tl.store(score + row * score_row + slot, 0.0, mask=there)
    count = tl.load(counts + row) + 1
    tl.store(counts + row, count)
    if UNIT:
        left = tl.load(reads + row) - count
        tl.store(units + row, tl.where(left >= UNIT, left // UNIT, 1))


def put_token(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor, counts: Tensor, now: Tensor,
    origin: int | None, ring: int, score: Tensor | None, limit: Limit | None,
) -> None:  # fmt: skip
    """See `kvengine.kernels.put_token`."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    if not len(k):
        return
    dim, dim_v = k.shape[-1], v.shape[-1]
    put_kernel[(len(k),)](
        k, v, keys, values, position, counts if score is None else score, counts, now,
        counts if limit is None else limit.reads, counts if limit is None else limit.units,
        k.stride(0), v.stride(0), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1), position.stride(0),
        0 if score is None else score.stride(0), position.shape[1], origin or 0, ring,
        DIM=dim, BLOCK_D=triton.next_power_of_2(dim), DIM_V=dim_v, BLOCK_V=triton.next_power_of_2(dim_v),
        FREE=origin is None, SCORED=score is not None, UNIT=0 if limit is None else limit.unit, BLOCK=1024, **FUSED,
    )  # fmt: skip
