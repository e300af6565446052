"""The remote tier: pages as values of a store."""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from kvengine.offload.placement._levels import Layout
from kvengine.offload.placement._packed import Packed
from kvengine.offload.stores.backend import Backend

EXTENT = 1 << 20
"""Bytes that go to a store as one value."""


class Owners:
    """How many copies of a cache want each value; common to them, and asked on any thread."""

    def __init__(self) -> None:
        self.count, self.lock = Counter[str](), threading.RLock()  # a cache may be collected while one is held

    def add(self, keys: Iterable[str]) -> None:
        with self.lock:
            self.count.update(list(keys))

    def remove(self, keys: Iterable[str]) -> list[str]:
        """Those that nobody wants any more."""
        with self.lock:
            self.count.subtract(keys := list(keys))
            gone = [key for key in keys if self.count[key] <= 0]
            for key in gone:
                del self.count[key]
        return gone


class Remote(Packed):
    """Slots in values of a store (`kvengine.offload.stores`): pages that go down together travel as one value.

    A value goes when its last page does, and after `ttl` seconds if the process is killed.
    """

    def __init__(self, layout: Layout, backend: Backend, capacity: int, ttl: float) -> None:
        super().__init__("remote", layout, capacity)
        self.backend, self.ttl, self.owners = backend, ttl, Owners()
        self.places: dict[int, tuple[str, int]] = {}  # slot: value, and where in it
        self.values: dict[str, tuple[int, int]] = {}  # value: bytes, and pages still wanted
        self.close = weakref.finalize(self, give_up, backend, self.values, self.owners, os.getpid())

    def __deepcopy__(self, memo: dict[int, Any]) -> Remote:
        """The same pieces: values never change, so copies share them, and the last one deletes them."""
        self.flush()
        twin = Remote(self.layout, self.backend, self.capacity, self.ttl)
        self.copied_to(twin)
        twin.places.update(self.places)
        twin.values.update(self.values)
        twin.close.detach()
        twin.owners = self.owners
        twin.owners.add(self.values)
        twin.close = weakref.finalize(twin, give_up, twin.backend, twin.values, twin.owners, os.getpid())
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
            delete(self.backend, [key for key, _, _ in made])
            raise
        with self.change:
            self.owners.add(key for key, _, _ in made)
            for key, a, n in made:
                self.values[key] = (n * self.layout.size, n)
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

    def disown(self, slots: np.ndarray) -> None:
        super().disown(slots)
        gone = []
        with self.change:
            for slot in slots.tolist():
                if (place := self.places.pop(slot, None)) is None:  # it was still waiting
                    continue
                size, wanted = self.values.pop(place[0])
                if wanted > 1:
                    self.values[place[0]] = (size, wanted - 1)
                else:
                    gone.append(place[0])
        if gone := self.owners.remove(gone):
            work = partial(delete, self.backend, gone)
            try:
                (self.run or direct)(work)
            except RuntimeError:  # no thread can be started
                work()

    def nbytes(self) -> dict[str, int]:
        with self.change:
            return {"values": sum(size for size, _ in self.values.values())}


def direct(work: Any) -> None:
    work()


def give_up(backend: Backend, values: dict[str, tuple[int, int]], owners: Owners, process: int) -> None:
    """Delete what nobody else wants. A cache may be collected at any moment, also while this very thread holds a lock that the
    store wants; so another thread does it, but at the end of the process, where there can be none. What a process that was forked
    off has are copies: the values are those of the `process` that made them."""
    if os.getpid() != process:
        return
    work = threading.Thread(target=delete, args=(backend, owners.remove(values)), name="kvpages-delete")
    try:
        work.start() if threading.main_thread().is_alive() else work.run()
    except RuntimeError:  # no thread can be started: they expire
        return


def delete(backend: Backend, keys: Iterable[str]) -> None:
    """One that cannot be deleted expires; then so will the others."""
    try:
        for key in keys:
            backend.delete(key)
    except Exception:
        return
