"""The Triton kernel for KIVI's pages, whose codes are multiplied as they are: no number is ever decoded.

A code is `code * scale + zero`, where a channel of keys has one scale and zero for `K_GROUP` tokens, and a token has one of
each for `V_GROUP` channels of its value. So what is multiplied by codes is scaled instead, of which there is less:

    score  = sum over channels of  code * (scale * query) + zero * query
    output = sum over tokens of    code * (scale * weight) + zero * weight

and the zeros are a product of their own, which sums of scores begin with, or one row for all channels of a group. Codes come as
float16's smallest numbers (`kvengine.kernels.gpu.halves.masked`), one instruction for two of them. Of keys in 4 bits a byte's
upper code comes with the lower one still in it (K_SUMS), for which the lower one's weight makes up: nothing is masked away
then.

A block is 64 tokens, in two lots of 32 with one maximum, as results are rescaled once for both and the products of one need not
wait for those of the other; of 4 bits in one page or in two. Or it is one lot of 32, or of 16 where chosen units are so small.
Of halves of words there are 16 / bits tiles, tile i has code i of each. For scores, halves are summed over and tokens are
columns: two channels lie in one register, as the product wants them. For the output, tokens are summed over and halves are
rows, for which shared memory is read by columns: two tokens lie in one register. All 16 rows of such a tile must have one
scale; where a group has fewer halves, several codes of each half are its rows, side by side. Scores have query heads as rows,
so that a lane holds scores of neighbouring tokens, and weights made of them are a factor of the next product where they are;
the same holds for scaled queries. With scores the other way round products were fewer, 42 for 58 of 32 tokens, but for all else
the first were written to shared memory and read again, nine times a block. A product has no fewer than 16 rows: of 8 heads, two
tiles' queries are the rows of one factor, and half of each product is not used.

QuantSpec's pages (FINE) have lower nibbles beside the upper ones, `zero + (16 code + low - 8) * scale / 16`. Two instructions
make codes of 8 bits of both, every second one at a time (`whole`), and what the 8 takes away is half of each scale, a product
like that of the zeros.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, var-annotated, misc"

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels.codecs import width
from kvengine.kernels.dispatch import interpreted
from kvengine.kernels.gpu import cdiv, next_power_of_2, room
from kvengine.kernels.gpu.again import launched_again
from kvengine.kernels.gpu.chain import chained, in_turn
from kvengine.kernels.gpu.halves import alive, field, masked, masking, upper, whole
from kvengine.kernels.gpu.layouts import apart, as_product, loaded, rows_of
from kvengine.kernels.gpu.stream import LOG2E, Partials, pick, row_ends, slot_at, unit_at
from kvengine.kernels.paged_attention.by_code import SMALLEST, asked, headroom, over, shared
from kvengine.kernels.paged_attention.words import BLOCK, EACH, MOST_HEADS
from kvengine.kernels.state import State

HALF = 16
"""Tokens at a time where units or key groups are no whole blocks."""
ROOM_OF_TWO = 200 << 10
"""Shared memory in which eight programs have two blocks, of 21 KiB, on their way."""
LEAST_GROUP = 32
"""Channels of a value with one scale: two tiles of 16 rows."""


@launched_again
@triton.jit(do_not_specialize=["columns", "chosen", "window", "table_row"])
def kivi_kernel(
    q, k_code, k_low, k_scale, k_zero, v_code, v_low, v_scale, v_zero, parts, tops, totals,
    table, position, units, query_position, table_row, position_row,
    rows, columns, heads, queries, chosen, window, scale, softcap,
    UNITS: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr, BY_POSITION: tl.constexpr,
    SOFTCAP: tl.constexpr, LENGTHS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    K_DIM: tl.constexpr, K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_ZERO: tl.constexpr,
    V_DIM: tl.constexpr, V_BITS: tl.constexpr, V_GROUP: tl.constexpr, FINE: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    K_TILES: tl.constexpr = 16 // K_BITS
    K_HALVES: tl.constexpr = K_DIM // K_TILES
    TWO: tl.constexpr = 2 if HEADS == 8 else 1
    HALF: tl.constexpr = K_TILES // TWO
    V_TILES: tl.constexpr = 16 // V_BITS
    V_GROUPS: tl.constexpr = V_DIM // V_GROUP
    # A tile of values: SIDE codes of V_HALVES halves. A part of a piece has that many halves. Pieces are loaded one by one as
    # rows of 32 bytes, in shared memory, are read by columns faster than longer ones.
    V_HALVES: tl.constexpr = min(16 if V_BITS == 8 or FINE else 8, V_GROUP // V_TILES)
    PIECE: tl.constexpr = min(V_DIM // V_TILES, max(16, 2 * V_HALVES))
    PIECES: tl.constexpr = V_DIM // V_TILES // PIECE
    PARTS: tl.constexpr = PIECE // V_HALVES
    SIDE: tl.constexpr = 16 // V_HALVES
    STEPS: tl.constexpr = V_TILES // SIDE
    # Tiles' codes stand in different places of their halves, for which queries make up: the highest place's are the least.
    # No scale of float16's keys times LEVEL overflows.
    LOT: tl.constexpr = min(BLOCK, 32)
    LOTS: tl.constexpr = BLOCK // LOT
    K_SUMS: tl.constexpr = K_BITS == 4 and not FINE
    PLACES: tl.constexpr = 4 if K_BITS == 2 else 8
    LEVEL: tl.constexpr = 64.0 if FINE else 4.0 if K_BITS == 4 else 1.0
    program, programs = tl.program_id(0), tl.num_programs(0)
    in_turn(PDL)
    ends, _length = row_ends(units, rows, columns, LENGTHS, ROWS, BLOCK)
    blocks = tl.max(ends, 0)
    per = (blocks + programs - 1) // programs
    at, stop = program * per, tl.minimum((program + 1) * per, blocks)
    n = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    some, t = n < heads, tl.arange(0, LOT)
    k_at = K_TILES * tl.arange(0, K_HALVES)
    k_all = k_at[:, None] + tl.arange(0, K_TILES)[None, :]
    side = tl.arange(0, 16) // V_HALVES
    mask = loaded((((1 << (8 if FINE else V_BITS)) - 1) << (V_BITS * side)).to(tl.int16), position, columns < 0)
    while at < stop:  # one turn per row that this program has a share of
        row = tl.sum((ends <= at).to(tl.int32), 0)
        start, end = pick(ends, row - 1, ROWS), pick(ends, row, ROWS)
        upto = tl.minimum(stop, end)
        r = row.to(tl.int64)
        largest, unit, query_z = asked(q + (r * heads + n) * K_DIM, some, scale, K_DIM, HEADS, LEVEL, K_ZERO)
        at_q = (
            q + (r * heads + n)[None, :, None] * K_DIM + HALF * tl.arange(0, TWO)[:, None, None] + k_at[None, None, :]
        )
        query, acc = (), ()
        for i in tl.static_range(HALF):
            x = tl.load(at_q + i, mask=some[None, :, None], other=0.0).to(tl.float32) / unit[None, :, None]
            x = x.reshape(TWO * HEADS, K_HALVES) * (LEVEL / (16 if FINE else 1 << K_BITS * i % PLACES))
            query = query + (as_product(x).to(tl.float16),)
        for _ in tl.static_range(V_DIM // 16):
            acc = acc + (tl.zeros([16, HEADS], tl.float32),)
        acc_z = tl.zeros([16, HEADS], tl.float32)
        total = tl.zeros([8, HEADS], tl.float32)  # of which each row says the same
        factor = largest * tl.abs(scale) / (LEVEL * SMALLEST)
        power = tl.full([HEADS], LOG2E, tl.float32) if SOFTCAP else factor * LOG2E
        ones = tl.full([16, LOT], 1.0, tl.float16)
        # `scores` count in units of `factor`, and weights and `top` in powers of two.
        top = tl.full([HEADS], -float("inf"), tl.float32)
        # Asked for turns ahead, so that nothing waits for it: the next block's page, what lives there, the unit after it.
        begin, last, places = at - start, upto - start - 1, position + r * position_row + t
        pages, next_unit = table + r * table_row, unit_at(begin, r, units, chosen, UNITS, UNIT, BLOCK)
        next_slot, next_there = slot_at(begin, next_unit, UNITS, UNIT, BLOCK), next_unit >= 0
        next_pages = pages_at(pages, next_slot, columns, PAGE, BLOCK, LOT)
        next_places = places_at(places, next_slot, columns, PAGE, BLOCK, LOT)
        next_unit = unit_at(tl.minimum(begin + 1, last), r, units, chosen, UNITS, UNIT, BLOCK)
        for block in range(begin, last + 1):
            slot, there, first, live = next_slot, (), (), ()
            for s in tl.static_range(LOTS):
                there = there + (next_there & (next_pages[s] >= 0),)
                first = first + (first_of(next_pages, slot, s, PAGE, BLOCK, LOT),)
                live = live + (there[s] & (next_places[s] >= 0),)
            next_there = next_unit >= 0
            next_slot = slot_at(tl.minimum(block + 1, last), next_unit, UNITS, UNIT, BLOCK)
            next_pages = pages_at(pages, next_slot, columns, PAGE, BLOCK, LOT)
            next_places = places_at(places, next_slot, columns, PAGE, BLOCK, LOT)
            next_unit = unit_at(tl.minimum(block + 2, last), r, units, chosen, UNITS, UNIT, BLOCK)
            found = ()
            for s in tl.static_range(LOTS):
                # Again, as registers that wait for a load cannot be handed on.
                place = place_at(places, slot, s, columns, PAGE, BLOCK, LOT)
                words = stretch(k_code, first[s], t, there[s], K_HALVES, K_HALVES)
                if FINE:
                    lower = stretch(k_low, first[s], t, there[s], K_HALVES, K_HALVES)
                if s == 0 or K_GROUP % BLOCK:  # else all of a block are of one group
                    group = first[s] // K_GROUP * K_DIM
                    k_scales = tl.load(k_scale + group + k_all, mask=there[s], other=0.0)
                    k_scales = apart(k_scales.to(tl.float16).reshape(K_HALVES, TWO, HALF), HALF)
                    base = shared(k_zero + group, there[s], query_z, K_DIM, LEVEL, K_ZERO)
                    if FINE:
                        halves = shared(k_scale + group, there[s], query_z, K_DIM, LEVEL, K_ZERO)
                        base = base[0] - 0.5 * halves[0], base[1] - 0.5 * halves[1]
                    if TWO == 1:
                        base = base[0] + base[1], base[1]
                    weights = ()
                    for i in tl.static_range(HALF):
                        sizes = tl.broadcast_to(tl.trans(k_scales[i])[:, None, :], TWO, HEADS, K_HALVES)
                        weights = weights + (query[i] * sizes.reshape(TWO * HEADS, K_HALVES),)
                low, low_of_second = over(base[0], LOT), over(base[1], LOT)
                high = tl.zeros([TWO * HEADS, LOT], tl.float32)
                high_of_second = high
                high_bytes = upper(words, ASM)
                for i in tl.static_range(HALF):
                    sized = weights[i]
                    if K_SUMS and i % 2 == 0:
                        sized = sized - weights[i + 1]
                    second = None
                    if FINE:
                        bytes_ = whole(words, lower, i % 2, ASM)
                        codes = tl.trans(field(bytes_, upper(bytes_, ASM), i // 2, 8, False, ASM))
                        if TWO == 2:
                            second = tl.trans(field(bytes_, upper(bytes_, ASM), i // 2 + 1, 8, False, ASM))
                    else:
                        codes = tl.trans(field(words, high_bytes, i, K_BITS, K_SUMS, ASM))
                        if TWO == 2:
                            second = tl.trans(field(words, high_bytes, i + HALF, K_BITS, K_SUMS, ASM))
                    if K_BITS * i % 8 < PLACES:
                        low = tl.dot(sized, codes, low)
                        if TWO == 2:
                            low_of_second = tl.dot(sized, second, low_of_second)
                    else:
                        high = tl.dot(sized, codes, high)
                        if TWO == 2:
                            high_of_second = tl.dot(sized, second, high_of_second)
                if PLACES < 8:
                    low, low_of_second = low + high / (1 << PLACES), low_of_second + high_of_second / (1 << PLACES)
                if TWO == 2:
                    scores = rows_of(low, 0) + rows_of(low_of_second, 1)
                else:
                    scores = low
                if SOFTCAP:
                    scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (factor * (2.0 / softcap))[:, None]) + 1.0))
                scores = alive(scores, place, ASM)
                if BY_POSITION:
                    own = tl.load(query_position + r * queries + n % queries, mask=some, other=0)
                    distance = own.to(tl.int64)[:, None] - place.to(tl.int64)[None, :]
                    seen = (distance >= 0) & ((distance < window) | (window == 0))
                    scores = tl.where(seen, scores, -float("inf"))
                found = found + (scores,)
            v_scales, v_zeros, spare = (), (), tl.full([], -float("inf"), tl.float32)
            for s in tl.static_range(LOTS):
                # A dead token's range may be anything; with 0 it adds nothing.
                group = (first[s] + t)[:, None] * V_GROUPS + tl.arange(0, V_GROUPS)[None, :]
                given = tl.load(v_scale + group, mask=live[s][:, None], other=0.0)
                v_scales, spare = v_scales + (given.to(tl.float16),), tl.maximum(spare, headroom(given))
                v_zeros = v_zeros + (tl.load(v_zero + group, mask=live[s][:, None], other=0.0).to(tl.float16),)
            highest = most(found, there, PAGE % BLOCK == 0)
            now_top = tl.maximum(top, highest * power + spare)
            shift = tl.where(now_top == float("-inf"), 0.0, now_top)
            shrink = tl.exp2(top - shift)
            top = now_top
            begin_of = ()
            for s in tl.static_range(LOTS):  # of nothing no weights
                begin_of = begin_of + (tl.where(there[s], shift, float("inf")),)
            acc_z, sums, now = acc_z * shrink[None, :], tl.zeros([16, HEADS], tl.float32), ()
            for i in tl.static_range(V_DIM // 16):
                now = now + (acc[i] * shrink[None, :],)
            acc = now
            for s in tl.static_range(LOTS):
                p = tl.exp2(found[s] * power[:, None] - begin_of[s][:, None])
                p, now = p.to(tl.float16), ()
                sums = tl.dot(ones, tl.trans(p), sums)
                acc_z = tl.dot(as_rows(v_zeros[s], V_GROUPS, LOT), tl.trans(p), acc_z)
                if FINE:
                    acc_z = tl.dot(as_rows(v_scales[s], V_GROUPS, LOT), tl.trans(p * -0.5), acc_z)
                sizes = apart(v_scales[s], V_GROUPS)
                for piece in tl.static_range(PIECES):
                    words = stretch(v_code + PIECE * piece, first[s], t, there[s], PIECES * PIECE, PIECE)
                    words = apart(tl.permute(words.reshape(LOT, PARTS, V_HALVES), (0, 2, 1)), PARTS)
                    if FINE:
                        lower = stretch(v_low + PIECE * piece, first[s], t, there[s], PIECES * PIECE, PIECE)
                        lower = apart(tl.permute(lower.reshape(LOT, PARTS, V_HALVES), (0, 2, 1)), PARTS)
                    for part in tl.static_range(PARTS):
                        few = tl.trans(words[part])
                        if SIDE > 1:
                            few = tl.broadcast_to(few[None], SIDE, V_HALVES, LOT).reshape(16, LOT)
                        sized = tl.trans(p * sizes[(PIECE * piece + V_HALVES * part) * V_TILES // V_GROUP][None, :])
                        for j in tl.static_range(STEPS):
                            if FINE:
                                bytes_ = whole(few, tl.trans(lower[part]), j % 2, ASM)
                                value = field(bytes_, upper(bytes_, ASM), j // 2, 8, False, ASM)
                            else:
                                bits = tl.broadcast_to((mask << V_BITS * SIDE * j % 8)[:, None], 16, LOT)
                                value = masked(few if V_BITS * SIDE * j < 8 else upper(few, ASM), bits, ASM)
                            now = now + (tl.dot(value, sized, acc[(piece * PARTS + part) * STEPS + j]),)
                acc = now
            total = total * shrink[None, :] + rows_of(sums, 0)
        out = (program + row).to(tl.int64) * heads + n
        for g in tl.static_range(V_GROUPS):
            mine = tl.sum(tl.where((tl.arange(0, 16) == g)[:, None], acc_z, 0.0), 0)
            for i in tl.static_range(g * (V_GROUP // 16), (g + 1) * (V_GROUP // 16)):
                shift = tl.full([16], 4, tl.int32) if FINE else V_BITS * SIDE * (i % STEPS) % 8 + V_BITS * side
                back = tl.exp2(-shift.to(tl.float32))[:, None] / SMALLEST
                c = V_TILES * (V_HALVES * (i // STEPS) + tl.arange(0, 16) % V_HALVES) + SIDE * (i % STEPS) + side
                found = acc[i] * back + mine[None, :]
                tl.store(parts + out[None, :] * V_DIM + c[:, None], found, mask=some[None, :])
        tl.store(tops + out, top / LOG2E, mask=some)
        tl.store(totals + out, tl.sum(total, 0) / 8, mask=some)
        at = upto


@triton.jit
def pages_at(pages, slot, columns, PAGE: tl.constexpr, BLOCK: tl.constexpr, LOT: tl.constexpr):
    """Where a block's lots are: in one page, or in some that follow one another, of which the last may be missing."""
    found = ()
    for s in tl.static_range(BLOCK // LOT):
        if PAGE % BLOCK == 0:
            found = found + (tl.load(pages + slot // PAGE),)
        else:
            at = slot + s * LOT
            found = found + (tl.load(pages + at // PAGE, mask=at < columns, other=-1),)
    return found


@triton.jit
def first_of(page, slot, s: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, LOT: tl.constexpr):
    """Of all pages' tokens, a lot's first."""
    if PAGE % BLOCK == 0:
        return tl.maximum(page[0], 0).to(tl.int64) * PAGE + slot % PAGE + s * LOT
    else:
        return tl.maximum(page[s], 0).to(tl.int64) * PAGE + (slot + s * LOT) % PAGE


@triton.jit
def places_at(places, slot, columns, PAGE: tl.constexpr, BLOCK: tl.constexpr, LOT: tl.constexpr):
    """The positions of a block's tokens, by lots."""
    found = ()
    for s in tl.static_range(BLOCK // LOT):
        found = found + (place_at(places, slot, s, columns, PAGE, BLOCK, LOT),)
    return found


@triton.jit
def place_at(places, slot, s: tl.constexpr, columns, PAGE: tl.constexpr, BLOCK: tl.constexpr, LOT: tl.constexpr):
    if PAGE % BLOCK == 0:
        return tl.load(places + slot + s * LOT)
    else:
        return tl.load(places + slot + s * LOT, mask=slot + s * LOT < columns)


@triton.jit
def most(found, there, ONE: tl.constexpr):
    """The highest scores of each query, in lots that are there: all or none of them if it is ONE page."""
    highest = tl.max(found[0], 1) if ONE else tl.where(there[0], tl.max(found[0], 1), -float("inf"))
    for s in tl.static_range(1, len(found)):
        other = tl.max(found[s], 1)
        highest = tl.maximum(highest, other if ONE else tl.where(there[s], other, -float("inf")))
    return tl.where(there[0], highest, -float("inf")) if ONE else highest


@triton.jit
def as_rows(x, GROUPS: tl.constexpr, LOT: tl.constexpr):
    """[token, group] as the 16 rows of a product's left factor, which repeat."""
    return tl.broadcast_to(tl.trans(x)[None], 16 // GROUPS, GROUPS, LOT).reshape(16, LOT)


@triton.jit
def stretch(code, first, t, there, ROW: tl.constexpr, COLUMNS: tl.constexpr):
    """Some columns of a block's rows."""
    at = code + first * ROW + t[:, None] * ROW + tl.arange(0, COLUMNS)[None, :]
    return tl.load(at, mask=there, other=0)


def fits(
    q: Tensor, fields: Mapping[str, Tensor], page: int, unit: int, codec: str, dim_v: int, want_probs: bool
) -> bool:
    """Whether these pages can be read so: whole or half blocks of one key group, codes of 2, 4 or 8 bits, values in groups that
    fill tiles. Ranges are float16 or bfloat16; those are turned into float16, whose numbers end at 65504: far beyond any key."""
    if codec not in ("kivi", "quantspec") or want_probs or page % HALF or unit % HALF:
        return False
    if codec == "quantspec" and dim_v // fields["v_scale"].shape[2] % 64:
        return False
    kinds = (torch.float16, torch.bfloat16)
    if q.dtype not in kinds or any(x.storage_offset() % 4 or not x.is_contiguous() for x in fields.values()):
        return False
    for side, dim in (("k", q.shape[-1]), ("v", dim_v)):
        code, scale = fields[f"{side}_code"], fields[f"{side}_scale"]
        if scale.dtype not in kinds or fields[f"{side}_zero"].dtype != scale.dtype:
            return False
        if dim & (dim - 1) or not 32 <= dim <= 256:
            return False
        if (bits := width(code, dim)) not in (2, 4, 8) or dim * bits < 256:
            return False
        if page // scale.shape[1] % HALF if side == "k" else dim // scale.shape[2] % LEAST_GROUP:
            return False
    return True


def attention(
    q: Tensor, fields: Mapping[str, Tensor], table: Tensor, position: Tensor, page: int, scale: float,
    units: Tensor | None, unit: int, codec: str, dim_v: int, query_position: Tensor | None, window: int | None,
    softcap: float | None, sinks: Tensor | None, wait: bool = False,
) -> State:  # fmt: skip
    """See `kvengine.kernels.paged_attention`, for what `fits`."""
    q = q.contiguous()
    rows, group, queries, dim = q.shape
    heads = group * queries
    tile = min(64, max(8, next_power_of_2(heads)))
    columns = table.shape[1] * page if units is None else units.shape[1] * unit
    block = HALF if page // fields["k_scale"].shape[1] % BLOCK or unit % BLOCK else BLOCK
    fine = codec == "quantspec"
    names = ("code", "low" if fine else "code", "scale", "zero")
    k, v = ([fields[f"{side}_{name}"] for name in names] for side in "kv")
    halves = lambda x: (x[0].view(torch.int16), x[1].view(torch.int16), *x[2:])  # noqa: E731
    bits = width(k[0], dim), width(v[0], dim_v)
    exact = k[3].dtype == q.dtype == torch.bfloat16 and not interpreted()  # which has no products of these
    alone = tile <= MOST_HEADS
    few = tile == 8 and max(dim, dim_v) <= 128 and max(bits) <= 4 and not fine
    # Of 2 bits registers do not suffice for two pages.
    two = unit % (2 * BLOCK) == 0 or (units is None and min(bits) == 4)
    if few and two and block == BLOCK and room(q.device) >= ROOM_OF_TWO:
        block = 2 * BLOCK
    parts = Partials(q, dim_v, columns, block, None, tiles_of := cdiv(heads, tile),
                     EACH if alone else 2)  # fmt: skip
    kivi_kernel[(parts.programs, tiles_of)](
        q, *halves(k), *halves(v), parts.parts, parts.tops, parts.totals,
        table, position, table if units is None else units.contiguous(),
        table if query_position is None else query_position.contiguous(), table.stride(0), position.stride(0),
        rows, columns, heads, queries, 0 if units is None else units.shape[1], window or 0, scale, softcap or 1.0,
        UNITS=units is not None, UNIT=unit, PAGE=page, BY_POSITION=query_position is not None,
        SOFTCAP=softcap is not None, HEADS=tile, **parts.shape, ASM=masking(),
        K_DIM=dim, K_BITS=bits[0], K_GROUP=page // k[2].shape[1], K_ZERO=tl.bfloat16 if exact else tl.float16,
        V_DIM=dim_v, V_BITS=bits[1], V_GROUP=dim_v // v[2].shape[2], FINE=fine,
        num_warps=1 if alone else 4, num_stages=3, **chained(q.device),
    )  # fmt: skip
    return parts.found(sinks, None, wait)
