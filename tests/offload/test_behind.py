"""Tiers are written behind the caller's back: in order, bounded, and a write that fails loses nothing."""

from __future__ import annotations

import copy
import errno
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from support_offload import deleted

from kvengine.errors import StoreError
from kvengine.offload.placement import Site
from kvengine.offload.placement import _packed as packed
from kvengine.offload.placement._ahead import Ahead
from kvengine.offload.placement._file import File
from kvengine.offload.placement._levels import Layout, Memory, Unwritable
from kvengine.offload.placement._remote import Remote
from kvengine.offload.placement._tiered import Tiered
from kvengine.offload.stores import Files
from kvengine.offload.stores.backend import Backend
from kvengine.offload.stores.index import Index
from kvengine.offload.stores.record import Buffer

LIKE = {"a": torch.zeros(0, 3), "b": torch.zeros(0, 2, dtype=torch.int16)}
SIZE = 16  # bytes of a piece
ROOM = 8  # pieces that may wait


class Gated(Backend):
    """A store in a dictionary whose puts can be held up, or made to fail: the N-th, or all."""

    def __init__(self, fails: Callable[[int], bool] = lambda n: False) -> None:
        self.values: dict[str, bytes] = {}
        self.fails, self.puts, self.gate = fails, 0, threading.Event()
        self.gate.set()

    def put(self, key: str, payload: Sequence[Buffer], ttl: float | None = None) -> None:
        self.puts += 1
        number = self.puts
        self.gate.wait(30)
        if self.fails(number):
            raise ConnectionError(f"put {number} was refused")
        self.values[key] = b"".join(payload)

    def read(self, key: str, into: memoryview, offset: int = 0) -> int:
        part = self.values[key][offset : offset + len(into)]
        into[: len(part)] = part
        return len(part)

    def delete(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(packed, "PENDING", ROOM * SIZE)
    monkeypatch.setattr(packed, "PAUSE", 0.0)
    yield


def shelf(*levels: Any) -> Tiered:
    made = Tiered(LIKE, list(levels), Site(ahead=Ahead()))
    made.reserve(64)
    return made


def in_store(store: Any) -> Remote:
    return Remote(Layout.of(LIKE), store, 1 << 40, 100.0)


def rows(values: Sequence[float]) -> dict[str, torch.Tensor]:
    x = torch.tensor(values, dtype=torch.float32)[:, None]
    return {"a": x.expand(-1, 3).contiguous(), "b": x.expand(-1, 2).to(torch.int16)}


def put(into: Tiered, ids: Sequence[int], add: float = 0) -> None:
    into.write(torch.tensor(ids), rows([i + add for i in ids]))


def got(of: Tiered, ids: Sequence[int]) -> list[float]:
    return of.read(torch.tensor(ids))["a"][:, 0].tolist()


def test_nobody_waits_for_a_slow_tier_and_what_waits_can_be_read() -> None:
    store = Gated()
    store.gate.clear()
    s = shelf(in_store(store))
    start = time.monotonic()
    put(s, range(4))
    put(s, range(4, 8))
    assert got(s, range(8)) == list(range(8)) and time.monotonic() - start < 5
    assert not store.values and s.nbytes()["host"]["behind"] == 8 * SIZE and s.faults == 0
    store.gate.set()
    s.flush()
    assert len(store.values) == 2 and "behind" not in s.nbytes().get("host", {})
    assert got(s, range(8)) == list(range(8))


def test_a_caller_that_is_faster_than_the_tier_waits_for_it() -> None:
    store = Gated()
    store.gate.clear()
    s = shelf(in_store(store))
    put(s, range(ROOM))
    done = threading.Event()

    def more() -> None:
        put(s, range(ROOM, 3 * ROOM))
        done.set()

    thread = threading.Thread(target=more)
    thread.start()
    assert not done.wait(0.2) and s.nbytes()["host"]["behind"] <= ROOM * SIZE
    store.gate.set()
    assert done.wait(30)
    thread.join()
    s.flush()
    assert got(s, range(3 * ROOM)) == list(range(3 * ROOM)) and s.faults == 0


def test_what_was_given_up_while_it_waited_is_not_sent() -> None:
    """The store would keep it until it expires: nobody deletes what no slot names."""
    store, later = Gated(), []
    tier = in_store(store)
    tier.behind(later.append, 1.0)
    slots = tier.slots.take(4)
    tier.write(slots, rows(range(4)))
    tier.release(slots[1:3])
    for work in later:
        work()
    assert b"".join(store.values.values()) == Layout.of(LIKE).pack(rows([0, 3])).tobytes()


def test_a_page_that_is_being_written_is_not_given_up_before_that() -> None:
    """Its value would come to the store when nobody knows of it any more."""
    store = Gated()
    store.gate.clear()
    s = shelf(in_store(store))
    put(s, range(2))
    while not store.puts:
        time.sleep(0.001)
    other = threading.Thread(target=s.forget, args=(np.arange(2),))
    other.start()
    other.join(0.1)
    assert other.is_alive()
    store.gate.set()
    other.join(30)
    s.site.ahead.threads["remote"].shutdown()
    assert not other.is_alive() and not store.values


def test_the_last_write_of_a_page_counts() -> None:
    """A page given up while its first contents wait, or are being written, and written again in the same place."""
    store = Gated()
    s = shelf(in_store(store))
    for turn in range(6):
        store.gate.clear() if turn % 2 else store.gate.set()
        threading.Timer(0.02, store.gate.set).start()
        put(s, [1, 2, 3], 100 * turn)
        assert got(s, [3, 1]) == [3 + 100 * turn, 1 + 100 * turn]
    s.flush()
    s.staged = None
    assert got(s, [1, 2, 3]) == [501, 502, 503]
    s.forget(np.arange(4))
    for _ in range(500):  # deleted on the thread
        if not store.values:
            break
        time.sleep(0.01)
    assert not store.values


def test_a_failed_write_is_kept_counted_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed, "PAUSE", 30.0)
    store = Gated(lambda n: n == 1)
    host = Memory("host", LIKE, None, 2)
    s = shelf(host, in_store(store))
    put(s, range(6))  # four go down, and are refused there
    s.flush()
    assert s.faults == 1 and "stay in memory: put 1 was refused" in caplog.text and not store.values
    assert got(s, range(6)) == list(range(6))
    put(s, [6, 7])  # the tier is given a pause: what comes next stays above, beyond the cap
    assert host.slots.used > host.capacity and s.faults > 1 and store.puts == 1
    monkeypatch.setattr(packed, "PAUSE", 0.0)
    s.levels[1].closed_until = 0.0  # type: ignore[attr-defined]
    put(s, [8])
    s.flush()
    assert store.values and got(s, range(9)) == list(range(9))


@pytest.mark.parametrize("before", [[], [0, 1, 2, 3]], ids=["empty", "below too"])
def test_more_than_a_tier_holds_stays_there_while_the_one_below_refuses(
    before: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was full, where nothing of what it had could go down or need not."""
    monkeypatch.setattr(packed, "PAUSE", 1e6)
    store = Gated(lambda n: n == 3)
    host = Memory("host", LIKE, None, 4)
    s = shelf(host, in_store(store))
    for ids in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12]):  # the third that goes down is refused
        put(s, ids)
        s.flush()
    s.forget(np.arange(8, 13))
    if before:
        assert got(s, before) == before
    assert s.levels[1].stuck and host.slots.used == len(before)  # type: ignore[attr-defined]
    put(s, range(20, 28))
    assert s.faults > 1 and host.slots.used == 8 and got(s, [*before, *range(20, 28)]) == [*before, *range(20, 28)]


def test_what_cannot_go_down_is_read_for_that_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every read from below while the tier there refuses: what would be brought up waits for room."""
    monkeypatch.setattr(packed, "PAUSE", 1e6)
    store, host = Gated(lambda n: n > 1), Memory("host", LIKE, None, 4)
    s = shelf(host, in_store(store))
    for ids in ([0, 1, 2, 3], [4, 5, 6, 7]):
        put(s, ids)
        s.flush()
    s.levels[1].stuck, s.levels[1].closed_until = "refused", time.monotonic() + 1e6  # type: ignore[attr-defined]
    copied, read = list[int](), host.read
    monkeypatch.setattr(host, "read", lambda slots, without: copied.append(len(slots)) or read(slots, without))
    assert got(s, [0, 1]) == [0, 1] and copied == [2]


def test_where_nothing_is_above_the_next_write_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "PAUSE", 30.0)
    s = shelf(in_store(Gated(lambda n: True)))
    put(s, range(4))
    s.flush()
    with pytest.raises(Unwritable, match="2 pages were not written to the remote tier: put 1 was refused"):
        put(s, [4, 5])
    assert got(s, range(4)) == [0, 1, 2, 3]  # what was taken is there
    with pytest.raises(StoreError):
        put(s, [4])


def test_more_than_may_wait_is_refused_whole() -> None:
    """The first part waits, the tier turns out to be broken: nothing of the call is taken."""
    store = Gated(lambda n: True)
    s = shelf(in_store(store))
    with pytest.raises(Unwritable):
        put(s, range(3 * ROOM))
    level = s.levels[0]
    assert not level.waiting and not level.batches and level.slots.used == 0  # type: ignore[attr-defined]
    store.fails = lambda n: False
    put(s, range(3 * ROOM))
    assert got(s, range(3 * ROOM)) == list(range(3 * ROOM))


script = st.lists(
    st.tuples(
        st.sampled_from(["read", "write", "write", "forget"]), st.lists(st.integers(0, 23), min_size=1, max_size=9)
    ),
    max_size=20,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script, st.integers(0, 2**31), st.floats(0, 0.7))
def test_whichever_writes_fail_what_was_taken_is_there(
    steps: list[tuple[str, list[int]]], seed: int, rate: float
) -> None:
    """Against a dictionary, over a store that refuses writes at random; what `write` took must be readable."""
    dice = np.random.default_rng(seed)
    store = Gated(lambda n: bool(dice.random() < rate))
    s = shelf(Memory("host", LIKE, None, 4), in_store(store))
    want: dict[int, float] = {}
    for number, (what, ids) in enumerate(steps):
        ids = list(dict.fromkeys(ids))
        if what == "write":
            put(s, ids, 100 * number)
            want.update({i: 100 * number + i for i in ids})
        elif what == "forget":
            s.forget(np.array(ids))
            want = {i: x for i, x in want.items() if i not in ids}
        else:
            assert got(s, ids) == [want.get(i, 0) for i in ids]
            s.fetch_ahead()
    store.fails = lambda n: False
    s.flush()
    assert got(s, range(24)) == [want.get(i, 0) for i in range(24)]


def test_a_cache_that_goes_takes_along_what_waits(tmp_path: Path) -> None:
    store = Gated()
    s = shelf(File(Layout.of(LIKE), str(tmp_path), 4), in_store(store))
    for a in range(0, 24, 4):
        put(s, range(a, a + 4))
    ahead = s.site.ahead
    del s
    gc.collect()
    for pool in ahead.threads.values():
        pool.shutdown(wait=True)
    gc.collect()
    deleted()
    assert not list(tmp_path.iterdir()) and not store.values


def test_a_cache_that_is_collected_while_its_store_is_busy_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were deleted on the spot: within another store's transaction on the same index, for half a minute each."""
    shelves = [shelf(Remote(Layout.of(LIKE), Files(tmp_path, sync="none"), 1 << 40, 1000.0))]
    for a in range(0, 12, 4):
        put(shelves[0], range(a, a + 4))
        shelves[0].flush()
    assert len(list((tmp_path / "objects").rglob("*.kv"))) > 1
    insert = Index._insert

    def collecting(*arguments: Any) -> None:
        shelves.clear()
        gc.collect()
        insert(*arguments)

    monkeypatch.setattr(Index, "_insert", collecting)
    start = time.monotonic()
    other = Files(tmp_path, sync="none")
    assert not shelves and time.monotonic() - start < 15
    while list((tmp_path / "objects").rglob("*.kv")) and time.monotonic() - start < 20:
        time.sleep(0.01)  # the thread that wrote them may be the last to let go of them
    assert not list((tmp_path / "objects").rglob("*.kv"))
    other.close()


def test_values_are_deleted_at_the_end_of_the_process(tmp_path: Path) -> None:
    code = f"""if 1:
        import torch
        from kvengine.offload.placement._levels import Layout
        from kvengine.offload.placement._remote import Remote
        from kvengine.offload.stores import Files
        like = {{"a": torch.zeros(1, 4)}}
        held = Remote(Layout.of(like), Files({str(tmp_path)!r}), 100, 1000.0)
        held.write(held.slots.take(3), {{"a": torch.zeros(3, 4)}})
        held.flush()
        print(len(held.values))"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "1" and not list((tmp_path / "objects").rglob("*.kv")), done.stderr


def test_a_process_that_was_forked_off_takes_no_values_along(tmp_path: Path) -> None:
    """As a server's or a daemon's first process ends: whoever goes on with the cache found its pages gone."""
    code = f"""if 1:
        import os, sys, torch
        from kvengine.offload.placement._levels import Layout
        from kvengine.offload.placement._remote import Remote
        from kvengine.offload.stores import Files
        like = {{"a": torch.zeros(1, 4)}}
        held = Remote(Layout.of(like), Files({str(tmp_path)!r}), 100, 1000.0)
        at = held.slots.take(3)
        held.write(at, {{"a": torch.ones(3, 4)}})
        held.flush()
        if (child := os.fork()) == 0:
            sys.exit(0)
        os.waitpid(child, 0)
        print(int(held.read(at, ())["a"].sum()))"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "12" and not list((tmp_path / "objects").rglob("*.kv")), done.stderr


@pytest.mark.parametrize("broken", [False, True])
def test_a_copy_has_what_waits(broken: bool, tmp_path: Path) -> None:
    store = Gated(lambda n: broken)
    s = shelf(File(Layout.of(LIKE), str(tmp_path), 4), in_store(store))
    put(s, range(12))
    twin = copy.deepcopy(s)
    put(s, range(12), 100)
    assert got(twin, range(12)) == list(range(12))
    del s
    gc.collect()
    store.fails = lambda n: False
    put(twin, [20])
    twin.flush()
    assert got(twin, [*range(12), 20]) == [*range(12), 20]


def refused(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("kind", ["file", "store"])
def test_where_no_thread_can_be_started_what_waits_stays_and_is_written_later(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was an error of Python's, and whoever waited for the tier from then on waited for ever."""
    store = Gated()
    s = shelf(File(Layout.of(LIKE), str(tmp_path), 64) if kind == "file" else in_store(store))
    with monkeypatch.context() as none:
        none.setattr(threading.Thread, "start", refused)
        put(s, range(4))
        s.flush()
        assert got(s, range(4)) == [0, 1, 2, 3] and s.faults > 0
        twin = copy.deepcopy(s)
    put(s, range(4, 8))
    s.flush()
    assert got(s, range(8)) == list(range(8)) and not s.levels[-1].batches
    assert len(store.values) == (2 if kind == "store" else 0)
    assert got(twin, range(4)) == [0, 1, 2, 3]


def test_of_a_load_that_never_began_nothing_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a thread, and interrupted (Control-C) just where one was to be asked: bytes that nobody had written were read."""
    s = shelf(in_store(Gated()))
    put(s, range(4))
    s.flush()
    for error in (RuntimeError("can't start new thread"), KeyboardInterrupt()):
        with monkeypatch.context() as broken:
            broken.setattr(Ahead, "run", lambda *_, error=error: (_ for _ in ()).throw(error))
            try:
                assert got(s, range(4)) == [0, 1, 2, 3]
            except KeyboardInterrupt:
                pass
        assert got(s, range(4)) == [0, 1, 2, 3]


def test_too_many_open_files_are_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tempfile.mkstemp", lambda *_: (_ for _ in ()).throw(OSError(errno.EMFILE, "Too many open files"))
    )
    with pytest.raises(StoreError, match="Too many open files; .*ulimit -n"):
        File(Layout.of(LIKE), str(tmp_path), 4)
