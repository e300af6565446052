"""The remote tier: pages as values of a store."""

from __future__ import annotations

import copy
import secrets
import weakref
from collections import Counter
from typing import Any

import numpy as np

from kvengine.offload.placement._levels import Layout, Packed
from kvengine.offload.stores.backend import Backend

EXTENT = 1 << 20
"""Bytes that go to a store as one value."""


class Remote(Packed):
    """Slots in values of a store (`kvengine.offload.stores`): pages that go down together travel as one value.

    A value goes when its last page does, and after `ttl` seconds if the process is killed.
    """

    def __init__(self, layout: Layout, backend: Backend, capacity: int, ttl: float) -> None:
        super().__init__("remote", layout, capacity)
        self.backend, self.ttl = backend, ttl
        self.places: dict[int, tuple[str, int]] = {}  # slot: value, and where in it
        self.values: dict[str, tuple[int, int]] = {}  # value: bytes, and pages still wanted
        self.owners = Counter[str]()  # how many copies of this cache want a value; common to them
        self.close = weakref.finalize(self, clear, backend, self.values, self.owners)

    def __deepcopy__(self, memo: dict[int, Any]) -> Remote:
        """The same pieces: values never change, so copies share them, and the last one deletes them."""
        twin = Remote(self.layout, self.backend, self.capacity, self.ttl)
        twin.slots, twin.sums = copy.deepcopy(self.slots, memo), dict(self.sums)
        twin.places.update(self.places)
        twin.values.update(self.values)
        twin.close.detach()
        twin.owners = self.owners
        twin.owners.update(self.values.keys())
        twin.close = weakref.finalize(twin, clear, twin.backend, twin.values, twin.owners)
        return twin

    def put(self, slots: np.ndarray, raw: np.ndarray) -> None:
        step = max(1, EXTENT // self.layout.size)
        made: list[tuple[str, int, int]] = []
        try:
            for a in range(0, len(slots), step):
                part = raw[a : a + step]
                key = secrets.token_hex(32)
                made.append((key, a, len(part)))
                self.backend.put(key, [np.ascontiguousarray(part).data.cast("B")], self.ttl)
        except Exception:
            clear(self.backend, {key: (0, 0) for key, _, _ in made}, Counter(key for key, _, _ in made))
            raise
        for key, a, n in made:
            self.values[key] = (n * self.layout.size, n)
            self.owners[key] += 1
            self.places.update((int(slots[a + i]), (key, i)) for i in range(n))

    def get(self, slots: np.ndarray, raw: np.ndarray) -> None:
        places = [self.places[slot] for slot in slots.tolist()]
        a = 0
        while a < len(places):
            key, first = places[a]
            b = a + 1
            while b < len(places) and places[b] == (key, first + b - a):
                b += 1
            view = raw[a:b].data.cast("B")
            if self.backend.read(key, view, first * self.layout.size) != len(view):
                raise OSError("a value is shorter than what was written to it")
            a = b

    def release(self, slots: np.ndarray) -> None:
        super().release(slots)
        gone: dict[str, tuple[int, int]] = {}
        for slot in slots.tolist():
            key, _ = self.places.pop(slot)
            size, wanted = self.values[key]
            self.values[key] = (size, wanted - 1)
            if wanted == 1:
                gone[key] = self.values.pop(key)
        clear(self.backend, gone, self.owners)

    def nbytes(self) -> dict[str, int]:
        return {"values": sum(size for size, _ in self.values.values())}


def clear(backend: Backend, values: dict[str, tuple[int, int]], owners: Counter[str]) -> None:
    """Delete values that nobody else wants; one that cannot be deleted expires."""
    for key in values:
        owners[key] -= 1
        if owners[key] > 0:
            continue
        del owners[key]
        try:
            backend.delete(key)
        except Exception:
            return
