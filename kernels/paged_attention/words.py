"""The Triton kernel for pages of KIVI codes that are read whole: 32 tokens of a page at a time, codes decoded by the word.

A word of 32 bits holds `PER` = 32 / bits codes. Masked with a code's place in both halves it holds two of them, k and
k + PER / 2; or'ed into 0x6400, which is 1024 in float16, each half is the number 1024 + code: no integer is converted,
and the arithmetic behind it takes two codes at once. So of word j there are PER / 2 tiles, tile k with the channels
PER j + k and PER j + k + PER / 2, and attention sums over tiles. Tokens are the rows of the products and query heads
their columns, of which 8 do; one warp has a block to itself and waits for no other.

Few bytes are read in little time, so what limits this kernel is instructions. For 64 tokens of 128 channels in 4 bits it
issues 1876 on sm_90, where decoding each code by itself (`attend_kernel`) took 12 064; while memory delivers these tokens,
a multiprocessor of an H200 issues 2200 to 2500.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels.codecs import width
from kvengine.kernels.dispatch import interpreted
from kvengine.kernels.gpu.stream import LOG2E, Partials, pick, row_ends
from kvengine.kernels.state import State

BLOCK = 32
"""Tokens at a time."""
MOST_HEADS = 16
"""Query rows that one warp has registers for."""
EACH = 8
"""Programs, of one warp, for each multiprocessor: as many as its registers hold."""
EACH_OF_FOUR_BITS = 12
"""With up to 8 query rows and 128 channels they need fewer."""


@triton.jit
def halves(words, k: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """Codes k and k + PER / 2 of each word, as float16."""
    place: tl.constexpr = BITS * k % 8
    if BITS * k >= 8:
        words = words >> 8
    if ASM is None:
        words = (words & (((1 << BITS) - 1) * 0x10001 << place)) | 0x64006400
        low = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        high = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    else:  # the compiler makes two instructions of the above, and two more to take the halves apart
        low, high = tl.inline_asm_elementwise(
            ASM[k], "=h,=h,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=1
        )
    x = tl.join(low, high)
    x = x.reshape(x.shape[0], 2 * x.shape[1])
    return x * (1.0 / (1 << place)) - 1024.0 / (1 << place)


def assembly(bits: int) -> tuple[str, ...] | None:
    """For each tile, PTX of two halves `1024 + (code << place)` from a word; the interpreter has none."""
    if interpreted():
        return None
    masks = [((1 << bits) - 1) * 0x10001 << bits * k % 8 for k in range(16 // bits)]
    or_and = "lop3.b32 t, $2, {mask:#010x}, 0x64006400, 0xea;"
    return tuple("{ .reg .b32 t; " + or_and.format(mask=mask) + " mov.b32 {$0, $1}, t; }" for mask in masks)


@triton.jit
def tiles(pointer, mask, other, TILES: tl.constexpr):
    """What lies at a tile's channels, and at each of the next tiles'."""
    found = ()
    for k in tl.static_range(TILES):
        found = found + (tl.load(pointer + k, mask=mask, other=other),)
    return found


@triton.jit
def channels(DIM: tl.constexpr, BITS: tl.constexpr):
    """Of tile 0."""
    PER: tl.constexpr = 32 // BITS
    c = tl.arange(0, 2 * DIM // PER)
    return PER * (c // 2) + PER // 2 * (c % 2)


@triton.jit(do_not_specialize=["columns", "chosen", "window"])
def words_kernel(
    q, k_code, k_scale, k_zero, v_code, v_scale, v_zero, parts, tops, totals,
    table, position, units, query_position, table_row, position_row,
    rows, columns, heads, queries, chosen, window, scale, softcap,
    UNITS: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr, BY_POSITION: tl.constexpr, SOFTCAP: tl.constexpr,
    LENGTHS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    K_DIM: tl.constexpr, K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_ASM: tl.constexpr,
    V_DIM: tl.constexpr, V_BITS: tl.constexpr, V_GROUP: tl.constexpr, V_ASM: tl.constexpr,
):  # fmt: skip
    K_WORDS: tl.constexpr = K_DIM * K_BITS // 32
    V_WORDS: tl.constexpr = V_DIM * V_BITS // 32
    K_TILES: tl.constexpr = 16 // K_BITS
    V_TILES: tl.constexpr = 16 // V_BITS
    V_GROUPS: tl.constexpr = V_DIM // V_GROUP
    program, programs = tl.program_id(0), tl.num_programs(0)
    ends, _length = row_ends(units, rows, columns, LENGTHS, ROWS, BLOCK)
    blocks = tl.max(ends, 0)
    per = (blocks + programs - 1) // programs
    at, stop = program * per, tl.minimum((program + 1) * per, blocks)
    n = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    some, t = n < heads, tl.arange(0, BLOCK)
    k_at, v_at = channels(K_DIM, K_BITS), channels(V_DIM, V_BITS)
    while at < stop:  # one turn per row that this program has a share of
        row = tl.sum((ends <= at).to(tl.int32), 0)
        start, end = pick(ends, row - 1, ROWS), pick(ends, row, ROWS)
        upto = tl.minimum(stop, end)
        r = row.to(tl.int64)
        asked = tiles(q + (r * heads + n)[None, :] * K_DIM + k_at[:, None], some[None, :], 0.0, K_TILES)
        largest = tl.zeros([HEADS], tl.float32)
        for i in tl.static_range(K_TILES):
            largest = tl.maximum(largest, tl.max(tl.abs(asked[i].to(tl.float32)), 0))
        largest = tl.where(largest > 0, largest, 1.0)
        query, acc = (), ()
        for i in tl.static_range(K_TILES):  # scaled to 1 at most, as float16 ends early
            query = query + ((asked[i].to(tl.float32) / largest[None, :]).to(tl.float16),)
        for _ in tl.static_range(V_TILES):
            acc = acc + (tl.zeros([2 * V_WORDS, HEADS], tl.float32),)
        top = tl.full([HEADS], -float("inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        for block in range(at - start, upto - start):
            slot = block * BLOCK
            there = slot >= 0
            if UNITS:
                unit = tl.load(units + r * chosen + slot // UNIT)
                there = unit >= 0
                slot = (tl.maximum(unit, 0) * UNIT + slot % UNIT).to(tl.int32)
            page = tl.load(table + r * table_row + slot // PAGE)
            there = there & (page >= 0)
            first = tl.maximum(page, 0).to(tl.int64) * PAGE + slot % PAGE
            place = tl.load(position + r * position_row + slot + t, mask=there, other=-1)
            ok = place >= 0
            words = tl.load(
                k_code + first * K_WORDS + t[:, None] * K_WORDS + tl.arange(0, K_WORDS)[None, :], mask=there, other=0
            )
            # Ranges in one dimension: so the words are loaded in the layout of the product, and nothing is moved.
            group = first // K_GROUP * K_DIM + k_at
            k_scales = tiles(k_scale + group, there, 0.0, K_TILES)
            k_zeros = tiles(k_zero + group, there, 0.0, K_TILES)
            scores = tl.zeros([BLOCK, HEADS], tl.float32)
            for i in tl.static_range(K_TILES):
                key = halves(words, i, K_BITS, K_ASM) * k_scales[i][None, :] + k_zeros[i][None, :]
                scores = tl.dot(key, query[i], scores, input_precision="ieee")
            scores = scores * (largest * scale)[None, :]
            if SOFTCAP:
                scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0))
            seen = ok[:, None] & some[None, :]
            if BY_POSITION:
                own = tl.load(query_position + r * queries + n % queries, mask=some, other=0)
                distance = own.to(tl.int64)[None, :] - place.to(tl.int64)[:, None]
                seen = seen & (distance >= 0) & ((distance < window) | (window == 0))
            scores = tl.where(seen, scores, -float("inf"))
            high = tl.maximum(top, tl.max(scores, 0))
            shift = tl.where(high == float("-inf"), 0.0, high)
            shrink = tl.exp2((top - shift) * LOG2E)
            p = tl.exp2((scores - shift[None, :]) * LOG2E)
            total, top, p = total * shrink + tl.sum(p, 0), high, p.to(tl.float16)
            words = tl.load(
                v_code + first * V_WORDS + t[:, None] * V_WORDS + tl.arange(0, V_WORDS)[None, :], mask=there, other=0
            )
            group = (first + t)[:, None] * V_GROUPS + tl.arange(0, V_GROUPS)[None, :]
            # A dead token's range may be anything; with 0 it adds nothing.
            v_scales = spread(tl.load(v_scale + group, mask=ok[:, None], other=0.0), 2 * V_WORDS)
            v_zeros = spread(tl.load(v_zero + group, mask=ok[:, None], other=0.0), 2 * V_WORDS)
            now = ()
            for i in tl.static_range(V_TILES):
                value = halves(words, i, V_BITS, V_ASM) * v_scales + v_zeros
                now = now + (tl.dot(tl.trans(value), p, acc[i] * shrink[None, :], input_precision="ieee"),)
            acc = now
        out = (program + row).to(tl.int64) * heads + n
        for i in tl.static_range(V_TILES):
            tl.store(parts + out[None, :] * V_DIM + v_at[:, None] + i, acc[i], mask=some[None, :])
        tl.store(tops + out, top, mask=some)
        tl.store(totals + out, total, mask=some)
        at = upto


@triton.jit
def spread(x, COLUMNS: tl.constexpr):
    """[token, groups] over the columns of a tile."""
    return tl.broadcast_to(x[:, :, None], x.shape[0], x.shape[1], COLUMNS // x.shape[1]).reshape(x.shape[0], COLUMNS)


def fits(
    q: Tensor, fields: Mapping[str, Tensor], page: int, unit: int, codec: str, dim_v: int, want_probs: bool
) -> bool:
    """Whether these pages can be read by the word: KIVI's codes, whole blocks of one key group, float16 ranges."""
    if codec != "kivi" or want_probs or q.dtype not in (torch.float16, torch.bfloat16) or page % BLOCK or unit % BLOCK:
        return False
    for side, dim in (("k", q.shape[-1]), ("v", dim_v)):
        code, scale, zero = (fields[f"{side}_{name}"] for name in ("code", "scale", "zero"))
        bits = width(code, dim)
        plain = scale.dtype == zero.dtype == torch.float16 and all(x.is_contiguous() for x in (code, scale, zero))
        shaped = dim & (dim - 1) == 0 and dim <= 256 and bits in (2, 4, 8) and dim * bits >= 256
        group = page // scale.shape[1] % BLOCK if side == "k" else dim // scale.shape[2] % (32 // bits)
        if not plain or not shaped or group or code.storage_offset() % 4:
            return False
    return True


def attention(
    q: Tensor, fields: Mapping[str, Tensor], table: Tensor, position: Tensor, page: int, scale: float,
    units: Tensor | None, unit: int, dim_v: int, query_position: Tensor | None, window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> State:  # fmt: skip
    """See `kvengine.kernels.paged_attention`, for what `fits`."""
    q = q.contiguous()
    rows, group, queries, dim = q.shape
    heads = group * queries
    tile = min(64, max(8, triton.next_power_of_2(heads)))
    columns = table.shape[1] * page if units is None else units.shape[1] * unit
    k, v = ([fields[f"{side}_{name}"] for name in ("code", "scale", "zero")] for side in ("k", "v"))
    k_bits, v_bits = width(k[0], dim), width(v[0], dim_v)
    small = k_bits == v_bits == 4 and tile == 8 and max(dim, dim_v) <= 128
    each = EACH_OF_FOUR_BITS if small else EACH if tile <= MOST_HEADS else 2
    parts = Partials(q, dim_v, columns, BLOCK, None, each)
    words_kernel[(parts.programs, triton.cdiv(heads, tile))](
        q, k[0].view(torch.int32), *k[1:], v[0].view(torch.int32), *v[1:], parts.parts, parts.tops, parts.totals,
        table, position, table if units is None else units.contiguous(),
        table if query_position is None else query_position.contiguous(), table.stride(0), position.stride(0),
        rows, columns, heads, queries, 0 if units is None else units.shape[1], window or 0, scale, softcap or 1.0,
        UNITS=units is not None, UNIT=unit, PAGE=page, BY_POSITION=query_position is not None,
        SOFTCAP=softcap is not None, HEADS=tile, **parts.shape,
        K_DIM=dim, K_BITS=k_bits, K_GROUP=page // k[1].shape[1], K_ASM=assembly(k_bits),
        V_DIM=dim_v, V_BITS=v_bits, V_GROUP=dim_v // v[1].shape[2], V_ASM=assembly(v_bits),
        num_warps=1 if tile <= MOST_HEADS else 4, num_stages=3,
    )  # fmt: skip
    return parts.join(sinks, None)
