"""The Triton kernel for pages of codes that are read whole: 32 tokens of a page at a time, codes decoded by the word.

Two codes of a word are decoded at once (`kvengine.kernels.gpu.halves`), so that it has PER / 2 tiles, and attention sums over
tiles. Tokens are the rows of the products and query heads their columns, of which 8 do; one warp has a block to itself and
waits for no other. ZipCache's codes of 4 and 2 bits are read so, the latter with room put between them, and TurboQuant's of 4
and 2 bits, whose scales, one for a token, wait until its products are there. KIVI's have a kernel of their own (`kivi.py`).

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

from kvengine.kernels import turboquant
from kvengine.kernels.codecs import width
from kvengine.kernels.gpu import cdiv, next_power_of_2
from kvengine.kernels.gpu.again import launched_again
from kvengine.kernels.gpu.chain import chained, in_turn
from kvengine.kernels.gpu.hadamard import turned_tiles
from kvengine.kernels.gpu.halves import SIZE, assembly, by_channel, by_token, ones, shared
from kvengine.kernels.gpu.layouts import apart
from kvengine.kernels.gpu.stream import LOG2E, Partials, block_at, pick, row_ends
from kvengine.kernels.state import State

BLOCK = 32
"""Tokens at a time."""
MOST_HEADS = 16
"""Query rows that one warp has registers for; more are shared by four."""
EACH = 8
"""Programs, of one warp, for each multiprocessor: as many as its registers hold."""
EACH_OF_FOUR_BITS = 12
"""With up to 8 query rows and 128 channels TurboQuant's need fewer, also those of 2 bits."""
REGISTERS = 65536 // (32 * EACH_OF_FOUR_BITS) // 8 * 8
"""Of a thread, where so many programs run at once: Triton 3.9's compiler would take more, and spills no more with these."""


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


@launched_again
@triton.jit(do_not_specialize=["columns", "chosen", "window", "table_row"])
def words_kernel(
    q, turn, k_code, k_low, k_scale, k_zero, v_code, v_low, v_scale, v_zero, salience, channel, parts, tops, totals,
    table, position, units, query_position, table_row, position_row,
    rows, columns, heads, queries, chosen, window, scale, softcap,
    WHOLE: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr, BY_POSITION: tl.constexpr,
    SOFTCAP: tl.constexpr, LENGTHS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    SALIENT: tl.constexpr, K_DIM: tl.constexpr, K_BITS: tl.constexpr, K_ASM: tl.constexpr,
    V_DIM: tl.constexpr, V_BITS: tl.constexpr, V_ASM: tl.constexpr, TURNED: tl.constexpr,
    K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    K_WORDS: tl.constexpr = K_DIM * K_BITS // 32
    V_WORDS: tl.constexpr = V_DIM * V_BITS // 32
    K_TILES: tl.constexpr = 16 // K_BITS
    V_TILES: tl.constexpr = 16 // V_BITS
    program, programs = tl.program_id(0), tl.num_programs(0)
    in_turn(PDL)
    ends, _length = row_ends(units, rows, columns, LENGTHS, ROWS, BLOCK)
    blocks = tl.max(ends, 0)
    per = (blocks + programs - 1) // programs
    at, stop = program * per, tl.minimum((program + 1) * per, blocks)
    n = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    some, t = n < heads, tl.arange(0, BLOCK)
    k_at, v_at = channels(K_DIM, K_BITS), channels(V_DIM, V_BITS)
    if TURNED:  # whose values stay in registers; others' ranges would have to be moved instead
        c = tl.arange(0, 2 * V_WORDS)
        v_at = 32 // V_BITS * (c % V_WORDS) + 16 // V_BITS * (c // V_WORDS)
    while at < stop:  # one turn per row that this program has a share of
        row = tl.sum((ends <= at).to(tl.int32), 0)
        start, end = pick(ends, row - 1, ROWS), pick(ends, row, ROWS)
        upto = tl.minimum(stop, end)
        r = row.to(tl.int64)
        asked = tiles(q + (r * heads + n)[:, None] * K_DIM + k_at[None, :], some[:, None], 0.0, K_TILES)
        query, acc = (), ()
        if TURNED:
            query, largest = turned_tiles(asked, tiles(turn + k_at[None, :], None, None, K_TILES), K_TILES)
        else:
            largest = tl.zeros([HEADS], tl.float32)
            for i in tl.static_range(K_TILES):
                largest = tl.maximum(largest, tl.max(tl.abs(asked[i].to(tl.float32)), 1))
            largest = tl.where(largest > 0, largest, 1.0)
            for i in tl.static_range(K_TILES):  # scaled to 1 at most, as float16 ends early
                query = query + ((asked[i].to(tl.float32) / largest[:, None]).to(tl.float16),)
        for _ in tl.static_range(V_TILES):
            acc = acc + (tl.zeros([2 * V_WORDS, HEADS], tl.float32),)
        top = tl.full([HEADS], -float("inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        unit_v = 0.0  # the largest scale so far: `acc` counts in it, so that weights times scales are at most 1
        for block in range(at - start, upto - start):
            if WHOLE:
                slot, number, there = block_at(block, r, units, table, chosen, table_row, UNITS, UNIT, PAGE, BLOCK)
                first = number * PAGE + slot % PAGE
                token, have = first + t, there
            else:  # pages, or units of them, of fewer tokens than a block
                first, have, slot = 0, block * BLOCK + t < columns, block * BLOCK + t
                if UNITS:
                    unit = tl.load(units + r * chosen + slot // UNIT, mask=have, other=-1)
                    have = have & (unit >= 0)
                    slot = (tl.maximum(unit, 0) * UNIT + slot % UNIT).to(tl.int32)
                number = tl.load(table + r * table_row + slot // PAGE, mask=have, other=-1)
                have = have & (number >= 0)
                token = tl.maximum(number, 0).to(tl.int64) * PAGE + slot % PAGE
            place = tl.load(position + r * position_row + slot + (t if WHOLE else 0), mask=have, other=-1)
            ok = place >= 0
            if not WHOLE:
                words = rows_at(k_code, token, have[:, None], K_WORDS)
            elif TURNED:
                words = rows_at(k_code + first * K_WORDS, t, there, K_WORDS)
            else:
                plain, before = ranks(salience, first, slot % PAGE, there, PAGE, BLOCK)
                after = slot % PAGE + t - before
                wide, narrow = number * SALIENT, number * (PAGE - SALIENT)
                codes = k_code + wide * K_WORDS, k_low + narrow * (K_WORDS // 2)
                words = mixed(*codes, before, after, plain, there, K_WORDS)
            if TURNED:
                k_sizes = tl.where(ok, of_token(k_scale, token, have).to(tl.float32), 0.0)
            else:
                # Of all tiles at once, four bytes a lane or more, so that they are asked for turns ahead.
                group = 2 * number * K_DIM + k_at[:, None] + tl.arange(0, K_TILES)[None, :]
                k_scales = apart(tl.load(k_scale + group, mask=there, other=0.0), K_TILES)
                k_zeros = apart(tl.load(k_zero + group, mask=there, other=0.0), K_TILES)
                others = apart(tl.load(k_scale + group + K_DIM, mask=there, other=0.0), K_TILES)
                their_zeros = apart(tl.load(k_zero + group + K_DIM, mask=there, other=0.0), K_TILES)
            scores = tl.zeros([BLOCK, HEADS], tl.float32)
            for i in tl.static_range(K_TILES):
                if TURNED:
                    key = by_channel(words, i, K_BITS, K_ASM, TURNED)
                else:
                    size = tl.where(plain[:, None], others[i][None, :], k_scales[i][None, :])
                    zero = tl.where(plain[:, None], their_zeros[i][None, :], k_zeros[i][None, :])
                    key = by_channel(words, i, K_BITS, K_ASM, TURNED) * size + zero
                scores = tl.dot(key, tl.trans(query[i]), scores, input_precision="ieee")
            scores = scores * (largest * scale)[None, :]
            if TURNED:
                scores = scores * (k_sizes * K_SIZE)[:, None]
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
            total, top = total * shrink + tl.sum(p, 0), high
            # A dead token's range may be anything; with 0 it adds nothing.
            if TURNED:
                if WHOLE:
                    words = rows_at(v_code + first * V_WORDS, t, there, V_WORDS)
                else:
                    words = rows_at(v_code, token, have[:, None], V_WORDS)
                v_sizes = tl.where(ok, of_token(v_scale, token, have).to(tl.float32), 0.0)
                before_v, unit_v = unit_v, tl.maximum(unit_v, tl.max(v_sizes, 0))
                of_unit = 1.0 / tl.where(unit_v > 1e-30, unit_v, 1.0)  # of less nothing is left
                p, shrink = p * (v_sizes * of_unit)[:, None], shrink * (before_v * of_unit)
            else:
                codes = v_code + wide * V_WORDS, v_low + narrow * (V_WORDS // 2)
                words = mixed(*codes, before, after, plain, there, V_WORDS)
                v_scales = tl.where(ok, of_token(v_scale, token, have), 0.0)[:, None]
                v_zeros = tl.where(ok, of_token(v_zero, token, have), 0.0)[:, None]
                some_live = tl.max(ok.to(tl.int32), 0) > 0
                group = number * V_DIM + v_at[:, None] + tl.arange(0, V_TILES)[None, :]
                factors = apart(tl.load(channel + group, mask=some_live, other=0.0), V_TILES)
            if TURNED:
                one, two = shared(words)
            p, now = p.to(tl.float16), ()
            for i in tl.static_range(V_TILES):
                if TURNED:
                    value = by_token(one, two, i, V_BITS, V_ASM, TURNED)
                else:
                    value = by_channel(words, i, V_BITS, V_ASM, TURNED) * v_scales + v_zeros
                    value = tl.trans(value * factors[i][None, :])
                now = now + (tl.dot(value, p, acc[i] * shrink[None, :], input_precision="ieee"),)
            acc = now
        out = (program + row).to(tl.int64) * heads + n
        for i in tl.static_range(V_TILES):
            if TURNED:
                acc_i = acc[i] * (unit_v * V_SIZE)
            else:
                acc_i = acc[i]
            tl.store(parts + out[None, :] * V_DIM + v_at[:, None] + i, acc_i, mask=some[None, :])
        tl.store(tops + out, top, mask=some)
        tl.store(totals + out, total, mask=some)
        at = upto


@triton.jit
def rows_at(code, at, mask, WORDS: tl.constexpr):
    return tl.load(code + at[:, None] * WORDS + tl.arange(0, WORDS)[None, :], mask=mask, other=0)


@triton.jit
def of_token(pointer, token, there):
    """Each token's number. Those of two bytes come with their neighbours: less than four bytes are not asked for turns ahead."""
    if pointer.dtype.element_ty.primitive_bitwidth == 16:
        both = tl.load(pointer.to(tl.pointer_type(tl.int32), bitcast=True) + token // 2, mask=there, other=0)
        return (both >> (token % 2 * 16).to(tl.int32)).to(tl.int16).to(pointer.dtype.element_ty, bitcast=True)
    else:
        return tl.load(pointer + token, mask=there, other=0.0)


@triton.jit
def ranks(bits, first, start, there, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Of the block at slot `start` of a page, `first` of all: whether each token is not salient, and how many of its page
    before it are. The block's word is loaded once for each token, as one number alone is waited for, and so are single bytes."""
    s, t = tl.arange(0, PAGE // BLOCK), tl.arange(0, BLOCK)
    earlier = tl.load(bits + (first - start) // BLOCK + s, mask=there & (s * BLOCK < start), other=0)
    own = (tl.load(bits + (first + t) // BLOCK, mask=there, other=0) >> t) & 1
    return own == 0, tl.sum(ones(earlier, None), 0) + tl.cumsum(own, 0) - own


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


def fits(
    q: Tensor, fields: Mapping[str, Tensor], page: int, unit: int, codec: str, dim_v: int, want_probs: bool
) -> bool:
    """Whether these pages can be read by the word: ZipCache's of 4 and 2 bits, whole blocks of float16's ranges;
    TurboQuant's of 4 or 2, with scales of any dtype."""
    if codec not in ("zipcache", "turboquant") or want_probs:
        return False
    if codec == "zipcache" and (unit % BLOCK or page & (page - 1)):  # a page is of whole units
        return False
    if q.dtype not in (torch.float16, torch.bfloat16):
        return False
    if any(x.storage_offset() % 4 or not x.is_contiguous() for x in fields.values()):
        return False
    for side, dim in (("k", q.shape[-1]), ("v", dim_v)):
        if dim & (dim - 1) or dim > 256 or fields[f"{side}_scale"].numel() % 2:  # which are read two at a time
            return False
        if codec == "zipcache":
            high, low = fields[f"{side}_high"], fields[f"{side}_low"]
            if (width(high, dim), width(low, dim)) != (4, 2) or dim < 64:
                return False
            if any(fields[f"{side}_{name}"].dtype != torch.float16 for name in ("scale", "zero")):
                return False
        elif (bits := turboquant.width(fields[f"{side}_code"], dim)) not in (2, 4) or dim * bits < 256:
            return False
    return True


def attention(
    q: Tensor, fields: Mapping[str, Tensor], table: Tensor, position: Tensor, page: int, scale: float,
    units: Tensor | None, unit: int, codec: str, dim_v: int, query_position: Tensor | None, window: int | None,
    softcap: float | None, sinks: Tensor | None, wait: bool = False,
) -> State:  # fmt: skip
    """See `kvengine.kernels.paged_attention`, for what `fits`."""
    turned, q = codec == "turboquant", q.contiguous()
    turn, back = (turboquant.rotation(dim, q.device) if turned else None for dim in (q.shape[-1], dim_v))
    rows, group, queries, dim = q.shape
    heads = group * queries
    whole = page % BLOCK == 0 and unit % BLOCK == 0
    # Four warps that share a block of several units are more than Triton 3.6's layouts bear.
    tile = min(64 if whole else MOST_HEADS, max(8, next_power_of_2(heads)))
    columns = table.shape[1] * page if units is None else units.shape[1] * unit
    names, bits, salient, mask, channel = ("high", "low"), (4, 4), None, table, table
    if turned:
        names, bits = ("code", "code"), (width(fields["k_code"], dim), width(fields["v_code"], dim_v))
    else:
        salient, mask, channel = fields["k_high"].shape[1], fields["mask"].view(torch.int32), fields["v_channel"]
    codes = [[fields[f"{side}_{name}"].view(torch.int32) for name in names] for side in "kv"]
    ranges = [[fields[f"{side}_{name}"] for name in ("scale", "scale" if turned else "zero")] for side in "kv"]
    wide = max(dim, dim_v) > 128
    alone = tile <= MOST_HEADS and (turned or not wide)
    small = turned and tile == 8 and not wide
    each = EACH_OF_FOUR_BITS if small else EACH if alone else 2
    tiles = cdiv(heads, tile)
    parts = Partials(q, dim_v, columns, BLOCK, None, tiles, each, turn=back)
    words_kernel[(parts.programs, tiles)](
        q, q if turn is None else turn, *codes[0], *ranges[0], *codes[1], *ranges[1], mask, channel, parts.parts, parts.tops,
        parts.totals, table, position, table if units is None else units.contiguous(),
        table if query_position is None else query_position.contiguous(), table.stride(0), position.stride(0),
        rows, columns, heads, queries, 0 if units is None else units.shape[1], window or 0, scale, softcap or 1.0,
        WHOLE=whole, UNITS=units is not None, UNIT=unit, PAGE=page, BY_POSITION=query_position is not None,
        SOFTCAP=softcap is not None, HEADS=tile, SALIENT=salient, **parts.shape,
        K_DIM=dim, K_BITS=bits[0], K_ASM=assembly(bits[0], turned),
        V_DIM=dim_v, V_BITS=bits[1], V_ASM=assembly(bits[1], turned), TURNED=turned,
        K_SIZE=SIZE[bits[0]] if turned else 1.0, V_SIZE=SIZE[bits[1]] if turned else 1.0,
        num_warps=1 if alone else 4, num_stages=3, maxnreg=REGISTERS if small else None, **chained(q.device),
    )  # fmt: skip
    return parts.found(sinks, None, wait)
