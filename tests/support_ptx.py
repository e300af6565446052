"""Runs a kernel's compiled code (PTX) on a CPU: what the compiler made of it, on the memory of CPU tensors.

Triton's interpreter runs what was written; a GPU runs what was compiled of it, inline assembly included. Here all threads of
a block take each instruction together, one NumPy array for each register. What a GPU leaves open is made as bad as it may be:
registers and shared memory begin as garbage, a `cp.async` writes when it is waited for and no earlier, an address outside of
the arguments or not aligned is an error. Not seen: warps that overtake each other, and what is slow.

Not every instruction is known (no `wgmma`, so compile for 8.0 what takes 64 rows of queries): an unknown one is an error.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from support_ptx_arithmetic import OPERATIONS, SIZES, Words, fit, typed

Array = np.ndarray
Step = Callable[["Block"], None]
SPECIAL = re.compile(r"%(n?tid|n?ctaid)\.([xyz])")


class Statement(NamedTuple):
    """`@guard op.parts operands;`"""

    guard: str
    op: str
    parts: tuple[str, ...]
    operands: list[str]


def statements(body: str) -> Iterator[str]:
    """Labels with their colon, and statements without semicolon; scopes' braces are dropped."""
    at = 0
    while at < len(body):
        rest = re.compile(r"[\s{}]*").match(body, at)
        at = rest.end() if rest else at
        if label := re.compile(r"\$?[\w$]+:").match(body, at):
            yield label[0]
            at = label.end()
        elif at < len(body):
            end = body.index(";", at)
            yield " ".join(body[at:end].split())
            at = end + 1


def parsed(text: str) -> Statement:
    guard, _, rest = text.partition(" ") if text.startswith("@") else ("", "", text)
    op, _, operands = rest.strip().partition(" ")
    name, *parts = op.split(".")
    return Statement(guard[1:], name, tuple(parts), [x.strip() for x in re.split(r",(?![^{]*})", operands) if x.strip()])


class Memory:
    """The storages that a launch was given, found by address."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
        self.starts = np.array(sorted(start for start, size in found.items() if size), dtype=np.uint64)
        self.bytes = [
            np.frombuffer((ctypes.c_uint8 * found[int(start)]).from_address(int(start)), dtype=np.uint8)
            for start in self.starts
        ]

    def places(self, address: Array, size: int) -> Iterator[tuple[Array, Array, Array]]:
        """For each storage that is touched: its bytes, which of the addresses lie there, and where."""
        if (address % np.uint64(size)).any():
            raise AssertionError(f"an address is not aligned to {size} bytes")
        which = np.searchsorted(self.starts, address, side="right").astype(np.int64) - 1
        for index in np.unique(which):
            mine = which == index
            held = self.bytes[index] if index >= 0 else np.empty(0, np.uint8)
            at = (address[mine] - self.starts[max(index, 0)]).astype(np.int64)
            if index < 0 or at.max() + size > len(held):
                raise AssertionError(f"{int(address[mine].max()):#x} is outside of the arguments")
            yield held, mine, at

    def load(self, address: Array, size: int) -> Array:
        """[address, byte]."""
        found = np.empty((len(address), size), dtype=np.uint8)
        for held, mine, at in self.places(address, size):
            found[mine] = held[at[:, None] + np.arange(size)]
        return found

    def store(self, address: Array, value: Array) -> None:
        for held, mine, at in self.places(address, value.shape[1]):
            held[at[:, None] + np.arange(value.shape[1])] = value[mine]


class Program:
    """A kernel as compiled."""

    def __init__(self, ptx: str, warps: int, shared: int) -> None:
        self.warps, self.threads, self.shared = warps, 32 * warps, shared
        head, _, body = ptx[ptx.index(".entry") :].partition("{")
        self.types = re.findall(r"\.param \.(\w+)", head)
        body = re.sub(r"//[^\n]*", "", body[: body.index("\n}")])
        body = re.sub(r"^\s*\.(loc|file|section|pragma|maxntid|reqntid)\b[^\n]*", "", body, flags=re.MULTILINE)
        self.sizes: dict[str, int] = {}
        self.local: dict[str, tuple[int, int]] = {}
        self.labels: dict[str, int] = {}
        self.code: list[Statement] = []
        for text in statements(body):
            if text.endswith(":"):
                self.labels[text[:-1]] = len(self.code)
            elif text.startswith(".reg"):
                self.declare(text)
            elif text.startswith(".local"):
                name, size = re.findall(r"(\w+)\[(\d+)\]", text)[0]
                self.local[name] = sum(size for _, size in self.local.values()), int(size)
            elif not text.startswith("."):
                self.code.append(parsed(text))
        self.steps = [self.step(statement) for statement in self.code]

    def declare(self, text: str) -> None:
        kind = text.split()[1][1:]
        for name in text.split(None, 2)[2].split(","):
            stem, count = re.match(r"([%\w$]+)(?:<(\d+)>)?", name.strip()).groups()
            for register in [stem] if count is None else [f"{stem}{i}" for i in range(int(count))]:
                self.sizes[register] = SIZES[kind]

    def step(self, s: Statement) -> tuple[str, Any]:
        """What is done for a statement, with what it branches on."""
        if s.op == "bra":
            return "bra", self.labels[s.operands[0]]
        if s.op in ("ret", "exit", "trap"):
            return s.op, None
        known = KNOWN.get(s.op) or KNOWN.get(f"{s.op}.{s.parts[0] if s.parts else ''}")
        return "do", (known or _arithmetic)(self, s)

    def read(self, operand: str, size: int) -> Callable[[Block], Array]:
        """An operand as an array over the threads, of unsigned integers of so many bytes (0: truths)."""
        if operand in self.sizes:
            return lambda b: fit(b.registers[operand], size)
        if found := SPECIAL.fullmatch(operand):
            return lambda b: fit(b.special[found[0]], size)
        if operand == "%laneid":
            return lambda b: fit(b.lane, size)
        if operand in ("true", "false", "1", "0", "-1") and size == 0:
            truth = np.full(self.threads, operand not in ("false", "0"))
            return lambda b: truth
        constant = np.full(self.threads, self.number(operand, size), dtype=Words[size])
        return lambda b: constant

    def number(self, operand: str, size: int) -> int:
        if operand in self.local:
            return self.local[operand][0]
        if "smem" in operand or "shared" in operand:
            return 0
        if operand[:2] in ("0f", "0d", "0F", "0D"):
            return int(operand[2:], 16)
        if not re.fullmatch(r"-?\w+", operand) or operand.startswith("_"):
            return 0xDEAD0001  # a table of the compiler's; a kernel that reads it stops here
        return int(operand.rstrip("U"), 0) & ((1 << 8 * size) - 1)

    def address(self, operand: str, size: int) -> Callable[[Block], Array]:
        base, sign, offset = re.match(r"\[\s*([^\s+\-\]]+)\s*(?:([+-])\s*(-?\w+))?\s*\]", operand).groups()
        start, more = self.read(base, size), int(f"{sign}{offset}".replace("+-", "-")) if offset else 0
        add = np.array(more & ((1 << 8 * size) - 1), dtype=Words[size])
        return lambda b: start(b) + add

    def guard(self, s: Statement) -> Callable[[Block], Array] | None:
        if not s.guard:
            return None
        truth = self.read(s.guard.lstrip("!"), 0)
        return (lambda b: ~truth(b)) if s.guard.startswith("!") else truth

    def writer(self, s: Statement, operand: str, signed: bool = False) -> Callable[[Block, Array], None]:
        """Keeps a value in a register, where the guard holds; narrower ones are widened."""
        if operand == "_":
            return lambda b, value: None
        size, guard = self.sizes[operand], self.guard(s)

        def write(b: Block, value: Array) -> None:
            value = fit(value, size, signed)
            if guard is not None:
                value = np.where(guard(b), value, b.registers[operand])
            b.registers[operand] = value

        return write

    def launch(self, grid: Sequence[int], arguments: Sequence[Any], memory: Memory) -> int:
        """Run the blocks one after the other; how many instructions they took."""
        grid = [*grid, 1, 1][:3]
        params = []
        for kind, x in zip(self.types, arguments, strict=True):
            params.append(np.array([x], dtype=np.float32 if kind == "f32" else Words[SIZES[kind]].type).view(Words[SIZES[kind]]))
        turns = 0
        for z in range(grid[2]):
            for y in range(grid[1]):
                for x in range(grid[0]):
                    turns += Block(self, (x, y, z), grid, params, memory).run()
        return turns


class Block:
    """One block of threads on its way."""

    def __init__(
        self, program: Program, at: Sequence[int], grid: Sequence[int], params: list[Array], memory: Memory
    ) -> None:
        self.program, self.params, self.memory = program, params, memory
        n, self.warps = program.threads, program.warps
        self.lane = np.arange(n, dtype=np.uint32) % 32
        garbage = {size: np.full(n, 0x7FF7C0DE7FF7C0DE & ((1 << 8 * size) - 1), dtype=Words[size]) for size in (2, 4, 8)}
        garbage[0] = np.ones(n, dtype=bool)
        self.registers = {name: garbage[size] for name, size in program.sizes.items()}
        self.shared = np.full(program.shared + 16, 0xF7, dtype=np.uint8)
        self.stack = np.full((n, sum(size for _, size in program.local.values())), 0xF7, dtype=np.uint8)
        self.pending: list[list[tuple[Array, Array]]] = [[]]
        zero = np.zeros(n, dtype=np.uint32)
        self.special = {f"%tid.{a}": np.arange(n, dtype=np.uint32) if a == "x" else zero for a in "xyz"}
        for axis, name in enumerate("xyz"):
            self.special |= {f"%ctaid.{name}": zero + np.uint32(at[axis]), f"%nctaid.{name}": zero + np.uint32(grid[axis])}
            self.special[f"%ntid.{name}"] = zero + np.uint32(n if name == "x" else 1)

    def run(self) -> int:
        at, turns, program = 0, 0, self.program
        guards = [program.guard(s) for s in program.code]
        while at < len(program.steps):
            (kind, what), turns = program.steps[at], turns + 1
            if kind == "do":
                what(self)
                at += 1
                continue
            goes = guards[at](self) if guards[at] is not None else np.ones(1, dtype=bool)
            if goes.any() != goes.all():
                raise NotImplementedError(f"threads of a block part: {program.code[at]}")
            if kind == "trap" and goes.all():
                raise AssertionError("the kernel gave up (trap)")
            if kind != "bra" and goes.all():
                return turns
            at = what if goes.all() else at + 1
        return turns

    def wait(self, but: int) -> None:
        """All groups of `cp.async` but the last so many arrive."""
        done, self.pending = self.pending[: len(self.pending) - 1 - but], self.pending[max(0, len(self.pending) - 1 - but) :]
        for group in done:
            for at, value in group:
                self.shared[at[:, None] + np.arange(value.shape[1])] = value


def _registers(operand: str) -> list[str]:
    return [x.strip() for x in operand.strip("{} ").split(",")]


def _arithmetic(program: Program, s: Statement) -> Step:
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


def _move(program: Program, s: Statement) -> Step:
    """Also halves of a register to and from registers of their own."""
    size, (to, of) = SIZES[s.parts[-1]], s.operands
    if of.startswith("{"):
        names = _registers(of)
        reads, write = [program.read(x, size // len(names)) for x in names], program.writer(s, to)
        return lambda b: write(b, np.stack([read(b) for read in reads], 1).view(Words[size])[:, 0])
    read = program.read(of, size)
    if to.startswith("{"):
        names = _registers(to)
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
    size, names = SIZES[kind], _registers(s.operands[0])
    writes = [program.writer(s, name, kind[0] == "s") for name in names]
    if space == "param":
        index = int(re.search(r"_(\d+)\s*\]", s.operands[1])[1])
        return lambda b: writes[0](b, np.repeat(fit(b.params[index], size), program.threads))
    address, guard, whole = program.address(s.operands[1], 4 if space == "shared" else 8), program.guard(s), size * len(names)

    def do(b: Block) -> None:
        at, active = address(b), np.ones(program.threads, dtype=bool) if guard is None else guard(b)
        found = np.zeros((program.threads, whole), dtype=np.uint8)
        if active.any():
            if space == "global":
                found[active] = b.memory.load(at[active], whole)
            elif space == "local":
                found[active] = b.stack[np.flatnonzero(active)[:, None], at[active].astype(np.int64)[:, None] + np.arange(whole)]
            else:
                found[active] = b.shared[_within(b, at[active], whole)[:, None] + np.arange(whole)]
        values = found.view(Words[size])
        for i, write in enumerate(writes):
            write(b, values[:, i].copy())

    return do


def _within(b: Block, at: Array, size: int) -> Array:
    if (at % np.uint32(size)).any() or int(at.max()) + size > b.program.shared:
        raise AssertionError(f"shared memory of {b.program.shared} bytes: {at.max()} of {size} bytes")
    return at.astype(np.int64)


def _store(program: Program, s: Statement) -> Step:
    kind, space, guard = s.parts[-1], s.parts[0], program.guard(s)
    size, names = SIZES[kind], _registers(s.operands[1])
    reads = [program.read(name, size) for name in names]
    address, whole = program.address(s.operands[0], 4 if space == "shared" else 8), size * len(names)

    def do(b: Block) -> None:
        active = np.ones(program.threads, dtype=bool) if guard is None else guard(b)
        if not active.any():
            return
        value = np.stack([read(b) for read in reads], 1).view(np.uint8)[active]
        at = address(b)[active]
        if space == "global":
            b.memory.store(at, value)
        elif space == "local":
            b.stack[np.flatnonzero(active)[:, None], at.astype(np.int64)[:, None] + np.arange(whole)] = value
        else:
            b.shared[_within(b, at, whole)[:, None] + np.arange(whole)] = value

    return do


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
        active = np.ones(program.threads, dtype=bool) if guard is None else guard(b)
        many = np.full(program.threads, size) if some is None else some(b)
        value, reads = np.zeros((program.threads, size), dtype=np.uint8), active & (many != 0)
        if not np.isin(many[active], (0, size)).all():
            raise NotImplementedError("a part of a copy")
        if reads.any():
            value[reads] = b.memory.load(of(b)[reads], size)
        if active.any():
            b.pending[-1].append((_within(b, to(b)[active], size), value[active]))

    return do


def _matrix(program: Program, s: Statement) -> Step:
    """`ldmatrix`: 8 x 8 halves, whose rows a lane each names."""
    writes, address = [program.writer(s, x) for x in _registers(s.operands[0])], program.address(s.operands[1], 4)
    lane, turned = np.arange(32), "trans" in s.parts

    def do(b: Block) -> None:
        named = address(b).reshape(b.warps, 32)
        for i, write in enumerate(writes):
            rows = _within(b, named[:, 8 * i : 8 * i + 8].reshape(-1), 16)
            tile = b.shared[rows[:, None] + np.arange(16)].view(np.uint16).reshape(b.warps, 8, 8)
            tile = tile.transpose(0, 2, 1) if turned else tile
            two = [tile[:, lane >> 2, 2 * (lane & 3) + half] for half in (0, 1)]
            write(b, np.stack(two, -1).reshape(-1, 2).view(np.uint32)[:, 0])

    return do


def _matrix_kept(program: Program, s: Statement) -> Step:
    """`stmatrix`: the other way."""
    reads, address = [program.read(x, 4) for x in _registers(s.operands[1])], program.address(s.operands[0], 4)
    lane, turned = np.arange(32), "trans" in s.parts

    def do(b: Block) -> None:
        named = address(b).reshape(b.warps, 32)
        for i, read in enumerate(reads):
            rows, tile = _within(b, named[:, 8 * i : 8 * i + 8].reshape(-1), 16), np.empty((b.warps, 8, 8), np.uint16)
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
    writes = [program.writer(s, x) for x in _registers(s.operands[0])]
    a, c, d = ([program.read(x, 4) for x in _registers(operand)] for operand in s.operands[1:])
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
        at = {"up": lane - shift, "down": lane + shift, "bfly": lane ^ shift, "idx": first | (shift & ~segment & 31)}[mode]
        good = at >= last if mode == "up" else at <= last
        at = np.where(good, at, lane)
        write(b, value(b)[np.arange(program.threads) // 32 * 32 + at])
        if valid:
            valid(b, good)

    return do


def _reduce(program: Program, s: Statement) -> Step:
    write, read = program.writer(s, s.operands[0]), program.read(s.operands[1], 4)
    how = {"add": np.sum, "max": np.max, "min": np.min, "or": np.bitwise_or.reduce, "and": np.bitwise_and.reduce}[s.parts[1]]

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


def _nothing(program: Program, s: Statement) -> Step:
    return lambda b: None


KNOWN: dict[str, Callable[[Program, Statement], Step]] = {
    "mov": _move, "ld": _load, "st": _store, "cp": _copy, "ldmatrix": _matrix, "stmatrix": _matrix_kept, "mma": _product, "shfl": _shuffle,
    "redux": _reduce, "vote": _vote, "bar": _nothing, "cvta": _move, "membar": _nothing, "fence": _nothing,
}  # fmt: skip
