"""TurboQuant's turn (`kvengine.kernels.turboquant`) inside of a kernel, where the number of channels is a power of two.

There R = S H S / sqrt(dim), with signs on the diagonal of S and Hadamard's matrix H: sums and differences of pairs, once for each
bit of a channel's number. So a query is turned as it is read, and what was attended to as it is joined, and neither is a launch
of its own. The first row of R is all signs, of which H's first row has none, over sqrt(dim): `sign` below.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl


@triton.constexpr_function
def bits(n):
    return n.bit_length() - 1


@triton.jit
def hadamard(x):
    """H x, of lines [line, dim]. Each turn takes the pairs of the lowest bit and makes it the highest; after all of them each is
    back in its place."""
    LINES: tl.constexpr = x.shape[0]
    DIM: tl.constexpr = x.shape[1]
    for _ in tl.static_range(bits(DIM)):
        a, b = tl.split(tl.reshape(x, [LINES, DIM // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [LINES, DIM])
    return x


@triton.jit
def turned(x, sign):
    """R x, of one line."""
    DIM: tl.constexpr = x.shape[0]
    y = tl.reshape(hadamard(tl.reshape(x * sign, [1, DIM])), [DIM])
    return y * sign * tl.sqrt(tl.full([], DIM, tl.float32))


@triton.jit
def turned_tiles(x, sign, TILES: tl.constexpr):
    """R x over a power of two of each line, in float16, and that power: of lines whose channel TILES c + i is number c of tile i,
    as is that of `sign` [1, c]. Within a tile by H's own numbers, which are exact in float16 as x over its power is, of 16 bits;
    what comes of it is at most 2 sqrt(dim)."""
    LINES: tl.constexpr = x[0].shape[0]
    WIDE: tl.constexpr = x[0].shape[1]
    largest = tl.zeros([LINES], tl.float32)
    for i in tl.static_range(TILES):
        largest = tl.maximum(largest, tl.max(tl.abs(x[i].to(tl.float32)), 1))
    power = tl.maximum(largest, 1e-30).to(tl.int32, bitcast=True) & 0x7F800000
    over = (0x7F000000 - power).to(tl.float32, bitcast=True)
    power = power.to(tl.float32, bitcast=True)
    a = tl.arange(0, WIDE)
    common = a[:, None] & a[None, :]
    odd = (0x6996 >> ((common ^ (common >> 4)) & 15)) & 1
    h = tl.where(odd != 0, -1.0, 1.0).to(tl.float16)
    y = ()
    for i in tl.static_range(TILES):
        part = x[i].to(tl.float32) * over[:, None]
        part = tl.where(sign[i] < 0, -part, part).to(tl.float16)
        y = y + (tl.dot(h, tl.trans(part), input_precision="ieee"),)
    for bit in tl.static_range(bits(TILES)):
        z = ()
        for i in tl.static_range(TILES):
            if (i >> bit) & 1:
                z = z + (y[i - (1 << bit)] - y[i],)
            else:
                z = z + (y[i] + y[i + (1 << bit)],)
        y = z
    z = ()
    for i in tl.static_range(TILES):
        z = z + (tl.trans((y[i] * tl.trans(sign[i])).to(tl.float16)),)
    return z, power
