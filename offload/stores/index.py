"""SQLite index of the file store: sizes, ages and reservations, for capacity and eviction.

Files are the truth, the index is a cache of it: any number of processes share it, and a lost, stale or damaged one is
rebuilt from a scan.
"""

from __future__ import annotations

import sqlite3
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kvengine.errors import StoreError
from kvengine.offload.stores.record import Entry

SCHEMA = """
create table if not exists object (
    key text primary key, size integer not null, created real not null, expires real not null,
    accessed real not null, pinned integer not null, writer text
) without rowid;
create index if not exists age on object (pinned, accessed);
create index if not exists expiry on object (expires) where expires > 0;
"""
SOUND = (
    sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_FULL,
)  # fmt: skip
"""What says nothing against an index: another process has it, or it may not be written. It is not to be made again."""
UNREADABLE = (sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ)
"""Of failures of the disk those that say something against it; others, as on a full disk, say that it could not be written."""
COLUMNS = "key, size, created, expires, accessed, pinned, writer"


class Index:
    """One connection, used under a lock by the threads of one process. Every method may raise sqlite3.Error.

    A row with a writer is a reservation: bytes that are counted but not there yet."""

    def __init__(self, path: Path) -> None:
        self.path, self.lock = path, threading.RLock()
        try:
            self.base = self._open()
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0)
            kind = code & 0xFF  # the rest of the code says more of the same
            if kind in SOUND or (kind == sqlite3.SQLITE_IOERR and code not in UNREADABLE):
                raise
            self._remove()
            self.base = self._open()
        weakref.finalize(self, self.base.close).atexit = False  # by itself it goes with the garbage: it is in a circle

    def anew(self) -> None:
        """Begin an empty one if its file was removed: what is written to that is gone."""
        with self.lock:
            if not self.path.exists():
                self.base.close()
                self.base = self._open()
                weakref.finalize(self, self.base.close).atexit = False

    def _open(self) -> sqlite3.Connection:
        base = sqlite3.connect(self.path, timeout=30, isolation_level=None, check_same_thread=False)
        try:
            base.execute("pragma journal_mode=wal")
            base.execute("pragma synchronous=off")  # it is rebuilt after a crash
            base.execute("pragma wal_autocheckpoint=100")  # 400 KB of log, for a disk that is full
            base.executescript(SCHEMA)
            base.execute(f"select {COLUMNS} from object limit 1")
        except sqlite3.DatabaseError:
            base.close()
            raise
        return base

    def _remove(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)

    @contextmanager
    def reserve(self, entry: Entry, writer: str, cap: int | None, now: float) -> Iterator[list[str]]:
        """Counts `entry` in and gives the keys that must go for it: expired ones, then the least recently used that
        are not pinned. While they are removed, nobody puts them anew. Raises StoreError, and changes nothing, if it cannot fit.
        """
        with self.lock, self._transaction():
            self.base.execute("delete from object where key = ?", (entry.key,))
            victims, over = self._victims(entry.size, cap, now)
            if over > 0:
                raise StoreError(f"no room: {entry.size} bytes do not fit under the cap of {cap} beside what is pinned")
            self._forget(victims)
            self._insert(entry, writer)
            yield victims

    def _forget(self, keys: list[str]) -> None:
        self.base.executemany("delete from object where key = ?", [(key,) for key in keys])

    def _victims(self, size: int, cap: int | None, now: float) -> tuple[list[str], int]:
        """(keys to remove, bytes that still do not fit)."""
        over = -1 if cap is None else self._total() + size - cap
        expired = self.base.execute(
            "select key, size from object where expires > 0 and expires <= ? and writer is null", (now,)
        ).fetchall()
        victims, over = [key for key, _ in expired], over - sum(n for _, n in expired)
        if over > 0:
            self.put_back(now)
        for key, n in self.base.execute(
            "select key, size from object where pinned = 0 and writer is null and not (expires > 0 and expires <= ?) "
            "order by accessed, key", (now,)
        ):  # fmt: skip
            if over <= 0:
                break
            victims.append(key)
            over -= n
        return victims, over

    @contextmanager
    def trim(self, cap: int | None, now: float) -> Iterator[list[str]]:
        """Forgets the keys that are expired or above the cap. While they are removed, nobody puts them anew."""
        with self.lock, self._transaction():
            victims, _ = self._victims(0, cap, now)
            self._forget(victims)
            yield victims

    def commit(self, entry: Entry) -> None:
        """The reserved value is there."""
        with self.lock:
            done = self.base.execute("update object set writer = null where key = ?", (entry.key,))
            # Others took the writer for dead, as those do that know its process by another number.
            if not done.rowcount:
                self._insert(entry, None, "ignore")

    def replace(
        self,
        known: Iterable[Entry],
        found: Iterable[Entry],
        alive: Callable[[str], bool],
        since: float,
        pins: Callable[[], set[str]],
    ) -> None:
        """Sets the index to what a scan found, where it is still as it was `known` before the scan; drops reservations of
        writers that are not alive, and all that were not made `since` then: a process may have a dead one's number. What is
        pinned is asked here, while nobody else changes it."""
        with self.lock, self._transaction():
            self.base.executemany(
                "delete from object where key = ? and created = ? and writer is null",
                [(e.key, e.created) for e in known],
            )
            dead = [(name,) for name in self.writers() if not alive(name)]
            self.base.executemany("delete from object where writer = ?", dead)
            self.base.execute("delete from object where writer is not null and created < ?", (since,))
            pinned = pins()
            for entry in found:
                self._insert(replace(entry, pinned=entry.key in pinned), None, "ignore")

    def add(self, entry: Entry) -> None:
        with self.lock:
            self._insert(entry, None, "ignore")

    def _insert(self, entry: Entry, writer: str | None, conflict: str = "replace") -> None:
        self.base.execute(
            f"insert or {conflict} into object ({COLUMNS}) values (?, ?, ?, ?, ?, ?, ?)",
            (entry.key, entry.size, entry.created, entry.expires, entry.accessed, entry.pinned, writer),
        )

    def remove(self, key: str, writer: str | None = None, unless: Callable[[], bool] = lambda: False) -> None:
        """Forgets a value, or what a writer has reserved for it; not what another writer has. `unless` is asked while nobody
        else changes the index."""
        with self.lock, self._transaction():
            if not unless():
                self.base.execute("delete from object where key = ? and writer is ?", (key, writer))

    def put_back(self, now: float) -> None:
        """After a clock was put back, what was used before would be the newest for as long as it was ahead."""
        with self.lock:
            self.base.execute("update object set accessed = ? where accessed > ?", (now, now))

    def touch(self, key: str, when: float) -> None:
        with self.lock:
            self.base.execute("update object set accessed = ? where key = ?", (when, key))

    def pin(self, key: str, pinned: bool) -> None:
        with self.lock:
            self.base.execute("update object set pinned = ? where key = ?", (pinned, key))

    def entries(self) -> list[Entry]:
        with self.lock:
            rows = self.base.execute(f"select {COLUMNS} from object where writer is null order by key").fetchall()
        return [Entry(key, size, made, gone, used, bool(pinned)) for key, size, made, gone, used, pinned, _ in rows]

    def writers(self) -> list[str]:
        with self.lock:
            return [
                name for (name,) in self.base.execute("select distinct writer from object where writer is not null")
            ]

    def total(self) -> int:
        """Bytes stored and reserved."""
        with self.lock:
            return self._total()

    def _total(self) -> int:
        return int(self.base.execute("select coalesce(sum(size), 0) from object").fetchone()[0])

    def close(self) -> None:
        with self.lock:
            self.base.close()

    def _transaction(self) -> _Transaction:
        return _Transaction(self.base)


class _Transaction:
    def __init__(self, base: sqlite3.Connection) -> None:
        self.base = base

    def __enter__(self) -> None:
        self.base.execute("begin immediate")

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.base.execute("commit")
        finally:
            if self.base.in_transaction:  # a full disk may have rolled back by itself
                self.base.execute("rollback")
