"""Finding the best of a row without sorting it."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

MOST = 8192
"""Numbers that one program holds in registers."""


@triton.jit
def ordered(score):
    """Integers in the order of the scores; 0 and -0 are the same."""
    bits = (score + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def threshold(key, count):
    """Bit by bit the `count`-th largest, or any number that exactly `count` of them reach."""
    more = tl.sum((key >= 0).to(tl.int32), 0)
    least = tl.where(more >= count, 0, -2147483648).to(tl.int32)
    step = tl.full([], 1073741824, tl.int32)
    while (step > 0) & (more != count):
        more = tl.sum((key >= least + step).to(tl.int32), 0)
        least = tl.where(more >= count, least + step, least)
        step = step // 2
    return least


@triton.jit
def best(score, count):
    """Which are the `count` best, of equal ones the later."""
    key = ordered(score)
    least = threshold(key, count)
    above, equal = key > least, (key == least).to(tl.int32)
    room = count - tl.sum(above.to(tl.int32), 0)
    later = tl.sum(equal, 0) - tl.cumsum(equal, 0)  # of those equal to it
    return above | ((equal != 0) & (later < room))


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
    return min(16, max(4, block // 512))
