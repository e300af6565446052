"""What threads do each for itself: `support_ptx`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from support_ptx.arithmetic import OPERATIONS, SIZES, Words, fit

if TYPE_CHECKING:
    from support_ptx import Block, Program, Statement

Array = np.ndarray
Step = Callable[["Block"], None]
LOCAL = np.uint64(0xF << 60)
"""Where a thread's own memory begins among all addresses."""


def registers(operand: str) -> list[str]:
    return [x.strip() for x in operand.strip("{} ").split(",")]


def arithmetic(program: Program, s: Statement) -> Step:
    """Whatever maps registers to one register, thread by thread."""
    operation = OPERATIONS.get(s.op)
    if operation is None:
        raise NotImplementedError(f"{s.op}.{'.'.join(s.parts)} {s.operands}")
    sizes, signed, compute = operation(s.parts)
    names = s.operands[0].split("|")
    reads = [program.read(x, size) for x, size in zip(s.operands[1:], sizes, strict=True)]
    writes = [program.writer(s, name, signed) for name in names]

    def do(b: Block) -> None:
        value = compute(*(read(b) for read in reads))
        writes[0](b, value)
        if len(writes) > 1:
            writes[1](b, ~value)

    return do


def carried(program: Program, s: Statement) -> Step:
    """Sums and products of words, of which one gives its carry to the next."""
    if s.parts[-1] not in ("u32", "b32") or s.op.startswith("sub"):
        raise NotImplementedError(f"{s.op}.{'.'.join(s.parts)}")
    write, reads = program.writer(s, s.operands[0]), [program.read(x, 4) for x in s.operands[1:]]
    takes, gives, high = s.op in ("addc", "madc"), "cc" in s.parts, np.uint64(32 if "hi" in s.parts else 0)

    def do(b: Block) -> None:
        *x, last = (read(b).astype(np.uint64) for read in reads)
        first = x[0] if len(x) == 1 else (x[0] * x[1] >> high) & np.uint64(0xFFFFFFFF)
        total = first + last + (b.carry if takes else np.uint64(0))
        write(b, total.astype(np.uint32))
        b.carry = np.where(b.active, total >> np.uint64(32), b.carry) if gives else b.carry

    return do


def _move(program: Program, s: Statement) -> Step:
    """Also halves of a register to and from registers of their own."""
    size, (to, of) = SIZES[s.parts[-1]], s.operands
    if of.startswith("{"):
        names = registers(of)
        reads, write = [program.read(x, size // len(names)) for x in names], program.writer(s, to)
        return lambda b: write(b, np.stack([read(b) for read in reads], 1).view(Words[size])[:, 0])
    read = program.read(of, size)
    if to.startswith("{"):
        names = registers(to)
        writes = [program.writer(s, x) for x in names]

        def apart(b: Block) -> None:
            halves = np.ascontiguousarray(read(b))[:, None].view(Words[size // len(names)])
            for i, write in enumerate(writes):
                write(b, halves[:, i].copy())

        return apart
    write = program.writer(s, to)
    return lambda b: write(b, read(b))


def _load(program: Program, s: Statement) -> Step:
    kind, space = s.parts[-1], s.parts[0]
    size, names = SIZES[kind], registers(s.operands[0])
    writes = [program.writer(s, name, kind[0] == "s") for name in names]
    if space == "param":
        index = int(re.search(r"_(\d+)\s*\]", s.operands[1])[1])
        return lambda b: writes[0](b, np.repeat(fit(b.params[index], size), program.threads))
    address, guard, whole = (
        program.address(s.operands[1], 4 if space == "shared" else 8),
        program.guard(s),
        size * len(names),
    )

    def do(b: Block) -> None:
        active, found = guard(b), np.zeros((program.threads, whole), dtype=np.uint8)
        if active.any():
            found[active] = b.load(space, address(b)[active], whole, active)
        values = found.view(Words[size])
        for i, write in enumerate(writes):
            write(b, values[:, i].copy())

    return do


def _store(program: Program, s: Statement) -> Step:
    kind, space, guard = s.parts[-1], s.parts[0], program.guard(s)
    size, names = SIZES[kind], registers(s.operands[1])
    reads = [program.read(name, size) for name in names]
    address = program.address(s.operands[0], 4 if space == "shared" else 8)

    def do(b: Block) -> None:
        active = guard(b)
        if active.any():
            value = np.stack([read(b) for read in reads], 1).view(np.uint8)[active]
            b.store(space, address(b)[active], value, active)

    return do


def _converted(program: Program, s: Statement) -> Step:
    """`cvta`: where a space lies among all addresses."""
    write, read = program.writer(s, s.operands[0]), program.read(s.operands[1], 8)
    if "local" not in s.parts:
        return lambda b: write(b, read(b))
    base = LOCAL if s.parts[0] == "local" else np.uint64(0) - LOCAL
    return lambda b: write(b, read(b) + base)


def _copy(program: Program, s: Statement) -> Step:
    """`cp.async`: read now, written when waited for."""
    if "commit_group" in s.parts:
        return lambda b: b.pending.append([])
    if "wait_group" in s.parts or "wait_all" in s.parts:
        but = int(s.operands[0]) if s.operands else 0
        return lambda b: b.wait(but)
    to, of, size = program.address(s.operands[0], 4), program.address(s.operands[1], 8), int(s.operands[2], 0)
    some = program.read(s.operands[3], 4) if len(s.operands) > 3 else None
    guard = program.guard(s)

    def do(b: Block) -> None:
        active = guard(b)
        many = np.full(program.threads, size) if some is None else some(b)
        value, reads = np.zeros((program.threads, size), dtype=np.uint8), active & (many != 0)
        if not np.isin(many[active], (0, size)).all():
            raise NotImplementedError("a part of a copy")
        if reads.any():
            value[reads] = b.memory.load(of(b)[reads], size)
        if active.any():
            b.pending[-1].append((b.within(to(b)[active], size), value[active]))

    return do


def nothing(program: Program, s: Statement) -> Step:
    return lambda b: None


THREADS: dict[str, Callable[[Program, Statement], Step]] = {
    "mov": _move, "ld": _load, "st": _store, "cp": _copy, "cvta": _converted, "membar": nothing, "fence": nothing,
    "griddepcontrol": nothing,
}  # fmt: skip
