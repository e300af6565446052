"""The Triton kernel: split over tokens, one pass over the bytes named, codes decoded in registers.

All query heads of a group (and all queries of a verification) are rows of one tile, so K/V is read once. Serves
contiguous tokens too (`kvengine.kernels.attention`).
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels import turboquant
from kvengine.kernels.dispatch import beyond, interpreted
from kvengine.kernels.gpu import cdiv, crowded, lined, next_power_of_2, room, scratch
from kvengine.kernels.gpu import fields as stored
from kvengine.kernels.gpu.again import launched_again
from kvengine.kernels.gpu.chain import chained, in_turn
from kvengine.kernels.gpu.fields import read
from kvengine.kernels.gpu.stream import Partials, absorb, block_at, keep, pick, row_ends, slot_at, unit_at
from kvengine.kernels.paged_attention import kivi, mixed, words
from kvengine.kernels.state import State

MOST_HEADS = 64
"""Query rows in one tile; more take further passes over the tokens."""
EACH_OF_SMALL = 12
"""Programs of one warp, for each multiprocessor, where a block is one chosen unit."""
REGISTERS = 65536 // (32 * EACH_OF_SMALL) // 8 * 8
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
ANYONE, GIVEN, BY_POSITION = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Who sees a token: every query, as `visible` says, or by position and window."""


@launched_again
@triton.jit(do_not_specialize=["columns", "chosen", "window", "table_row", "visible_row", "visible_query"])
def attend_kernel(
    q, k0, k1, k2, k3, k4, k5, v0, v1, v2, v3, v4, v5, parts, tops, totals, scores_out,
    table, position, units, query_position, visible, lengths,
    k_row, k_token, v_row, v_token, table_row, position_row, visible_row, visible_query, visible_column,
    rows, columns, heads, queries, chosen, window, scale, softcap,
    PAGED: tl.constexpr, PLACED: tl.constexpr, WHOLE: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr,
    SEEN: tl.constexpr, SOFTCAP: tl.constexpr, SCORES: tl.constexpr, LENGTHS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, HEADS: tl.constexpr, COMPUTE: tl.constexpr,
    K_LAYOUT: tl.constexpr, K_DIM: tl.constexpr, K_BLOCK_D: tl.constexpr, K_BITS: tl.constexpr,
    K_LOW_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_SALIENT: tl.constexpr, K_STRIDE: tl.constexpr,
    V_LAYOUT: tl.constexpr, V_DIM: tl.constexpr, V_BLOCK_D: tl.constexpr, V_BITS: tl.constexpr,
    V_LOW_BITS: tl.constexpr, V_GROUP: tl.constexpr, V_SALIENT: tl.constexpr, V_STRIDE: tl.constexpr,
    REST: tl.constexpr, TOGETHER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    AHEAD: tl.constexpr = PAGED and WHOLE and (UNITS or REST > 0)
    program, programs = tl.program_id(0), tl.num_programs(0)
    in_turn(PDL)
    ends, length = row_ends(lengths, rows, columns, LENGTHS, ROWS, BLOCK)
    blocks = tl.max(ends, 0)
    per = (blocks + programs - 1) // programs
    at, stop = program * per, tl.minimum((program + 1) * per, blocks)
    n = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, K_BLOCK_D)
    while at < stop:  # one turn per row that this program has a share of
        row = tl.sum((ends <= at).to(tl.int32), 0)
        start, end = pick(ends, row - 1, ROWS), pick(ends, row, ROWS)
        length_here = pick(length, row, ROWS)
        upto = tl.minimum(stop, end)
        r = row.to(tl.int64)
        at_q = (r * heads + n)[:, None] * (K_DIM + REST)
        mask_q = (n < heads)[:, None] & (d < K_DIM)[None, :]
        queries_here = tl.load(q + at_q + d[None, :], mask=mask_q, other=0.0).to(COMPUTE)
        if REST:
            e = K_DIM + tl.arange(0, REST)
            others_here = tl.load(q + at_q + e[None, :], mask=(n < heads)[:, None], other=0.0).to(COMPUTE)
        acc = tl.zeros([HEADS, V_BLOCK_D], tl.float32)
        top = tl.full([HEADS], -float("inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        begin, last = at - start, upto - start - 1
        t = tl.arange(0, BLOCK)
        pages, places = table + r * table_row, position + r * position_row + t
        if AHEAD:  # asked for turns ahead: the next block's page, what lives there, and the unit after it
            next_unit = unit_at(begin, r, units, chosen, UNITS, UNIT, BLOCK)
            next_slot, next_there = slot_at(begin, next_unit, UNITS, UNIT, BLOCK), next_unit >= 0
            next_page, next_place = tl.load(pages + next_slot // PAGE), tl.load(places + next_slot)
            next_unit = unit_at(tl.minimum(begin + 1, last), r, units, chosen, UNITS, UNIT, BLOCK)
        for block in range(begin, last + 1):
            column = block * BLOCK + t
            ok = column < length_here
            exist, live = ok, ok
            token = column.to(tl.int64)
            place = token
            if PLACED and not PAGED:
                ok = ok & (tl.load(position + r * position_row + column, mask=ok, other=-1) >= 0)
            if AHEAD:
                slot, page, there = next_slot, next_page, next_there & (next_page >= 0)
                live = there & (next_place >= 0)
                next_there = next_unit >= 0
                next_slot = slot_at(tl.minimum(block + 1, last), next_unit, UNITS, UNIT, BLOCK)
                next_page, next_place = tl.load(pages + next_slot // PAGE), tl.load(places + next_slot)
                next_unit = unit_at(tl.minimum(block + 2, last), r, units, chosen, UNITS, UNIT, BLOCK)
                page = tl.maximum(page, 0).to(tl.int64)
            elif PAGED and WHOLE:
                slot, page, there = block_at(block, r, units, table, chosen, table_row, UNITS, UNIT, PAGE, BLOCK)
            if PAGED and WHOLE:
                place = tl.load(places + slot).to(tl.int64)  # again: registers that wait for a load cannot be handed on
                ok = (place >= 0) & there
                token = page * PAGE + slot % PAGE + t
                exist = tl.broadcast_to(there, BLOCK)  # a dead token's key is read: nothing tells so early that it is
            elif PAGED and TOGETHER > 1:  # tokens that lie together are looked up once
                number = block * (BLOCK // TOGETHER) + tl.arange(0, BLOCK // TOGETHER)
                have = number < (chosen if UNITS else columns // TOGETHER)
                if UNITS:
                    number = tl.load(units + r * chosen + number, mask=have, other=-1).to(tl.int32)
                    have = have & (number >= 0)
                first = tl.maximum(number, 0) * TOGETHER
                page = tl.load(table + r * table_row + first // PAGE, mask=have, other=-1)
                have = have & (page >= 0)
                slot = each(first, TOGETHER, BLOCK)
                place = tl.load(position + r * position_row + slot, mask=each_of(have, TOGETHER, BLOCK), other=-1).to(
                    tl.int64
                )
                ok = place >= 0
                token = each(tl.maximum(page, 0).to(tl.int64) * PAGE + first % PAGE, TOGETHER, BLOCK)
            elif PAGED:
                slot = column
                if UNITS:
                    unit = tl.load(units + r * chosen + column // UNIT, mask=ok, other=-1).to(tl.int32)
                    ok = ok & (unit >= 0)
                    slot = tl.maximum(unit, 0) * UNIT + column % UNIT
                page = tl.load(table + r * table_row + slot // PAGE, mask=ok, other=-1)
                place = tl.load(position + r * position_row + slot, mask=ok, other=-1).to(tl.int64)
                ok = ok & (page >= 0) & (place >= 0)
                # A select here breaks Triton 3.6's layouts.
                token = tl.maximum(page, 0).to(tl.int64) * PAGE + slot % PAGE
            own = live if AHEAD else ok  # latents are values too, in which a dead token's would count
            key = read(
                k0, k1, k2, k3, k4, k5, token, own if REST else exist if WHOLE else ok, 0 if K_STRIDE else r * k_row,
                K_STRIDE if K_STRIDE else k_token, K_LAYOUT, K_DIM, K_BLOCK_D, K_BITS, K_LOW_BITS, K_GROUP, PAGE, K_SALIENT,
            )  # fmt: skip
            scores = tl.dot(queries_here, tl.trans(key.to(COMPUTE)), input_precision="ieee")
            if REST:  # channels of the keys behind those that are the values
                rest = tl.load(k0 + r * k_row + token[:, None] * k_token + e[None, :], mask=own[:, None], other=0.0)
                scores += tl.dot(others_here, tl.trans(rest.to(COMPUTE)), input_precision="ieee")
            scores *= scale
            if SOFTCAP:
                scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0))
            seen = (n < heads)[:, None] & ok[None, :]
            if SEEN == GIVEN:
                line = r * visible_row + (n % queries).to(tl.int64) * visible_query
                where = line[:, None] + token[None, :] * visible_column
                seen = seen & (tl.load(visible + where, mask=seen, other=0) != 0)
            if SEEN == BY_POSITION:
                own = tl.load(query_position + r * queries + n % queries, mask=n < heads, other=0)
                distance = own.to(tl.int64)[:, None] - place[None, :]
                seen = seen & (distance >= 0) & ((distance < window) | (window == 0))
            scores = tl.where(seen, scores, -float("inf"))
            if SCORES:
                line = scores_out + (r * heads + n)[:, None] * columns + column[None, :]
                tl.store(line, scores, mask=(n < heads)[:, None] & (column < columns)[None, :])
            if SEEN != ANYONE:  # a value nobody in this tile sees may hold anything
                ok = ok & (tl.max(seen.to(tl.int32), 0) > 0)
            if REST:
                value = key if AHEAD and SEEN == ANYONE else tl.where(ok[:, None], key, 0.0)
            else:
                value = read(
                    v0, v1, v2, v3, v4, v5, token, live if UNITS and WHOLE and SEEN == ANYONE else ok,
                    0 if V_STRIDE else r * v_row, V_STRIDE if V_STRIDE else v_token,
                    V_LAYOUT, V_DIM, V_BLOCK_D, V_BITS, V_LOW_BITS, V_GROUP, PAGE, V_SALIENT,
                )  # fmt: skip
            acc, top, total = absorb(scores, value.to(COMPUTE), acc, top, total)
        keep(parts, tops, totals, program + row, n, heads, acc, top, total, V_DIM, V_BLOCK_D)
        at = upto


@triton.jit
def each(first, TOGETHER: tl.constexpr, BLOCK: tl.constexpr):
    """Of so many that lie together, each one's number."""
    return (first[:, None] + tl.arange(0, TOGETHER)[None, :]).reshape(BLOCK)


@triton.jit
def each_of(x, TOGETHER: tl.constexpr, BLOCK: tl.constexpr):
    return tl.broadcast_to(x[:, None], BLOCK // TOGETHER, TOGETHER).reshape(BLOCK)


def paged_attention(
    q: Tensor,
    fields: Mapping[str, Tensor],
    table: Tensor,
    position: Tensor,
    page: int,
    scale: float,
    units: Tensor | None,
    unit: int,
    codec: str,
    dim_v: int,
    query_position: Tensor | None,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    want_probs: bool,
    wait: bool = False,
) -> State:
    """See `kvengine.kernels.paged_attention`."""
    table, position = lined(table), lined(position)
    if mixed.fits(q, fields, page, units, codec, dim_v, want_probs):
        return mixed.attention(
            q, fields, table, position, page, scale, dim_v, query_position, window, softcap, sinks, wait
        )
    by_word = kivi if codec in ("kivi", "quantspec") else words
    if by_word.fits(q, fields, page, unit, codec, dim_v, want_probs):
        return by_word.attention(
            q, fields, table, position, page, scale, units, unit, codec, dim_v, query_position, window, softcap, sinks, wait
        )  # fmt: skip
    turns, back = codec == "turboquant", None
    if turns:
        q = turboquant.turned(q).to(q.dtype)
        back = turboquant.rotation(dim_v, q.device) if dim_v & (dim_v - 1) == 0 else None
    k, v = (stored.paged(codec, fields, side, dim, page) for side, dim in (("k", q.shape[-1]), ("v", dim_v)))
    columns = table.shape[1] * page if units is None else units.shape[1] * unit
    units = None if units is None else units.contiguous()
    at = None if query_position is None else query_position.contiguous()
    tensors = {"table": table, "position": position, "units": units, "query_position": at}
    apart = turns and back is None
    found = launch(
        q, k, v, columns, page, scale, softcap, sinks, want_probs, unit=unit, window=window, wait=wait and not apart, turn=back,
        **tensors,
    )  # fmt: skip
    return found._replace(out=turboquant.turned(found.out)) if apart else found


def launch(
    q: Tensor, k: stored.Side, v: stored.Side, columns: int, page: int, scale: float, softcap: float | None,
    sinks: Tensor | None, want_probs: bool, *, unit: int = 1, window: int | None = None, table: Tensor | None = None,
    position: Tensor | None = None, units: Tensor | None = None, query_position: Tensor | None = None,
    visible: Tensor | None = None, lengths: Tensor | None = None, wait: bool = False, turn: Tensor | None = None,
) -> State:  # fmt: skip
    """Attend over columns of pages (`table` given) or of contiguous tokens, of which those are none whose `position` is -1. What
    is found is multiplied by `turn`."""
    q = q.contiguous()
    rows, group, queries, dim = q.shape
    heads = group * queries
    rest = beyond(k.pointers[0], v.pointers[0])
    if rest:
        k = k._replace(layout=k.layout | {"K_DIM": dim - rest, "K_BLOCK_D": dim - rest})
    # The compiler counts stages by how many loads wait for one another: a token's place for nothing, its page, a unit's page.
    waits = 0 if table is None else 1 if units is None else 2
    chosen = 0 if units is None or page % unit else unit
    tile, block, warps, stages = _shape(
        heads, max(dim, v.layout["V_DIM"]), k.layout["K_BLOCK_D"], q.element_size(),
        k.layout["K_LAYOUT"] != stored.DENSE.value, rest, waits, chosen, room(q.device),
    )  # fmt: skip
    small, tiles = warps == 1, cdiv(heads, tile)
    parts = Partials(q, v.layout["V_DIM"], columns, block, lengths, tiles, EACH_OF_SMALL if small else 2, turn=turn)
    scores = None
    if want_probs:  # columns behind a row's length are not looked at
        scores = scratch(rows, heads, columns, dtype=torch.float32, device=q.device)
        scores = scores if lengths is None else scores.fill_(-torch.inf)
    none = parts.tops  # stands for pointers that are not read
    seen = GIVEN if visible is not None else BY_POSITION if query_position is not None else ANYONE
    whole = page % block == 0 and (
        units is None or unit % block == 0
    )  # a block lies in one page, which is looked up once
    together = page if units is None else unit
    together = 1 if block % together else together
    attend_kernel[(parts.programs, tiles)](
        q, *k.pointers, *v.pointers, parts.parts, parts.tops, parts.totals, _or(scores, none),
        *(_or(x, none) for x in (table, position, units, query_position, visible, lengths)),
        *k.strides, *v.strides, *(_stride(x) for x in (table, position)),
        *((0, 0, 0) if visible is None else visible.stride()),
        rows, columns, heads, queries, 0 if units is None else units.shape[1], window or 0, scale, softcap or 1.0,
        PAGED=table is not None, PLACED=position is not None, WHOLE=whole, UNITS=units is not None, UNIT=unit, PAGE=page,
        SEEN=seen.value, SOFTCAP=softcap is not None, SCORES=want_probs, HEADS=tile, COMPUTE=compute_dtype(q, k), **parts.shape,
        **k.layout, **v.layout, REST=rest, TOGETHER=together, num_warps=warps, num_stages=stages,
        maxnreg=REGISTERS if small else None, **chained(q.device),
    )  # fmt: skip
    return parts.found(sinks, scores, wait)


@functools.lru_cache  # asked for at every launch, and hardly ever of anything new
def _shape(
    heads: int, widest: int, block_d: int, size: int, coded: bool, rest: int, waits: int, chosen: int, room: int
) -> tuple[int, int, int, int]:
    """Query rows of a program, tokens that it takes at a time, warps, and stages. `chosen`: tokens of a chosen unit."""
    tile = min(MOST_HEADS, max(16, next_power_of_2(heads)))
    wide, single = not rest and widest > 256, size == 4
    # Of shared memory 64 query rows over latents take 148 KiB, as codes of wide heads do; codes of 256 channels in float32 180.
    short = room < (192 if single and coded else 160) << 10
    if wide or (rest and (single or short)):
        tile = 16  # the queries of more would not fit beside the tokens
    while tile > 16 and crowded(room, (3 if coded else 1) * tile * block_d * size):
        tile //= 2  # decoded numbers lie there too
    large = tile * block_d > 4096  # more registers than four warps have
    plain = not coded and block_d <= 128
    # Of small chosen units each is a block of one warp: among 64 tokens of several each would be looked up, and that takes longer
    # than to attend to them.
    if plain and tile == 16 and size == 2 and chosen in (16, 32):
        return tile, chosen, 1, 2
    tight = (single and (rest or wide)) or (short and coded and wide) or (short and single and block_d > 128)
    block = 64 if plain and not large else 16 if tight else 32
    if chosen and chosen % block == 0:
        waits = 0  # of whole units all this is asked for a turn ahead
    # Two blocks on their way while one is worked on.
    stages = 3 + 2 * waits if plain and size == 2 else 1 if tight else 2
    return tile, block, 8 if large else 4, stages


def compute_dtype(q: Tensor, k: stored.Side) -> tl.dtype:
    """What the tiles are multiplied in: the stored dtype if dense, else the queries'."""
    dtype = k.pointers[0].dtype if k.layout["K_LAYOUT"] == stored.DENSE.value else q.dtype
    if dtype == torch.bfloat16 and interpreted():  # the interpreter multiplies the bits of bfloat16 as integers
        dtype = torch.float32
    return TYPES[dtype]


def _or(x: Tensor | None, stand_in: Tensor) -> Tensor:
    return stand_in if x is None else x


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)
