"""What survives: kill -9 at every step, a failing N-th call, and every state that a power loss may leave."""

from __future__ import annotations

import errno
import os
import random
import select
import shutil
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, example, given, settings
from support_crash import Recorder, Saboteur, die

from kvengine.errors import CorruptBitstream, StoreError
from kvengine.offload.stores import Files, Store

KEYS = [f"{i:064x}" for i in range(40)]


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory where there is such a place: these tests make thousands of files, and model syncs."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def value(key: str, size: int = 300) -> bytes:
    return random.Random(key).randbytes(size)


def read(store: Files, key: str) -> bytes | None:
    size = store.size(key)
    if size is None:
        return None
    into = bytearray(size)
    try:
        store.read(key, memoryview(into))
    except CorruptBitstream:  # a miss, as Store makes it
        return None
    return bytes(into)


def child(work: Callable[[], None]) -> int:
    """Runs `work` in a forked process; returns its exit status as `waitpid` gives it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads; the child uses none of them
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(pid, 0)[1]


def calls_of_a_put(folder: Path) -> tuple[int, int]:
    """(calls until the store is open, calls after one put)."""
    files = Saboteur()
    store = Files(folder, files=files)
    opened = files.calls
    store.put(KEYS[1], [value(KEYS[1])])
    store.close()
    return opened, files.calls


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_killed_at_every_step_of_a_put(tmp_path: Path, after: bool) -> None:
    start = Files(tmp_path / "start")
    start.put(KEYS[0], [value(KEYS[0])])
    start.close()
    shutil.copytree(tmp_path / "start", tmp_path / "count")
    opened, done = calls_of_a_put(tmp_path / "count")
    assert done - opened >= 6  # create, two writes, sync, close, rename, sync of the folder
    for at in range(opened + 1, done + 1):
        folder = tmp_path / f"run{at}"
        shutil.copytree(tmp_path / "start", folder)

        def put(at: int = at, folder: Path = folder) -> None:
            Files(folder, files=Saboteur(at, die, after)).put(KEYS[1], [value(KEYS[1])])

        assert os.WTERMSIG(child(put)) == signal.SIGKILL
        store = Files(folder, grace=0)
        assert read(store, KEYS[0]) == value(KEYS[0])
        assert read(store, KEYS[1]) in (None, value(KEYS[1]))
        assert not list((folder / "tmp").iterdir())
        store.put(KEYS[1], [value(KEYS[1])])
        assert read(store, KEYS[1]) == value(KEYS[1]) and store.index.total() == 600
        store.close()


@pytest.mark.parametrize("rounds", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_at_random_moments_no_acknowledged_value_is_lost(tmp_path: Path, rounds: int) -> None:
    dice, acked = random.Random(rounds), dict[str, int]()
    for turn in range(rounds):
        receive, send = os.pipe()

        def work(send: int = send, turn: int = turn) -> None:
            store = Files(tmp_path)
            for i in range(10_000):
                key = f"{turn:032x}{i:032x}"
                store.put(key, [value(key, 5000)])
                os.write(send, key.encode())

        pid_status: list[int] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            work()
            os._exit(0)
        os.close(send)
        select.select([receive], [], [], 60)  # until the first, however long a busy machine takes to open the store
        time.sleep(dice.random() * 0.2)
        os.kill(pid, signal.SIGKILL)
        pid_status.append(os.waitpid(pid, 0)[1])
        with os.fdopen(receive, "rb") as pipe:
            text = pipe.read().decode()
        acked.update({text[at : at + 64]: turn for at in range(0, len(text) - 63, 64)})
    store = Files(tmp_path, grace=0)
    assert len(acked) > rounds
    assert all(read(store, key) == value(key, 5000) for key in acked)
    assert all(read(store, entry.key) == value(entry.key, 5000) for entry in store.entries())
    assert store.index.total() == sum(path.stat().st_size - 96 for path in (tmp_path / "objects").rglob("*.kv"))
    store.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EINTR], ids=["EIO", "ENOSPC", "EINTR"])
def test_every_call_may_fail(tmp_path: Path, code: int) -> None:
    """Two puts and two reads, with the N-th call failing, for every N: what is there is right, and put again works."""

    def fail(name: str) -> None:
        raise OSError(code, os.strerror(code), name)

    for at in range(1, 10_000):
        folder = tmp_path / str(at)
        first = Files(folder)  # its own preparation is 20 calls: opening is swept below
        first.put(KEYS[0], [value(KEYS[0])])
        files = Saboteur()
        first.files, files.at, files.act = files, at, fail
        stored, front = set(), Store(first, threads=1, pause=0)
        for key in KEYS[1:3]:
            done = front.wait(front.submit_put([key], [value(key)]))
            assert done is not None
            stored |= {key} if done.ok[0] else set()
        for key in [*stored, KEYS[0]]:
            into = bytearray(300)
            done = front.wait(front.submit_get([key], [into]))
            assert done is not None and (not done.ok[0] or bytes(into) == value(key))
        front.close()
        again = Files(folder, grace=0)
        kept = (None, value(KEYS[0])) if code == errno.ENOSPC else (value(KEYS[0]),)  # a full disk may cost the oldest
        assert read(again, KEYS[0]) in kept
        assert all(read(again, key) == value(key) for key in stored)
        again.put(KEYS[3], [value(KEYS[3])])
        assert again.index.total() == 300 * len(again.entries())
        again.close()
        shutil.rmtree(folder)
        if files.calls < at:
            assert at > 20 and len(stored) == 2
            return


@pytest.mark.parametrize("at", [1, 2, 10, 18, 19, 20, 21, 22, 23, 24, 26])
def test_opening_may_fail(tmp_path: Path, at: int) -> None:
    def fail(name: str) -> None:
        raise OSError(errno.EIO, "broken", name)

    store = Files(tmp_path)
    store.put(KEYS[0], [value(KEYS[0])])
    store.close()
    try:
        Files(tmp_path, files=Saboteur(at, fail)).close()
    except StoreError:
        pass
    store = Files(tmp_path)
    assert read(store, KEYS[0]) == value(KEYS[0])
    store.close()


def test_a_full_disk_evicts_then_gives_up(tmp_path: Path) -> None:
    class Small(Saboteur):
        """A disk of 2000 bytes of payload files."""

        def __init__(self) -> None:
            super().__init__()
            real = self.write

            def write(handle: int, data: bytes) -> None:
                used = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file() and "sqlite" not in p.name)
                if used + len(data) > 2000:
                    raise OSError(errno.ENOSPC, "no space left")
                real(handle, data)

            self.write = write  # type: ignore[method-assign,assignment]

    store = Files(tmp_path, files=Small())
    for i, key in enumerate(KEYS[:8]):
        store.put(key, [value(key)])
        store.index.touch(key, time.time() + i)
    assert read(store, KEYS[7]) == value(KEYS[7]) and read(store, KEYS[0]) is None
    with pytest.raises(StoreError, match="not stored"):
        store.put(KEYS[9], [bytes(5000)])
    assert not list((tmp_path / "tmp").iterdir())
    store.close()


def test_many_processes_write_and_read_the_same_keys(tmp_path: Path) -> None:
    def work(seed: int) -> None:
        dice, store = random.Random(seed), Files(tmp_path, cap=3000, sync="none")
        for _ in range(60):
            key = dice.choice(KEYS[:15])
            store.put(key, [value(key)])
            try:
                back = read(store, dice.choice(KEYS[:15]))
            except KeyError:  # evicted by another since its size was asked for
                continue
            if back is not None and back not in map(value, KEYS[:15]):
                os._exit(7)

    pids = []
    for seed in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            code = 3
            try:
                work(seed)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    store = Files(tmp_path, cap=3000)
    assert 0 < store.index.total() <= 3000
    assert all(read(store, entry.key) == value(entry.key) for entry in store.entries())
    store.close()


steps = st.lists(st.tuples(st.sampled_from(["put", "put", "put", "delete", "pin"]), st.integers(0, 3)), max_size=7)


def check_crashes(root: Path, script: list[tuple[str, int]], cap: int | None, sync: str, most: int) -> int:
    """Plays a script; after each step opens the store on states that a power loss may leave. Returns their number."""
    live, count = root / "live", 0
    files = Recorder(live)
    store = Files(live, cap=cap, sync=sync, files=files)  # type: ignore[arg-type]
    for step, number in script:
        key = KEYS[number]
        before = {e.key for e in store.entries()}
        if step == "put":
            try:
                store.put(key, [value(key)])
            except StoreError:  # everything else is pinned
                pass
        elif step == "delete":
            store.delete(key)
        elif key in before:
            store.pin(key)
        certain = {(e.key, e.pinned) for e in store.entries()} if sync == "always" else set()
        for state in files.crashes(most):
            count += 1
            check_state(root / "crashed", live, state, certain, cap)
    store.close()
    return count


def check_state(
    folder: Path, live: Path, state: dict[Path, bytes], certain: set[tuple[str, bool]], cap: int | None
) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for path, data in state.items():
        target = folder / path.relative_to(live)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    store = Files(folder, cap=cap, sync="none", grace=0)
    found = {key: read(store, key) for key in KEYS[:4]}
    assert all(data in (None, value(key)) for key, data in found.items())
    present = {key for key, data in found.items() if data is not None}
    assert {key for key, pinned in certain if pinned} <= {e.key for e in store.entries() if e.pinned}
    if cap is None:
        assert {key for key, _ in certain} <= present
    else:
        assert sum(len(data or b"") for data in found.values()) <= cap and store.index.total() <= cap
    store.put(KEYS[5], [value(KEYS[5], 10)]) if cap is None else None
    store.close()


fixture_once = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@settings(fixture_once, max_examples=15)
@given(steps, st.sampled_from([None, 700]), st.sampled_from(["always", "none"]))
@example([("put", 1), ("pin", 1)], None, "always")
def test_every_legal_state_after_a_power_loss(
    tmp_path: Path, script: list[tuple[str, int]], cap: int | None, sync: str
) -> None:
    check_crashes(Path(tempfile.mkdtemp(dir=tmp_path)), script, cap, sync, 6)


@pytest.mark.slow
@settings(fixture_once, max_examples=150)
@given(steps, st.sampled_from([None, 700]), st.sampled_from(["always", "none"]))
def test_many_more_legal_states(tmp_path: Path, script: list[tuple[str, int]], cap: int | None, sync: str) -> None:
    check_crashes(Path(tempfile.mkdtemp(dir=tmp_path)), script, cap, sync, 60)


def test_the_double_notices_a_store_that_does_not_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: leave out either sync, and an acknowledged value is lost in some legal state."""
    for broken in ("sync", "sync_folder"):
        with monkeypatch.context() as patch, pytest.raises(AssertionError):
            real = getattr(Recorder, broken)
            patch.setattr(
                Recorder, broken, lambda self, at, real=real: None if self.names else real(self, at)
            )  # once a value is written
            check_crashes(tmp_path / broken, [("put", 1), ("put", 2)], None, "always", 60)
