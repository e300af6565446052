"""The Triton kernels: bounds loaded once per KV head, and the best units of a row found in one program."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels.best_tokens.triton import best_tokens
from kvengine.kernels.dispatch import interpreted
from kvengine.kernels.gpu import cdiv, lined, next_power_of_2, room, scratch, stream
from kvengine.kernels.gpu.again import launched_again
from kvengine.kernels.gpu.chain import chained, in_turn
from kvengine.kernels.gpu.select import MOST, best_from, counted, first_best, ordered, threshold_of_many, warps
from kvengine.kernels.gpu.stream import LOG2E
from kvengine.kernels.page_scores import reference
from kvengine.kernels.page_scores.reference import ALIKE, Ops, parts_of

EACH = 4
"""Programs that look at bounds, for each multiprocessor."""
SHARED = 1 << 18
"""Logits of a row, at most, of which one program makes shares: a megabyte takes it as long as all that it saves. Many heads over
a long context have more (MLA), and those are shared out."""
NONE, OUTLIERS, FIRST = (tl.constexpr(i) for i in range(3))
"""Which units are read whatever the queries are: none, the least coherent, which no softmax counts, or the first that lives."""


@launched_again
@triton.jit(do_not_specialize=["units", "alive_row", "out_row", "each"])
def score_kernel(
    q, low, high, alive, out, low_row, low_unit, high_row, high_unit, alive_row, out_row, units, group, each,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, MEAN: tl.constexpr,
    COMPUTE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As no channel's low is above its high, max(q low, q high) is max(q, 0) high + min(q, 0) low: two products. A program has
    `each` units of a row, some at a time with the next on their way."""
    row, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * each
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, HEADS)
    asked = (n < group)[None, :] & (d < DIM)[:, None]
    in_turn(PDL)
    x = tl.load(q + (row * group + n)[None, :] * DIM + d[:, None], mask=asked, other=0.0)
    above, below = tl.maximum(x, 0.0).to(COMPUTE), tl.minimum(x, 0.0).to(COMPUTE)
    end = tl.minimum(begin + each, units)
    alive += row * alive_row + tl.arange(0, BLOCK)
    next_live = tl.load(alive + begin, mask=begin + tl.arange(0, BLOCK) < end, other=0)
    for start in range(begin, end, BLOCK):
        u = start + tl.arange(0, BLOCK)
        live = next_live != 0  # asked for a turn before, as it is not among what the compiler brings in ahead
        next_live = tl.load(alive + start + BLOCK, mask=u + BLOCK < end, other=0)
        inside = (u < units)[:, None] & (d < DIM)[None, :]  # a dead unit's bounds tell of nothing but itself
        at = u.to(tl.int64)[:, None]
        lower = tl.load(low + row * low_row + at * low_unit + d[None, :], mask=inside, other=0.0).to(COMPUTE)
        upper = tl.load(high + row * high_row + at * high_unit + d[None, :], mask=inside, other=0.0).to(COMPUTE)
        bound = tl.dot(upper, above, input_precision="ieee")
        bound = tl.dot(lower, below, bound, input_precision="ieee")
        if MEAN:
            result = tl.sum(bound, 1) / group
        else:
            result = tl.max(tl.where((n < group)[None, :], bound, -float("inf")), 1)
        tl.store(out + row * out_row + u, tl.where(live, result, -float("inf")), mask=u < units)


@launched_again
@triton.jit(do_not_specialize=["units", "alive_row", "out_row"])
def logit_kernel(
    q, mean, alive, out, mean_row, mean_unit, alive_row, out_row, units, group, scale, softcap,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, COMPUTE: tl.constexpr,
    SOFTCAP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of each query head and unit, with the mean keys read once for the group."""
    row = tl.program_id(0).to(tl.int64)
    u = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    d, n = tl.arange(0, BLOCK_D), tl.arange(0, HEADS)
    inside = (u < units)[:, None] & (d < DIM)[None, :]
    in_turn(PDL)
    key = tl.load(mean + row * mean_row + u.to(tl.int64)[:, None] * mean_unit + d[None, :], mask=inside, other=0.0)
    live = tl.load(alive + row * alive_row + u, mask=u < units, other=0) != 0
    asked = (n < group)[None, :] & (d < DIM)[:, None]
    x = tl.load(q + (row * group + n)[None, :] * DIM + d[:, None], mask=asked, other=0.0)
    score = tl.dot(key.to(COMPUTE), x.to(COMPUTE), input_precision="ieee") * scale
    if SOFTCAP:
        score = softcap * (1.0 - 2.0 / (tl.exp(score * (2.0 / softcap)) + 1.0))
    at = out + (row * group + n)[None, :] * out_row + u[:, None]
    tl.store(at, tl.where(live[:, None], score, -float("inf")), mask=(n < group)[None, :] & (u < units)[:, None])


@launched_again
@triton.jit(do_not_specialize=["units"])
def share_kernel(logits, units, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """The logarithm of a line's softmax, in its place."""
    line = logits + tl.program_id(0).to(tl.int64) * units
    high, total = tl.full([], -float("inf"), tl.float32), tl.full([], 0.0, tl.float32)
    in_turn(PDL)
    for begin in range(0, units, BLOCK):
        u = begin + tl.arange(0, BLOCK)
        x = tl.load(line + u, mask=u < units, other=-float("inf"))
        now = tl.maximum(high, tl.max(x, 0))
        shift = tl.where(now == float("-inf"), 0.0, now)
        total = total * tl.exp2((high - shift) * LOG2E) + tl.sum(tl.exp2((x - shift) * LOG2E), 0)
        high = now
    lse = tl.where(total > 0, high + tl.log(tl.where(total > 0, total, 1.0)), 0.0)
    for begin in range(0, units, BLOCK):
        u = begin + tl.arange(0, BLOCK)
        x = tl.load(line + u, mask=u < units, other=-float("inf"))
        tl.store(line + u, x - lse, mask=u < units)


@launched_again
@triton.jit(do_not_specialize=["scores_row", "alive_row", "candidates", "count"])
def top_kernel(
    scores, among, alive, limits, ids, scores_row, alive_row, candidates, count,
    BLOCK_COUNT: tl.constexpr, BLOCK: tl.constexpr, AMONG: tl.constexpr, ALIVE: tl.constexpr, LIMITS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Of a row's candidates from here to BLOCK further (units, or what `among` names of them) the best `count`, or so many as
    the row's limit allows."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    here = at < candidates
    in_turn(PDL)
    if AMONG:
        unit = tl.load(among + row * candidates + at, mask=here, other=-1).to(tl.int32)
        score = tl.load(scores + row * scores_row + unit, mask=unit >= 0, other=-float("inf"))
    else:  # the rows are of whole fours, which the compiler has to be told: then four neighbours are one lane's
        unit = at
        whole = at < (candidates + 3) // 4 * 4
        score = tl.load(scores + row * (scores_row // 4 * 4) + at, mask=whole, other=-float("inf"))
        if ALIVE:
            here = here & (tl.load(alive + row * alive_row + at, mask=here, other=0) != 0)
        score = tl.where(here, score, -float("inf"))
    key = ordered(tl.where(score == score, score, -float("inf")))
    wanted = count
    if LIMITS:
        wanted = tl.minimum(tl.load(limits + row), count).to(tl.int32)
    chosen = first_best(key, wanted, BLOCK_COUNT)
    name(ids + (row * tl.num_programs(1) + part) * count, unit, chosen, count, BLOCK_COUNT)


@triton.jit
def name(out, unit, chosen, count, BLOCK_COUNT: tl.constexpr):
    """The ids of those chosen, one after the other, and -1 behind them."""
    place, found = counted(chosen.to(tl.int32))
    tl.store(out + place - 1, unit.to(tl.int64), mask=chosen)
    rest = tl.arange(0, BLOCK_COUNT)
    tl.store(out + rest, -1, mask=(rest >= found) & (rest < count))


@launched_again
@triton.jit(do_not_specialize=["logits_row", "alive_row", "coherence_row", "units", "count", "most"])
def share_top_kernel(
    logits, alive, coherence, limits, ids, logits_row, alive_row, coherence_row, units, count, most, group, outliers,
    FORCED: tl.constexpr, PARTS: tl.constexpr, SHIFT: tl.constexpr, MEAN: tl.constexpr, LIMITS: tl.constexpr,
    BLOCK_COUNT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of a row's units those that are read whatever the queries are, and of the others the best by their shares, up to `count` in
    all, or so many as the row's limit allows. All of a row is one program's: a share is of a sum over all units."""
    row, u = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    here = u < units
    in_turn(PDL)
    live = here & (tl.load(alive + row * alive_row + u, mask=here, other=0) != 0)
    allowed = tl.minimum(tl.load(limits + row), most).to(tl.int32) if LIMITS else tl.full([], 0, tl.int32) + most
    wanted = tl.minimum(allowed, count)
    forced = u < 0
    if FORCED == OUTLIERS:
        far = -tl.load(coherence + row * coherence_row + u, mask=live, other=0.0).to(tl.float32)
        far = tl.where(live, far, -float("inf"))
        key, number = ordered(far) >> SHIFT, (allowed.to(tl.float32) * outliers).to(tl.int32)
        least, _reach = threshold_of_many(key, number, PARTS)
        forced = best_from(key, least, number) & (far > -float("inf"))
    if FORCED == FIRST:
        forced = live & (u == tl.min(tl.where(live, u, BLOCK), 0)) & (wanted > 0)
    free = live & (forced == 0)
    among = free if FORCED == OUTLIERS else live
    want = tl.full([BLOCK], -float("inf"), tl.float32)
    lines = logits + row * group * (logits_row // 4 * 4) + u  # of whole fours, as in `top_kernel`
    for h in range(group):
        x = tl.load(lines + h * (logits_row // 4 * 4), mask=u < (units + 3) // 4 * 4, other=-float("inf"))
        x = tl.where(among, x, -float("inf"))
        high = tl.max(x, 0)
        shift = tl.where(high == -float("inf"), 0.0, high)
        total = tl.sum(tl.exp2((x - shift) * LOG2E), 0)
        share = x - tl.where(total > 0, shift + tl.log(tl.where(total > 0, total, 1.0)), 0.0)
        if MEAN:  # the logarithm of their sum: none is too small to be told from another
            top = tl.maximum(want, share)
            shift = tl.where(top == -float("inf"), 0.0, top)
            want = top + tl.log(1.0 + tl.exp2((tl.minimum(want, share) - shift) * LOG2E))
        else:
            want = tl.maximum(want, share)
    want = tl.where(free & (want == want), want, -float("inf"))
    chosen = first_best(ordered(want), wanted - tl.sum(forced.to(tl.int32), 0), BLOCK_COUNT)
    name(ids + row * count, u, chosen | forced, count, BLOCK_COUNT)


def page_scores(q: Tensor, low: Tensor, high: Tensor, alive: Tensor, reduce: str) -> Tensor:
    """See `kvengine.kernels.page_scores`. More query heads than a program has room for are scored by torch."""
    low, high, alive = lined(low), lined(high), lined(alive)
    (rows, group, dim), units = q.shape, alive.shape[1]
    out = _rows(rows, units, q.device)
    compute, block_d, block, heads, stages = _blocks(q, low, high, taken=8192)
    if not heads:
        return reference.page_scores(q, low, high, alive, reduce)
    if out.numel():
        parts = max(1, min(cdiv(units, block), stream.programs(q.device, EACH) // rows))
        each = cdiv(units, parts * block) * block
        score_kernel[(rows, cdiv(units, each))](
            q.contiguous(), low, high, alive, out, low.stride(0), low.stride(1), high.stride(0), high.stride(1),
            alive.stride(0), out.stride(0), units, group, each, DIM=dim, BLOCK_D=block_d, BLOCK=block, MEAN=reduce == "mean",
            HEADS=heads, COMPUTE=compute, num_warps=2, num_stages=stages, **chained(q.device),
        )  # fmt: skip
    return out


def log_shares(q: Tensor, mean: Tensor, alive: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """See `kvengine.kernels.page_scores.log_shares`; as `page_scores`."""
    (rows, group, _), units = q.shape, alive.shape[1]
    out = torch.empty(rows, group, units, device=q.device, dtype=torch.float32)
    if not _logits(q, mean, alive, out, scale, softcap):
        return reference.log_shares(q, mean, alive, scale, softcap)
    if out.numel():
        share_kernel[(rows * group,)](out, units, BLOCK=4096, num_warps=8, **chained(q.device))
    return out


def _logits(q: Tensor, mean: Tensor, alive: Tensor, out: Tensor, scale: float, softcap: float | None) -> bool:
    """Write them, unless there are more query heads than a program has room for."""
    mean, alive = lined(mean), lined(alive)
    (rows, group, dim), units = q.shape, alive.shape[1]
    compute, block_d, block, heads, _ = _blocks(q, mean, taken=16384)
    if heads and out.numel():
        logit_kernel[(rows, cdiv(units, block))](
            q.contiguous(), mean, alive, out, mean.stride(0), mean.stride(1), alive.stride(0), out.stride(1), units, group, scale,
            softcap or 1.0, DIM=dim, BLOCK_D=block_d, BLOCK=block, HEADS=heads, COMPUTE=compute, SOFTCAP=softcap is not None,
            **chained(q.device),
        )  # fmt: skip
    return heads > 0


def units_by_share(
    q: Tensor, mean: Tensor, alive: Tensor, most: int, scale: float, counts: Tensor | None, coherence: Tensor | None,
    outliers: float, first: bool, reduce: str, softcap: float | None,
) -> Tensor:  # fmt: skip
    """See `kvengine.kernels.page_scores.units_by_share`. More units than a program holds are scored and chosen apart."""
    (rows, group, _), units = q.shape, alive.shape[1]
    count = min(most, units)
    logits = _rows(rows * group, units, q.device)
    fits = units <= MOST and group * logits.stride(0) <= SHARED and rows * count > 0
    if not fits or not _logits(q, mean, alive, logits.unflatten(0, (rows, group)), scale, softcap):
        ops = Ops(log_shares, best_tokens, top_units)
        return reference.units_by_share(
            q, mean, alive, most, scale, counts, coherence, outliers, first, reduce, softcap, ops
        )
    alive, ids = lined(alive), alive.new_empty(rows, count, dtype=torch.int64)
    far = logits if coherence is None else lined(coherence)
    forced, block = OUTLIERS if coherence is not None else FIRST if first else NONE, next_power_of_2(units)
    outliers = 0.0 if coherence is None else outliers
    share_top_kernel[(rows,)](
        logits, alive, far, ids if counts is None else counts.contiguous(), ids, logits.stride(0), alive.stride(0), far.stride(0),
        units, count, most, group, outliers, FORCED=forced.value, PARTS=parts_of(most, outliers),
        SHIFT=13 if far.dtype == torch.float16 else 0, MEAN=reduce == "mean", LIMITS=counts is not None,
        BLOCK_COUNT=next_power_of_2(count), BLOCK=block, num_warps=warps(block), **chained(q.device),
    )  # fmt: skip
    return ids


SLACK = 256
"""Bytes of shared memory that programs take beside what they multiply."""


def _blocks(q: Tensor, *stored: Tensor, taken: int) -> tuple[tl.dtype, int, int, int, int]:
    """What is multiplied in, channels, units that a program takes at a time (of `taken` bytes), its query heads, 0 if there is
    no room for them, and how many such takes there is room for."""
    block_d, heads = max(16, next_power_of_2(q.shape[-1])), max(8, next_power_of_2(q.shape[1]))
    exact = all(x.dtype == q.dtype for x in stored) and not (interpreted() and q.dtype == torch.bfloat16)
    compute = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}.get(q.dtype, tl.float32) if exact else tl.float32
    size = 4 if compute == tl.float32 else 2
    block = max(16, taken // block_d // size)
    space, at_once = room(q.device) - SLACK, len(stored) * block * block_d * size
    queries = len(stored) * heads * block_d * size  # what is above 0 in them, beside upper bounds, and what is below
    stages = max(1, min(3, room(q.device) // 2 // at_once))
    while stages > 2 and queries + (stages - 1) * at_once > space:  # one of the takes is in registers
        stages -= 1
    return compute, block_d, block, heads if queries + at_once <= space else 0, stages


def _rows(rows: int, units: int, device: torch.device) -> Tensor:
    """Room for scores. Each row begins at a multiple of four and ends before one, so that it can be read in whole fours."""
    return scratch(rows, cdiv(units, ALIKE) * ALIKE, device=device, dtype=torch.float32)[:, :units]


def _in_fours(scores: Tensor) -> Tensor:
    """As `_rows` has them: themselves, or a copy."""
    (rows, units), row = scores.shape, scores.stride(0)
    wide = cdiv(units, 4) * 4
    end = scores.storage_offset() + (rows - 1) * row + wide
    if scores.dtype == torch.float32 and scores.stride(1) == 1 and row % 4 == 0 and row >= wide:
        if end * 4 <= scores.untyped_storage().nbytes():
            return scores
    return _rows(rows, units, scores.device).copy_(scores)


def top_units(scores: Tensor, count: int, counts: Tensor | None = None, alive: Tensor | None = None) -> Tensor:
    """See `kvengine.kernels.page_scores.top_units`. More units than a program holds are chosen from what several chose."""
    if not scores.shape[0] * count:
        return reference.top_units(scores, count, counts, alive)
    scores, left, ids = _in_fours(scores), scores.shape[1], None
    if alive is not None and alive.stride(1) != 1:
        alive = alive.contiguous()
    while left > MOST:
        parts = cdiv(left, MOST)
        if 2 * parts * count > left:  # hardly fewer
            return reference.top_units(scores, count, counts, alive)
        ids, left = _top(scores, ids, alive, None, left, count, parts), parts * count
    return _top(scores, ids, alive, counts, left, count, 1)


def _top(
    scores: Tensor, among: Tensor | None, alive: Tensor | None, limits: Tensor | None, candidates: int, count: int,
    parts: int,
) -> Tensor:  # fmt: skip
    if among is not None:  # and so alive
        alive = None
    rows, block = scores.shape[0], MOST if parts > 1 else next_power_of_2(candidates)
    ids = torch.empty(rows, parts * count, device=scores.device, dtype=torch.int64)
    top_kernel[(rows, parts)](
        scores, scores if among is None else among, scores if alive is None else alive,
        ids if limits is None else limits.contiguous(), ids, scores.stride(0), 0 if alive is None else alive.stride(0),
        candidates, count, BLOCK_COUNT=next_power_of_2(count), BLOCK=block, AMONG=among is not None, ALIVE=alive is not None,
        LIMITS=limits is not None, num_warps=warps(block), **chained(scores.device),
    )  # fmt: skip
    return ids
