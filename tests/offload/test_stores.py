"""Every store keeps the same promises; a store that fails is a miss, never an exception."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support_offload import cache, stack
from support_s3 import Bucket

from kvengine.errors import CorruptBitstream, StoreError
from kvengine.offload import cachegen, stores
from kvengine.offload.stores import record, resp
from kvengine.offload.stores.record import Buffer, Entry
from kvengine.offload.stores.store import FAILURES

KEYS = [f"{i:064x}" for i in range(10)]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = shutil.which("valkey-server") or shutil.which("redis-server")
    if server is None:
        pytest.skip("no redis-server or valkey-server on the PATH")
    pytest.importorskip("redis")
    port, folder = free_port(), tmp_path_factory.mktemp("redis")
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for(port)
    yield f"redis://127.0.0.1:{port}/0"
    process.terminate()
    process.wait(10)


def wait_for(port: int) -> None:
    for _ in range(200):
        with socket.socket() as s:
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port}")


@pytest.fixture(scope="session")
def bucket() -> Iterator[Any]:
    pytest.importorskip("obstore")
    server = Bucket()
    yield server.store()
    server.close()


@pytest.fixture(scope="session")
def moto_bucket() -> Iterator[Any]:
    """A second opinion on the protocol, where moto is installed."""
    moto = pytest.importorskip("moto.server")
    s3 = pytest.importorskip("obstore.store")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=free_port(), verbose=False)
    server.start()
    url = f"http://127.0.0.1:{server._port}"
    urllib.request.urlopen(urllib.request.Request(f"{url}/kvengine-test", method="PUT")).close()
    yield s3.S3Store(
        "kvengine-test", endpoint=url, region="us-east-1", access_key_id="a", secret_access_key="b",
        client_options={"allow_http": True}, virtual_hosted_style_request=False,
    )  # fmt: skip
    server.stop()


@pytest.fixture(params=["files", "redis", "s3", "moto", "memory"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    match request.param:
        case "files":
            made: Any = stores.Files(tmp_path / "kv")
        case "redis":
            made = stores.Resp(request.getfixturevalue("redis_url"), prefix=tmp_path.name)
        case "s3":
            made = stores.Objects(request.getfixturevalue("bucket"), prefix=tmp_path.name)
        case "moto":
            made = stores.Objects(request.getfixturevalue("moto_bucket"), prefix=tmp_path.name)
        case _:
            pytest.importorskip("obstore")
            made = stores.backend("memory://")
    yield made
    made.close()


def fetch(backend: Any, key: str) -> bytes:
    into = bytearray(backend.size(key) or 0)
    got = backend.read(key, memoryview(into))
    return bytes(into[:got])


def test_what_is_put_comes_back(backend: Any) -> None:
    values = {KEYS[0]: b"", KEYS[1]: b"x", KEYS[2]: bytes(range(256)) * 5000}
    for key, value in values.items():
        backend.put(key, [value[:3], memoryview(value)[3:]])
        backend.put(key, [value])
    assert {key: fetch(backend, key) for key in values} == values
    assert sorted((e.key, e.size) for e in backend.entries()) == sorted((k, len(v)) for k, v in values.items())
    part = bytearray(1000)
    assert backend.read(KEYS[2], memoryview(part), 70_001) == 1000 and bytes(part) == values[KEYS[2]][70_001:71_001]
    assert backend.read(KEYS[1], memoryview(part), 5) == 0
    for key in values:
        backend.verify(key)
    assert backend.delete(KEYS[1]) and not backend.delete(KEYS[1])
    assert backend.size(KEYS[1]) is None
    with pytest.raises(KeyError):
        backend.read(KEYS[1], memoryview(part))
    for pinned in (True, False):
        with pytest.raises(KeyError):
            backend.pin(KEYS[1], pinned)
    with pytest.raises(ValueError, match="not a key"):
        backend.put("../escape", [b""])


def test_values_expire(backend: Any) -> None:
    backend.put(KEYS[1], [b"long"], 1000)
    backend.put(KEYS[2], [b"twice"], 1.0)
    backend.put(KEYS[2], [b"twice"], None)
    backend.put(KEYS[0], [b"short"], 1.0)
    assert fetch(backend, KEYS[0]) == b"short"
    time.sleep(1.1)
    assert backend.size(KEYS[0]) is None
    with pytest.raises(KeyError):
        backend.read(KEYS[0], memoryview(bytearray(5)))
    assert (fetch(backend, KEYS[1]), fetch(backend, KEYS[2])) == (b"long", b"twice")
    backend.gc()
    assert {e.key for e in backend.entries()} == {KEYS[1], KEYS[2]}


def test_a_large_value_is_cut_for_redis(redis_url: str, tmp_path: Path) -> None:
    store = stores.Resp(redis_url, prefix=tmp_path.name)
    value = bytes(range(256)) * (resp.PART // 256) + b"tail"
    store.put(KEYS[0], [value])
    assert fetch(store, KEYS[0]) == value
    into = bytearray(52)
    store.read(KEYS[0], memoryview(into), resp.PART - 50)
    assert bytes(into) == value[resp.PART - 50 : resp.PART + 2]
    store.client.delete(store._name(KEYS[0], 1))
    with pytest.raises(CorruptBitstream, match="part 1"):
        fetch(store, KEYS[0])
    assert store.size(KEYS[0]) is None
    store.close()


def test_pinned_and_recent_values_stay(tmp_path: Path) -> None:
    store = stores.Files(tmp_path, cap=1000)
    for key in KEYS[:4]:
        store.put(key, [bytes(250)])
        store.index.touch(key, time.time() - 100 + int(key, 16))
    store.pin(KEYS[0])
    store.index.touch(KEYS[1], time.time() + 1)
    store.put(KEYS[4], [bytes(400)])
    assert [e.key for e in store.entries()] == [KEYS[0], KEYS[1], KEYS[4]]
    with pytest.raises(StoreError, match="no room"):
        store.put(KEYS[5], [bytes(800)])
    store.pin(KEYS[0], False)
    store.put(KEYS[6], [bytes(900)])
    assert [e.key for e in store.entries()] == [KEYS[6]]
    assert sum(1 for _ in (tmp_path / "objects").rglob("*.kv")) == 1
    store.close()


def test_objects_are_collected_down_to_the_cap() -> None:
    store = stores.backend("memory://", cap=600)
    for key in KEYS[:4]:
        store.put(key, [bytes(250)])
    store.pin(KEYS[0])
    assert store.gc() == 2
    kept = {e.key for e in store.entries()}
    assert len(kept) == 2 and KEYS[0] in kept


def test_a_bucket_with_other_things_in_it() -> None:
    """What a console puts for a folder, and a value of another version, ended each listing."""
    pytest.importorskip("obstore")
    store: Any = stores.backend("memory://", cap=600)
    front = bytearray(record.header(KEYS[1], [bytes(400)], None)[: record.HEADER.size])
    front[8] = 99
    newer = bytes(front) + record.digest(bytes(front)) + bytes(400)
    for key, value in ((KEYS[1], newer), (KEYS[2], b""), (KEYS[3], bytes(200))):
        store.api.put(store.store, store._name(key), value)
    store.api.put(store.store, f"{store.prefix}/objects/notes.txt", bytes(200))
    store.put(KEYS[0], [bytes(250)])
    damaged = {KEYS[3]: 200 - record.SIZE}
    assert {e.key: e.size for e in store.entries()} == {KEYS[0]: 250, KEYS[1]: 400} | damaged
    with pytest.raises(CorruptBitstream):
        store.read(KEYS[3], memoryview(bytearray(5)))
    assert not store.delete(KEYS[3])  # it was put out of the way
    assert store.gc() == 1 and [e.key for e in store.entries()] == [KEYS[0]]
    store.api.put(store.store, store._name(KEYS[1]), newer)
    assert store.delete(KEYS[1]) and not store.delete(KEYS[1])


def test_damage_is_a_miss_and_goes_to_quarantine(tmp_path: Path) -> None:
    store = stores.Store(stores.Files(tmp_path))
    value = bytes(range(200))
    for at in range(0, record.SIZE + 200, 3):
        assert store.wait(store.submit_put([KEYS[0]], [value])).ok == (True,)  # type: ignore[union-attr]
        path = store.backend.path(KEYS[0])  # type: ignore[attr-defined]
        hurt = bytearray(path.read_bytes())
        hurt[at] ^= 0x10
        path.write_bytes(hurt)
        into = bytearray(200)
        assert store.wait(store.submit_get([KEYS[0]], [into])).ok == (False,)  # type: ignore[union-attr]
        assert store.lookup([KEYS[0]]) == 0
    path.write_bytes(record.header(KEYS[0], [value], None) + value[:-1])
    assert store.sizes([KEYS[0]]) == [None]
    store.backend.put(KEYS[1], [value])
    path.write_bytes(store.backend.path(KEYS[1]).read_bytes())  # type: ignore[attr-defined]
    assert store.sizes([KEYS[0]]) == [None]
    assert {e.kind for e in store.events()} <= {"corrupt", "miss", "incompatible"} and store.counts["corrupt"] > 90
    assert len(list((tmp_path / "quarantine").iterdir())) <= 8
    store.close()


def test_a_lost_or_damaged_index_is_rebuilt(tmp_path: Path) -> None:
    store = stores.Files(tmp_path)
    for key in KEYS[:5]:
        store.put(key, [key.encode()], 1000)
    store.pin(KEYS[3])
    before = [(e.key, e.size, e.created, e.expires, e.pinned) for e in store.entries()]
    store.close()
    for damage in (b"", b"not a database at all" * 500, None):
        for path in tmp_path.glob("index.sqlite*"):
            path.unlink()
        if damage is not None:
            (tmp_path / "index.sqlite").write_bytes(damage)
        again = stores.Files(tmp_path)
        assert [(e.key, e.size, e.created, e.expires, e.pinned) for e in again.entries()] == before
        again.close()


def test_an_index_that_another_process_holds_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was deleted as if damaged, and two processes then counted apart."""
    stores.Files(tmp_path).close()
    path, connect = tmp_path / "index.sqlite", sqlite3.connect
    other = connect(path, isolation_level=None)
    other.execute("pragma journal_mode=delete")
    other.execute("begin exclusive")
    before = path.stat().st_ino
    monkeypatch.setattr(sqlite3, "connect", lambda *args, **options: connect(*args, **{**options, "timeout": 0.01}))
    with pytest.raises(StoreError, match="cannot be opened: database is locked"):
        stores.Files(tmp_path)
    other.execute("rollback")
    other.close()
    assert path.stat().st_ino == before
    stores.Files(tmp_path).close()


def test_a_folder_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores.Files(tmp_path).close()
    monkeypatch.setattr(
        os, "access", lambda path, mode: not mode & os.W_OK
    )  # as whoever may do everything sees none such
    with pytest.raises(StoreError, match="cannot be opened: its folder cannot be written"):
        stores.Files(tmp_path)


class Faulty:
    """A backend that does what it is told to do wrong."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.calls = 0

    def _meet(self) -> None:
        self.calls += 1
        self.gate.wait(10)
        if self.error:
            raise self.error

    def put(self, key: str, payload: Sequence[Buffer], ttl: float | None = None) -> None:
        self._meet()
        self.values[key] = b"".join(payload)

    def read(self, key: str, into: memoryview, offset: int = 0) -> int:
        self._meet()
        into[: len(self.values[key])] = self.values[key]
        return len(self.values[key])

    def size(self, key: str) -> int | None:
        self._meet()
        return len(self.values[key]) if key in self.values else None

    def delete(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def entries(self) -> list[Entry]:
        return [Entry(key, len(value), 0) for key, value in self.values.items()]

    def pin(self, key: str, pinned: bool = True) -> None: ...

    def verify(self, key: str) -> None: ...

    def gc(self) -> int:
        return 0

    def close(self) -> None: ...


def test_a_store_that_is_down_costs_nothing_and_comes_back() -> None:
    backend = Faulty()
    store = stores.Store(backend, pause=1000)
    store.wait(store.submit_put(KEYS[:2], [b"a", b"b"]))
    assert store.lookup(KEYS[:3]) == 2
    backend.error = ConnectionError("gone")
    for _ in range(5):
        assert store.sizes(KEYS[:2]) == [None, None]
    assert store.counts["failed"] == 3 and store.counts["skipped"] == 7
    calls = backend.calls
    done = store.wait(store.submit_get([KEYS[0]], [bytearray(1)]))
    assert done is not None and done.ok == (False,) and backend.calls == calls
    backend.error, store._closed_until = None, 0.0
    assert store.lookup(KEYS[:2]) == 2
    store.close()


def test_a_store_that_is_still_down_after_the_pause_is_asked_once() -> None:
    """Three times, and requests waited most of the time for a store that lets its clients wait."""
    backend = Faulty()
    backend.error = TimeoutError("no answer")
    store = stores.Store(backend, pause=1000)
    for pauses in range(3):
        store._closed_until = 0.0
        assert store.sizes(KEYS[:6]) == [None] * 6
        assert backend.calls == store.counts["failed"] == FAILURES + pauses
    backend.error, store._closed_until = None, 0.0
    assert store.sizes(KEYS[:1]) == [None] and store.counts["miss"] == 1
    backend.error = TimeoutError("no answer")
    assert store.sizes(KEYS[:6]) == [None] * 6 and store.counts["failed"] == 2 * FAILURES + 2
    store.close()


@pytest.mark.parametrize("change", ["put", "pin", "delete"])
def test_a_store_that_takes_nothing_is_still_read(change: str) -> None:
    """Full, or for reading alone: what it had was computed anew as long as others were to be stored."""
    store = stores.Store(backend := Faulty(), pause=1000)
    store.wait(store.submit_put(KEYS[:1], [b"a"]))

    def refused(*_: Any) -> Any:
        raise PermissionError("403: you may read")

    setattr(backend, change, refused)
    for _ in range(3):
        if change == "put":
            store.wait(store.submit_put(KEYS[1:3], [b"b", b"c"]))
        else:
            getattr(store, change)(KEYS[1:3])
        assert store.lookup(KEYS[:2]) == 1
    assert store.counts["failed"] == FAILURES and store.counts["skipped"] == 6 - FAILURES
    done = store.wait(store.submit_put(KEYS[1:2], [b"b"]))
    assert done is not None and done.ok == (change != "put",)
    assert store.pin(KEYS[:1]) == [change != "pin"] and store.delete(KEYS[:1]) == [change != "delete"]
    store._refused_until.clear()
    delattr(backend, change)
    done = store.wait(store.submit_put(KEYS[2:3], [b"c"]))
    assert done is not None and done.ok == (True,) and store.delete(KEYS[2:3]) == [True]
    store.close()


def test_who_asks_for_nothing_does_not_wait_for_those_whom_the_store_keeps_waiting() -> None:
    """A prompt shorter than a chunk has no keys, which to name in an event was an IndexError."""
    backend, go = Faulty(), threading.Event()
    backend.size = lambda key: go.wait() and None  # type: ignore[assignment, method-assign, return-value]
    store = stores.Store(backend, threads=1)
    assert store.lookup(KEYS[:1], 0.01) == 0
    assert store.lookup([], 0.01) == 0 and store.counts["failed"] == 1
    go.set()
    store.close()


@pytest.mark.parametrize("what", ["", "tmp", f"objects/{KEYS[1][0]}"])
def test_a_folder_that_was_removed_is_made_anew(tmp_path: Path, what: str) -> None:
    store, gone = stores.Store(stores.Files(tmp_path / "store")), tmp_path / "store" / what
    store.wait(store.submit_put(KEYS[:1], [b"a"]))
    shutil.rmtree(gone)
    for key in KEYS[1:3]:
        done = store.wait(store.submit_put([key], [b"b"]))
        assert done is not None and done.ok == (True,)
    assert store.lookup(KEYS[1:3]) == 2 and {entry.key for entry in store.entries()} >= set(KEYS[1:3])
    assert (tmp_path / "store" / "index.sqlite").exists()
    store.close()


def test_nothing_is_listening(tmp_path: Path) -> None:
    pytest.importorskip("redis")
    store = stores.Store(stores.Resp(f"redis://127.0.0.1:{free_port()}/0", timeout=0.5))
    start = time.monotonic()
    assert store.lookup(KEYS) == 0
    assert store.wait(store.submit_put(KEYS, [b"x"] * 10)).ok == (False,) * 10  # type: ignore[union-attr]
    assert time.monotonic() - start < 5 and store.counts["failed"] >= 1
    store.close()


def test_a_slow_store_does_not_block() -> None:
    backend = Faulty()
    store = stores.Store(backend, pending=100)
    backend.gate.clear()
    start = time.monotonic()
    slow = store.submit_put([KEYS[0]], [bytes(60)])
    dropped = store.submit_put([KEYS[1]], [bytes(60)])
    assert store.poll()[0].job == dropped and store.counts["dropped"] == 1
    assert store.wait(slow, timeout=0.05) is None and time.monotonic() - start < 2
    backend.gate.set()
    store.drain()
    assert [d.job for d in store.poll() if all(d.ok)] == [slow]
    with pytest.raises(ValueError, match="never submitted"):
        store.wait(slow)
    store.close()


def test_puts_that_are_done_leave_room_for_others(tmp_path: Path) -> None:
    store = stores.Store(stores.Files(tmp_path, sync="none"), pending=10)
    for key in KEYS[:4]:
        store.submit_put([key], [bytes(8)])
        store.drain()
    assert store.lookup(KEYS) == 4 and not store.counts["dropped"]
    store.close()


def test_a_value_larger_than_what_may_wait_is_stored_where_none_waits() -> None:
    """It was dropped each time, though nothing else had waited."""
    backend = Faulty()
    store = stores.Store(backend, pending=100)
    backend.gate.clear()
    large, other = store.submit_put([KEYS[0]], [bytes(101)]), store.submit_put([KEYS[1]], [bytes(1)])
    backend.gate.set()
    done = {job: store.wait(job).ok for job in (large, other)}  # type: ignore[union-attr]
    assert done == {large: (True,), other: (False,)} and store.counts["dropped"] == 1
    store.close()


def test_where_no_thread_can_be_started_nothing_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was an error of Python's in a generation, and whoever waited for the store from then on waited for ever."""

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = stores.Store(backend := Faulty(), threads=1)
    with monkeypatch.context() as none:
        none.setattr(threading.Thread, "start", refused)
        jobs = [store.submit_put(KEYS[:1], [b"a"]), store.submit_get(KEYS[:1], [bytearray(1)])]
        store.drain()
        assert [(done.job, done.ok) for done in store.poll()] == [(job, (False,)) for job in jobs]
        assert store.lookup(KEYS[:1], 1.0) == 0 and store.counts == {"dropped": 2, "failed": 1}
    store.wait(store.submit_put(KEYS[1:2], [b"b"]))
    assert store.lookup(KEYS[1:2], 5.0) == 1 and store.usage()["open"] == 0
    assert list(backend.values) == KEYS[1:2]  # what was dropped is not done after all
    store.close()


def test_several_keys_are_looked_up_at_once_and_none_behind_a_miss() -> None:
    """One after another, a far store's round trips left no time to find a long text's chunks."""
    asked, together, most, lock = list[str](), 0, 0, threading.Lock()

    class Far(Faulty):
        def size(self, key: str) -> int:
            nonlocal together, most
            with lock:
                asked.append(key)
                together += 1
                most = max(most, together)
            time.sleep(0.01)
            with lock:
                together -= 1
            return super().size(key)

    store = stores.Store(Far(), threads=4)
    keys = [f"{i:064x}" for i in range(40)]
    assert store.leading(keys) == [] and asked == keys[:1]
    store.wait(store.submit_put(keys[:30], [bytes(i) for i in range(30)]))
    assert store.leading(keys, 30) == [*range(30)] and most == 4
    store.close()
    assert {*keys[:30]} <= {*asked} and len(asked) <= 1 + 30 + 4


def test_a_store_that_answers_too_slowly_for_all_has_not_failed() -> None:
    class Slow(Faulty):
        def size(self, key: str) -> int | None:
            time.sleep(0.02)
            return super().size(key)

    store = stores.Store(Slow(), threads=1)
    keys = [f"{i:064x}" for i in range(40)]
    store.wait(store.submit_put(keys, [bytes(i) for i in range(40)]))
    for i in range(FAILURES + 1):
        assert 0 < len(store.leading(keys, 0.2)) < 40
        assert store.counts["failed"] == 0 and store.counts["late"] == i + 1
    store.backend.gate.clear()  # type: ignore[attr-defined]
    assert store.leading(keys, 0.1) == [] and store.counts["failed"] == 1
    store.backend.gate.set()  # type: ignore[attr-defined]
    store.close()


def test_each_key_has_a_value_and_an_offset() -> None:
    """One too few was a failure of the store's, which was then left alone; before a value's beginning lies its header."""
    store = stores.Store(Faulty())
    for call, words in (
        (lambda: store.submit_put(KEYS[:2], [b"a"]), "2 keys need as many values, got 1"),
        (lambda: store.submit_get(KEYS[:1], []), "1 keys need as many buffers, got 0"),
        (lambda: store.submit_get(KEYS[:1], [bytearray(1)], []), "1 keys need as many offsets, got 0"),
        (lambda: store.submit_get(KEYS[:1], [bytearray(1)], [-1]), "offset 0, -1 was asked for"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    store.drain()
    store.close()


def test_finished_jobs_that_nobody_asks_for_are_forgotten() -> None:
    """Storing chunks of prompts for days must not fill the memory with what became of each."""
    store = stores.Store(Faulty(), finished=3)
    jobs = [store.submit_put([key], [b"x"]) for key in KEYS[:8]]
    store.drain()
    assert len(store._finished) == 3 and store.counts["forgotten"] == 5 and not store._awaited
    kept = sorted(store._finished)
    for job in set(jobs) - set(kept):
        with pytest.raises(ValueError, match="forgotten"):
            store.wait(job)
    last = store.wait(kept[0])
    assert last is not None and last.ok == (True,)
    assert sorted(done.job for done in store.poll()) == kept[1:] and store.poll() == []
    store.close()


def test_a_job_that_is_waited_for_is_neither_forgotten_nor_handed_to_others() -> None:
    backend = Faulty()
    store = stores.Store(backend, threads=2, finished=0)
    backend.gate.clear()
    found: list[stores.Done | None] = []
    job = store.submit_put([KEYS[0]], [b"x"])
    waiting = threading.Thread(target=lambda: found.append(store.wait(job, 20)))
    waiting.start()
    while not store._awaited:
        time.sleep(0.001)
    with store._change:  # the waiting thread cannot run before all of this is over
        store._finish(stores.Done(job, (True,), 1, 0.0), 0)
        assert store.poll() == []
    waiting.join(10)
    assert [done and done.job for done in found] == [job] and not store._awaited
    backend.gate.set()
    store.close()


def test_the_buffer_is_the_callers(tmp_path: Path) -> None:
    """A chunk goes from bytes to a tensor's own memory without a copy in between."""
    store = stores.Store(stores.Files(tmp_path))
    x = torch.arange(100, dtype=torch.int32)
    store.wait(store.submit_put([KEYS[0]], [memoryview(x.numpy())]))
    y = torch.zeros(100, dtype=torch.int32)
    done = store.wait(store.submit_get([KEYS[0]], [memoryview(y.numpy())]))
    assert done is not None and done.ok == (True,) and done.nbytes == 400 and torch.equal(x, y)
    short = store.wait(store.submit_get([KEYS[0]], [bytearray(401)]))
    assert short is not None and short.ok == (False,)
    store.close()


def test_a_chunk_of_another_model_is_never_found(tmp_path: Path) -> None:
    store = stores.Store(stores.Files(tmp_path))
    mine, other = cachegen.Identity(model="mine"), cachegen.Identity(model="other")
    tokens = list(range(32))
    names = {
        (who.model, policy, salt, chunk): stores.chain(tokens, stores.root(who, policy, chunk=chunk, salt=salt), chunk)
        for who in (mine, other) for policy in ("full", "kivi") for salt in ("", "tenant") for chunk in (8, 16)
    }  # fmt: skip
    flat = [key for chain in names.values() for key in chain]
    assert len(set(flat)) == len(flat)
    kv = cache(identity=mine)
    store.wait(store.submit_put(names["mine", "full", "", 8][:1], [cachegen.encode(kv, "lossless")]))
    assert store.lookup(names["mine", "full", "", 8]) == 1
    assert store.lookup(names["other", "full", "", 8]) == 0
    size = store.sizes(names["mine", "full", "", 8])[0]
    assert size is not None
    into = bytearray(size)
    store.wait(store.submit_get(names["mine", "full", "", 8][:1], [into]))
    assert torch.equal(stack(cachegen.decode(into, mine)), stack(kv))
    store.close()


def test_a_bucket_that_is_down_is_given_up_soon() -> None:
    pytest.importorskip("obstore")
    store = stores.Store(stores.backend(
        "s3://bucket/x", endpoint=f"http://127.0.0.1:{free_port()}", region="us-east-1", access_key_id="a",
        secret_access_key="b", client_options={"allow_http": True},
    ))  # fmt: skip
    start = time.monotonic()
    assert store.lookup(KEYS) == 0 and store.counts["failed"] == 1
    assert time.monotonic() - start < 15
    store.close()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"chunk": 0}, "1 to 16384 tokens, 0 were"),
        ({"chunk": 16385}, "16385 were"),
        ({"chunk": 2.0}, "2.0 were"),
        ({"chunk": 2, "salt": "x" * 129}, "at most 128 characters, this one 129"),
    ],
)
def test_keys_of_what_no_chunk_can_be_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        stores.root(cachegen.Identity(model="m"), "full", **wrong)


def test_a_chain_of_empty_chunks_is_refused() -> None:
    start = stores.root(cachegen.Identity(model="m"), "full", chunk=1)
    with pytest.raises(ValueError, match="at least 1 token, 0 were"):
        stores.chain([1, 2], start, 0)
