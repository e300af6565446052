"""The Triton kernel: one pass over the parts."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvengine.kernels.gpu import FUSED
from kvengine.kernels.gpu.stream import LOG2E
from kvengine.kernels.state import State

AT_ONCE = 4


@triton.jit
def merge_kernel(
    out0, out1, out2, out3, lse0, lse1, lse2, lse3, out, lse, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    COUNT: tl.constexpr,
):  # fmt: skip
    """One program per query row."""
    n = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    high = tl.maximum(tl.load(lse0 + n), tl.load(lse1 + n))
    if COUNT > 2:
        high = tl.maximum(high, tl.load(lse2 + n))
    if COUNT > 3:
        high = tl.maximum(high, tl.load(lse3 + n))
    shift = tl.where(high == float("-inf"), 0.0, high)
    acc, total = share(out0, lse0, n, d, shift, DIM)
    part, weight = share(out1, lse1, n, d, shift, DIM)
    acc, total = acc + part, total + weight
    if COUNT > 2:
        part, weight = share(out2, lse2, n, d, shift, DIM)
        acc, total = acc + part, total + weight
    if COUNT > 3:
        part, weight = share(out3, lse3, n, d, shift, DIM)
        acc, total = acc + part, total + weight
    safe = tl.where(total > 0, total, 1.0)
    tl.store(out + n * DIM + d, acc / safe, mask=d < DIM)
    tl.store(lse + n, tl.where(total > 0, shift + tl.log(safe), -float("inf")))


@triton.jit
def share(out, lse, n, d, shift, DIM: tl.constexpr):
    """A part's weighted output and weight; its output is not read if the weight is 0."""
    weight = tl.exp2((tl.load(lse + n) - shift) * LOG2E)
    return weight * tl.load(out + n * DIM + d, mask=(d < DIM) & (d * 0.0 + weight > 0), other=0.0), weight


def merge_states(states: Sequence[State]) -> State:
    """See `kvengine.kernels.merge_states`."""
    first, *rest = states
    while rest:
        first, rest = _some([first, *rest[: AT_ONCE - 1]]), rest[AT_ONCE - 1 :]
    return first._replace(probs=None)


def _some(states: Sequence[State]) -> State:
    outs, lses = ([getattr(s, name).contiguous() for s in states] for name in ("out", "lse"))
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    spare = AT_ONCE - len(states)
    dim = out.shape[-1]
    if lse.numel():
        merge_kernel[(lse.numel(),)](
            *outs, *outs[:1] * spare, *lses, *lses[:1] * spare, out, lse, DIM=dim,
            BLOCK_D=triton.next_power_of_2(dim), COUNT=len(states), **FUSED,
        )  # fmt: skip
    return State(out, lse)
