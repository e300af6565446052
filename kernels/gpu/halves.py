"""Codes of a word decoded two at a time, as float16.

A word of 32 bits holds `PER` = 32 / bits codes. Masked with a code's place in both halves it holds two of them, k and
k + PER / 2; or'ed into 0x6400, which is 1024 in float16, each half is the number 1024 + code: no integer is converted,
and the arithmetic behind it takes two codes at once. So of word j there are PER / 2 tiles, tile k with the channels
PER j + k and PER j + k + PER / 2.

TurboQuant's codes stand for levels, which a polynomial of the code gives, two at a time as well: to look them up would take
a load for each.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from kvengine.kernels.dispatch import interpreted

CURVE = tl.constexpr((2.173828125, 0.67333984375, -0.449951171875))
LINE = tl.constexpr(17.61377)
SIZE = {4: 0.9407354737185717, 2: 0.05069253333333329}
"""TurboQuant's levels as an odd polynomial of the code's distance u from the middle: of 4 bits SIZE u (CURVE[0] + CURVE[1] s +
CURVE[2] s^2 + s^3) with s = u^2 and u in eighths, which is within a thousandth of what levels measure, as rounding to
bfloat16 is; of 2 bits SIZE u (LINE + u^2), through both levels of a sign."""


@triton.constexpr_function
def place(k, BITS, TURNED):
    """The bit of tile k's codes, once the word is shifted. TurboQuant's leave bit 0 free: 1024 + the middle of all codes is
    no number of float16."""
    if not TURNED:
        return BITS * k % 8
    return 2 if k == 0 else BITS * k if BITS * k < 8 else BITS * k - 6


@triton.jit
def raw(words, k: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr, TURNED: tl.constexpr):
    """1024 + (code << place) in float16, of code k and of code k + PER / 2 of each word."""
    if TURNED and k == 0:
        words = words << 2
    if BITS * k >= 8:
        words = words >> (6 if TURNED else 8)
    if ASM is None:
        words = (words & (((1 << BITS) - 1) * 0x10001 << place(k, BITS, TURNED))) | 0x64006400
        low = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    else:  # the compiler makes two instructions of the above, and two more to take the halves apart
        low, high = tl.inline_asm_elementwise(
            ASM[k], "=h,=h,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=1
        )
    return low, high


@triton.jit
def by_channel(words, k: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr, TURNED: tl.constexpr):
    """Tile k as [token, channel], from words [token, word]: two channels of a token lie in one register."""
    low, high = raw(words, k, BITS, ASM, TURNED)
    x = tl.join(low, high)
    return meant(x.reshape(x.shape[0], 2 * x.shape[1]), k, BITS, TURNED)


@triton.jit
def by_token(one, two, k: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr, TURNED: tl.constexpr):
    """Tile k as [channel, token], from halves of words that two tokens share: these lie in one register, as a product
    that sums over tokens wants them, and nothing goes through shared memory."""
    a, b = raw(one, k, BITS, ASM, TURNED)
    c, d = raw(two, k, BITS, ASM, TURNED)
    x = tl.permute(tl.join(tl.join(a, b), tl.join(c, d)), (3, 1, 0, 2))  # half, word, two tokens, token
    return meant(x.reshape(2 * x.shape[1], 2 * x.shape[2]), k, BITS, TURNED)


@triton.jit
def shared(words):
    """Of each two tokens' words, the lower halves in one and the upper halves in another."""
    one, two = tl.split(tl.permute(words.reshape(words.shape[0] // 2, 2, words.shape[1]), (0, 2, 1)))
    return (one & 0xFFFF) | (two << 16), ((one >> 16) & 0xFFFF) | (two & -65536)


@triton.jit
def meant(x, k: tl.constexpr, BITS: tl.constexpr, TURNED: tl.constexpr):
    """Codes, or what TurboQuant's stand for, of 1024 + (code << place)."""
    at: tl.constexpr = place(k, BITS, TURNED)
    if not TURNED:
        return x * (1.0 / (1 << at)) - 1024.0 / (1 << at)
    elif BITS == 4:
        u = x * (1.0 / (8 << at)) - (1024.0 / (1 << at) + 7.5) / 8
        s = u * u
        return u * along(along(s + CURVE[2], s, CURVE[1]), s, CURVE[0])
    else:
        u = x * (1.0 / (1 << at)) - (1024.0 / (1 << at) + 1.5)
        return u * along(u, u, LINE)


@triton.jit
def along(x, y, then: tl.constexpr):
    """x y + then in one step: of longer chains the compiler takes the numbers one by one."""
    return tl.fma(x, y, tl.full(x.shape, then, x.dtype))


def assembly(bits: int, turned: bool = False) -> tuple[str, ...] | None:
    """For each tile, PTX of two halves `1024 + (code << place)` from a word; the interpreter has none."""
    if interpreted():
        return None
    masks = [((1 << bits) - 1) * 0x10001 << place(k, bits, turned) for k in range(16 // bits)]
    or_and = "lop3.b32 t, $2, {mask:#010x}, 0x64006400, 0xea;"
    return tuple("{ .reg .b32 t; " + or_and.format(mask=mask) + " mov.b32 {$0, $1}, t; }" for mask in masks)


@triton.jit
def masked(x, mask, ASM: tl.constexpr):
    """Codes as numbers: halves of words, masked, are multiples of float16's smallest number. Products of tensor cores have no
    trouble with those, unlike sums and products of other instructions, which would round what they make of them; and no 1024
    needs to be taken away again."""
    if ASM is None:
        return (x & mask).to(tl.float16, bitcast=True)
    return tl.inline_asm_elementwise(ASM[0], "=r,r,r", [x, mask], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def upper(x, ASM: tl.constexpr):
    """The upper bytes of halves of words, as their lower ones."""
    if ASM is None:
        return (x >> 8) & 0xFF
    return tl.inline_asm_elementwise(ASM[1], "=r,r", [x], dtype=tl.int16, is_pure=True, pack=2)


@triton.jit
def field(lower, upper, i: tl.constexpr, BITS: tl.constexpr, SUMS: tl.constexpr, ASM: tl.constexpr):
    """Code i of each half of a word, times 2 ** (BITS * i % 8), of the half and of its `upper`; with `SUMS` all of its byte up
    to code i: of the last one nothing is masked away then."""
    x = lower if BITS * i < 8 else upper
    PLACE: tl.constexpr = BITS * i % 8
    MASK: tl.constexpr = (1 << PLACE + BITS) - 1 if SUMS else ((1 << BITS) - 1) << PLACE
    if MASK == 0xFF and BITS * i >= 8:
        return x.to(tl.float16, bitcast=True)
    return masked(x, tl.full(x.shape, MASK, tl.int16), ASM)


@triton.jit
def ones(x, ASM: tl.constexpr):
    """How many bits of a word are set."""
    if ASM is None:
        x = x - ((x >> 1) & 0x55555555)
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F
        return (x + (x >> 8) + (x >> 16) + (x >> 24)) & 63
    else:
        return tl.inline_asm_elementwise(ASM[4], "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def whole(upper, lower, odd: tl.constexpr, ASM: tl.constexpr):
    """Of halves of words that hold four upper and four lower nibbles, codes of 8 bits: 0 and 2 in one half, or 1 and 3."""
    if ASM is None:
        if odd:
            return (upper & -0xF10) | ((lower >> 4) & 0xF0F)
        else:
            return ((upper << 4) & -0xF10) | (lower & 0xF0F)
    else:
        return tl.inline_asm_elementwise(ASM[2 + odd], "=r,r,r", [upper, lower], dtype=tl.int16, is_pure=True, pack=2)


@triton.jit
def alive(scores, place, ASM: tl.constexpr):
    """Scores [head, token], -inf of dead tokens, whose place is negative, whatever theirs are. Not by conditions: of so many the
    compiler makes bits of a number first. A minimum leaves the number that is one, of which the interpreter knows nothing."""
    if ASM is None:
        return tl.where((place >= 0)[None, :], scores, -float("inf"))
    else:  # of two constants the compiler would make two instructions
        bound = tl.inline_asm_elementwise(ASM[5], "=r,r", [place], dtype=tl.int32, is_pure=True, pack=1)
        return tl.minimum(scores, bound.to(tl.float32, bitcast=True)[None, :])


def masking() -> tuple[str, ...] | None:
    """PTX for two halves at a time: of `masked`, of `upper`, and of `whole`; of `ones`; and of `alive`. The interpreter has none.
    What a shift brings over from the other half is masked away."""
    if interpreted():
        return None
    either = "lop3.b32 $0, {}, {}, 0xF0F0F0F0, 0xE4;"  # the upper nibbles of the first, the lower ones of the second
    return (
        "and.b32 $0, $1, $2;",
        "prmt.b32 $0, $1, 0, 0x4341;",
        "{ .reg .b32 t; shl.b32 t, $1, 4; " + either.format("t", "$2") + " }",
        "{ .reg .b32 t; shr.u32 t, $2, 4; " + either.format("$1", "t") + " }",
        "popc.b32 $0, $1;",
        "lop3.b32 $0, $1, 0x80000000, 0x7F800000, 0xEA;",
    )
