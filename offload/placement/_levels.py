"""The tiers that a page can be on: each keeps pieces in numbered slots.

    take, release    slots
    write, read      pieces, as named tensors

Tiers below memory are in `_packed`. Whatever a tier's failure is, it comes as StoreError; `Unwritable` says that nothing
was taken, so that what was to be written stays where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from kvengine.errors import StoreError
from kvengine.offload.placement import Fields, Site, TensorStore

UNLIMITED = 1 << 62
"""Pieces."""


class Unwritable(StoreError):
    """A tier did not take pages; they are where they were."""


class Full(StoreError):
    """No tier has room for more pages; all are where they were."""


class Slots:
    """Numbers given out and taken back."""

    def __init__(self) -> None:
        self.count = 0
        self.free: list[int] = []

    @property
    def used(self) -> int:
        return self.count - len(self.free)

    def take(self, n: int) -> np.ndarray:
        if (more := n - len(self.free)) > 0:
            self.free += range(self.count, self.count + more)
            self.count += more
        taken, self.free = self.free[:n], self.free[n:]
        return np.asarray(taken, dtype=np.int64)

    def release(self, slots: np.ndarray) -> None:
        """Low numbers are given out first, and the end is given up when it is free."""
        self.free = sorted([*self.free, *slots.tolist()])
        while self.free and self.free[-1] == self.count - 1:
            self.free.pop()
            self.count -= 1


@dataclass(frozen=True)
class Layout:
    """How the fields of a piece lie in its bytes."""

    fields: tuple[tuple[str, torch.dtype, tuple[int, ...], int, int], ...]  # name, dtype, shape, first byte, end
    size: int

    @staticmethod
    def of(like: Mapping[str, Tensor]) -> Layout:
        found, at = [], 0
        for name, x in like.items():
            size = x.new_empty(1, *x.shape[1:]).nbytes
            found.append((name, x.dtype, tuple(x.shape[1:]), at, at + size))
            at += size
        return Layout(tuple(found), at)

    def pack(self, fields: Mapping[str, Tensor]) -> np.ndarray:
        """[piece, byte]."""
        parts = [fields[name].flatten(1).contiguous().view(torch.uint8).cpu() for name, *_ in self.fields]
        return torch.cat(parts, 1).numpy()

    def unpack(self, raw: Tensor, without: tuple[str, ...] = ()) -> Fields:
        """The way back, from [piece, byte]."""
        return {
            name: raw[:, a:b].clone(memory_format=torch.contiguous_format).view(dtype).reshape(len(raw), *shape)
            for name, dtype, shape, a, b in self.fields
            if name not in without
        }


@runtime_checkable
class Level(Protocol):
    name: str
    capacity: int  # pieces
    slots: Slots

    def write(self, slots: np.ndarray, fields: Mapping[str, Tensor]) -> None: ...

    def read(self, slots: np.ndarray, without: tuple[str, ...]) -> Fields: ...

    def release(self, slots: np.ndarray) -> None: ...

    def nbytes(self) -> dict[str, int]: ...


class Memory:
    """Slots in tensors, on the device or in host memory."""

    def __init__(self, name: str, like: Mapping[str, Tensor], device: torch.device | None, capacity: int) -> None:
        self.name, self.capacity, self.slots = name, capacity, Slots()
        self.stores = {field: TensorStore(x, device) for field, x in like.items()}

    def write(self, slots: np.ndarray, fields: Mapping[str, Tensor]) -> None:
        need = self.slots.count
        for name, store in self.stores.items():
            if (have := len(store.data)) < need:
                store.reserve(max(need, min(self.capacity, have + have // 8)))
            store.write(torch.from_numpy(slots), fields[name])

    def read(self, slots: np.ndarray, without: tuple[str, ...]) -> Fields:
        at = torch.from_numpy(slots)  # read where they are: what goes further down need not pass the device
        return {n: store.data[at.to(store.data.device)] for n, store in self.stores.items() if n not in without}

    def release(self, slots: np.ndarray) -> None:
        self.slots.release(slots)

    def nbytes(self) -> dict[str, int]:
        return {name: store.data.nbytes for name, store in self.stores.items()}


def room(cap: int | None, layout: Layout, site: Site) -> int:
    """Pieces of this lane under a cap in bytes of the whole cache."""
    return UNLIMITED if cap is None else int(cap * site.share) // layout.size


def memory(like: Mapping[str, Tensor], layout: Layout, site: Site, device: int, host: int) -> list[Level]:
    """The tiers in memory under these caps, leaving out those without room for a piece."""
    cpu = torch.device("cpu")
    tiers = [("device", None, room(device, layout, site)), ("host", cpu, room(host, layout, site))]
    return [Memory(name, like, where, pieces) for name, where, pieces in tiers if pieces]
