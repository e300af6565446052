"""The embedded store: one file per value, found by its key; an SQLite index for capacity.

    objects/a/<key>.kv    header and payload (record.py)        tmp/         files being written
    pins/<key>            empty: not evicted                    quarantine/  damaged files, the last 8
    index.sqlite          rebuildable (index.py)

A value is written to tmp/, made durable, renamed into place, and its folder made durable; only then does `put` return.
So after a crash or power loss at any point a value is there whole or not at all, and an acknowledged one is there. A
file system that reorders or tears unsynced writes is allowed for: headers and payloads carry digests.

After a failed fsync the kernel may have dropped the pages and call them clean (Rebello et al., ATC 2020), so the file
is given up, never synced again.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

from kvengine.errors import CorruptBitstream, StoreError
from kvengine.offload.stores import keys, record
from kvengine.offload.stores.filesystem import FileSystem
from kvengine.offload.stores.index import Index
from kvengine.offload.stores.record import Buffer, Entry

log = logging.getLogger(__name__)
SHARDS = "0123456789abcdef"
QUARANTINED = 8
COARSE = 1.0  # seconds: accesses closer together count once


class Files:
    """A folder of stored values, shared by any number of processes on one machine.

    folder:  made if missing
    cap:     most bytes of payload, None without limit; least recently used values that are not pinned make room
    sync:    "always" survives power loss; "none" only the end of the process, and is several times faster
    spares:  what does not fit on a full disk is not stored; else it costs values, those that were used longest ago
    grace:   seconds after which an unfinished file, and the room kept for it, count as left over
    files:   where the bytes go; for tests

    Raises StoreError if the folder cannot be used.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        cap: int | None = None,
        sync: Literal["always", "none"] = "always",
        spares: bool = False,
        grace: float = 3600.0,
        files: FileSystem | None = None,
    ) -> None:
        self.folder, self.cap, self.durable, self.grace = Path(folder), cap, sync == "always", grace
        self.files, self.spares = files or FileSystem(), spares
        self.damaged = self.removed = 0  # values that were moved to quarantine, and that opening it removed
        try:
            self._prepare()
            if not os.access(self.folder, os.W_OK):
                raise PermissionError("its folder cannot be written, where what was used when is written down; copy it")
            self.index = Index(self.folder / "index.sqlite")
            self.removed = self.gc()
        except (OSError, sqlite3.Error) as error:
            full = "; the disk is full" if _is_full(self.folder) else ""
            raise StoreError(f"the store at {self.folder} cannot be opened: {error}{full}") from error

    def _prepare(self) -> None:
        for name in ("tmp", "pins", "quarantine", *(f"objects/{shard}" for shard in SHARDS)):
            self.files.mkdir(self.folder / name)
        for name in ("objects", "."):
            self._sync_folder(self.folder / name)

    def path(self, key: str) -> Path:
        return self.folder / "objects" / key[:1] / f"{keys.check(key)}.kv"

    def put(self, key: str, payload: Sequence[Buffer], ttl: float | None = None) -> None:
        """Stores a value. Raises StoreError if there is no room for it or the disk fails."""
        front = record.header(key, payload, ttl)
        entry = record.parse(front)
        if self._has(entry):
            return self._touch(key)
        try:
            self._reserved_write(entry, [front, *payload])
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if error.errno == errno.ENOENT:
                self._make_anew()
            elif not full or self.spares or not self._make_room(entry.size):
                raise StoreError(f"{key[:12]}... was not stored: {error}") from error
            self._last_try(entry, [front, *payload])

    def _make_anew(self) -> None:
        """Folders were removed while the store is open, by who clears temporary files, say: it would take nothing any more."""
        log.warning("folders of the store at %s were removed, and are made anew", self.folder)
        try:
            self._prepare()
            self.index.anew()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"the store at {self.folder} was removed and cannot be made anew: {error}") from error

    def _last_try(self, entry: Entry, parts: Sequence[Buffer]) -> None:
        try:
            self._reserved_write(entry, parts)
        except OSError as error:
            raise StoreError(f"{entry.key[:12]}... was not stored: {error}") from error

    def _has(self, entry: Entry) -> bool:
        """Whether an equal value is there, whole, that lives at least as long. One that is damaged goes out of the way."""
        try:
            if serves := self._header(entry.key).serves(entry):
                self.verify(entry.key)
            return serves
        except (KeyError, OSError):
            return False

    def _reserved_write(self, entry: Entry, parts: Sequence[Buffer]) -> None:
        writer = f"{os.getpid()}-{secrets.token_hex(4)}"
        try:
            with self.index.reserve(entry, writer, self.cap, time.time()) as victims:
                self.index.pin(entry.key, self._pin(entry.key).exists())
                for victim in victims:
                    self._unlink(victim)
        except sqlite3.Error as error:
            full = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
            raise OSError(errno.ENOSPC if full else errno.EIO, f"the index failed: {error}") from error
        try:
            self._write(self.folder / "tmp" / f"{entry.key[:16]}-{writer}", self.path(entry.key), parts)
        except BaseException:
            self._quietly(lambda key: self._take_back(key, writer), entry.key)
            raise
        self._quietly(lambda key: self.index.commit(self._marked(entry)), entry.key)
        if not self.path(entry.key).exists():  # deleted before that, by who leaves to a writer what it has reserved
            self._quietly(self._uncount, entry.key)

    def _uncount(self, key: str) -> None:
        """A value is gone, unless somebody has put it anew by now."""
        self.index.remove(key, unless=self.path(key).exists)

    def _take_back(self, key: str, writer: str) -> None:
        """A write failed: forget what was reserved for it, and count again what is still there."""
        self.index.remove(key, writer)
        with suppress(KeyError, OSError):
            self.index.add(self._marked(self._header(key)))

    def _marked(self, entry: Entry) -> Entry:
        return replace(entry, pinned=self._pin(entry.key).exists())

    def _write(self, draft: Path, target: Path, parts: Sequence[Buffer]) -> None:
        handle = self.files.create(draft)
        try:
            try:
                for part in parts:
                    self.files.write(handle, part)
                if self.durable:
                    self.files.sync(handle)
            finally:
                self.files.close(handle)
            self.files.rename(draft, target)
        except BaseException:
            self.files.unlink(draft)
            raise
        self._sync_folder(target.parent)

    def _sync_folder(self, folder: Path) -> None:
        if self.durable:
            self.files.sync_folder(folder)

    def _make_room(self, size: int) -> bool:
        """The disk is full though the cap is not: give up as much as is about to be written, or nothing if that is not there."""
        self._quietly(lambda _: self.index.put_back(time.time()), "")
        free = sorted((e for e in self.entries() if not e.pinned), key=lambda e: e.accessed)
        if sum(entry.size for entry in free) < size:
            return False
        freed = 0
        for entry in free:
            if freed >= size:
                break
            freed += entry.size
            self.delete(entry.key)
        log.warning("disk full: %d bytes evicted from %s", freed, self.folder)
        return True

    def read(self, key: str, into: memoryview, offset: int = 0) -> int:
        """Fills `into`. Raises KeyError, or CorruptBitstream after moving the damaged file out of the way."""
        handle = self._open(key)
        try:
            entry = self._parse(handle, key)
            want = max(min(len(into), entry.size - offset), 0)
            got = self.files.read(handle, into[:want], record.SIZE + offset)
            if want == entry.size:
                record.check_payload(entry, into[:got])
        except CorruptBitstream:
            self._quarantine(key)
            raise
        finally:
            self.files.close(handle)
        if entry.expired(time.time()):
            raise KeyError(key)  # by its name it might be another by now, that somebody has put anew
        self._touch(key, entry)
        return got

    def _open(self, key: str) -> int:
        try:
            return self.files.open(self.path(key))
        except FileNotFoundError:
            self._quietly(self._uncount, key)
            raise KeyError(key) from None

    def _header(self, key: str) -> Entry:
        handle = self._open(key)
        try:
            return self._parse(handle, key)
        finally:
            self.files.close(handle)

    def _parse(self, handle: int, key: str) -> Entry:
        front = bytearray(record.SIZE)
        got = self.files.read(handle, memoryview(front), 0)
        entry = record.parse(front[:got], key)
        if self.files.size(handle) != record.SIZE + entry.size:
            raise CorruptBitstream(f"the file of {key[:12]}... is torn")
        return entry

    def size(self, key: str) -> int | None:
        try:
            entry = self._header(key)
        except KeyError:
            return None
        except CorruptBitstream:
            self._quarantine(key)
            return None
        return None if entry.expired(time.time()) else entry.size

    def delete(self, key: str) -> bool:
        there = self.path(key).exists()
        self._unlink(key)
        for damaged, _, _ in self.files.scan(self.folder / "quarantine"):
            if damaged.name.startswith(key):
                self.files.unlink(damaged)
        self._quietly(self._uncount, key)
        return there

    def _unlink(self, key: str) -> None:
        self.files.unlink(self.path(key))
        self.files.unlink(self._pin(key))

    def _pin(self, key: str) -> Path:
        return self.folder / "pins" / keys.check(key)

    def entries(self) -> list[Entry]:
        with self._index_errors():
            return self.index.entries()

    def pin(self, key: str, pinned: bool = True) -> None:
        """A pin is a file of its own, so that it outlives the index."""
        mark = self._pin(key)
        if not pinned:
            self.files.unlink(mark)
        elif self.size(key) is None:
            raise KeyError(key)
        else:
            with suppress(FileExistsError):
                self.files.close(self.files.create(mark))
            self._sync_folder(mark.parent)
        with self._index_errors():
            self.index.pin(key, pinned)
        gone = self.size(key) is None if pinned else not self.path(key).exists()
        if gone:  # or has made room before the index knew
            self.files.unlink(mark)
            raise KeyError(key)

    def verify(self, key: str) -> None:
        size = self.size(key)
        if size is None:
            raise KeyError(key)
        self.read(key, memoryview(bytearray(size)))

    def gc(self) -> int:
        """Sweeps left-over files, rebuilds the index from a scan, removes what is expired or above the cap."""
        now = time.time()
        for path, _, changed in self.files.scan(self.folder / "tmp"):
            if now - changed > self.grace:
                self.files.unlink(path)
        with self._index_errors():
            known, found = self.index.entries(), list(self._scan(now))
            still = (entry for entry in found if self.path(entry.key).exists())  # asked while the index is set
            self.index.replace(known, still, _alive, now - self.grace, self._pinned)
            with self.index.trim(self.cap, now) as gone:
                for key in gone:
                    self._unlink(key)
        return len(gone)

    def _pinned(self) -> set[str]:
        return {path.name for path, _, _ in self.files.scan(self.folder / "pins")}

    def _scan(self, now: float) -> Iterator[Entry]:
        for shard in SHARDS:
            for path, size, changed in self.files.scan(self.folder / "objects" / shard):
                if path.name != f"{path.stem}.kv" or not keys.KEY.fullmatch(path.stem):
                    continue  # not ours, as what copies a store puts there before it is whole
                changed = min(changed, now)  # a clock that was put back would make it the last to be evicted
                try:
                    entry = self._header(path.stem)
                except KeyError:
                    continue
                except CorruptBitstream:
                    self._quarantine_path(path)
                    continue
                except OSError as error:  # of another version, or unreadable: it takes its room, until it is evicted
                    log.warning("%s is left as it is: %s", path, error)
                    entry = Entry(path.stem, max(0, size - record.SIZE), changed)
                yield Entry(entry.key, entry.size, entry.created, entry.expires, changed)

    def _quarantine(self, key: str) -> None:
        self._quarantine_path(self.path(key))
        self._quietly(self._uncount, key)

    def _quarantine_path(self, path: Path) -> None:
        log.warning("damaged value moved to quarantine: %s", path)
        try:
            self.files.rename(path, self.folder / "quarantine" / f"{path.name}-{secrets.token_hex(4)}")
        except FileNotFoundError:
            return  # another process was faster
        self.damaged += 1
        found = sorted(self.files.scan(self.folder / "quarantine"), key=lambda item: item[2])
        for old, _, _ in found[:-QUARANTINED]:
            self.files.unlink(old)

    def _touch(self, key: str, entry: Entry | None = None) -> None:
        now = time.time()
        try:
            if abs(now - self.path(key).stat().st_mtime) > COARSE:
                self.files.touch(self.path(key), now)
                if entry is not None:  # unless it is there: the index may have fallen behind
                    self.index.add(self._marked(entry))
                self.index.touch(key, now)
        except (OSError, sqlite3.Error) as error:
            log.debug("access to %s was not written down: %s", key, error)

    def _quietly(self, change: Callable[[str], None], key: str) -> None:
        """Index upkeep that a later scan can do as well."""
        try:
            change(key)
        except sqlite3.Error as error:
            log.warning("the index of %s fell behind: %s", self.folder, error)

    @contextmanager
    def _index_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StoreError(f"the index of the store at {self.folder} failed: {error}") from error

    def close(self) -> None:
        self.index.close()


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < 1 << 16
    except OSError:
        return False


def _alive(writer: str) -> bool:
    try:
        os.kill(int(writer.split("-")[0]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
