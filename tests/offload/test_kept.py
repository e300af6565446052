"""What the file store keeps: pins, bytes under the cap, values that it cannot read, and everything on a full disk."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvengine.errors import IncompatibleCache, StoreError
from kvengine.offload.stores import Files, record
from kvengine.offload.stores.filesystem import FileSystem

KEYS = [f"{i:064x}" for i in range(40)]


def held(store: Files) -> int:
    """Bytes of payload in the folder."""
    return sum(path.stat().st_size - record.SIZE for path in (store.folder / "objects").rglob("*.kv"))


def test_a_pinned_value_that_is_put_again_stays_pinned(tmp_path: Path) -> None:
    store = Files(tmp_path, cap=1000, sync="none")
    store.put(KEYS[0], [bytes(300)], 100)
    store.pin(KEYS[0])
    store.put(KEYS[0], [bytes(300)])  # for ever
    store.index.touch(KEYS[0], 1.0)
    for key in KEYS[1:9]:
        store.put(key, [bytes(300)])
    assert store.size(KEYS[0]) == 300
    store.close()


def test_a_pinned_value_that_the_index_forgot_stays_pinned(tmp_path: Path) -> None:
    store = Files(tmp_path, sync="none")
    store.put(KEYS[0], [bytes(300)])
    store.pin(KEYS[0])
    store.index.remove(KEYS[0])
    os.utime(store.path(KEYS[0]), (1.0, 1.0))
    store.verify(KEYS[0])
    assert [entry.pinned for entry in store.entries()] == [True]
    store.close()


def test_the_pin_of_an_expired_value_goes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, later = Files(tmp_path, cap=1000, sync="none"), time.time() + 1000
    store.put(KEYS[0], [bytes(300)], 100)
    store.pin(KEYS[0])
    monkeypatch.setattr(time, "time", lambda: later)
    store.put(KEYS[1], [bytes(300)])
    assert held(store) == 300 and not list((tmp_path / "pins").iterdir())
    store.close()


class Asked(FileSystem):
    """Calls `hook` while a value is being written."""

    hook: Callable[[], object] = staticmethod(lambda: None)

    def write(self, handle: int, data: Any) -> None:
        super().write(handle, data)
        self.hook()


@pytest.mark.parametrize("what", ["size", "delete"])
def test_who_asks_for_a_value_while_it_is_written_does_not_take_it_out_of_the_count(tmp_path: Path, what: str) -> None:
    files = Asked()
    store = Files(tmp_path, cap=1000, sync="none", files=files)
    for key in KEYS[:10]:
        files.hook = lambda key=key: getattr(store, what)(key)  # type: ignore[misc]
        store.put(key, [bytes(300)])
    assert held(store) == store.index.total() == 900
    store.close()


def test_a_writer_that_fails_leaves_the_value_of_a_faster_one_counted(tmp_path: Path) -> None:
    files = Asked()
    store, other = Files(tmp_path, sync="none", files=files), Files(tmp_path, sync="none")

    def fail() -> None:
        other.put(KEYS[0], [bytes(300)])
        raise OSError(errno.EIO, "broken")

    files.hook = fail
    with pytest.raises(StoreError, match="broken"):
        store.put(KEYS[0], [bytes(300)])
    assert held(store) == other.index.total() == 300
    store.close()
    other.close()


def test_a_value_that_is_deleted_before_its_writer_has_counted_it_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was listed, and took its room, until somebody asked for it."""
    store, other = Files(tmp_path, sync="none"), Files(tmp_path, sync="none")
    commit = store.index.commit

    def late(entry: record.Entry) -> None:
        other.delete(entry.key)
        commit(entry)

    monkeypatch.setattr(store.index, "commit", late)
    store.put(KEYS[0], [bytes(300)])
    assert store.entries() == [] and held(store) == store.index.total() == 0
    store.close()
    other.close()


@pytest.mark.parametrize("how", ["delete", "size"])
def test_a_value_that_is_put_anew_before_the_former_one_is_forgotten_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It took its room beside the cap, until somebody asked for it."""
    store, other = Files(tmp_path, sync="none"), Files(tmp_path, sync="none")
    store.put(KEYS[0], [bytes(200)])
    remove = store.index.remove

    def late(key: str, *rest: Any, **named: Any) -> None:
        other.put(KEYS[0], [bytes(300)])
        remove(key, *rest, **named)

    monkeypatch.setattr(store.index, "remove", late)
    if how == "size":
        store.path(KEYS[0]).unlink()
    getattr(store, how)(KEYS[0])
    assert held(store) == store.index.total() == 300 and [entry.size for entry in store.entries()] == [300]
    store.close()
    other.close()


def test_a_value_that_is_deleted_after_the_folder_was_scanned_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = Files(tmp_path, sync="none"), Files(tmp_path, sync="none")
    for key in KEYS[:2]:
        store.put(key, [bytes(300)])
    scan = store._scan

    def slowly(now: float) -> list[record.Entry]:
        found = list(scan(now))
        other.delete(KEYS[0])
        return found

    monkeypatch.setattr(store, "_scan", slowly)
    store.gc()
    assert [entry.key for entry in store.entries()] == [KEYS[1]] and held(store) == store.index.total() == 300
    store.close()
    other.close()


@pytest.mark.parametrize("alive", [True, False], ids=["", "by another number"])
def test_a_store_that_is_opened_while_another_writes_counts_what_that_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    """The file is put into place, and counted, after the folder was scanned and before the index is set. In another container
    its writer's process has another number, and is taken for dead."""
    monkeypatch.setattr("kvengine.offload.stores.files._alive", lambda writer: alive)
    store, other = Files(tmp_path, sync="none"), Files(tmp_path, sync="none", files=(files := Asked()))
    scan = store._scan

    def slowly(now: float) -> list[record.Entry]:
        found = list(scan(now))
        writing.set()
        writer.join(20)
        return found

    writing = threading.Event()
    writer = threading.Thread(target=other.put, args=(KEYS[0], [bytes(300)]))
    files.hook = (lambda: writing.wait(20)) if alive else store.gc
    if alive:
        monkeypatch.setattr(store, "_scan", slowly)
    writer.start()
    while not store.index.writers() and alive:
        time.sleep(0.001)
    store.gc() if alive else writer.join(20)
    writer.join(20)
    assert held(store) == store.index.total() == 300 and [entry.key for entry in store.entries()] == [KEYS[0]]
    store.close()
    other.close()


def another_version(store: Files, key: str) -> None:
    body = bytes(100)
    front = bytearray(record.header(key, [body], None)[: record.HEADER.size])
    front[8] = 99
    store.path(key).write_bytes(bytes(front) + record.digest(bytes(front)) + body)


def test_values_of_another_version_stay_and_are_counted(tmp_path: Path) -> None:
    """They went to quarantine when the folder was opened, and all but eight were lost."""
    store = Files(tmp_path, sync="none")
    for key in KEYS[:20]:
        another_version(store, key)
    store.close()
    store = Files(tmp_path, cap=2500, sync="none")
    assert held(store) == store.index.total() == 2000
    with pytest.raises(IncompatibleCache, match="version 99"):
        store.size(KEYS[3])
    store.put(KEYS[30], [bytes(600)])
    assert held(store) == store.index.total() == 2500
    store.close()


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    """Of what rsync, say, was about to put there all but eight files were lost when the folder was opened."""
    store = Files(tmp_path, sync="none")
    store.put(KEYS[0], [bytes(300)])
    store.close()
    names = {f".{KEYS[0]}.kv.Ab12Cd", f"{KEYS[0]}.kv.bak", "notes.txt", *(f"{i}.kv" for i in range(9))}
    for name in names:
        (tmp_path / "objects" / "0" / name).write_bytes(b"not ours")
    (tmp_path / "tmp" / "folder").mkdir()
    os.utime(tmp_path / "tmp" / "folder", (1.0, 1.0))
    store = Files(tmp_path, sync="none")
    assert store.damaged == 0 and [entry.key for entry in store.entries()] == [KEYS[0]]
    assert {path.name for path in (tmp_path / "objects" / "0").iterdir()} == names | {f"{KEYS[0]}.kv"}
    store.close()


def test_one_bad_block_does_not_close_the_store(tmp_path: Path) -> None:
    class Bad(FileSystem):
        def read(self, handle: int, into: memoryview, offset: int) -> int:
            if os.readlink(f"/proc/self/fd/{handle}").endswith(f"{KEYS[0]}.kv"):
                raise OSError(errno.EIO, "a bad block")
            return super().read(handle, into, offset)

    store = Files(tmp_path, sync="none")
    for key in KEYS[:2]:
        store.put(key, [bytes(100)])
    store.close()
    store = Files(tmp_path, sync="none", files=Bad())
    assert store.size(KEYS[1]) == 100 and store.index.total() == 200
    with pytest.raises(OSError, match="a bad block"):
        store.size(KEYS[0])
    store.close()


def test_a_disk_too_full_for_the_index_makes_room_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Files(tmp_path, sync="none")
    for key in KEYS[:3]:
        store.put(key, [bytes(100)])
    reserve, calls = store.index.reserve, []

    def full(*arguments: Any) -> AbstractContextManager[list[str]]:
        calls.append(arguments)
        if len(calls) == 1:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return reserve(*arguments)

    monkeypatch.setattr(store.index, "reserve", full)
    store.put(KEYS[5], [bytes(100)])
    assert store.size(KEYS[5]) == 100 and held(store) == store.index.total() == 300
    store.close()


def test_an_index_that_a_full_disk_keeps_from_being_opened_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was removed as if damaged, also from under other processes, and all that was said was "disk I/O error"."""
    Files(tmp_path, sync="none").close()
    before, error = (tmp_path / "index.sqlite").stat().st_ino, sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
    monkeypatch.setattr(sqlite3, "connect", lambda *_, **__: (_ for _ in ()).throw(error))
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(StoreError, match="cannot be opened: disk I/O error; the disk is full"):
        Files(tmp_path, sync="none")
    assert (tmp_path / "index.sqlite").stat().st_ino == before


def test_an_index_that_was_full_goes_on(tmp_path: Path) -> None:
    store = Files(tmp_path, sync="none")
    pages = store.index.base.execute("pragma page_count").fetchone()[0]
    store.index.base.execute(f"pragma max_page_count={pages}")
    with pytest.raises(StoreError, match="full"):
        for i in range(10_000):
            store.put(f"{i:064x}", [b""])
    store.index.base.execute("pragma max_page_count=100000")
    store.put(KEYS[39], [bytes(100)])
    assert not store.index.base.in_transaction
    store.close()


def test_what_does_not_fit_on_a_full_disk_evicts_nothing(tmp_path: Path) -> None:
    class Full(FileSystem):
        def write(self, handle: int, data: Any) -> None:
            if len(data) > 500:
                raise OSError(errno.ENOSPC, "no space left")
            super().write(handle, data)

    store = Files(tmp_path, sync="none", files=Full())
    for key in KEYS[:3]:
        store.put(key, [bytes(300)])
    with pytest.raises(StoreError, match="no space left"):
        store.put(KEYS[5], [bytes(1000)])
    assert held(store) == store.index.total() == 900
    store.close()


def test_a_clock_that_was_put_back(tmp_path: Path) -> None:
    """What was used before is not taken for the newest for as long as the clock was ahead, nor listed when it is gone."""
    store = Files(tmp_path, cap=900, sync="none")
    for key in KEYS[:3]:
        store.put(key, [bytes(300)])
        later = time.time() + 1e6
        store.index.base.execute("update object set created = ?, accessed = ? where key = ?", (later, later, key))
        os.utime(store.path(key), (later, later))
    store.verify(KEYS[1])
    store.path(KEYS[2]).unlink()
    store.gc()
    assert [entry.key for entry in store.entries()] == KEYS[:2]
    assert max(entry.accessed for entry in store.entries()) <= time.time()
    for key in KEYS[3:6]:
        time.sleep(0.002)
        store.put(key, [bytes(300)])
    assert [entry.key for entry in store.entries()] == KEYS[3:6]
    store.close()


def newest_stay(store: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store of three values keeps those that were put last, though the clock was put back before most were."""
    now = 0.0
    for module in ("files", "record"):
        monkeypatch.setattr(f"kvengine.offload.stores.{module}.time", SimpleNamespace(time=lambda: now))
    for now, key in zip([90_000, 90_001, *range(8)], KEYS, strict=False):  # noqa: B007
        store.put(key, [bytes(300)])
    assert [entry.key for entry in store.entries()] == KEYS[7:10]
    store.close()


def test_a_clock_that_is_put_back_while_a_store_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values from before stayed, and whatever was put then went when the next one came."""
    newest_stay(Files(tmp_path, cap=900, sync="none"), monkeypatch)


def test_a_clock_that_was_put_back_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a cap: each value that was put cost the one before it, and those from before the clock's change stayed."""

    class Full(FileSystem):
        """Has room for three values."""

        def write(self, handle: int, data: Any) -> None:
            if len(list(tmp_path.glob("objects/*/*.kv"))) >= 3:
                raise OSError(errno.ENOSPC, "no space left")
            super().write(handle, data)

    newest_stay(Files(tmp_path, sync="none", files=Full()), monkeypatch)


def test_what_was_deleted_is_not_left_in_quarantine(tmp_path: Path) -> None:
    store = Files(tmp_path, sync="none")
    for key in KEYS[:2]:
        store.put(key, [bytes(300)])
        store.path(key).write_bytes(b"damaged")
        assert store.size(key) is None
    assert len(list((tmp_path / "quarantine").iterdir())) == 2
    store.delete(KEYS[0])
    assert [path.name[:64] for path in (tmp_path / "quarantine").iterdir()] == [KEYS[1]]
    store.close()


def test_an_index_that_fails_is_an_error_of_ours(tmp_path: Path) -> None:
    store = Files(tmp_path, sync="none")
    store.put(KEYS[0], [bytes(300)])
    store.close()
    for call in (store.entries, store.gc, lambda: store.pin(KEYS[0]), lambda: store.put(KEYS[1], [b"x"])):
        with pytest.raises(StoreError, match="index"):
            call()


def test_many_expired_values_go_at_once(tmp_path: Path) -> None:
    """Each was looked for among all that were to go."""
    store = Files(tmp_path, cap=10, sync="none")
    now = time.time()
    rows = [record.Entry(f"{i:064x}", 1, now, 1.0 * (i % 2), 2.0) for i in range(60_000)]
    store.index.replace([], rows, lambda writer: True, 0.0, set)
    start = time.monotonic()
    with store.index.reserve(record.Entry(KEYS[0][::-1].replace("0", "f"), 1, now), "w", 10, now) as victims:
        pass
    assert len(victims) == 60_000 - 9 and time.monotonic() - start < 10
    store.close()


@pytest.mark.parametrize("how", ["put", "open"])
def test_what_is_put_anew_while_its_former_value_goes_stays(tmp_path: Path, how: str) -> None:
    """Between its name in the index and its file there was a moment at which another process could put it: the file went."""
    store, other = Files(tmp_path, sync="none"), Files(tmp_path, sync="none")
    store.put(KEYS[0], [bytes(300)], 0.01)
    time.sleep(0.02)
    writer, unlink = threading.Thread(target=other.put, args=(KEYS[0], [bytes(200)])), store._unlink

    def slowly(key: str) -> None:
        writer.start()
        writer.join(0.3)
        unlink(key)

    store._unlink = slowly  # type: ignore[method-assign]
    store.put(KEYS[1], [bytes(300)]) if how == "put" else store.gc()
    writer.join(20)
    assert other.size(KEYS[0]) == 200 and held(store) == store.index.total()
    store.close()
    other.close()


def test_who_reads_an_expired_value_does_not_take_away_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, later = Files(tmp_path, sync="none", files=(files := Asked())), time.time() + 1000
    store.put(KEYS[0], [bytes(300)], 100)
    read, into = FileSystem.read, memoryview(bytearray(300))

    def slowly(handle: int, part: memoryview, offset: int) -> int:
        got = read(files, handle, part, offset)
        if offset:
            monkeypatch.setattr(time, "time", lambda: later)
            files.read = read.__get__(files)  # type: ignore[method-assign]
            store.put(KEYS[0], [bytes(200)])
        return got

    files.read = slowly  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        store.read(KEYS[0], into)
    assert store.size(KEYS[0]) == 200
    store.close()


def test_a_writer_that_fails_leaves_what_was_there_counted(tmp_path: Path) -> None:
    """A value that is put again, for longer or in other bytes, and does not fit any more."""
    store = Files(tmp_path, sync="none", files=(files := Asked()))
    store.put(KEYS[0], [bytes(300)], 100)

    def fail() -> None:
        raise OSError(errno.EIO, "broken")

    files.hook = fail
    with pytest.raises(StoreError, match="broken"):
        store.put(KEYS[0], [bytes(300)])
    assert held(store) == store.index.total() == 300 and [entry.key for entry in store.entries()] == [KEYS[0]]
    store.close()


def test_room_that_a_dead_writer_of_this_number_kept_is_given_back(tmp_path: Path) -> None:
    """In a container every process may have the number 1: what was kept for those that were killed was never given back."""
    store, now = Files(tmp_path, sync="none"), time.time()
    for key, age in ((KEYS[0], 7200), (KEYS[1], 60)):
        with store.index.reserve(record.Entry(key, 300, now - age), f"{os.getpid()}-0123abcd-{age}", None, now):
            pass
    store.close()
    store = Files(tmp_path, sync="none")
    assert store.index.total() == 300  # the second may be on its way
    store.close()


@pytest.mark.parametrize("pinned", [True, False])
def test_what_is_pinned_while_another_opens_the_store_is(tmp_path: Path, pinned: bool) -> None:
    """A folder that is large takes long to look through, and what was pinned meanwhile was evicted like all others."""
    store, other = Files(tmp_path, sync="none"), Files(tmp_path, cap=500, sync="none")
    scan = store._scan
    store.put(KEYS[0], [bytes(300)])
    store.pin(KEYS[0], not pinned)

    def slowly(now: float) -> list[record.Entry]:
        found = list(scan(now))
        other.pin(KEYS[0], pinned)
        return found

    store._scan = slowly  # type: ignore[method-assign]
    store.gc()
    assert [entry.pinned for entry in store.entries()] == [pinned]
    if pinned:
        with pytest.raises(StoreError, match="no room"):
            other.put(KEYS[1], [bytes(300)])
    assert store.size(KEYS[0]) == 300
    store.close()
    other.close()


def test_a_value_that_makes_room_while_it_is_pinned_is_not_there(tmp_path: Path) -> None:
    store, other = Files(tmp_path, sync="none", files=(files := FileSystem())), Files(tmp_path, cap=500, sync="none")
    store.put(KEYS[0], [bytes(300)])
    create = files.create

    def late(path: Path) -> int:
        files.create = create  # type: ignore[method-assign]
        handle = create(path)
        other.put(KEYS[1], [bytes(300)])
        return handle

    files.create = late  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        store.pin(KEYS[0])
    assert not list((tmp_path / "pins").iterdir()) and [entry.key for entry in store.entries()] == [KEYS[1]]
    store.close()
    other.close()


def test_two_may_pin_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, exists = Files(tmp_path, sync="none"), Path.exists
    store.put(KEYS[0], [bytes(300)])
    store.pin(KEYS[0])
    monkeypatch.setattr(Path, "exists", lambda path: path.parent.name != "pins" and exists(path))
    store.pin(KEYS[0])
    store.close()


def test_a_full_store_without_its_index_is_opened_as_it_is_and_knows_what_was_used(tmp_path: Path) -> None:
    store = Files(tmp_path, cap=900, sync="none")
    for i, key in enumerate(KEYS[:3]):
        store.put(key, [bytes(300)])
        os.utime(store.path(key), (1000 + i, 1000 + i))
    store.put(KEYS[2], [bytes(300)], 5.0)  # it is to stay for ever
    store.verify(KEYS[0])
    os.utime(store.path(KEYS[2]), (1002, 1002))
    store.close()
    for path in tmp_path.glob("index.sqlite*"):
        path.unlink()
    store = Files(tmp_path, cap=900, sync="none")
    assert store.removed == 0 and [(entry.key, entry.expires) for entry in store.entries()] == [
        (k, 0) for k in KEYS[:3]
    ]
    store.put(KEYS[3], [bytes(300)])
    assert [entry.key for entry in store.entries()] == [KEYS[0], KEYS[2], KEYS[3]]
    store.close()
