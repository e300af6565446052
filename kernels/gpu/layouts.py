"""Which lane of a warp holds which number, where Triton is left to choose and moves more than it must.

A block of numbers goes through shared memory, or from lane to lane, wherever the order that it was made in differs from the
order that it is wanted in. What is here changes no number and makes Triton's compiler choose an order that costs less. What
came of it is seen only in compiled code (`benchmarks/gpu_budget.py`).
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def apart(x, N: tl.constexpr):
    """[..., N] as N of [...]. Where a lane has all of the last axis, nothing moves, and it may have been loaded at once."""
    if N == 1:
        return (x.reshape(x.shape[:-1]),)
    elif N == 2:
        a, b = tl.split(x)
        return (a, b)
    else:
        a, b = tl.split(x.reshape(x.shape[:-1] + (N // 2, 2)))
        a, b, found = apart(a, N // 2), apart(b, N // 2), ()
        for i in tl.static_range(N // 2):
            found = found + (a[i], b[i])
        return found


@triton.jit
def loaded(x, pointer, never):
    """x, in the compiler's eyes out of memory: it brings what was loaded into the order of a product, once, but leaves in
    its own order what was computed, and then moves what comes of it each time. `never` is False, of which it knows nothing.
    Each number has an address of its own: from one for several Triton 3.6 concludes that these are one number."""
    at = tl.arange(0, x.numel).reshape(x.shape)
    return tl.load(
        pointer.to(tl.pointer_type(x.dtype), bitcast=True) + at, mask=tl.broadcast_to(never, x.shape), other=x
    )


@triton.jit
def as_product(x):
    """x in float32, in the order that products come in."""
    nothing = tl.zeros([x.shape[0], 16], tl.float16), tl.zeros([16, x.shape[1]], tl.float16)
    return tl.dot(nothing[0], nothing[1], x)


@triton.jit
def rows_of(x, second: tl.constexpr):
    """The first or the second 8 of a product's 16 rows, which lie in different registers of the same lanes."""
    return tl.split(tl.permute(x.reshape(2, 8, x.shape[1]), (1, 2, 0)))[second]
