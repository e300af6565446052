"""Tiers below memory: pieces as bytes, written by a thread of their own.

`write` packs pieces, puts them behind those that wait, and returns; a thread writes them in that order. What waits is
read from where it waits, so a page is never out of reach, and it is bounded: a caller that is faster than the tier waits
for it (`PENDING`).

A write that fails is logged and counted, and nothing of it is lost: it stays where it waits, counted as host memory.
For `PAUSE` seconds the tier then takes nothing more (`Unwritable`, with the reason), and what comes next stays on the
tier above; after that, what waits is tried again, oldest first.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
import weakref
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvengine.errors import CorruptBitstream, StoreError
from kvengine.offload.forked import check_process
from kvengine.offload.placement import Fields
from kvengine.offload.placement._levels import Layout, Slots, Unwritable

log = logging.getLogger(__name__)
PAUSE = 5.0
"""Seconds for which a tier that failed to write is not tried again."""

PENDING = 1 << 26
"""Bytes of one cache's pages that may wait to be written to a tier; its layers have equal parts."""

Run = Callable[[Callable[[], None]], object]
"""Runs work later, on another thread."""


@dataclass
class Batch:
    """Pieces that were taken together: their slots, whether each is still wanted, and their bytes [piece, byte]."""

    slots: np.ndarray
    raw: np.ndarray
    wanted: np.ndarray = field(init=False)
    busy: bool = False  # being written just now

    def __post_init__(self) -> None:
        self.wanted = np.ones(len(self.slots), dtype=bool)


class Packed(ABC):
    """Pieces as bytes in numbered slots, with a checksum of each kept here.

    Subclasses say how bytes are put and got. Until `behind` is called, writing waits for the tier.
    """

    def __init__(self, name: str, layout: Layout, capacity: int) -> None:
        self.name, self.layout, self.capacity, self.slots = name, layout, capacity, Slots()
        self.sums: dict[int, int] = {}
        self.process = os.getpid()
        self.most = max(1, PENDING // layout.size)  # pieces that may wait
        self.run: Run | None = None
        self.change = threading.Condition()
        self.batches: deque[Batch] = deque()
        self.waiting: dict[int, tuple[Batch, int]] = {}  # slot: where its bytes wait
        self.running = False  # the thread has been asked
        self.failures, self.stuck, self.closed_until = 0, "", 0.0  # stuck: why the oldest batch was not written

    def behind(self, run: Run, share: float) -> None:
        """From now on write on another thread; `share` of `PENDING` may wait."""
        self.run, self.most = run, max(1, int(PENDING * share) // self.layout.size)

    def check_process(self) -> None:
        """Raises StoreError in a process that was forked off: the bytes are where the other one goes on writing."""
        instead = "save the session before the fork (kvengine.saved.save) and load it here, or begin another cache"
        check_process(self.process, f"pages were put on the {self.name} tier", instead)

    # Down

    def write(self, slots: np.ndarray, fields: Mapping[str, Tensor]) -> None:
        """Take pieces. Waits while too many others do. Raises Unwritable while the tier fails; none is taken then."""
        try:
            for a in range(0, len(slots), self.most):
                part = slots[a : a + self.most]
                self.take(part, {name: x[a : a + self.most] for name, x in fields.items()})
        except Unwritable:
            self.disown(slots)
            raise

    def take(self, slots: np.ndarray, fields: Mapping[str, Tensor]) -> None:
        self.check_open(len(slots))
        batch = Batch(slots, self.layout.pack(fields))
        sums = [zlib.crc32(piece) for piece in batch.raw]
        with self.change:
            self.wake()
            self.change.wait_for(lambda: bool(self.stuck) or len(self.waiting) + len(slots) <= self.most)
            if self.stuck:
                raise self.unwritable(len(slots))
            self.enqueue(batch)
            self.sums.update(zip(slots.tolist(), sums, strict=True))
            self.wake()
            if self.run is None and self.stuck:
                raise self.unwritable(len(slots))

    def check_open(self, pieces: int) -> None:
        """Refuse at once while the tier is given a pause."""
        self.check_process()
        self.reopen()
        if self.stuck:
            raise self.unwritable(pieces)

    def reopen(self) -> None:
        """After the pause, what waits may be tried again."""
        with self.change:
            if time.monotonic() >= self.closed_until:
                self.stuck = ""

    def unwritable(self, pieces: int) -> Unwritable:
        return Unwritable(f"{pieces} pages were not written to the {self.name} tier: {self.stuck}")

    def enqueue(self, batch: Batch) -> None:
        self.batches.append(batch)
        self.waiting.update((int(slot), (batch, i)) for i, slot in enumerate(batch.slots))

    def wake(self) -> None:
        """Have what waits written."""
        if self.running or not self.batches or self.stuck:
            return
        self.running = True
        if self.run is None:
            while self.write_next():
                pass
            return
        try:
            self.run(partial(drain, weakref.ref(self)))
        except BaseException as error:
            self.running = False
            if not isinstance(error, RuntimeError):  # which says that no thread can be started
                raise
            self.failed(self.batches[0], str(error))

    def write_next(self) -> bool:
        """Write the oldest batch; whether there may be another."""
        with self.change:
            if not self.batches or self.stuck or self.batches[0].busy:  # by a thread that goes on with those behind it
                self.running = False
                return False
            batch = self.batches[0]
            batch.busy, wanted = True, batch.wanted.copy()
        problem = ""
        try:
            self.put(*((batch.slots, batch.raw) if wanted.all() else (batch.slots[wanted], batch.raw[wanted])))
        except Exception as error:  # whatever a client library raises
            problem = f"{error}" or type(error).__name__
        with self.change:
            batch.busy = False
            self.failed(batch, problem) if problem else self.written(batch)
            self.change.notify_all()
        return True

    def written(self, batch: Batch) -> None:
        self.batches.popleft()
        for slot in batch.slots[batch.wanted].tolist():
            del self.waiting[slot]

    def failed(self, batch: Batch, problem: str) -> None:
        self.failures, self.stuck, self.closed_until = self.failures + 1, problem, time.monotonic() + PAUSE
        count = int(batch.wanted.sum())
        log.warning("%d pages were not written to the %s tier and stay in memory: %s", count, self.name, problem)

    def disown(self, slots: np.ndarray) -> None:
        """Forget what these slots hold, written or waiting; waits if one is being written just now."""
        self.check_process()
        with self.change:
            mine = [self.waiting[slot] for slot in slots.tolist() if slot in self.waiting]
            self.change.wait_for(lambda: not any(batch.busy for batch, _ in mine))
            for slot in slots.tolist():
                self.sums.pop(slot, None)
                if (entry := self.waiting.pop(slot, None)) is not None:
                    entry[0].wanted[entry[1]] = False
            self.batches = deque(batch for batch in self.batches if batch.wanted.any())
            self.change.notify_all()

    def release(self, slots: np.ndarray) -> None:
        self.disown(slots)
        self.slots.release(slots)

    def flush(self) -> None:
        """Wait until all is written, or the tier fails."""
        if self.slots.used:
            self.check_process()
        self.reopen()
        with self.change:
            self.wake()
            self.change.wait_for(lambda: not self.batches or bool(self.stuck))

    @property
    def waiting_bytes(self) -> int:
        with self.change:
            return sum(batch.raw.nbytes for batch in self.batches)

    # Up

    def read(self, slots: np.ndarray, without: tuple[str, ...]) -> Fields:
        raw = torch.empty(len(slots), self.layout.size, dtype=torch.uint8)
        self.fetch(slots, raw)
        return self.layout.unpack(raw, without)

    def fetch(self, slots: np.ndarray, into: Tensor) -> None:
        """Fill `into` [piece, byte]. Raises StoreError, or CorruptBitstream for bytes that are not those written."""
        self.check_process()
        raw = into.numpy()
        with self.change:
            entries = [self.waiting.get(slot) for slot in slots.tolist()]
        there = np.array([entry is None for entry in entries], dtype=bool)
        for i, entry in enumerate(entries):
            if entry is not None:
                raw[i] = entry[0].raw[entry[1]]
        if there.all():
            self.get_checked(slots, raw)
        elif there.any():
            part = np.empty((int(there.sum()), raw.shape[1]), dtype=np.uint8)
            self.get_checked(slots[there], part)
            raw[there] = part

    def get_checked(self, slots: np.ndarray, raw: np.ndarray) -> None:
        try:
            self.get(slots, raw)
        except KeyError as error:
            raise StoreError(
                f"pages could not be read from the {self.name} tier, which has them no more: they expired (ttl), or were evicted "
                "or deleted. kvengine.recover.generate computes such tokens again"
            ) from error
        except Exception as error:
            raise StoreError(f"pages could not be read from the {self.name} tier: {error}") from error
        for slot, piece in zip(slots.tolist(), raw, strict=True):
            if zlib.crc32(piece) != self.sums[slot]:
                raise CorruptBitstream(f"a page on the {self.name} tier is not what was written there")

    def copied_to(self, twin: Packed) -> None:
        """Give a copy of this tier what waits here, and the rest of its state; call `flush` before."""
        with self.change:
            twin.slots, twin.sums, twin.most = copy.deepcopy(self.slots), dict(self.sums), self.most
            twin.stuck, twin.closed_until = self.stuck, self.closed_until
            for batch in self.batches:
                twin.enqueue(Batch(batch.slots[batch.wanted], batch.raw[batch.wanted]))

    @abstractmethod
    def put(self, slots: np.ndarray, raw: np.ndarray) -> None: ...

    @abstractmethod
    def get(self, slots: np.ndarray, raw: np.ndarray) -> None: ...


def drain(level: weakref.ref[Packed]) -> None:
    """Write what waits; stops when the tier is gone, and then nobody wants it."""
    while (there := level()) is not None and there.write_next():
        del there
