"""The Triton kernel: one program per row."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels.gpu import lined, next_power_of_2
from kvengine.kernels.gpu.again import launched_again
from kvengine.kernels.gpu.chain import chained, in_turn
from kvengine.kernels.put_token import Limit

FREE, GIVEN, COUNTED = (tl.constexpr(i) for i in range(3))
"""Which slot: one that is free, number `at`, or as many as `now` is behind `at`."""


@launched_again
@triton.jit(do_not_specialize=["at", "ring", "slots", "position_row", "score_row", "now_row"])
def put_kernel(
    k, v, keys, values, position, score, counts, now, reads, units, k_row, v_row, keys_row, keys_slot, values_row,
    values_slot, position_row, score_row, now_row, slots, at, ring,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, DIM_V: tl.constexpr, BLOCK_V: tl.constexpr, WHICH: tl.constexpr,
    PLACED: tl.constexpr, SCORED: tl.constexpr, COUNTS: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    in_turn(PDL)
    place = tl.load(now + row * now_row)
    if WHICH == FREE:
        slot = tl.full([], 0, tl.int32) + slots
        for begin in range(0, slots, BLOCK):
            s = begin + tl.arange(0, BLOCK)
            held = tl.load(position + row * position_row + s, mask=s < slots, other=0)
            slot = tl.minimum(slot, tl.min(tl.where(held < 0, s, slots), 0))
        slot = slot.to(tl.int64)
    elif WHICH == GIVEN:
        slot = tl.full([], 0, tl.int64) + at
    else:
        slot = place - at
        slot = tl.where(ring > 0, slot % tl.maximum(ring, 1), slot)
    there = (slot >= 0) & (slot < slots)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    key = tl.load(k + row * k_row + d, mask=d < DIM, other=0.0)
    value = tl.load(v + row * v_row + e, mask=e < DIM_V, other=0.0)
    count = tl.load(counts + row) + 1 if COUNTS else 0
    tl.debug_barrier()  # a warp may run ahead of those that have not read yet
    tl.store(keys + row * keys_row + slot * keys_slot + d, key, mask=(d < DIM) & there)
    tl.debug_barrier()  # values may be a part of the keys
    tl.store(values + row * values_row + slot * values_slot + e, value, mask=(e < DIM_V) & there)
    if PLACED:
        tl.store(position + row * position_row + slot, place.to(tl.int32), mask=there)
    if SCORED:
        tl.store(score + row * score_row + slot, 0.0, mask=there)
    if COUNTS:
        tl.store(counts + row, count)
        if UNIT:
            left = tl.load(reads + row) - count
            tl.store(units + row, tl.where(left >= UNIT, left // UNIT, 1))


def put_token(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor | None, now: Tensor, slot: int | None,
    origin: int | None, ring: int, counts: Tensor | None, score: Tensor | None, limit: Limit | None,
) -> None:  # fmt: skip
    """See `kvengine.kernels.put_token`."""
    k, v = lined(k), lined(v)
    if not len(k):
        return
    dim, dim_v = k.shape[-1], v.shape[-1]
    which, at = (GIVEN, slot) if slot is not None else (COUNTED, origin) if origin is not None else (FREE, 0)
    put_kernel[(len(k),)](
        k, v, keys, values, now if position is None else position, now if score is None else score,
        now if counts is None else counts, now, now if limit is None else limit.reads, now if limit is None else limit.units,
        k.stride(0), v.stride(0), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        0 if position is None else position.stride(0), 0 if score is None else score.stride(0),
        0 if len(now) == 1 else now.stride(0), keys.shape[1], at, ring,
        DIM=dim, BLOCK_D=next_power_of_2(dim), DIM_V=dim_v, BLOCK_V=next_power_of_2(max(dim_v, 1)), WHICH=which,
        PLACED=position is not None, SCORED=score is not None, COUNTS=counts is not None,
        UNIT=0 if limit is None else limit.unit, BLOCK=1024, **chained(k.device),
    )  # fmt: skip
