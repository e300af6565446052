"""Finding the best of a row without sorting it."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

MOST = 16384
"""Numbers that one program holds in registers."""
NEVER = tl.constexpr(-2139095041)
"""-inf among ordered integers."""


@triton.jit
def ordered(score):
    """Integers in the order of the scores; 0 and -0 are the same."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def threshold(key, count):
    """The `count`-th largest, or any number that exactly `count` of them reach."""
    least, _reach = between(key, count, tl.min(key, 0), tl.max(key, 0))
    return least


@triton.jit
def threshold_of_many(key, count, PARTS: tl.constexpr):
    """As `between`, of a `count` of at most PARTS: so many reach the smallest of the parts' largest."""
    BLOCK: tl.constexpr = key.shape[0]
    if PARTS >= BLOCK:
        least = tl.min(key, 0)
    else:
        least = tl.min(tl.max(tl.reshape(key, [PARTS, BLOCK // PARTS]), 1), 0)
    return between(key, count, least, tl.max(key, 0))


@triton.jit
def between(key, count, least, most):
    """The `threshold`, which lies from `least`, which `count` of them reach if so many there are, to `most`; and how many
    reach it, or fewer than none if nobody had to ask. A turn asks how many reach a quarter and a half of the way, with one
    sum for both, as each sum waits for all warps."""
    more = tl.full([], -2147483648, tl.int32)
    while (least < most) & (more != count):
        way = most.to(tl.int64) - least
        quarter, half = (least + tl.maximum(way // 4, 1)).to(tl.int32), (least + tl.maximum(way // 2, 1)).to(tl.int32)
        both = tl.sum((key >= quarter).to(tl.int32) + ((key >= half).to(tl.int32) << 16), 0)
        reach_quarter, reach_half = both & 0xFFFF, both >> 16
        upper = reach_half >= count
        lower = reach_quarter >= count
        most = tl.where(upper, most, tl.where(lower, half - 1, quarter - 1))
        least = tl.where(upper, half, tl.where(lower, quarter, least))
        more = tl.where(upper, reach_half, tl.where(lower, reach_quarter, more))
    return least, more


@triton.jit
def counted(x):
    """The sums up to each number, and of all. By lines of 32, which a few neighbouring lanes hold: summed up in one go, each
    warp's part of a long row would go from lane to lane as often as there are parts."""
    LINE: tl.constexpr = min(32, x.shape[0])
    lines = x.reshape(x.shape[0] // LINE, LINE)
    totals = tl.sum(lines, 1)
    upto = tl.cumsum(totals, 0)
    return (tl.cumsum(lines, 1) + (upto - totals)[:, None]).reshape(x.shape), tl.sum(totals, 0)


@triton.jit
def best(score, count):
    """Which are the `count` best, of equal ones the later."""
    key = ordered(score)
    return best_from(key, threshold(key, count), count)


@triton.jit
def best_from(key, least, count):
    """Which are the `count` largest, of which `least` is the smallest: of equal ones the later."""
    above, equal = key > least, (key == least).to(tl.int32)
    room = count - tl.sum(above.to(tl.int32), 0)
    upto, all_ = counted(equal)
    return above | ((equal != 0) & (all_ - upto < room))


@triton.jit
def first_best(key, count, PARTS: tl.constexpr):
    """Which are the `count` largest, at most PARTS and none that is NEVER: of equal ones the first."""
    BLOCK: tl.constexpr = key.shape[0]
    least, reach = threshold_of_many(key, count, PARTS)
    here = tl.arange(0, BLOCK)
    last = tl.full([], BLOCK, tl.int32)
    if reach != count:  # the first of those that are alike
        room = count - tl.sum((key > least).to(tl.int32), 0)
        last = BLOCK - threshold(tl.where(key == least, BLOCK - here, 0), room)
    return ((key > least) | ((key == least) & (here <= last))) & (key > NEVER) & (count > 0)


@triton.jit
def best_placed(score, count, place):
    """Which are the `count` best, of equal ones those that come later by `place`; `place` is negative where there is none."""
    key = ordered(score)
    least = threshold(key, count)
    above = key > least
    tied = tl.where(key == least, place, -1)
    room = count - tl.sum(above.to(tl.int32), 0)
    return above | ((tied >= 0) & (tied >= threshold(tied, room)))


def warps(block: int) -> int:
    """For so many numbers."""
    return min(16, max(4, block // 1024))
