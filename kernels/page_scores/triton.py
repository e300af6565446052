"""The Triton kernels: bounds loaded once per KV head, and the best units of a row found in one program."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels.page_scores import reference

MOST_UNITS = 32768
"""Units of a row that one program can hold; beyond, torch sorts."""


@triton.jit
def score_kernel(
    q, low, high, alive, out, low_row, low_unit, high_row, high_unit, alive_row, units, group,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, MEAN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    u = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    live = tl.load(alive + row * alive_row + u, mask=u < units, other=0) != 0
    mask = live[:, None] & (d < DIM)[None, :]
    at = u.to(tl.int64)[:, None]
    lower = tl.load(low + row * low_row + at * low_unit + d[None, :], mask=mask, other=0.0).to(tl.float32)
    upper = tl.load(high + row * high_row + at * high_unit + d[None, :], mask=mask, other=0.0).to(tl.float32)
    best = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for g in range(0, group):
        x = tl.load(q + (row * group + g) * DIM + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        bound = tl.sum(tl.maximum(x * lower, x * upper), 1)
        best = tl.maximum(best, bound)
        total += bound
    result = total / group if MEAN else best
    tl.store(out + row * units + u, tl.where(live, result, -float("inf")), mask=u < units)


@triton.jit
def top_kernel(scores, ids, units, COUNT: tl.constexpr, BLOCK_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The COUNT-th largest score of a row, bit by bit; then every unit above it, and the first of those equal to it."""
    row = tl.program_id(0).to(tl.int64)
    u = tl.arange(0, BLOCK)
    score = tl.load(scores + row * units + u, mask=u < units, other=-float("inf")) + 0.0  # -0 becomes 0
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64) + 2147483648  # ordered as the scores are
    key = tl.where(u < units, key, -1)
    least = tl.zeros([], tl.int64)
    step = tl.full([], 2147483648, tl.int64)
    for _ in range(0, 32):
        more = tl.sum((key >= least + step).to(tl.int32), 0)
        least = tl.where(more >= COUNT, least + step, least)
        step = step // 2
    above, equal = key > least, (key == least).to(tl.int32)
    room = COUNT - tl.sum(above.to(tl.int32), 0)
    chosen = (above | ((equal != 0) & (tl.cumsum(equal, 0) <= room))) & (score > -float("inf"))
    place = tl.cumsum(chosen.to(tl.int32), 0)
    tl.store(ids + row * COUNT + place - 1, u.to(tl.int64), mask=chosen)
    rest = tl.arange(0, BLOCK_COUNT)
    tl.store(ids + row * COUNT + rest, -1, mask=(rest >= tl.sum(chosen.to(tl.int32), 0)) & (rest < COUNT))


def page_scores(q: Tensor, low: Tensor, high: Tensor, alive: Tensor, reduce: str) -> Tensor:
    """See `kvengine.kernels.page_scores`."""
    low, high, alive = (x if x.stride(-1) == 1 else x.contiguous() for x in (low, high, alive))
    (rows, group, dim), units = q.shape, alive.shape[1]
    out = torch.empty(rows, units, device=q.device, dtype=torch.float32)
    block_d = triton.next_power_of_2(dim)
    block = max(16, 4096 // block_d)
    if out.numel():
        score_kernel[(rows, triton.cdiv(units, block))](
            q.contiguous(), low, high, alive, out, low.stride(0), low.stride(1), high.stride(0), high.stride(1),
            alive.stride(0), units, group, DIM=dim, BLOCK_D=block_d, BLOCK=block, MEAN=reduce == "mean",
        )  # fmt: skip
    return out


def top_units(scores: Tensor, count: int) -> Tensor:
    """See `kvengine.kernels.page_scores.top_units`."""
    rows, units = scores.shape
    if units > MOST_UNITS or not rows * count:
        return reference.top_units(scores, count)
    ids = torch.empty(rows, count, device=scores.device, dtype=torch.int64)
    block = triton.next_power_of_2(units)
    top_kernel[(rows,)](
        scores.to(torch.float32).contiguous(), ids, units, COUNT=count, BLOCK_COUNT=triton.next_power_of_2(count),
        BLOCK=block, num_warps=8 if block >= 2048 else 4,
    )  # fmt: skip
    return ids
