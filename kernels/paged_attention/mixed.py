"""The Triton kernel for ZipCache's pages, whose tokens of 4 and of 2 bits are read apart: no number is ever decoded.

Attention asks for no order of tokens, and a page's codes of one width lie side by side. So a row is read twice, first its pages'
salient tokens and then the others, each time as `kivi.py` reads its pages: codes are multiplied as they are, and what scales them
is multiplied with queries and weights instead.

    score  = sum over channels of  code * (scale * query) + zero * query              scale, zero: of the page's tokens of a width
    output = channel * (sum over tokens of  code * (scale * weight) + zero * weight)  channel: of the page

Rows stand on the line of work twice, one width behind the other, and their shares are joined as those of any row.

What lies by slot, positions and the ranges of values, is brought into the order of the codes a turn ahead (`by_width.py`). A
lot is 32 tokens, or 16 where a page's last ones are so few. Results add up by tiles of 16 channels, two codes of each of 8 halves
of words, over all tokens of a page before its channels' factors come in; zeros are where a tile's sum begins.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated, misc"

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels.codecs import width
from kvengine.kernels.gpu import cdiv
from kvengine.kernels.gpu.again import launched_again
from kvengine.kernels.gpu.chain import chained, in_turn
from kvengine.kernels.gpu.halves import field, masked, masking, upper
from kvengine.kernels.gpu.layouts import apart, as_product, loaded, rows_of
from kvengine.kernels.gpu.stream import LOG2E, Partials, pick, row_ends
from kvengine.kernels.paged_attention.by_code import SMALLEST, counted_in, headroom
from kvengine.kernels.paged_attention.by_width import by_lot, lots, low_half, range_of, words_of
from kvengine.kernels.state import State

HEADS = 8
"""Query rows of a program."""
MOST_TILES = 3
"""In how many parts query rows are taken, at most, each of which reads the pages: `words.py` reads them once for more."""
EACH = 10
"""Programs for each multiprocessor: a warp waits more than it computes, so they are more than have all registers they want."""
REGISTERS = 65536 // (32 * EACH) // 8 * 8


@triton.constexpr_function
def level(bits):
    """By how much queries are more than 1 at most, that few are lost; no scale of float16's keys times it overflows."""
    return 4.0 if bits == 4 else 1.0


@launched_again
@triton.jit(do_not_specialize=["columns", "window", "table_row"])
def mixed_kernel(
    q, k_high, k_low, k_scale, k_zero, v_high, v_low, v_scale, v_zero, channel, salience, parts, tops, totals,
    table, position, query_position, table_row, position_row, rows, columns, heads, queries, window, scale, softcap,
    PAGE: tl.constexpr, SALIENT: tl.constexpr, BY_POSITION: tl.constexpr, SOFTCAP: tl.constexpr, LENGTHS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    in_turn(PDL)
    ends, _length = row_ends(table, 2 * rows, columns, LENGTHS, ROWS, BLOCK)
    blocks = tl.max(ends, 0)
    per = (blocks + programs - 1) // programs
    at, stop = program * per, tl.minimum((program + 1) * per, blocks)
    while at < stop:  # one turn per row and width that this program has a share of
        both = tl.sum((ends <= at).to(tl.int32), 0)
        start, end = pick(ends, both - 1, ROWS), pick(ends, both, ROWS)
        upto = tl.minimum(stop, end)
        row, out = (both // 2).to(tl.int64), (program + both).to(tl.int64) * heads
        if both % 2 == 0:
            share(
                q, k_high, k_scale, k_zero, v_high, v_scale, v_zero, channel, salience, parts, tops, totals, table, position,
                query_position, table_row, position_row, heads, queries, window, scale, softcap, columns < 0, row, out,
                at - start, upto - start - 1, 4, SALIENT, PAGE, BY_POSITION, SOFTCAP, HEADS, K_DIM, V_DIM, ASM,
            )  # fmt: skip
        else:
            share(
                q, k_low, k_scale + K_DIM, k_zero + K_DIM, v_low, v_scale, v_zero, channel, salience, parts, tops, totals, table,
                position, query_position, table_row, position_row, heads, queries, window, scale, softcap, columns < 0, row, out,
                at - start, upto - start - 1, 2, PAGE - SALIENT, PAGE, BY_POSITION, SOFTCAP, HEADS, K_DIM, V_DIM, ASM,
            )  # fmt: skip
        at = upto


@triton.jit
def share(
    q, k_code, k_scale, k_zero, v_code, v_scale, v_zero, channel, salience, parts, tops, totals, table, position,
    query_position, table_row, position_row, heads, queries, window, scale, softcap, never, r, out, begin, last,
    BITS: tl.constexpr, TOKENS: tl.constexpr, PAGE: tl.constexpr, BY_POSITION: tl.constexpr, SOFTCAP: tl.constexpr,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Pages `begin` to `last` of a row, of them the tokens of one width."""
    WORDS: tl.constexpr = PAGE // 32
    n = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    some = n < heads
    mask = loaded((((1 << BITS) - 1) << BITS * (tl.arange(0, 16) // 8)).to(tl.int16), position, never)
    d = tl.arange(0, K_DIM // 2)
    d = d // 16 * 32 + d % 8 // 2 * 8 + d % 16 // 8 * 4 + d % 2
    at_q = q + (r * heads + n)[:, None] * K_DIM
    x = tl.load(at_q + d[None, :], mask=some[:, None], other=0.0).to(tl.float32)
    y = tl.load(at_q + d[None, :] + 2, mask=some[:, None], other=0.0).to(tl.float32)
    largest, unit = counted_in(tl.max(tl.maximum(tl.abs(x), tl.abs(y)), 1), scale)
    query_x = tl.trans(loaded((x / unit[:, None]).to(tl.float16), position, never))
    query_y = tl.trans(loaded((y / unit[:, None]).to(tl.float16), position, never))
    query, acc = by_tile(q, r * heads, n, some, unit, K_DIM, BITS, HEADS), ()
    for _ in tl.static_range(V_DIM // 16):
        acc = acc + (tl.zeros([16, HEADS], tl.float32),)
    total = tl.zeros([HEADS, 8], tl.float32)
    factor = largest * tl.abs(scale) / (level(BITS) * SMALLEST)
    power = tl.full([HEADS], LOG2E, tl.float32) if SOFTCAP else factor * LOG2E
    # `scores` count in units of `factor`, and weights and `top` in powers of two.
    top = tl.full([HEADS], -float("inf"), tl.float32)
    pages, places = table + r * table_row, position + r * position_row
    # Each turn asks for what the next ones begin with: the next page's positions and ranges, the mask of the one after it, and
    # where the page after that is.
    this, next_page = tl.load(pages + begin), tl.load(pages + tl.minimum(begin + 1, last))
    third = tl.load(pages + tl.minimum(begin + 2, last))
    nexts = by_lot(
        places + begin * PAGE, v_scale, v_zero, this, words_of(salience, this, WORDS), BITS, TOKENS, PAGE, ASM
    )
    next_place, next_size, next_zero = nexts[0::3], nexts[1::3], nexts[2::3]
    next_bits, next_by = words_of(salience, next_page, WORDS), factors(channel, this, V_DIM, BITS)
    for block in range(begin, last + 1):
        page, there = tl.maximum(this, 0).to(tl.int64), this >= 0
        here, ranges_of, bits, by = next_place, (), next_bits, next_by
        for s in tl.static_range(len(here)):
            ranges_of = ranges_of + (range_of(here[s], next_size[s], next_zero[s]),)
        this, next_page = tl.maximum(next_page, -1), tl.maximum(third, -1)
        next_bits, next_by = words_of(salience, next_page, WORDS), factors(channel, this, V_DIM, BITS)
        third = tl.load(pages + tl.minimum(block + 3, last))
        scores = width_scores(
            k_code, page, there, query, query_x, query_y, k_scale, k_zero, BITS, TOKENS, K_DIM, HEADS, ASM
        )
        found, spare = (), tl.full([], -float("inf"), tl.float32)
        for s in tl.static_range(len(scores)):
            score = scores[s]
            if SOFTCAP:
                score = softcap * (1.0 - 2.0 / (tl.exp(score * (factor * (2.0 / softcap))[:, None]) + 1.0))
            seen = (here[s] >= 0)[None, :]
            if BY_POSITION:
                own = tl.load(query_position + r * queries + n % queries, mask=some, other=0)
                distance = own.to(tl.int64)[:, None] - here[s].to(tl.int64)[None, :]
                seen = seen & (distance >= 0) & ((distance < window) | (window == 0))
            found = found + (tl.where(seen, score, -float("inf")),)
            spare = tl.maximum(spare, headroom(low_half(ranges_of[s])[:, None]))
        where = places + tl.minimum(block + 1, last) * PAGE
        nexts = by_lot(where, v_scale, v_zero, this, bits, BITS, TOKENS, PAGE, ASM)
        next_place, next_size, next_zero = nexts[0::3], nexts[1::3], nexts[2::3]
        highest = tl.max(found[0], 1)
        for s in tl.static_range(1, len(found)):
            highest = tl.maximum(highest, tl.max(found[s], 1))
        highest = tl.where(there, highest, -float("inf"))
        by = tl.where(
            tl.max(highest, 0) > -float("inf"), by, 0.0
        )  # of a page whose tokens are dead they may be anything
        now_top = tl.maximum(top, highest * power + spare)
        shift = tl.where(now_top == float("-inf"), 0.0, now_top)
        shrink = tl.exp2(top - shift)
        top, shift = now_top, tl.where(there, shift, float("inf"))  # of nothing no weights
        total = total * shrink[:, None]
        rest, sized = tl.zeros([HEADS, 8], tl.float32), ()
        for s in tl.static_range(len(found)):
            p = tl.exp2(found[s] * power[:, None] - shift[:, None])
            total += tl.sum(p.reshape(HEADS, p.shape[1] // 8, 8), 1)
            size, zero = low_half(ranges_of[s]), low_half(ranges_of[s] >> 16)
            rest += tl.sum((p * zero.to(tl.float32)[None, :]).reshape(HEADS, p.shape[1] // 8, 8), 1)
            sized = sized + (tl.trans(p.to(tl.float16) * size[None, :]),)
        values = v_code + page * (TOKENS * V_DIM * BITS // 16)
        acc = together(values, there, sized, acc, shrink, by, tl.sum(rest, 1), mask, TOKENS, V_DIM, BITS, ASM)
    STEPS: tl.constexpr = 8 // BITS
    for i in tl.static_range(V_DIM // 16):
        back = tl.exp2(-places_of(i % STEPS, BITS)) / SMALLEST
        c = 16 // BITS * (8 * (i // STEPS) + tl.arange(0, 16) % 8) + 2 * (i % STEPS) + tl.arange(0, 16) // 8
        tl.store(parts + (out + n)[None, :] * V_DIM + c[:, None], acc[i] * back[:, None], mask=some[None, :])
    tl.store(tops + out + n, top / LOG2E, mask=some)
    tl.store(totals + out + n, tl.sum(total, 1), mask=some)


@triton.jit
def factors(channel, page, DIM: tl.constexpr, BITS: tl.constexpr):
    """Of a page's channels, by halves of words."""
    TILES: tl.constexpr = 16 // BITS
    at = TILES * tl.arange(0, DIM // TILES)[:, None] + tl.arange(0, TILES)[None, :]
    return tl.load(channel + tl.maximum(page, 0).to(tl.int64) * DIM + at, mask=page >= 0, other=0.0)


@triton.jit
def width_scores(
    code, page, there, query, query_x, query_y, scale, zero, BITS: tl.constexpr, TOKENS: tl.constexpr,
    DIM: tl.constexpr, HEADS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Scores of a page's tokens of one width, by lots."""
    group = 2 * page * DIM
    weights = weighted(query, scale + group, there, DIM * BITS // 16, BITS, HEADS)
    base = ranges(zero + group, there, query_x, query_y, DIM) * (level(BITS) * SMALLEST)
    scores = ()
    for s in tl.static_range(len(lots(TOKENS))):
        # Behind the last token its own codes again, of which nothing comes.
        t = tl.minimum(32 * s + tl.arange(0, lots(TOKENS)[s]), TOKENS - 1)[:, None]
        at = t * (DIM * BITS // 16) + tl.arange(0, DIM * BITS // 16)[None, :]
        words = tl.load(code + page * (TOKENS * DIM * BITS // 16) + at, mask=there, other=0)
        scores = scores + (scored(words, weights, base, BITS, lots(TOKENS)[s], HEADS, ASM),)
    return scores


@triton.jit
def ranges(pointer, there, query_x, query_y, DIM: tl.constexpr):
    """Of a page's zeros, the product with each query. A lane holds them as the left factor of a product, of which two of the four
    registers are rows 0 to 7, and two are rows 8 to 15: other channels, and other queries that are multiplied by them."""
    x = tl.load(pointer + tl.arange(0, DIM), mask=there, other=0.0).to(tl.float16)
    x = tl.permute(x.reshape(DIM // 32, 4, 2, 2, 2), (3, 0, 2, 1, 4)).reshape(2, 1, DIM // 2)
    x = tl.broadcast_to(x, 2, 8, DIM // 2).reshape(16, DIM // 2)
    return rows_of(tl.dot(x, query_x), 0) + rows_of(tl.dot(x, query_y), 1)


@triton.jit
def by_tile(q, first, n, some, unit, DIM: tl.constexpr, BITS: tl.constexpr, HEADS: tl.constexpr):
    """Queries by tiles, two of them the rows of one factor, for codes of so many bits."""
    TILES: tl.constexpr = 16 // BITS
    HALVES: tl.constexpr = DIM // TILES
    at = q + (first + n)[None, :, None] * DIM + TILES // 2 * tl.arange(0, 2)[:, None, None]
    at += TILES * tl.arange(0, HALVES)[None, None, :]
    found = ()
    for i in tl.static_range(TILES // 2):
        x = tl.load(at + i, mask=some[None, :, None], other=0.0).to(tl.float32) / unit[None, :, None]
        x = x.reshape(2 * HEADS, HALVES) * (level(BITS) / (1 << BITS * i % (8 if BITS == 4 else 4)))
        found = found + (as_product(x).to(tl.float16),)
    return found


@triton.jit
def weighted(query, scale, there, HALVES: tl.constexpr, BITS: tl.constexpr, HEADS: tl.constexpr):
    """Those queries times a page's scales."""
    TILES: tl.constexpr = 16 // BITS
    at = TILES * tl.arange(0, HALVES)[:, None] + tl.arange(0, TILES)[None, :]
    scales = tl.load(scale + at, mask=there, other=0.0).to(tl.float16)
    scales = apart(scales.reshape(HALVES, 2, TILES // 2), TILES // 2)
    found = ()
    for i in tl.static_range(TILES // 2):
        sizes = tl.broadcast_to(tl.trans(scales[i])[:, None, :], 2, HEADS, HALVES)
        found = found + (query[i] * sizes.reshape(2 * HEADS, HALVES),)
    if BITS == 4:  # with the lower code of a byte still in it
        found = (found[0] - found[1], found[1])
    return found


@triton.jit
def scored(words, weights, base, BITS: tl.constexpr, LOT: tl.constexpr, HEADS: tl.constexpr, ASM: tl.constexpr):
    """Scores [head, token] of a lot."""
    HALF: tl.constexpr = 8 // BITS
    SUMS: tl.constexpr = BITS == 4
    low = tl.zeros([2 * HEADS, LOT], tl.float32)
    high, low_of_second, high_of_second = low, low, low
    high_bytes = upper(words, ASM)
    for i in tl.static_range(HALF):
        codes = tl.trans(field(words, high_bytes, i, BITS, SUMS, ASM))
        second = tl.trans(field(words, high_bytes, i + HALF, BITS, SUMS, ASM))
        if BITS == 4 or i < 2:
            low = tl.dot(weights[i], codes, low)
            low_of_second = tl.dot(weights[i], second, low_of_second)
        else:
            high = tl.dot(weights[i], codes, high)
            high_of_second = tl.dot(weights[i], second, high_of_second)
    if BITS == 2:
        low, low_of_second = low + high / 16, low_of_second + high_of_second / 16
    scores = tl.broadcast_to(tl.trans(base)[:, None, :], HEADS, LOT // 8, 8).reshape(HEADS, LOT)
    return scores + rows_of(low, 0) + rows_of(low_of_second, 1)


@triton.jit
def together(
    code, there, sized, acc, shrink, by, rest, mask, TOKENS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """What came before, and a page's values of one width."""
    TILES: tl.constexpr = 16 // BITS
    PIECES: tl.constexpr = DIM // TILES // 16
    STEPS: tl.constexpr = TILES // 2
    now = ()
    by = tl.permute(by.reshape(2 * PIECES, 8, STEPS, 2), (3, 1, 0, 2)).reshape(16, 2 * PIECES * STEPS)
    by = apart(by, 2 * PIECES * STEPS)
    for piece in tl.static_range(PIECES):
        words = ()
        for s in tl.static_range(len(sized)):
            t = tl.minimum(32 * s + tl.arange(0, sized[s].shape[0]), TOKENS - 1)[:, None]
            x = tl.load(code + t * (PIECES * 16) + 16 * piece + tl.arange(0, 16)[None, :], mask=there, other=0)
            words = words + (apart(tl.permute(x.reshape(x.shape[0], 2, 8), (0, 2, 1)), 2),)
        for part in tl.static_range(2):
            for j in tl.static_range(STEPS):
                x = tile(words, part, sized, by[(2 * piece + part) * STEPS + j], rest, mask, j, BITS, ASM)
                now = now + (acc[(2 * piece + part) * STEPS + j] * shrink[None, :] + x,)
    return now


@triton.jit
def tile(words, part: tl.constexpr, sized, by, rest, mask, j: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """16 channels' sums over a page's values of one width."""
    sum = rest[None, :] * (tl.exp2(places_of(j, BITS)) * SMALLEST)[:, None]
    for s in tl.static_range(len(sized)):
        few = tl.trans(words[s][part])
        few = tl.broadcast_to(few[None], 2, 8, few.shape[1]).reshape(16, few.shape[1])
        bits = tl.broadcast_to((mask << 2 * BITS * j % 8)[:, None], 16, few.shape[1])
        value = masked(few if 2 * BITS * j < 8 else upper(few, ASM), bits, ASM)
        sum = tl.dot(value, sized[s], sum)
    return by.to(tl.float32)[:, None] * sum


@triton.jit
def places_of(j: tl.constexpr, BITS: tl.constexpr):
    """Of a tile's rows: by how many bits their codes are shifted."""
    return (2 * BITS * j % 8 + BITS * (tl.arange(0, 16) // 8)).to(tl.float32)


def fits(
    q: Tensor, fields: Mapping[str, Tensor], page: int, units: Tensor | None, codec: str, dim_v: int, want_probs: bool
) -> bool:
    """Whether pages can be read so: all of them, if there are any, of 4 and 2 bits, ranges in float16, few queries."""
    if codec != "zipcache" or want_probs or units is not None or page not in (32, 64, 128):
        return False
    if q.dtype not in (torch.float16, torch.bfloat16) or q.shape[1] * q.shape[2] > MOST_TILES * HEADS:
        return False
    pages, salient = fields["k_high"].shape[:2]
    if not pages:  # a mask is read whether its page is there or not
        return False
    if not 0 < salient < page or any(x.storage_offset() % 4 or not x.is_contiguous() for x in fields.values()):
        return False
    for side, dim in (("k", q.shape[-1]), ("v", dim_v)):
        high, low = fields[f"{side}_high"], fields[f"{side}_low"]
        if dim != 128 or (width(high, dim), width(low, dim)) != (4, 2):
            return False
        if any(fields[f"{side}_{name}"].dtype != torch.float16 for name in ("scale", "zero")):
            return False
    return True


def attention(
    q: Tensor, fields: Mapping[str, Tensor], table: Tensor, position: Tensor, page: int, scale: float, dim_v: int,
    query_position: Tensor | None, window: int | None, softcap: float | None, sinks: Tensor | None, wait: bool = False,
) -> State:  # fmt: skip
    """See `kvengine.kernels.paged_attention`, for what `fits`."""
    q = q.contiguous()
    rows, group, queries, dim = q.shape
    columns = table.shape[1] * page
    k, v = ([fields[f"{side}_{name}"].view(torch.int16) for name in ("high", "low")] for side in "kv")
    ranges_of = [[fields[f"{side}_{name}"] for name in ("scale", "zero")] for side in "kv"]
    tiles = cdiv(group * queries, HEADS)
    parts = Partials(q, dim_v, columns, page, None, tiles, EACH, times=2)
    mixed_kernel[(parts.programs, tiles)](
        q, *k, *ranges_of[0], *v, *ranges_of[1], fields["v_channel"], fields["mask"].view(torch.int32),
        parts.parts, parts.tops, parts.totals, table, position,
        table if query_position is None else query_position.contiguous(), table.stride(0), position.stride(0),
        rows, columns, group * queries, queries, window or 0, scale, softcap or 1.0,
        PAGE=page, SALIENT=fields["k_high"].shape[1], BY_POSITION=query_position is not None,
        SOFTCAP=softcap is not None, HEADS=HEADS, K_DIM=dim, V_DIM=dim_v, ASM=masking(),
        num_warps=1, num_stages=3, maxnreg=REGISTERS, **parts.shape, **chained(q.device),
    )  # fmt: skip
    return parts.found(sinks, None, wait)
