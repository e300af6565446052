"""The Triton kernel: gather rows of U, multiply by the row's basis, rotate, attend, without keys in memory."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels.dispatch import interpreted
from kvengine.kernels.gpu import cdiv, crowds, lined, next_power_of_2, room
from kvengine.kernels.gpu.again import launched_again
from kvengine.kernels.gpu.chain import chained, in_turn
from kvengine.kernels.gpu.stream import Partials, absorb, keep, pick, row_ends
from kvengine.kernels.paged_attention.triton import MOST_HEADS
from kvengine.kernels.state import State

TURN = ("cos.approx.f32 $0, $1;", "sin.approx.f32 $0, $1;")


@triton.jit
def part(
    q, basis, u, r, n, heads, token, ok,
    FROM: tl.constexpr, WIDTH: tl.constexpr, BLOCK_W: tl.constexpr, RANK: tl.constexpr, STEP: tl.constexpr,
    HELD: tl.constexpr, DIM: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Channels [FROM, FROM + WIDTH): the queries, and the keys U @ basis of the tokens, before rotation."""
    w = tl.arange(0, BLOCK_W)
    x = tl.load(
        q + (r * heads + n)[:, None] * DIM + FROM + w[None, :], mask=(n < heads)[:, None] & (w < WIDTH)[None, :],
        other=0.0,
    )  # fmt: skip
    keys = tl.zeros([BLOCK, BLOCK_W], tl.float32)
    if HELD:  # no loop: so the basis stays in shared memory, and U is on its way while the tokens before are worked on
        for first in tl.static_range(0, RANK, STEP):
            keys = some(keys, basis, u, r, w, token, ok, first, FROM, WIDTH, RANK, STEP, DIM, COMPUTE)
    else:
        for first in range(0, RANK, STEP):
            keys = some(keys, basis, u, r, w, token, ok, first, FROM, WIDTH, RANK, STEP, DIM, COMPUTE)
    return x.to(COMPUTE), keys


@triton.jit
def some(
    keys, basis, u, r, w, token, ok, first, FROM: tl.constexpr, WIDTH: tl.constexpr, RANK: tl.constexpr,
    STEP: tl.constexpr, DIM: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The keys, with what STEP columns of U from `first` on add."""
    k = first + tl.arange(0, STEP)
    inside = k < RANK
    rows = tl.load(u + token[:, None] * RANK + k[None, :], mask=ok[:, None] & inside[None, :], other=0.0).to(COMPUTE)
    columns = tl.load(
        basis + (r * RANK + k)[:, None] * DIM + FROM + w[None, :], mask=inside[:, None] & (w < WIDTH)[None, :], other=0.0
    ).to(COMPUTE)  # fmt: skip
    return tl.dot(rows, columns, keys, input_precision="ieee")


@triton.jit
def turn(angle, ASM: tl.constexpr):
    """Cosine and sine, of angles up to ten millions, within 1e-6: far less than an angle of float32 is off itself.

    The library's are exact to the last digit for any number, with a loop for those beyond 105615: of what 32 tokens of 128
    channels took they were three fifths. Here whole turns are taken away in two steps, of which the first rounds once, and the
    processor's own functions do the rest."""
    if ASM is None:
        return tl.cos(angle), tl.sin(angle)
    turns = (angle * 0.15915494309189535 + 12582912.0) - 12582912.0  # the sum has no room for less than one
    left = tl.fma(turns, tl.full(turns.shape, -6.2831854820251465, tl.float32), angle)
    left = tl.fma(turns, tl.full(turns.shape, 1.7484556000744883e-07, tl.float32), left)
    cos = tl.inline_asm_elementwise(ASM[0], "=f,f", [left], dtype=tl.float32, is_pure=True, pack=1)
    sin = tl.inline_asm_elementwise(ASM[1], "=f,f", [left], dtype=tl.float32, is_pure=True, pack=1)
    return cos, sin


@launched_again
@triton.jit(do_not_specialize=["columns", "chosen", "table_row", "places"])
def lowrank_kernel(
    q, u, v, basis, inv_freq, table, position, units, parts, tops, totals, scores_out, lengths,
    table_row, position_row, places, sharing, rows, columns, heads, chosen, scale, scaling,
    UNITS: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr, SCORES: tl.constexpr, LENGTHS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, COMPUTE: tl.constexpr, RANK: tl.constexpr,
    STEP: tl.constexpr, HELD: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_H: tl.constexpr, REST: tl.constexpr,
    BLOCK_R: tl.constexpr, DIM_V: tl.constexpr, BLOCK_V: tl.constexpr, ASM: tl.constexpr, IN_ORDER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    in_turn(PDL)
    ends, length = row_ends(lengths, rows, columns, LENGTHS, ROWS, BLOCK)
    blocks = tl.max(ends, 0)
    per = (blocks + programs - 1) // programs
    at, stop = program * per, tl.minimum((program + 1) * per, blocks)
    n = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    h, dv = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_V)
    frequency = tl.load(inv_freq + h, mask=h < HALF, other=0.0)
    while at < stop:
        row = tl.sum((ends <= at).to(tl.int32), 0)
        start, end = pick(ends, row - 1, ROWS), pick(ends, row, ROWS)
        length_here = pick(length, row, ROWS)
        upto = tl.minimum(stop, end)
        r = row.to(tl.int64)
        acc = tl.zeros([HEADS, BLOCK_V], tl.float32)
        top = tl.full([HEADS], -float("inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        for block in range(at - start, upto - start):
            column = block * BLOCK + tl.arange(0, BLOCK)
            ok = column < length_here
            slot = column
            if UNITS:
                unit = tl.load(units + r * chosen + column // UNIT, mask=ok, other=-1)
                ok = ok & (unit >= 0)
                slot = (tl.maximum(unit, 0) * UNIT + column % UNIT).to(tl.int32)
            if IN_ORDER:
                page = r * table_row + slot // PAGE
            else:
                page = tl.load(table + r * table_row + slot // PAGE, mask=ok, other=-1).to(tl.int64)
            place = tl.load(position + r * position_row + slot, mask=ok, other=-1)
            ok = ok & (page >= 0) & (place >= 0)
            token = tl.maximum(page, 0) * PAGE + slot % PAGE
            u_token = (r // sharing) * places + tl.maximum(place, 0).to(tl.int64)
            q1, k1 = part(
                q, basis, u, r, n, heads, u_token, ok, 0, HALF, BLOCK_H, RANK, STEP, HELD, DIM, COMPUTE, BLOCK
            )
            q2, k2 = part(
                q, basis, u, r, n, heads, u_token, ok, HALF, HALF, BLOCK_H, RANK, STEP, HELD, DIM, COMPUTE, BLOCK
            )
            angle = place.to(tl.float32)[:, None] * frequency[None, :]
            cos, sin = turn(angle, ASM)
            first, second = k1 * cos - k2 * sin, k2 * cos + k1 * sin
            scores = tl.dot(q1, tl.trans(first.to(COMPUTE)), input_precision="ieee")
            scores = tl.dot(q2, tl.trans(second.to(COMPUTE)), scores, input_precision="ieee") * scaling
            if REST:
                q3, k3 = part(
                    q, basis, u, r, n, heads, u_token, ok, 2 * HALF, REST, BLOCK_R, RANK, STEP, HELD, DIM, COMPUTE, BLOCK
                )  # fmt: skip
                scores += tl.dot(q3, tl.trans(k3.to(COMPUTE)), input_precision="ieee")
            seen = (n < heads)[:, None] & ok[None, :]
            scores = tl.where(seen, scores * scale, -float("inf"))
            if SCORES:
                tl.store(scores_out + (r * heads + n)[:, None] * columns + column[None, :], scores, mask=seen)
            value = tl.load(
                v + token[:, None] * DIM_V + dv[None, :], mask=ok[:, None] & (dv < DIM_V)[None, :], other=0.0
            )
            acc, top, total = absorb(scores, value.to(COMPUTE), acc, top, total)
        keep(parts, tops, totals, program + row, n, heads, acc, top, total, DIM_V, BLOCK_V)
        at = upto


def lowrank_attention(
    q: Tensor,
    u: Tensor,
    v: Tensor,
    basis: Tensor,
    inv_freq: Tensor,
    table: Tensor | None,
    position: Tensor,
    page: int,
    scale: float,
    units: Tensor | None,
    unit: int,
    rope_scaling: float,
    want_probs: bool,
    wait: bool = False,
) -> State:
    """See `kvengine.kernels.lowrank_attention`."""
    q, u, v, basis = (x.contiguous() for x in (q, u, v, basis))
    table, position = None if table is None else lined(table), lined(position)
    rows, group, queries, dim = q.shape
    heads, half, dim_v, block = group * queries, inv_freq.shape[0], v.shape[-1], 32
    columns = position.shape[1] if units is None else units.shape[1] * unit
    scores = q.new_full((rows, heads, columns), -torch.inf, dtype=torch.float32) if want_probs else None
    tile = min(MOST_HEADS, max(16, next_power_of_2(heads)))
    each = next_power_of_2(max(dim, dim_v)) * q.itemsize  # bytes of a query
    while tile > 16 and crowds(q.device, tile * each):
        tile //= 2
    # What takes one step is no loop, and the compiler keeps all of the basis in shared memory.
    step = 16 if u.shape[-1] <= 32 and crowds(q.device, 128 * each) else 32
    narrow = each <= 256 and tile == 16
    held = narrow and 5 * cdiv(u.shape[-1], step) * step * each <= 2 * room(q.device)
    # As many as loads that wait for one another, and one block on its way (see paged_attention); else steps of the rank.
    stages = (5 if units is None else 7) if held else 4 if narrow else 1 if crowds(q.device, 32 * each) else 2
    tiles = cdiv(heads, tile)
    parts = Partials(q, dim_v, columns, block, None, tiles)
    low = torch.float32 if interpreted() else q.dtype  # the interpreter multiplies the bits of bfloat16 as integers
    lowrank_kernel[(parts.programs, tiles)](
        q, u, v, basis, inv_freq.to(torch.float32).contiguous(), position if table is None else table, position,
        position if units is None else units.contiguous(), parts.parts, parts.tops, parts.totals,
        parts.tops if scores is None else scores, parts.tops, position.shape[1] // page if table is None else table.stride(0),
        position.stride(0),
        u.shape[1], rows // len(u), rows, columns, heads, 0 if units is None else units.shape[1], scale, rope_scaling,
        UNITS=units is not None, UNIT=unit, PAGE=page, SCORES=want_probs, HEADS=tile,
        COMPUTE={torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[low],
        RANK=u.shape[-1], STEP=step, HELD=held, DIM=dim, HALF=half, BLOCK_H=max(16, next_power_of_2(half)),
        REST=dim - 2 * half, BLOCK_R=max(16, next_power_of_2(max(1, dim - 2 * half))), DIM_V=dim_v,
        BLOCK_V=max(16, next_power_of_2(dim_v)), ASM=None if interpreted() else TURN, IN_ORDER=table is None,
        num_warps=4 if held else 8, num_stages=stages, **parts.shape, **chained(q.device),
    )  # fmt: skip
    return parts.found(None, scores, wait)
