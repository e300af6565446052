"""The disk tier: a file of slots for each shelf."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvengine.errors import StoreError
from kvengine.offload.placement._levels import Layout
from kvengine.offload.placement._packed import Packed

SUFFIX = ".kvpages"


class File(Packed):
    """Slots in a file of its own, which goes when the cache does.

    The file is locked while its process lives; files that no process locks were left by one that was killed, and go
    when the next is opened in the same folder. Nothing in it outlives the process, so nothing is synced.
    """

    def __init__(self, layout: Layout, folder: str, capacity: int, swept: set[Path] | None = None) -> None:
        """`swept`: folders in which no more files of killed processes are looked for. All that are there are tried, so for every
        lane of a cache that would take longer the more caches there are."""
        super().__init__("disk", layout, capacity)
        self.folder, self.length = folder, threading.Lock()  # held while the file grows or shrinks
        self.swept = set() if swept is None else swept
        self.open()

    def open(self) -> None:
        place = Path(os.path.expanduser(self.folder) or tempfile.gettempdir())
        try:
            place.mkdir(parents=True, exist_ok=True)
            if place not in self.swept:
                sweep(place)
                self.swept.add(place)
            self.handle, path = tempfile.mkstemp(SUFFIX, "kvengine-", place)
            self.close = weakref.finalize(self, dispose, self.handle, path)
            try:
                fcntl.flock(self.handle, fcntl.LOCK_EX)
            except OSError:  # a file system without locks
                self.close()
                raise
        except OSError as error:
            way = "give another folder"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                way = "every cache has a file open for each lane of a layer: raise the limit (ulimit -n), or keep fewer caches"
            raise StoreError(f"pages cannot be kept in {place}: {error}; {way}") from error

    def __deepcopy__(self, memo: dict[int, Any]) -> File:
        """The same pieces in a file of its own."""
        self.flush()
        twin = File(self.layout, self.folder, self.capacity, self.swept)
        self.copied_to(twin)
        at = 0
        try:
            while part := os.pread(self.handle, 1 << 24, at):
                at += os.pwrite(twin.handle, part, at)
        except OSError as error:
            raise StoreError(f"pages on the disk tier could not be copied: {error}") from error
        return twin

    def put(self, slots: np.ndarray, raw: np.ndarray) -> None:
        with self.length:
            for a, b in runs(slots):
                view, at = raw[a:b].data.cast("B"), int(slots[a]) * self.layout.size
                while view:
                    done = os.pwrite(self.handle, view, at)
                    view, at = view[done:], at + done

    def get(self, slots: np.ndarray, raw: np.ndarray) -> None:
        for a, b in runs(slots):
            view, at = raw[a:b].data.cast("B"), int(slots[a]) * self.layout.size
            while view:
                if not (done := os.preadv(self.handle, [view], at)):
                    raise OSError("the file is shorter than what was written to it")
                view, at = view[done:], at + done

    def release(self, slots: np.ndarray) -> None:
        super().release(slots)
        with self.length:
            os.ftruncate(self.handle, min(self.slots.count * self.layout.size, os.fstat(self.handle).st_size))

    def nbytes(self) -> dict[str, int]:
        return {"file": os.fstat(self.handle).st_size}


def dispose(handle: int, path: str) -> None:
    os.close(handle)
    Path(path).unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Remove files that no living process holds."""
    for path in folder.glob(f"kvengine-*{SUFFIX}"):
        try:
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # another user's, a link, or gone
            continue
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except OSError:
            pass
        finally:
            os.close(handle)


def runs(slots: np.ndarray) -> Iterator[tuple[int, int]]:
    """Where slots that follow one another begin and end.

    >>> list(runs(np.array([4, 5, 6, 9, 2])))
    [(0, 3), (3, 4), (4, 5)]
    """
    cuts = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    yield from zip(cuts, cuts[1:], strict=False)
