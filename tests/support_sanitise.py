"""What compute-sanitizer would say of the Triton kernels, asked of their interpreter: where each program reads and writes.

The interpreter runs a launch's programs one after the other, and each one's threads as one. A GPU orders neither. So every
access is noted, by bytes, and a launch fails if it

- touches memory outside the storages that it was given,
- writes what another of its programs reads or writes,
- reads what the same program wrote, or writes what it read, with no barrier in between and more than one warp to run ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

LARGE = 1 << 26
"""Bytes of a storage beyond which only its ends are watched."""


class Trace:
    """Who last did something to each byte of a storage: which program, after how many of its barriers, in which lane
    (0: in several)."""

    def __init__(self, size: int) -> None:
        self.program = np.zeros(size, dtype=np.int32)  # from 1; 0 is nobody, -1 several
        self.phase = np.zeros(size, dtype=np.int32)
        self.lane = np.zeros(size, dtype=np.int64)

    def note(self, touched: np.ndarray, program: int, phase: int, lane: np.ndarray) -> None:
        before = self.program[touched]
        again = (before == program) & (self.phase[touched] == phase) & (self.lane[touched] != lane)
        self.program[touched] = np.where((before == 0) | (before == program), program, -1)
        self.phase[touched] = phase
        self.lane[touched] = np.where(again, 0, lane)
        self.lane[touched[self.lane[touched] != lane]] = 0  # several lanes at once, or one after the other


class Storage:
    """The bytes of one argument."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        whole = tensor.untyped_storage()
        self.name, self.start, self.size = name, whole.data_ptr(), whole.nbytes()

    @cached_property
    def written(self) -> Trace:
        return Trace(self.size)

    @cached_property
    def read(self) -> Trace:
        return Trace(self.size)


class Watch:
    """The accesses of one launch's programs; each is a block of addresses in bytes, and a mask."""

    def __init__(self, kernel: str, tensors: list[tuple[str, torch.Tensor]], warps: int) -> None:
        self.kernel, self.warps, self.program, self.phase = kernel, warps, 0, 0
        known = {storage.start: storage for storage in (Storage(*named) for named in reversed(tensors))}
        self.storages = [known[start] for start in sorted(known)]
        self.starts = np.array([storage.start for storage in self.storages], dtype=np.int64)

    def read(self, block: np.ndarray, mask: np.ndarray, width: int) -> None:
        for storage, touched, lane in self._touched(block, mask, width, "reads"):
            self._refuse(storage, touched, lane, storage.written, "reads what {} wrote")
            storage.read.note(touched, self.program, self.phase, lane)

    def write(self, block: np.ndarray, mask: np.ndarray, width: int) -> None:
        for storage, touched, lane in self._touched(block, mask, width, "writes"):
            self._refuse(storage, touched, lane, storage.written, "writes what {} wrote")
            self._refuse(storage, touched, lane, storage.read, "writes what {} read")
            storage.written.note(touched, self.program, self.phase, lane)
            if len(np.unique(touched)) < len(touched):
                raise AssertionError(f"{self.kernel}: one store writes a byte of {storage.name} twice")

    def _touched(
        self, block: np.ndarray, mask: np.ndarray, width: int, does: str
    ) -> Iterator[tuple[Storage, np.ndarray, np.ndarray]]:
        """Of each storage the bytes, and the lanes that touch them. A lane is a thread as far as one is known: threads hold
        the same places of equal blocks; of a block smaller than they are many, several hold the same (below 0)."""
        block, mask = np.broadcast_arrays(block, mask)
        asked = np.flatnonzero(mask)
        addresses = block.reshape(-1)[asked].astype(np.int64)
        lanes = asked + 1 + (hash(block.shape) & 0xFFFF) * 2**40
        lanes = lanes if block.size >= 32 * self.warps else -lanes
        which = np.maximum(np.searchsorted(self.starts, addresses, side="right") - 1, 0)
        for index in np.unique(which):
            storage, mine = self.storages[index], which == index
            first = addresses[mine] - storage.start
            if first.min() < 0 or first.max() + width > storage.size:
                raise AssertionError(
                    f"{self.kernel}: program {self.program} {does} outside; the nearest storage is {storage.name}'s, of "
                    f"{storage.size} bytes, and what it touches begins at bytes {first.min()} to {first.max()}"
                )
            if storage.size <= LARGE:
                yield storage, (first[:, None] + np.arange(width)).reshape(-1), np.repeat(lanes[mine], width)

    def _refuse(self, storage: Storage, touched: np.ndarray, lane: np.ndarray, trace: Trace, does: str) -> None:
        by = trace.program[touched]
        if ((by != 0) & (by != self.program)).any():
            raise AssertionError(f"{self.kernel}: a program {does.format('another')}, of {storage.name}")
        hurried = (by == self.program) & (trace.phase[touched] == self.phase)
        if self.warps > 1 and (hurried & ((lane < 0) | (trace.lane[touched] != lane))).any():
            raise AssertionError(
                f"{self.kernel}: a program {does.format('it')}, of {storage.name}, and no barrier is between"
            )


def named(name: str, argument: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(argument, torch.Tensor):
        yield name, argument
    elif isinstance(argument, tuple):
        for index, part in enumerate(argument):
            yield from named(f"{name}[{index}]", part)


def watch_interpreter() -> None:
    """From now on, every interpreted launch is watched."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    load, store, place = builder.create_masked_load, builder.create_masked_store, builder.set_grid_idx
    launch = interpreter.GridExecutor.__call__
    state = SimpleNamespace(watch=None)

    def noted_load(ptrs: Any, mask: Any, *rest: Any) -> Any:
        if state.watch is not None:
            state.watch.read(ptrs.data, mask.data, bytes_of(ptrs))
        return load(ptrs, mask, *rest)

    def noted_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if state.watch is not None:
            state.watch.write(ptrs.data, mask.data, bytes_of(ptrs))
        return store(ptrs, value, mask, *rest)

    def bytes_of(ptrs: Any) -> int:
        return max(1, ptrs.get_element_ty().primitive_bitwidth // 8)

    def placed(x: int, y: int, z: int) -> None:
        place(x, y, z)
        if state.watch is not None:
            _, ny, nz = builder.grid_dim
            state.watch.program, state.watch.phase = 1 + (x * ny + y) * nz + z, 0

    def barrier() -> None:
        if state.watch is not None:
            state.watch.phase += 1

    def watched(self: Any, *args: Any, **options: Any) -> Any:
        names = [*self.arg_names[: len(args)], *options]
        tensors = [
            found for name, value in zip(names, [*args, *options.values()], strict=True) for found in named(name, value)
        ]
        state.watch = Watch(self.fn.__name__, tensors, options.get("num_warps", 4))
        try:
            return launch(self, *args, **options)
        finally:
            state.watch = None

    builder.create_masked_load, builder.create_masked_store = noted_load, noted_store
    builder.set_grid_idx, builder.create_barrier = placed, barrier
    interpreter.GridExecutor.__call__ = watched
