"""What the kernels share that multiply codes as they are (`kivi.py`, `mixed.py`): queries in units that float16 holds, and by how
much weights may grow; and, of KIVI's, the share of a score that all tokens of a key group have.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from __future__ import annotations

import triton
import triton.language as tl

from kvengine.kernels.gpu.layouts import as_product

SMALLEST = tl.constexpr(2.0**-24)
"""Float16's smallest number, of which codes are multiples."""


@triton.jit
def counted_in(largest, scale):
    """Of each query row's largest number a power of two that is no less, in which its numbers are counted, as float16 ends early
    and nothing is rounded by it; and the same with the sign of `scale`."""
    largest = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 2.0
    largest = tl.where(largest > 0, largest, 1.0)
    return largest, tl.where(scale < 0, -largest, largest)


@triton.jit
def asked(q, some, scale, DIM: tl.constexpr, HEADS: tl.constexpr, LEVEL: tl.constexpr, DTYPE: tl.constexpr):
    """What each query row (`q`: where it begins) is `counted_in`, and the left factors for `shared`: of 8 rows one, which has
    channels in its rows 0 to 7 and others in 8 to 15, of more rows one for each."""
    # Nothing is joined: Triton's compiler takes that for wider loads, and brings factors into another order.
    d = tl.arange(0, DIM // 2)
    d = d // 16 * 32 + d % 8 // 2 * 8 + d % 16 // 8 * 2 + d % 2
    at = q[None, :, None] + 4 * tl.arange(0, 2)[:, None, None] + d[None, None, :]
    x = tl.load(at, mask=some[None, :, None], other=0.0).to(tl.float32)
    largest, unit = counted_in(tl.max(tl.max(tl.abs(x), 2), 0), scale)
    x = x / unit[None, :, None]
    if DTYPE == tl.bfloat16:  # whose numbers get as small as codes are
        x = x * (LEVEL * SMALLEST)
    if HEADS == 8:
        return largest, unit, (as_product(x.reshape(16, DIM // 2)).to(DTYPE),)
    else:
        x, y = tl.split(tl.permute(x, (1, 2, 0)))
        return largest, unit, (as_product(x).to(DTYPE), as_product(y).to(DTYPE))


@triton.jit
def shared(pointer, there, query, DIM: tl.constexpr, LEVEL: tl.constexpr, DTYPE: tl.constexpr):
    """Of a key group's zeros or scales, the products with each query, as two parts of what the scores of any 8 tokens begin
    with: [row, 8], each number eight times. Of 8 queries rows 0 to 7 of the first are meant, and rows 8 to 15 of the second."""
    # A lane loads eight channels, and holds them as the right factors of two products, of four each.
    x = tl.load(pointer + tl.arange(0, DIM), mask=there, other=0.0).to(DTYPE)
    x, y = tl.split(tl.permute(x.reshape(DIM // 32, 4, 2, 2, 2), (0, 3, 1, 4, 2)).reshape(DIM // 2, 2))
    x, y = tl.broadcast_to(x[:, None], DIM // 2, 8), tl.broadcast_to(y[:, None], DIM // 2, 8)
    if len(query) == 1:
        x, y = tl.dot(query[0], x), tl.dot(query[0], y)
    else:
        x, y = tl.dot(query[0], x), tl.dot(query[1], y)
    if DTYPE != tl.bfloat16:
        x, y = x * (LEVEL * SMALLEST), y * (LEVEL * SMALLEST)
    return x, y


@triton.jit
def over(x, LOT: tl.constexpr):
    """What 8 tokens begin with, for a lot of them."""
    return tl.broadcast_to(x[:, None, :], x.shape[0], LOT // 8, 8).reshape(x.shape[0], LOT)


@triton.jit
def headroom(scales):
    """By how many powers of two weights must be less than float16's largest, so that none overflows times a scale; less 15,
    that is: as many as are left are used, so that small weights times small scales do not vanish."""
    bits = tl.max(tl.max(scales.to(tl.int16, bitcast=True).to(tl.int32), 1), 0)  # none is negative: as whole numbers
    if scales.dtype == tl.float16:
        return (tl.maximum((bits >> 10) - 14, 0) - 15).to(tl.float32)
    else:
        return (tl.maximum((bits >> 7) - 126, 0) - 15).to(tl.float32)
