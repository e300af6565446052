"""What the threads of a warp, or of four, do together: `support_ptx`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from support_ptx.arithmetic import typed
from support_ptx.threads import nothing, registers

if TYPE_CHECKING:
    from support_ptx import Block, Program, Statement
    from support_ptx.threads import Step

Array = np.ndarray


def _matrix(program: Program, s: Statement) -> Step:
    """`ldmatrix`: 8 x 8 halves, whose rows a lane each names."""
    writes, address = [program.writer(s, x) for x in registers(s.operands[0])], program.address(s.operands[1], 4)
    lane, turned = np.arange(32), "trans" in s.parts

    def do(b: Block) -> None:
        named = address(b).reshape(b.warps, 32)
        for i, write in enumerate(writes):
            rows = b.within(named[:, 8 * i : 8 * i + 8].reshape(-1), 16)
            tile = b.shared[rows[:, None] + np.arange(16)].view(np.uint16).reshape(b.warps, 8, 8)
            tile = tile.transpose(0, 2, 1) if turned else tile
            two = [tile[:, lane >> 2, 2 * (lane & 3) + half] for half in (0, 1)]
            write(b, np.stack(two, -1).reshape(-1, 2).view(np.uint32)[:, 0])

    return do


def _matrix_kept(program: Program, s: Statement) -> Step:
    """`stmatrix`: the other way."""
    reads, address = [program.read(x, 4) for x in registers(s.operands[1])], program.address(s.operands[0], 4)
    lane, turned = np.arange(32), "trans" in s.parts

    def do(b: Block) -> None:
        named = address(b).reshape(b.warps, 32)
        for i, read in enumerate(reads):
            rows, tile = b.within(named[:, 8 * i : 8 * i + 8].reshape(-1), 16), np.empty((b.warps, 8, 8), np.uint16)
            for half in (0, 1):
                tile[:, lane >> 2, 2 * (lane & 3) + half] = (read(b) >> np.uint32(16 * half)).reshape(b.warps, 32)
            tile = np.ascontiguousarray(tile.transpose(0, 2, 1) if turned else tile)
            b.shared[rows[:, None] + np.arange(16)] = tile.reshape(-1, 8).view(np.uint8)

    return do


def _product(program: Program, s: Statement) -> Step:
    """`mma.sync` of 16 x 16 and 16 x 8 halves, sums in float32."""
    if s.parts[2] != "m16n8k16" or s.parts[-1] != "f32":
        raise NotImplementedError(s.parts)
    kind, lane = s.parts[6], np.arange(32)
    writes = [program.writer(s, x) for x in registers(s.operands[0])]
    a, c, d = ([program.read(x, 4) for x in registers(operand)] for operand in s.operands[1:])
    row, pair = lane >> 2, 2 * (lane & 3)

    def do(b: Block) -> None:
        left, right, sums = np.zeros((b.warps, 16, 16)), np.zeros((b.warps, 16, 8)), np.zeros((b.warps, 16, 8))
        for half in (0, 1):
            for i, read in enumerate(a):
                left[:, row + 8 * (i % 2), pair + half + 8 * (i // 2)] = _half(read(b), kind, half).reshape(b.warps, 32)
            for i, read in enumerate(c):
                right[:, pair + half + 8 * i, row] = _half(read(b), kind, half).reshape(b.warps, 32)
        for i, read in enumerate(d):
            sums[:, row + 8 * (i // 2), pair + i % 2] = typed(read(b), "f32").reshape(b.warps, 32)
        with np.errstate(all="ignore"):
            out = (left @ right + sums).astype(np.float32)
        for i, write in enumerate(writes):
            write(b, np.ascontiguousarray(out[:, row + 8 * (i // 2), pair + i % 2]).reshape(-1).view(np.uint32))

    return do


def _group(program: Program, s: Statement) -> Step:
    """`wgmma`: 64 x 16 halves, of registers or of shared memory, and 16 x N of that, by four warps; at once."""
    if s.parts[0] in ("fence", "commit_group", "wait_group"):
        return nothing(program, s)
    kind, columns = s.parts[-1], int(re.fullmatch(r"m64n(\d+)k16", s.parts[3])[1])
    names = registers(s.operands[0])
    writes, sums = [program.writer(s, x) for x in names], [program.read(x, 4) for x in names]
    held = s.operands[1].startswith("{")
    of = [program.read(x, 4 if held else 8) for x in registers(s.operands[1])]
    right, rest = program.read(s.operands[2], 8), s.operands[3:]
    adds = program.read(rest[0], 0)
    turned = [x == "1" for x in rest[3:]]  # A only where it is in memory
    turned = [False, *turned] if held else turned
    if rest[1] != "1" or rest[2] != "1":
        raise NotImplementedError("negated factors")
    warp, lane = np.divmod(np.arange(program.threads), 32)
    row, pair, group = 16 * (warp % 4) + (lane >> 2), 2 * (lane & 3), warp // 4

    def do(b: Block) -> None:
        groups = program.warps // 4
        a, c = np.zeros((groups, 64, 16)), np.zeros((groups, 16, columns))
        for g in range(groups):
            first = 128 * g
            if not held:
                a[g] = _described(b, int(of[0](b)[first]), 64, kind, turned[0])
            c[g] = _described(b, int(right(b)[first]), columns, kind, turned[1]).T
        for half in (0, 1) if held else ():
            for i, read in enumerate(of):
                a[group, row + 8 * (i % 2), pair + half + 8 * (i // 2)] = _half(read(b), kind, half)
        with np.errstate(all="ignore"):
            product, more = a @ c, adds(b)
            for i, write in enumerate(writes):
                before = np.where(more, typed(sums[i](b), "f32").astype(np.float64), 0.0)
                mine = product[group, row + 8 * (i % 4 // 2), 8 * (i // 4) + pair + i % 2]
                write(b, (mine + before).astype(np.float32).view(np.uint32))

    return do


def _described(b: Block, descriptor: int, rows: int, kind: str, turned: bool) -> Array:
    """[rows, 16] of shared memory: 16 along K lie together, or (`turned`) rows do, in swizzled lines of 32 to 128 bytes."""
    start, lead, stride = (descriptor >> shift & 0x3FFF for shift in (0, 16, 32))
    line = {1: 128, 2: 64, 3: 32}[descriptor >> 62 & 3]
    n, k = np.arange(rows)[:, None], np.arange(16)[None, :]
    if turned:
        at = n // (line // 2) * (lead << 4) + k // 8 * (stride << 4) + k % 8 * line + n % (line // 2) * 2
    else:
        at = n // 8 * (stride << 4) + n % 8 * line + k * 2
    at = at + (start << 4)
    at = at ^ ((at >> 7 & (line // 16 - 1)) << 4)
    found = (
        b.shared[b.within(at.reshape(-1).astype(np.uint32), 2)[:, None] + np.arange(2)]
        .view(np.uint16)
        .reshape(rows, 16)
    )
    return _half(found.astype(np.uint32), kind, 0).astype(np.float64)


def _half(x: Array, kind: str, which: int) -> Array:
    part = (x >> np.uint32(16 * which)) & np.uint32(0xFFFF)
    return (part << np.uint32(16)).view(np.float32) if kind == "bf16" else part.astype(np.uint16).view(np.float16)


def _shuffle(program: Program, s: Statement) -> Step:
    names = s.operands[0].split("|")
    write, valid = program.writer(s, names[0]), program.writer(s, names[1]) if len(names) > 1 else None
    value, by, clamp = (program.read(x, 4) for x in s.operands[1:4])
    mode = s.parts[1]

    def do(b: Block) -> None:
        lane, shift, c = b.lane.astype(np.int64), by(b).astype(np.int64) & 31, clamp(b).astype(np.int64)
        segment, bound = (c >> 8) & 31, c & 31
        first = lane & segment
        last = first | (bound & ~segment & 31)
        at = {"up": lane - shift, "down": lane + shift, "bfly": lane ^ shift, "idx": first | (shift & ~segment & 31)}[
            mode
        ]
        good = at >= last if mode == "up" else at <= last
        at = np.where(good, at, lane)
        write(b, value(b)[np.arange(program.threads) // 32 * 32 + at])
        if valid:
            valid(b, good)

    return do


def _reduce(program: Program, s: Statement) -> Step:
    write, read = program.writer(s, s.operands[0]), program.read(s.operands[1], 4)
    how = {"add": np.sum, "max": np.max, "min": np.min, "or": np.bitwise_or.reduce, "and": np.bitwise_and.reduce}[
        s.parts[1]
    ]

    def do(b: Block) -> None:
        x = typed(read(b), s.parts[-1] if s.parts[-1] != "b32" else "u32").reshape(b.warps, 32)
        found = how(x, axis=1).astype(np.int64) & 0xFFFFFFFF
        write(b, np.repeat(found.astype(np.uint32), 32))

    return do


def _vote(program: Program, s: Statement) -> Step:
    write, read = program.writer(s, s.operands[0]), program.read(s.operands[1].lstrip("!"), 0)
    if s.parts[1] != "ballot":
        raise NotImplementedError(s.parts)
    negated = s.operands[1].startswith("!")

    def do(b: Block) -> None:
        bits = (read(b) ^ negated).reshape(b.warps, 32).astype(np.uint64) << np.arange(32, dtype=np.uint64)
        write(b, np.repeat(bits.sum(1).astype(np.uint32), 32))

    return do


WARPS: dict[str, Callable[[Program, Statement], Step]] = {
    "ldmatrix": _matrix, "stmatrix": _matrix_kept, "mma": _product, "wgmma": _group, "shfl": _shuffle, "redux": _reduce,
    "vote": _vote, "bar": nothing,
}  # fmt: skip
TOGETHER = {*WARPS, "cp"}
"""What needs all threads of a warp, or of a block."""
