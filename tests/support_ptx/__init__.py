"""Runs a kernel's compiled code (PTX) on a CPU: what the compiler made of it, on the memory of CPU tensors.

Triton's interpreter runs what was written; a GPU runs what was compiled of it, inline assembly included. Here all threads of
a block take each instruction together, one NumPy array for each register. What a GPU leaves open is made as bad as it may be:
registers and shared memory begin as garbage, a `cp.async` writes when it is waited for and no earlier, an address outside of
the arguments or not aligned is an error. Not seen: warps that overtake each other, and what is slow.

Not every instruction is known: an unknown one is an error.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from support_ptx.arithmetic import SIZES, Words, fit
from support_ptx.threads import LOCAL, THREADS, arithmetic, carried
from support_ptx.warps import TOGETHER, WARPS

Array = np.ndarray
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
    name, *parts = op.replace("::cta", "").split(".")  # shared memory is the block's own, whether that is said or not
    return Statement(
        guard[1:], name, tuple(parts), [x.strip() for x in re.split(r",(?![^{]*})", operands) if x.strip()]
    )


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
        tables = re.findall(r"\.global [^;]*?\.b8 ([\w$]+)\[\d+\] = {([^}]*)}", ptx)
        self.tables = {
            name: torch.tensor([int(x) for x in found.split(",")], dtype=torch.uint8) for name, found in tables
        }
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
        known = carried if "cc" in s.parts or s.op in ("addc", "madc") else (THREADS | WARPS).get(s.op, arithmetic)
        return "do", known(self, s)

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
        if operand in self.tables:
            return self.tables[operand].data_ptr()
        return int(operand.rstrip("U"), 0) & ((1 << 8 * size) - 1)

    def address(self, operand: str, size: int) -> Callable[[Block], Array]:
        base, sign, offset = re.match(r"\[\s*([^\s+\-\]]+)\s*(?:([+-])\s*(-?\w+))?\s*\]", operand).groups()
        start, more = self.read(base, size), int(f"{sign}{offset}".replace("+-", "-")) if offset else 0
        add = np.array(more & ((1 << 8 * size) - 1), dtype=Words[size])
        return lambda b: start(b) + add

    def guard(self, s: Statement) -> Callable[[Block], Array]:
        """Which threads do it."""
        if not s.guard:
            return lambda b: b.active
        truth, not_ = self.read(s.guard.lstrip("!"), 0), s.guard.startswith("!")
        return lambda b: (truth(b) ^ not_) & b.active

    def writer(self, s: Statement, operand: str, signed: bool = False) -> Callable[[Block, Array], None]:
        """Keeps a value in a register, where the guard holds; narrower ones are widened."""
        if operand == "_":
            return lambda b, value: None
        size, guard, always = self.sizes[operand], self.guard(s), not s.guard

        def write(b: Block, value: Array) -> None:
            value = fit(value, size, signed)
            b.registers[operand] = value if always and b.whole else np.where(guard(b), value, b.registers[operand])

        return write

    def launch(self, grid: Sequence[int], arguments: Sequence[Any], memory: Memory) -> int:
        """Run the blocks one after the other; how many instructions they took."""
        grid = [*grid, 1, 1][:3]
        params = []
        for kind, x in zip(self.types, arguments, strict=True):
            params.append(
                np.array([x], dtype=np.float32 if kind == "f32" else Words[SIZES[kind]].type).view(Words[SIZES[kind]])
            )
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
        self.active, self.whole, self.carry = np.ones(n, dtype=bool), True, np.zeros(n, dtype=np.uint64)
        garbage = {
            size: np.full(n, 0x7FF7C0DE7FF7C0DE & ((1 << 8 * size) - 1), dtype=Words[size]) for size in (2, 4, 8)
        }
        garbage[0] = np.ones(n, dtype=bool)
        self.registers = {name: garbage[size] for name, size in program.sizes.items()}
        self.shared = np.full(program.shared + 16, 0xF7, dtype=np.uint8)
        self.stack = np.full((n, sum(size for _, size in program.local.values())), 0xF7, dtype=np.uint8)
        self.pending: list[list[tuple[Array, Array]]] = [[]]
        zero = np.zeros(n, dtype=np.uint32)
        self.special = {f"%tid.{a}": np.arange(n, dtype=np.uint32) if a == "x" else zero for a in "xyz"}
        for axis, name in enumerate("xyz"):
            self.special |= {
                f"%ctaid.{name}": zero + np.uint32(at[axis]),
                f"%nctaid.{name}": zero + np.uint32(grid[axis]),
            }
            self.special[f"%ntid.{name}"] = zero + np.uint32(n if name == "x" else 1)

    def run(self) -> int:
        """Threads that part are taken on from the earliest statement that one of them is at, up to one that needs all."""
        turns, program, end = 0, self.program, len(self.program.steps)
        at, places = 0, np.zeros(program.threads, dtype=np.int64)
        waiting = np.zeros(program.threads, dtype=bool)
        while at < end:
            (kind, what), turns = program.steps[at], turns + 1
            if kind == "do" and self.whole:
                what(self)
                at += 1
                continue
            if kind == "do" and program.code[at].op in TOGETHER:
                waiting |= self.active
            elif kind == "do":
                what(self)
                places[self.active] = at + 1
            else:
                goes = program.guard(program.code[at])(self)
                if kind == "trap" and goes.any():
                    raise AssertionError("the kernel gave up (trap)")
                to = what if kind == "bra" else end
                if self.whole and goes.all() == goes.any():
                    at = to if goes.all() else at + 1
                    continue
                if self.whole:
                    places[:] = at
                places[self.active] = at + 1
                places[goes] = to
            at = int(places.min() if waiting.all() else places[~waiting].min())
            self.active = places == at
            self.whole = bool(self.active.all())
            if waiting.all() and not self.whole:
                raise AssertionError(f"threads wait for each other at different places, one of them {program.code[at]}")
            waiting &= not self.whole
        return turns

    def load(self, space: str, at: Array, size: int, active: Array) -> Array:
        """What so many bytes hold, [address, byte]; `active` threads ask."""
        if space == "shared":
            return self.shared[self.within(at, size)[:, None] + np.arange(size)]
        if space == "local" or (space != "global" and at.min() >= LOCAL):
            return self.stack[np.flatnonzero(active)[:, None], self.inner(at)[:, None] + np.arange(size)]
        return self.memory.load(at, size)

    def store(self, space: str, at: Array, value: Array, active: Array) -> None:
        size = value.shape[1]
        if space == "shared":
            self.shared[self.within(at, size)[:, None] + np.arange(size)] = value
        elif space == "local" or (space != "global" and at.min() >= LOCAL):
            self.stack[np.flatnonzero(active)[:, None], self.inner(at)[:, None] + np.arange(size)] = value
        else:
            self.memory.store(at, value)

    def inner(self, at: Array) -> Array:
        return (at & np.uint64(0xFFFFFFFF)).astype(np.int64)

    def within(self, at: Array, size: int) -> Array:
        """Places in shared memory."""
        if (at % np.uint32(size)).any() or int(at.max()) + size > self.program.shared:
            raise AssertionError(f"shared memory of {self.program.shared} bytes: {at.max()} of {size} bytes")
        return at.astype(np.int64)

    def wait(self, but: int) -> None:
        """All groups of `cp.async` but the last so many arrive."""
        done, self.pending = (
            self.pending[: len(self.pending) - 1 - but],
            self.pending[max(0, len(self.pending) - 1 - but) :],
        )
        for group in done:
            for at, value in group:
                self.shared[at[:, None] + np.arange(value.shape[1])] = value
