"""Doubles for the file store's seam: one that fails or kills at the N-th call, one that knows every legal state after a
crash."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from kvengine.offload.stores.filesystem import FileSystem

METHODS = (
    "mkdir",
    "create",
    "open",
    "size",
    "read",
    "write",
    "sync",
    "close",
    "rename",
    "sync_folder",
    "unlink",
    "touch",
)


class Quick(FileSystem):
    """Real files without real syncs: the doubles model what a sync is for."""

    def sync(self, handle: int) -> None: ...

    def sync_folder(self, path: Path) -> None: ...


class Saboteur(Quick):
    """Does `act` instead of (or, with `after`, just after) the N-th call, counted from 1; otherwise real files."""

    def __init__(self, at: int = 0, act: Callable[[str], None] | None = None, after: bool = False) -> None:
        self.calls, self.at, self.act, self.after = 0, at, act, after
        for name in METHODS:
            setattr(self, name, self._wrapped(name, getattr(super(), name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls += 1
            now = self.calls == self.at and self.act is not None
            if now and not self.after:
                if name == "write":  # half of it arrives
                    real(arguments[0], memoryview(arguments[1])[: len(arguments[1]) // 2])
                if name == "close":  # a failed close still closes
                    real(*arguments)
                self.act(name)  # type: ignore[misc]
            try:
                return real(*arguments)
            finally:
                if now and self.after:
                    self.act(name)  # type: ignore[misc]

        return call


def die(_: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Inode:
    """A file's bytes as written, and as many of them as are certain to survive."""

    data: bytearray = field(default_factory=bytearray)
    synced: bytes | None = None

    def states(self) -> list[bytes]:
        """What may be in it after a power loss: all, nothing, a part, or the right length with holes."""
        if self.synced == bytes(self.data):
            return [self.synced]
        base, whole = self.synced or b"", bytes(self.data)
        half = len(whole) // 2
        holes = whole[:half] + bytes(len(whole) - half)
        return list(dict.fromkeys([whole, base, whole[:half], holes, bytes(len(whole))]))


class Recorder(Quick):
    """Real files, and beside them a model of what a power loss at this moment may leave.

    Names are durable once their folder is synced; until then each change of names may or may not have happened, except
    that a rename never loses both names. Bytes are durable once their file is synced.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.handles = root, dict[int, Path]()
        self.names: dict[Path, Inode] = {}  # as a running system sees them
        self.durable: dict[Path, Inode] = {}
        self.pending: list[tuple[Path, Inode | None]] = []  # (name, file or None for removed), not yet durable

    def create(self, path: Path) -> int:
        handle = super().create(path)
        self.handles[handle] = path
        self._set(path, Inode())
        return handle

    def _set(self, path: Path, inode: Inode | None) -> None:
        self.pending.append((path, inode))
        if inode is None:
            self.names.pop(path, None)
        else:
            self.names[path] = inode

    def write(self, handle: int, data: Any) -> None:
        super().write(handle, data)
        self.names[self.handles[handle]].data += bytes(data)

    def sync(self, handle: int) -> None:
        super().sync(handle)
        inode = self.names[self.handles[handle]]
        inode.synced = bytes(inode.data)

    def close(self, handle: int) -> None:
        super().close(handle)
        self.handles.pop(handle, None)

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        inode = self.names[source]
        self._set(target, inode)
        self._set(source, None)

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        if path in self.names:
            self._set(path, None)

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        for name, inode in [change for change in self.pending if change[0].parent == path]:
            self._apply(self.durable, name, inode)
        self.pending = [change for change in self.pending if change[0].parent != path]

    @staticmethod
    def _apply(names: dict[Path, Inode], name: Path, inode: Inode | None) -> None:
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode

    def crashes(self, most: int) -> Iterator[dict[Path, bytes]]:
        """Legal states of the disk now, at most `most` (the newest changes vary first)."""
        free = self.pending[-6:]
        settled = dict(self.durable)
        for name, inode in self.pending[:-6]:
            self._apply(settled, name, inode)
        seen: set[tuple[tuple[str, bytes], ...]] = set()
        for happened in product((True, False), repeat=len(free)):
            names = dict(settled)
            for did, (name, inode) in zip(happened, free, strict=True):
                if did and (inode is not None or self._moved(name, names)):
                    self._apply(names, name, inode)
            for contents in product(*(inode.states() for inode in names.values())):
                state = dict(zip(names, contents, strict=True))
                mark = tuple(sorted((str(path), data) for path, data in state.items()))
                if mark not in seen:
                    seen.add(mark)
                    yield state
                if len(seen) >= most:
                    return

    def _moved(self, name: Path, names: dict[Path, Inode]) -> bool:
        """A name may go if it was deleted, or if its file is there under the new name."""
        inode = names.get(name)
        target = next((p for p, i in self.names.items() if i is inode), None)
        return inode is None or target is None or names.get(target) is inode
