"""The Triton kernels: one pass over the parts."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels.gpu import cdiv, next_power_of_2, scratch
from kvengine.kernels.gpu.again import launched_again
from kvengine.kernels.gpu.chain import chained, in_turn
from kvengine.kernels.gpu.stream import LOG2E
from kvengine.kernels.state import Into, State

AT_ONCE = 4
PAID = 256
"""Tokens whose attention a program adds up."""


@launched_again
@triton.jit
def merge_kernel(
    out0, out1, out2, out3, lse0, lse1, lse2, lse3, out, lse, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program per query row."""
    n = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    in_turn(PDL)
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
    safe = tl.where(total == 0, 1.0, total)  # not NaN, which is passed on
    tl.store(out + n * DIM + d, acc / safe, mask=d < DIM)
    tl.store(lse + n, tl.where(total == 0, -float("inf"), shift + tl.log(safe)))


@triton.jit
def share(out, lse, n, d, shift, DIM: tl.constexpr):
    """A part's weighted output and weight; its output is not read if the weight is 0."""
    weight = tl.exp2((tl.load(lse + n) - shift) * LOG2E)
    return weight * tl.load(out + n * DIM + d, mask=(d < DIM) & (d * 0.0 + weight > 0), other=0.0), weight


@launched_again
@triton.jit(do_not_specialize=["columns", "column", "every"])
def received_kernel(
    scores, lse, out, columns, column, every, queries, QUERIES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What a query head's queries pay to BLOCK of a part's tokens, which are the whole's from `column` on."""
    head, t = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n = tl.arange(0, QUERIES)
    asked = n < queries
    in_turn(PDL)
    whole = tl.load(lse + head * queries + n, mask=asked, other=0.0)
    whole = tl.where(whole == float("-inf"), 0.0, whole)
    at = (head * queries + n)[:, None] * columns + t[None, :]
    score = tl.load(scores + at, mask=asked[:, None] & (t < columns)[None, :], other=-float("inf"))
    paid = tl.sum(tl.exp2((score - whole[:, None]) * LOG2E), 0)
    tl.store(out + head * every + column + t, paid, mask=t < columns)


@launched_again
@triton.jit(do_not_specialize=["columns", "mean_row", "position_row", "judged"])
def ongoing_kernel(
    scores, lse, mean, position, at, judged_row, columns, mean_row, position_row, judged, group,
    BY_ROW: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What a row's queries, one for each of its heads, pay to BLOCK of a part's tokens, and the mean that goes on with it."""
    row, t = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    n, here = tl.arange(0, GROUP), t < columns
    asked = n < group
    in_turn(PDL)
    whole = tl.load(lse + row * group + n, mask=asked, other=0.0)
    whole = tl.where(whole == float("-inf"), 0.0, whole)
    score = scores + (row * group + n)[:, None] * columns + t[None, :]
    score = tl.load(score, mask=asked[:, None] & here[None, :], other=-float("inf"))
    paid = tl.sum(tl.exp2((score - whole[:, None]) * LOG2E), 0)
    since = (tl.load(judged_row + row) if BY_ROW else judged).to(tl.int32) - 1
    place = tl.load(position + row * position_row + t, mask=here, other=0).to(tl.int32)
    seen = tl.load(at).to(tl.int32) + 1 - tl.maximum(place, since)
    old = tl.load(mean + row * mean_row + t, mask=here, other=0.0)
    tl.store(mean + row * mean_row + t, old + (paid - old) / seen.to(tl.float32), mask=here)


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
            BLOCK_D=next_power_of_2(dim), COUNT=len(states), **chained(out.device),
        )  # fmt: skip
    return State(out, lse)


def joined(
    states: Sequence[State], sinks: Tensor | None, dtype: torch.dtype, into: Into | None = None
) -> tuple[State, Sequence[State]]:
    """Those that wait, joined two by two and with the sinks, and what is left to be merged with that. Where nothing is, it is
    written `into` what was given."""
    waiting = [s.waiting for s in states if s.waiting is not None]
    rest = [s for s in states if s.waiting is None]
    last = not rest and len(waiting) <= 2
    final, into = dtype if last else torch.float32, into if last else None
    found = []
    for i in range(0, len(waiting), 2):
        second = waiting[i + 1] if i + 1 < len(waiting) else None
        found.append(waiting[i].join(None if i else sinks, second, final, into))
    return found[0], [*found[1:], *rest]


def received(parts: Sequence[State], whole: State) -> Tensor:
    """What each query head pays to each token [row, group, token], of parts that all wait, or waited."""
    rows, group, queries = whole.lse.shape
    columns = [0 if p.waiting is None else p.waiting.columns for p in parts]
    out = scratch(rows, group, sum(columns), device=whole.lse.device, dtype=torch.float32)
    column = 0
    for part, width in zip(parts, columns, strict=True):
        if part.waiting is not None and part.waiting.scores is not None and out.numel() and width:
            received_kernel[(rows * group, cdiv(width, PAID))](
                part.waiting.scores, whole.lse, out, width, column, out.shape[2], queries,
                QUERIES=next_power_of_2(queries), BLOCK=PAID, **chained(out.device),
            )  # fmt: skip
        column += width
    return out


def ongoing(part: State, whole: State, mean: Tensor, position: Tensor, at: Tensor, judged: int | Tensor) -> None:
    """See `kvengine.kernels.merge_states.ongoing`; of a part that waits, or waited."""
    rows, group, _ = whole.lse.shape
    waits, by_row = part.waiting, isinstance(judged, Tensor)
    if waits is not None and mean.numel():
        ongoing_kernel[(rows, cdiv(waits.columns, PAID))](
            waits.scores, whole.lse, mean, position, at, judged if by_row else at, waits.columns, mean.stride(0),
            position.stride(0), 0 if by_row else judged, group, BY_ROW=by_row, GROUP=next_power_of_2(group), BLOCK=PAID,
            **chained(mean.device),
        )  # fmt: skip
