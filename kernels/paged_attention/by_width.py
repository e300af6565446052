"""What lies by slot in ZipCache's pages, brought into the order of the codes of one width.

A page's mask says which of its tokens are salient, in the order of slots, and codes of the salient ones lie side by side, as do
the others'. So the i-th code is of the i-th set bit of the mask, or the i-th that is not.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from kvengine.kernels.gpu.halves import ones


@triton.constexpr_function
def lots(tokens):
    """Of how many tokens each lot is."""
    whole, rest = tokens // 32, tokens % 32
    return (32,) * whole + (() if rest == 0 else (16,) if rest <= 16 else (32,))


@triton.jit
def words_of(salience, page, WORDS: tl.constexpr):
    """A page's mask."""
    found = ()
    for w in tl.static_range(WORDS):
        found = found + (tl.load(salience + tl.maximum(page, 0).to(tl.int64) * WORDS + w),)
    return found


@triton.jit
def by_lot(
    places, v_scale, v_zero, page, bits, BITS: tl.constexpr, TOKENS: tl.constexpr, PAGE: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Of each lot: positions, and both halves of values' ranges."""
    found = ()
    for s in tl.static_range(len(lots(TOKENS))):
        found = found + of_lot(places, v_scale, v_zero, page, bits, BITS, s, lots(TOKENS)[s], TOKENS, PAGE, ASM)
    return found


@triton.jit
def of_lot(
    places, v_scale, v_zero, page, bits, BITS: tl.constexpr, s: tl.constexpr, LOT: tl.constexpr, TOKENS: tl.constexpr,
    PAGE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    i = 32 * s + tl.arange(0, LOT)
    slot = nth(bits, tl.minimum(i, TOKENS - 1), BITS == 2, ASM)
    there = (i < TOKENS) & (page >= 0)
    place = tl.load(places + slot, mask=there, other=-1)
    first = tl.maximum(page, 0).to(tl.int64) * PAGE
    size = tl.load(v_scale + first + slot, mask=there, other=0.0)
    return place, size, tl.load(v_zero + first + slot, mask=there, other=0.0)


@triton.jit
def range_of(place, size, zero):
    """Both in one number; a dead token's may be anything, with 0 it adds nothing."""
    size, zero = size.to(tl.int16, bitcast=True).to(tl.int32), zero.to(tl.int16, bitcast=True).to(tl.int32)
    return tl.where(place >= 0, (size & 0xFFFF) | (zero << 16), 0)


@triton.jit
def low_half(x):
    return x.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def nth(words, i, low: tl.constexpr, ASM: tl.constexpr):
    """Slot of the i-th salient token of a page, or of the i-th other one."""
    at, before = tl.zeros(i.shape, tl.int32), tl.zeros(i.shape, tl.int32)
    word = tl.broadcast_to(words[0] ^ (-1 if low else 0), i.shape)
    seen = ones(words[0] ^ (-1 if low else 0), ASM)
    for w in tl.static_range(1, len(words)):
        past = i >= seen
        word = tl.where(past, words[w] ^ (-1 if low else 0), word)
        at, before = tl.where(past, 32 * w, at), tl.where(past, seen, before)
        seen += ones(words[w] ^ (-1 if low else 0), ASM)
    i -= before
    for k in tl.static_range(5):
        below = ones(word & ((1 << (16 >> k)) - 1), ASM)
        past = i >= below
        i, at = tl.where(past, i - below, i), tl.where(past, at + (16 >> k), at)
        word = tl.where(past, word >> (16 >> k), word)
    return at
