"""Divide the tokens of all rows evenly among a fixed number of programs, and join what they found (stream-K).

Rows differ in length, so a grid of rows leaves most of a GPU idle while the longest finishes. Here all rows' blocks of
`BLOCK` columns form one line, and program `p` takes blocks `p * per ... (p + 1) * per - 1`, across row boundaries. Its
share of row `r` goes to partial result `p + r`: a program that ends one row starts the next, so no two shares meet.

Lengths stay on the device, and the grid does not depend on them, so a step can be captured in a graph.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels.gpu import cdiv, chip, next_power_of_2, scratch
from kvengine.kernels.gpu.again import launched_again
from kvengine.kernels.gpu.chain import chained, in_turn
from kvengine.kernels.gpu.hadamard import turned
from kvengine.kernels.state import Into, State

LOG2E = tl.constexpr(1.4426950408889634)
JOINED, SHARES, SOME, FEW = 32, 128, 32, 4
"""Channels of a query row that one program joins, and shares that it takes in at a time: it waits for memory at each turn, and
nothing else of a step runs meanwhile. Where rows are many, each has SOME or FEW shares, which one warp joins, the latter of all
channels."""


@triton.jit
def row_ends(lengths, rows, columns, LENGTHS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Where each row's blocks end on the line; and each row's length."""
    r = tl.arange(0, ROWS)
    if LENGTHS:
        length = tl.load(lengths + r, mask=r < rows, other=0)
    else:
        length = tl.where(r < rows, columns, 0)
    return tl.cumsum((length + BLOCK - 1) // BLOCK, 0), length


@triton.jit
def pick(values, index, ROWS: tl.constexpr):
    """values[index], and 0 for -1."""
    return tl.sum(tl.where(tl.arange(0, ROWS) == index, values, 0), 0)


@triton.jit
def block_at(
    block, r, units, table, chosen, table_row, UNITS: tl.constexpr, UNIT: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a block that lies in one page: its row's slot, the page (0 for none), and whether there is one."""
    unit = unit_at(block, r, units, chosen, UNITS, UNIT, BLOCK)
    slot = slot_at(block, unit, UNITS, UNIT, BLOCK)
    page = tl.load(table + r * table_row + slot // PAGE)
    return slot, tl.maximum(page, 0).to(tl.int64), (unit >= 0) & (page >= 0)


@triton.jit
def unit_at(block, r, units, chosen, UNITS: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Which unit holds a block, where they are chosen; -1 for none."""
    return tl.load(units + r * chosen + block * BLOCK // UNIT) if UNITS else block


@triton.jit
def slot_at(block, unit, UNITS: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Where a block of this unit begins in its row."""
    return (tl.maximum(unit, 0) * UNIT + block * BLOCK % UNIT).to(tl.int32) if UNITS else block * BLOCK


@triton.jit
def absorb(scores, value, acc, top, total):
    """Online softmax: take in scores [M, T] (-inf: unseen) and values [T, D]."""
    high = tl.maximum(top, tl.max(scores, 1))
    shift = tl.where(high == float("-inf"), 0.0, high)
    shrink = tl.exp2((top - shift) * LOG2E)
    p = tl.exp2((scores - shift[:, None]) * LOG2E)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None] + tl.dot(p.to(value.dtype), value, input_precision="ieee")
    return acc, high, total


@triton.jit
def keep(parts, tops, totals, slot, n, heads, acc, top, total, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store a partial result."""
    d = tl.arange(0, BLOCK_D)
    at = slot.to(tl.int64) * heads + n
    tl.store(parts + at[:, None] * DIM + d[None, :], acc, mask=(n < heads)[:, None] & (d < DIM)[None, :])
    tl.store(tops + at, top, mask=n < heads)
    tl.store(totals + at, total, mask=n < heads)


@launched_again
@triton.jit(do_not_specialize=["columns", "programs", "columns2", "programs2"])
def join_kernel(
    parts, tops, totals, lengths, columns, programs, parts2, tops2, totals2, lengths2, columns2, programs2, sinks, turn, where,
    out, lse, rows, heads, SINKS: tl.constexpr, LENGTHS: tl.constexpr, BLOCK: tl.constexpr, BOTH: tl.constexpr,
    LENGTHS2: tl.constexpr, BLOCK2: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    SHARES: tl.constexpr, TIMES: tl.constexpr, TIMES2: tl.constexpr, TURNED: tl.constexpr, PLACED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program per BLOCK_D channels of a query row of a row: combine its shares, of one set of tokens or of two. Each set's
    line has a row so many TIMES, one after the other. So many sets as are TURNED, the first ones, are turned back. If they are
    PLACED, `where` says which row of `out` is which of ours."""
    SLICES: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    n, first_d = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES * BLOCK_D
    row = tl.program_id(1)  # only the first axis holds more than 65535 programs
    in_turn(PDL)
    high = tl.load(sinks + row * heads + n).to(tl.float32) if SINKS else -float("inf")
    total = tl.where(high == float("-inf"), 0.0, 1.0)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for i in tl.static_range(TIMES):
        acc, high, total = gather(
            parts, tops, totals, lengths, columns, programs, TIMES * rows, heads, TIMES * row + i, n, first_d, acc, high, total,
            LENGTHS, BLOCK, ROWS, DIM, BLOCK_D, SHARES,
        )  # fmt: skip
    if TURNED == 1:
        acc = turned(acc, tl.load(turn + tl.arange(0, BLOCK_D)))
    for i in tl.static_range(TIMES2 if BOTH else 0):
        acc, high, total = gather(
            parts2, tops2, totals2, lengths2, columns2, programs2, TIMES2 * rows, heads, TIMES2 * row + i, n, first_d, acc, high,
            total, LENGTHS2, BLOCK2, ROWS, DIM, BLOCK_D, SHARES,
        )  # fmt: skip
    if TURNED == 2:
        acc = turned(acc, tl.load(turn + tl.arange(0, BLOCK_D)))
    place = tl.load(where + row) if PLACED else row
    at, d = place.to(tl.int64) * heads + n, first_d + tl.arange(0, BLOCK_D)
    none = total == 0  # not NaN, which is passed on
    tl.store(out + at * DIM + d, tl.where(none, 0.0, acc / tl.where(none, 1.0, total)), mask=d < DIM)
    if first_d == 0:
        at = row.to(tl.int64) * heads + n
        tl.store(lse + at, tl.where(none, -float("inf"), high + tl.log(tl.where(none, 1.0, total))))


@triton.jit
def gather(
    parts, tops, totals, lengths, columns, programs, rows, heads, row, n, first_d, acc, high, total,
    LENGTHS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    """Take in a query row's shares, SHARES at a time as each waits for memory."""
    if LENGTHS:
        ends, _ = row_ends(lengths, rows, columns, LENGTHS, ROWS, BLOCK)
        blocks = tl.max(ends, 0)
        start, end = pick(ends, row - 1, ROWS), pick(ends, row, ROWS)
    else:
        end = (columns + BLOCK - 1) // BLOCK
        blocks, start, end = end * rows, end * row, end * (row + 1)
    per = (blocks + programs - 1) // programs
    d, p = first_d + tl.arange(0, BLOCK_D), tl.arange(0, SHARES)
    first, last = 0, -1
    if end > start:
        first, last = start // per, (end - 1) // per
    for share in range(first, last + 1, SHARES):
        some = share + p <= last
        at = (share + p + row).to(tl.int64) * heads + n
        top = tl.load(tops + at, mask=some, other=-float("inf"))
        now = tl.maximum(high, tl.max(top, 0))
        shift = tl.where(now == float("-inf"), 0.0, now)
        old, new = tl.exp2((high - shift) * LOG2E), tl.exp2((top - shift) * LOG2E)
        found = tl.load(parts + at[:, None] * DIM + d[None, :], mask=some[:, None] & (d < DIM)[None, :], other=0.0)
        acc = acc * old + tl.sum(new[:, None] * found, 0)
        total = total * old + tl.sum(new * tl.load(totals + at, mask=some, other=0.0), 0)
        high = now
    return acc, high, total


@functools.lru_cache  # a search at every launch
def undivided(blocks: int, most: int) -> int:
    """Into how many equal parts, at most, a row's blocks can be divided; 0 for none. Programs that take such a part never pass
    from one row to the next, for which their loads of the one have to end before those of the other begin."""
    return next((parts for parts in range(most, 0, -1) if blocks % parts == 0), 0)


def programs(device: torch.device, each: int) -> int:
    """How many programs share the work: so many for each multiprocessor; a handful in the interpreter."""
    if device.type != "cuda":
        return 5
    return each * chip(device).processors


class Partials:
    """Room for what the programs find, and the launch that joins it.

    `tiles`: in how many parts the query rows of a row are taken, each by programs of its own. `each`: programs for each
    multiprocessor. `times`: how often the line has each row. `turn`: R, of a power of two, if what is found is to be turned back.
    """

    def __init__(
        self, q: Tensor, dim_v: int, columns: int, block: int, lengths: Tensor | None, tiles: int, each: int = 2,
        times: int = 1, turn: Tensor | None = None,
    ) -> None:  # fmt: skip
        self.rows, self.group, self.queries, _ = q.shape
        self.heads, self.dim_v, self.columns, self.lengths = self.group * self.queries, dim_v, columns, lengths
        self.scores: Tensor | None = None
        self.turn = turn
        self.times, rows = times, times * self.rows
        share, blocks = -(-programs(q.device, each) // max(1, tiles)), -(-columns // block)
        self.programs = max(1, min(share, rows * blocks))
        if lengths is None and rows and (whole := undivided(blocks, self.programs // rows)):
            if 10 * rows * whole >= 9 * self.programs:  # hardly fewer
                self.programs = rows * whole
        self.most = self.programs
        """Shares that a row has, at most."""
        if lengths is None and blocks:
            per = -(-rows * blocks // self.programs)
            self.most = -(-blocks // per) + (blocks % per > 0)  # a row that programs share unevenly begins within one's
        shape = (self.programs + rows, self.heads)
        self.parts = scratch(*shape, dim_v, device=q.device, dtype=torch.float32)
        # One allocation each: where a half of one begins would depend on the programs, and with it what is compiled.
        self.tops, self.totals = (scratch(*shape, device=q.device, dtype=torch.float32) for _ in range(2))
        self.shape: dict[str, Any] = {
            "LENGTHS": lengths is not None,
            "ROWS": next_power_of_2(rows),
            "BLOCK": block,
        }

    def found(self, sinks: Tensor | None, scores: Tensor | None, wait: bool) -> State:
        """What the programs found, joined unless it may `wait`; `scores` [row, heads, column] become probabilities."""
        self.scores = scores
        if wait and sinks is None:
            nothing = self.tops[:0]
            return State(nothing, nothing, None, self)
        state = self.join(sinks)
        if scores is None:
            return state
        lse = state.lse
        probs = torch.exp(
            scores.unflatten(1, (self.group, self.queries)) - torch.where(lse == -torch.inf, 0, lse)[..., None]
        )
        return state._replace(probs=probs)

    def join(
        self, sinks: Tensor | None, other: Partials | None = None, dtype: torch.dtype = torch.float32,
        into: Into | None = None,
    ) -> State:  # fmt: skip
        """Combine, and with what `other` programs found of other tokens; `out` is of the dtype, or what it is written `into`."""
        if other is not None and self.turn is None and other.turn is not None:
            return other.join(sinks, self, dtype, into)
        shape, device = (self.rows, self.group, self.queries), self.parts.device
        out = scratch(*shape, self.dim_v, device=device, dtype=dtype) if into is None else into.out
        lse = scratch(*shape, device=device, dtype=torch.float32)
        logits = lse if sinks is None else sinks[..., None].expand(-1, -1, self.queries).contiguous()
        second = self if other is None else other
        if self.rows and self.heads:
            wide = next_power_of_2(self.dim_v)
            most = max(self.most, second.most)
            shares = next(size for size in (FEW, SOME, SHARES) if most <= size or size == SHARES)
            turns = (self.turn is not None) + (other is not None and other.turn is not None)
            slice_of = wide if shares == FEW or turns else min(wide, JOINED)  # channels of a program
            if slice_of > 256:
                shares = min(shares, SOME)
            warps = {FEW: (1, 1), SOME: (1, 4), SHARES: (4, 16)}[shares][turns > 0]
            turn, where = lse if self.turn is None else self.turn, lse if into is None else into.rows
            join_kernel[(self.heads * cdiv(self.dim_v, slice_of), self.rows)](
                *self.given(lse), *second.given(lse), logits, turn, where, out, lse, self.rows, self.heads,
                SINKS=sinks is not None, BOTH=other is not None, LENGTHS2=second.shape["LENGTHS"], BLOCK2=second.shape["BLOCK"],
                TIMES=self.times, TIMES2=second.times, DIM=self.dim_v, BLOCK_D=slice_of, SHARES=shares, TURNED=turns,
                PLACED=into is not None, num_warps=warps, **self.shape, **chained(device),
            )  # fmt: skip
        return State(out, lse)

    def given(self, none: Tensor) -> tuple[Any, ...]:
        """For the launch that joins; `none` stands for lengths that are not there."""
        lengths = none if self.lengths is None else self.lengths
        return self.parts, self.tops, self.totals, lengths, self.columns, self.programs
