"""The few operations on files that the file store makes, behind one seam: tests put a recorder or a saboteur there."""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kvengine.offload.stores.record import Buffer

LEFT = 3600.0
"""Seconds after which a draft is no writer's any more: it was killed."""


class FileSystem:
    """Real files. Every method may raise OSError."""

    def mkdir(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def create(self, path: Path) -> int:
        """A new file, opened for writing; raises FileExistsError if there is one."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)

    def write(self, handle: int, data: Buffer) -> None:
        """All of `data`; a short write is continued."""
        view = memoryview(data).cast("B")
        while view:
            view = view[os.write(handle, view[: 1 << 26]) :]

    def open(self, path: Path) -> int:
        """An existing file, opened for reading; raises FileNotFoundError."""
        return os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))

    def size(self, handle: int) -> int:
        return os.fstat(handle).st_size

    def read(self, handle: int, into: memoryview, offset: int) -> int:
        """Fills `into` from `offset`; returns the bytes read, fewer only at the end of the file."""
        done = 0
        while done < len(into) and (got := os.preadv(handle, [into[done:]], offset + done)):
            done += got
        return done

    def sync(self, handle: int) -> None:
        """Data and length are durable when this returns."""
        getattr(os, "fdatasync", os.fsync)(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        os.replace(source, target)

    def sync_folder(self, path: Path) -> None:
        """Names in a folder are durable when this returns."""
        if os.name == "nt":
            return  # no such call there: NTFS logs its names
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def touch(self, path: Path, when: float) -> None:
        os.utime(path, (when, when))

    def scan(self, folder: Path) -> Iterator[tuple[Path, int, float]]:
        """(path, bytes, time of last change) of the files in a folder; nothing if there is no such folder."""
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return
        for entry in entries:
            try:
                state = entry.stat()
            except FileNotFoundError:  # another process removed it
                continue
            if entry.is_file():
                yield Path(entry.path), state.st_size, state.st_mtime


@contextmanager
def made_folder(folder: Path) -> Iterator[None]:
    """A folder that is there for the block, made if it is missing with those above it. Of what was made goes again what the block
    has left empty. Raises OSError."""
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        with suppress(OSError):  # it has been filled, and those above it are not empty either
            for one in new:
                one.rmdir()


def replace_file(path: Path, *data: Buffer) -> None:
    """Write a file of these parts: the whole of it or nothing, durable when this returns, whoever else writes it; who may read
    one that is replaced may read the new one. A link stays, and what it leads to is replaced. Drafts of it that killed writers
    left an hour ago go. Raises OSError."""
    if path.exists() and not path.is_file():
        with path.open("wb") as there:  # a rename would make a file of /dev/null, for everybody
            there.writelines(data)
        return
    path = Path(os.path.realpath(path)) if path.is_symlink() else path
    files, draft = FileSystem(), path.with_name(f".{path.name[:50]}.{secrets.token_hex(4)}.part")
    try:
        with draft.open("xb") as file:
            if path.exists():
                draft.chmod(stat.S_IMODE(path.stat().st_mode))
            file.writelines(data)
            file.flush()
            os.fsync(file.fileno())
        files.rename(draft, path)
    finally:
        files.unlink(draft)
    files.sync_folder(path.parent)
    with suppress(OSError):  # the file is there
        sweep(files, path)


def sweep(files: FileSystem, path: Path) -> None:
    """Remove what writers of this file left who were killed."""
    draft = re.compile(re.escape(f".{path.name[:50]}.") + r"[0-9a-f]{8}\.part")
    for one, _, changed in files.scan(path.parent):
        if draft.fullmatch(one.name) and time.time() - changed > LEFT:
            files.unlink(one)
