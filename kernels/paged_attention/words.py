"""The Triton kernel for pages of codes that are read whole: 32 tokens of a page at a time, codes decoded by the word.

A word of 32 bits holds `PER` = 32 / bits codes. Masked with a code's place in both halves it holds two of them, k and
k + PER / 2; or'ed into 0x6400, which is 1024 in float16, each half is the number 1024 + code: no integer is converted,
and the arithmetic behind it takes two codes at once. So of word j there are PER / 2 tiles, tile k with the channels
PER j + k and PER j + k + PER / 2, and attention sums over tiles. Tokens are the rows of the products and query heads
their columns, of which 8 do; one warp has a block to itself and waits for no other. KIVI's codes of 2, 4 and 8 bits are
read so, and ZipCache's of 4 and 2 bits, the latter with room put between them.

Few bytes are read in little time, so what limits this kernel is instructions (`benchmarks/gpu_budget.py`). Decoded code
by code, as `attend_kernel` does what does not fit here, 64 tokens of 128 channels in 4 bits took six times as many.
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
from kvengine.kernels.gpu.stream import LOG2E, Partials, block_at, pick, row_ends
from kvengine.kernels.state import State

BLOCK = 32
"""Tokens at a time."""
MOST_HEADS = 16
"""Query rows that one warp has registers for; more are shared by four."""
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
def half(x, ASM: tl.constexpr):
    """In float16; two at a time where the compiler would take them one by one."""
    if x.dtype == tl.float16 or ASM is None:
        return x.to(tl.float16)
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b; .reg .f32 c, d; shl.b32 a, $1, 16; and.b32 b, $1, 0xffff0000;"
        " mov.b32 c, a; mov.b32 d, b; cvt.rn.f16x2.f32 $0, d, c; }",
        "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2,
    )  # fmt: skip


@triton.jit
def channels(DIM: tl.constexpr, BITS: tl.constexpr):
    """Of tile 0."""
    PER: tl.constexpr = 32 // BITS
    c = tl.arange(0, 2 * DIM // PER)
    return PER * (c // 2) + PER // 2 * (c % 2)


@triton.jit(do_not_specialize=["columns", "chosen", "window", "table_row"])
def words_kernel(
    q, k_code, k_low, k_scale, k_zero, v_code, v_low, v_scale, v_zero, salience, channel, parts, tops, totals,
    table, position, units, query_position, table_row, position_row,
    rows, columns, heads, queries, chosen, window, scale, softcap,
    UNITS: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr, BY_POSITION: tl.constexpr, SOFTCAP: tl.constexpr,
    LENGTHS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, SALIENT: tl.constexpr,
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
            slot, number, there = block_at(block, r, units, table, chosen, table_row, UNITS, UNIT, PAGE, BLOCK)
            first = number * PAGE + slot % PAGE
            place = tl.load(position + r * position_row + slot + t, mask=there, other=-1)
            ok = place >= 0
            if SALIENT is None:
                words = rows_at(k_code + first * K_WORDS, t, there, K_WORDS)
            else:
                plain, before = ranks(salience + number * (PAGE // 8), slot % PAGE, there, PAGE, BLOCK)
                high_at = number * SALIENT + before
                low_at = first + t - high_at
                words = mixed(k_code, k_low, high_at, low_at, plain, there, K_WORDS)
            # Ranges in one dimension: so the words are loaded in the layout of the product, and nothing is moved.
            group = (first // K_GROUP if SALIENT is None else 2 * number) * K_DIM + k_at
            k_scales = tiles(k_scale + group, there, 0.0, K_TILES)
            k_zeros = tiles(k_zero + group, there, 0.0, K_TILES)
            if SALIENT is not None:
                others = tiles(k_scale + group + K_DIM, there, 0.0, K_TILES)
                their_zeros = tiles(k_zero + group + K_DIM, there, 0.0, K_TILES)
            scores = tl.zeros([BLOCK, HEADS], tl.float32)
            for i in tl.static_range(K_TILES):
                size, zero = half(k_scales[i], K_ASM)[None, :], half(k_zeros[i], K_ASM)[None, :]
                if SALIENT is not None:
                    size = tl.where(plain[:, None], others[i][None, :], size)
                    zero = tl.where(plain[:, None], their_zeros[i][None, :], zero)
                key = halves(words, i, K_BITS, K_ASM) * size + zero
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
            # A dead token's range may be anything; with 0 it adds nothing.
            if SALIENT is None:
                words = rows_at(v_code + first * V_WORDS, t, there, V_WORDS)
                group = (first + t)[:, None] * V_GROUPS + tl.arange(0, V_GROUPS)[None, :]
                v_scales = tl.load(v_scale + group, mask=ok[:, None], other=0.0).to(tl.float16)
                v_zeros = tl.load(v_zero + group, mask=ok[:, None], other=0.0).to(tl.float16)
                v_scales, v_zeros = spread(v_scales, 2 * V_WORDS), spread(v_zeros, 2 * V_WORDS)
            else:
                words = mixed(v_code, v_low, high_at, low_at, plain, there, V_WORDS)
                v_scales = tl.load(v_scale + first + t, mask=ok, other=0.0)[:, None]
                v_zeros = tl.load(v_zero + first + t, mask=ok, other=0.0)[:, None]
                some_live = tl.max(ok.to(tl.int32), 0) > 0
                factors = tiles(channel + number * V_DIM + v_at, some_live, 0.0, V_TILES)
            now = ()
            for i in tl.static_range(V_TILES):
                value = halves(words, i, V_BITS, V_ASM) * v_scales + v_zeros
                if SALIENT is not None:
                    value = value * factors[i][None, :]
                now = now + (tl.dot(tl.trans(value), p, acc[i] * shrink[None, :], input_precision="ieee"),)
            acc = now
        out = (program + row).to(tl.int64) * heads + n
        for i in tl.static_range(V_TILES):
            tl.store(parts + out[None, :] * V_DIM + v_at[:, None] + i, acc[i], mask=some[None, :])
        tl.store(tops + out, top, mask=some)
        tl.store(totals + out, total, mask=some)
        at = upto


@triton.jit
def rows_at(code, at, mask, WORDS: tl.constexpr):
    return tl.load(code + at[:, None] * WORDS + tl.arange(0, WORDS)[None, :], mask=mask, other=0)


@triton.jit
def ranks(bits, start, there, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Of the slots from `start`: whether each is not salient, and how many of its page before it are."""
    s, t = tl.arange(0, PAGE), start + tl.arange(0, BLOCK)
    earlier = (tl.load(bits + s // 8, mask=there & (s < start), other=0).to(tl.int32) >> (s % 8)) & 1
    own = (tl.load(bits + t // 8, mask=there, other=0).to(tl.int32) >> (t % 8)) & 1
    return own == 0, tl.sum(earlier, 0) + tl.cumsum(own, 0) - own


@triton.jit
def mixed(high, low, high_at, low_at, plain, there, WORDS: tl.constexpr):
    """Words of 4-bit codes: a salient token's own; another's of 2 bits, with room put between them."""
    own = rows_at(high, high_at, there & (~plain)[:, None], WORDS)
    x = rows_at(low, low_at, there & plain[:, None], WORDS // 2)
    x = tl.join(x & 0xFFFF, (x >> 16) & 0xFFFF).reshape(x.shape[0], WORDS)
    x = (x | (x << 8)) & 0x00FF00FF
    x = (x | (x << 4)) & 0x0F0F0F0F
    x = (x | (x << 2)) & 0x33333333
    return tl.where(plain[:, None], x, own)


@triton.jit
def spread(x, COLUMNS: tl.constexpr):
    """[token, groups] over the columns of a tile."""
    return tl.broadcast_to(x[:, :, None], x.shape[0], x.shape[1], COLUMNS // x.shape[1]).reshape(x.shape[0], COLUMNS)


def fits(
    q: Tensor, fields: Mapping[str, Tensor], page: int, unit: int, codec: str, dim_v: int, want_probs: bool
) -> bool:
    """Whether these pages can be read by the word: KIVI's codes, whole blocks of one key group; or ZipCache's of 4 and 2
    bits. Ranges are float16, or for KIVI bfloat16, as of a model in it; those are turned into float16, whose numbers end
    at 65504: far beyond any key."""
    if codec not in ("kivi", "zipcache") or want_probs or page % BLOCK or unit % BLOCK:
        return False
    if q.dtype not in (torch.float16, torch.bfloat16):
        return False
    if any(x.storage_offset() % 4 or not x.is_contiguous() for x in fields.values()):
        return False
    ranges = (torch.float16, torch.bfloat16) if codec == "kivi" else (torch.float16,)
    if any(fields[f"{side}_{name}"].dtype not in ranges for side in "kv" for name in ("scale", "zero")):
        return False
    for side, dim in (("k", q.shape[-1]), ("v", dim_v)):
        if dim & (dim - 1) or dim > 256:
            return False
        if codec == "zipcache":
            high, low = fields[f"{side}_high"], fields[f"{side}_low"]
            if (width(high, dim), width(low, dim)) != (4, 2) or dim < 64 or page & (page - 1):
                return False
            continue
        bits, groups = width(fields[f"{side}_code"], dim), fields[f"{side}_scale"].shape
        if bits not in (2, 4, 8) or dim * bits < 256:
            return False
        if page // groups[1] % BLOCK if side == "k" else dim // groups[2] % (32 // bits):
            return False
    return True


def attention(
    q: Tensor, fields: Mapping[str, Tensor], table: Tensor, position: Tensor, page: int, scale: float,
    units: Tensor | None, unit: int, codec: str, dim_v: int, query_position: Tensor | None, window: int | None,
    softcap: float | None, sinks: Tensor | None,
) -> State:  # fmt: skip
    """See `kvengine.kernels.paged_attention`, for what `fits`."""
    q = q.contiguous()
    rows, group, queries, dim = q.shape
    heads = group * queries
    tile = min(64, max(8, triton.next_power_of_2(heads)))
    columns = table.shape[1] * page if units is None else units.shape[1] * unit
    names, bits, groups, salient, mask, channel = ("high", "low"), (4, 4), (page, dim_v), None, table, table
    if codec == "kivi":
        names, bits = ("code", "code"), (width(fields["k_code"], dim), width(fields["v_code"], dim_v))
        groups = page // fields["k_scale"].shape[1], dim_v // fields["v_scale"].shape[2]
    else:
        salient, mask, channel = fields["k_high"].shape[1], fields["mask"], fields["v_channel"]
    codes = [[fields[f"{side}_{name}"].view(torch.int32) for name in names] for side in "kv"]
    ranges = [[fields[f"{side}_{name}"] for name in ("scale", "zero")] for side in "kv"]
    wide = max(dim, dim_v) > 128
    alone = tile <= MOST_HEADS and not (wide and codec == "zipcache")
    small = codec == "kivi" and bits == (4, 4) and tile == 8 and not wide
    each = EACH_OF_FOUR_BITS if small else EACH if alone else 2
    parts = Partials(q, dim_v, columns, BLOCK, None, each)
    words_kernel[(parts.programs, triton.cdiv(heads, tile))](
        q, *codes[0], *ranges[0], *codes[1], *ranges[1], mask, channel, parts.parts, parts.tops, parts.totals,
        table, position, table if units is None else units.contiguous(),
        table if query_position is None else query_position.contiguous(), table.stride(0), position.stride(0),
        rows, columns, heads, queries, 0 if units is None else units.shape[1], window or 0, scale, softcap or 1.0,
        UNITS=units is not None, UNIT=unit, PAGE=page, BY_POSITION=query_position is not None,
        SOFTCAP=softcap is not None, HEADS=tile, SALIENT=salient, **parts.shape,
        K_DIM=dim, K_BITS=bits[0], K_GROUP=groups[0], K_ASM=assembly(bits[0]),
        V_DIM=dim_v, V_BITS=bits[1], V_GROUP=groups[1], V_ASM=assembly(bits[1]),
        num_warps=1 if alone else 4, num_stages=3,
    )  # fmt: skip
    return parts.join(sinks, None)
