"""The non-blocking face of every store.

    lookup leading sizes submit_put submit_get poll wait pin delete entries usage events drain close

Buffers belong to the caller: those given to `submit_put` must not change, and those given to `submit_get` must not be
used, until `poll` or `wait` has named the job. Whoever does not care need not ask: of the finished jobs that nobody has
asked for the newest are remembered, some ten thousands. Nothing here raises because a store is down, slow, full or damaged: such
a key is a miss, the event is logged and counted, and the caller computes instead. After three failures in a row, and after each
that follows them, the store is left alone for `pause` seconds, so a dead one costs next to nothing per request; one that only
takes nothing more, as it is full or may only be read, is still read. A closed store, and in a process that was forked off
one that was opened before, raise StoreError: that is a mistake of the caller's, and as a miss it would be computed around
for ever.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from kvengine.errors import CorruptBitstream, IncompatibleCache, StoreError
from kvengine.offload.forked import check_process
from kvengine.offload.stores.backend import Backend
from kvengine.offload.stores.record import Buffer, Entry, check_ttl

log = logging.getLogger(__name__)
X = TypeVar("X")
FAILURES = 3


@dataclass(frozen=True)
class Done:
    """A finished job: per key whether it worked, bytes moved, seconds from submission."""

    job: int
    ok: tuple[bool, ...]
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Event:
    """Something that went wrong: `kind` is "miss", "corrupt", "incompatible", "failed", "late", "skipped" or "dropped"; `when` is
    in seconds since 1970."""

    kind: str
    key: str
    detail: str
    when: float


def check_count(keys: Sequence[str], given: Sequence[object], what: str) -> int:
    """How many were given. Raises ValueError unless there is one for each key."""
    if len(given) != len(keys):
        raise ValueError(f"{len(keys)} keys need as many {what}, got {len(given)}")
    return len(given)


class Store:
    """Runs a backend on threads.

    backend:  where values live
    threads:  requests served at once, and questions after values (`leading`) beside them
    pending:  most bytes of puts that wait; further puts are dropped (a cache must not hold up the model). One of more bytes than
              that is taken where none waits: it could never be stored
    pause:    seconds to leave a failing backend alone
    finished: most finished jobs that are remembered until somebody asks; older ones are forgotten (`counts["forgotten"]`)
    """

    def __init__(
        self,
        backend: Backend,
        *,
        threads: int = 4,
        pending: int = 1 << 30,
        pause: float = 5.0,
        finished: int = 1 << 15,
    ) -> None:
        self.backend, self.pending, self.pause, self.finished = backend, pending, pause, finished
        self.threads = threads
        self.counts: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="kvstore")
        self._asking = ThreadPoolExecutor(threads, thread_name_prefix="kvstore-asks")  # not behind values on their way
        self._change = threading.Condition()
        self._jobs, self._queued, self._failures, self._answers, self._closed_until = 0, 0, 0, 0, 0.0
        # The same of each way to change it: a full store takes nothing more, and still may be read and deleted from.
        self._refusals, self._refused_until = Counter[str](), defaultdict[str, float](float)
        self._open: set[int] = set()
        self._finished: dict[int, Done] = {}  # the oldest first
        self._awaited: Counter[int] = Counter()  # by `wait`, which is to get them whatever becomes of others
        self._events: deque[Event] = deque(maxlen=1000)
        self._closed, self._process = False, os.getpid()

    def _check_process(self) -> None:
        """A fork has neither its threads nor its connections."""
        check_process(self._process, "the store was opened", "open it here too")

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise StoreError("the store is closed; make another")

    def lookup(self, keys: Sequence[str], timeout: float | None = None) -> int:
        """How many of the first keys are there: the length of the reusable prefix, in chunks."""
        return len(self.leading(keys, timeout))

    def leading(self, keys: Sequence[str], timeout: float | None = None) -> list[int]:
        """Bytes of each of the first values that are there, up to the first miss. What a store has not told after `timeout`
        seconds is a miss, and a failure of the store if it has told nobody anything meanwhile."""
        self._check_open()
        if not keys:
            return []  # there is nothing to wait for, nor to name if others keep the store from answering
        found, over, rest, answers = list[int](), threading.Event(), iter(keys), self._answers
        end = None if timeout is None else time.monotonic() + timeout
        coming: deque[Future[int | None]] = deque()

        def ask(key: str) -> int | None:
            return None if over.is_set() else self.sizes([key])[0]

        try:
            while True:
                ahead = min(1 + len(found), self.threads) - len(coming)  # the first alone: it is the likeliest to miss
                coming += [self._asking.submit(ask, key) for key in islice(rest, ahead)]
                if not coming or (size := coming.popleft().result(end and max(0.0, end - time.monotonic()))) is None:
                    break
                found.append(size)
        except (TimeoutError, RuntimeError) as error:  # the latter where no thread can be started
            late = isinstance(error, TimeoutError) and self._answers > answers
            self._note("late" if late else "failed", keys[0], f"{error}" or f"no answer within {timeout} seconds")
            if not late:
                self._failed()
        finally:
            over.set()
        return found

    def sizes(self, keys: Sequence[str]) -> list[int | None]:
        """Bytes of each value, None for a miss: what buffers to bring to `submit_get`."""
        self._check_open()
        return [self._guarded(key, self.backend.size, key) for key in keys]

    def submit_put(
        self, keys: Sequence[str], values: Sequence[Buffer | Sequence[Buffer]], ttl: float | None = None
    ) -> int:
        """Stores values, each a buffer or a list of buffers to be joined, for `ttl` seconds. Returns the job.

        Raises ValueError unless there are as many values as keys, StoreError for what is no time."""
        self._check_process()
        check_ttl(ttl)
        check_count(keys, values, "values")
        parts = [[v] if isinstance(v, bytes | bytearray | memoryview) else list(v) for v in values]
        sizes = [sum(memoryview(part).nbytes for part in value) for value in parts]

        def put(i: int) -> int:
            self.backend.put(keys[i], parts[i], ttl)
            return sizes[i]

        return self._submit(keys, put, sum(sizes), "put")

    def submit_get(self, keys: Sequence[str], buffers: Sequence[Buffer], offsets: Sequence[int] | None = None) -> int:
        """Reads values into the caller's buffers, from `offsets` (bytes) on. A buffer that is not filled counts as a
        miss. Returns the job.

        Raises ValueError unless there are as many buffers, and offsets from 0 on, as keys."""
        self._check_process()
        check_count(keys, buffers, "buffers")
        if offsets is not None and check_count(keys, offsets, "offsets") and min(offsets) < 0:
            raise ValueError(f"a value begins at offset 0, {min(offsets)} was asked for")
        views = [memoryview(buffer).cast("B") for buffer in buffers]

        def get(i: int) -> int:
            got = self.backend.read(keys[i], views[i], offsets[i] if offsets else 0)
            if got != len(views[i]):
                raise KeyError(f"{got} of {len(views[i])} bytes")
            return got

        return self._submit(keys, get, 0)

    def _submit(self, keys: Sequence[str], work: Callable[[int], int], size: int, change: str = "") -> int:
        with self._change:
            self._check_open()
            self._jobs += 1
            job, start, why = self._jobs, time.monotonic(), ""
            if self._queued and 0 < size > self.pending - self._queued:
                why = f"{size} bytes beside {self._queued} waiting"
            else:
                try:
                    self._pool.submit(self._run, job, list(keys), work, size, start, change)
                    self._open.add(job)
                    self._queued += size
                except RuntimeError as error:  # no thread can be started
                    why = str(error)
        if why:
            self._note("dropped", keys[0], why)
            self._finish(Done(job, (False,) * len(keys), 0, 0.0), 0)
        return job

    def _run(self, job: int, keys: list[str], work: Callable[[int], int], size: int, start: float, change: str) -> None:
        with self._change:
            if job not in self._open:  # dropped, and yet left in the queue for whichever thread is next
                return
        moved = [self._guarded(key, work, i, change) for i, key in enumerate(keys)]
        total = sum(n or 0 for n in moved)
        self._finish(Done(job, tuple(n is not None for n in moved), total, time.monotonic() - start), size)

    def _finish(self, done: Done, size: int) -> None:
        with self._change:
            self._queued -= size
            self._open.discard(done.job)
            self._finished[done.job] = done
            self._forget()
            self._change.notify_all()

    def _forget(self) -> None:
        """Give up the oldest finished jobs beyond those that are remembered."""
        over = max(0, len(self._finished) - self.finished)
        oldest = islice((job for job in self._finished if job not in self._awaited), over)
        for job in list(oldest):
            del self._finished[job]
            self.counts["forgotten"] += 1

    def _guarded(self, key: str, work: Callable[[X], int | None], argument: X, change: str = "") -> int | None:
        """The result, or None and a note of what went wrong. `change`: what is done, if that is more than to read."""
        if time.monotonic() < max(self._closed_until, self._refused_until[change]):
            self._note("skipped", key, "the store failed a moment ago")
            return None
        try:
            result = work(argument)
        except KeyError as error:
            self._note("miss", key, str(error))
        except CorruptBitstream as error:
            self._note("corrupt", key, str(error))
        except IncompatibleCache as error:
            self._note("incompatible", key, str(error))
        except Exception as error:  # a store must never end a generation, whatever its client library raises
            self._note("failed", key, f"{type(error).__name__}: {error}")
            self._failed(change)
            return None
        else:
            self._answered()
            self._refusals[change] = 0
            self.counts["miss" if result is None else "ok"] += 1
            return result
        self._answered()
        return None

    def _answered(self) -> None:
        self._failures, self._answers = 0, self._answers + 1

    def _failed(self, change: str = "") -> None:
        if change:
            self._refusals[change] += 1
            if self._refusals[change] >= FAILURES:
                self._refused_until[change] = time.monotonic() + self.pause
            return
        self._failures += 1
        if self._failures >= FAILURES:
            self._closed_until = time.monotonic() + self.pause

    def _note(self, kind: str, key: str, detail: str) -> None:
        self.counts[kind] += 1
        self._events.append(Event(kind, key, detail, time.time()))
        log.log(logging.DEBUG if kind in ("miss", "skipped") else logging.WARNING, "%s %s: %s", kind, key[:12], detail)

    def poll(self) -> list[Done]:
        """Jobs finished since the last call, whoever submitted them, the newest `finished`; never waits. One that is handed
        out here can no longer be waited for; one that somebody is waiting for is not handed out."""
        with self._change:
            done = [done for job, done in self._finished.items() if job not in self._awaited]
            self._finished = {job: done for job, done in self._finished.items() if job in self._awaited}
        return done

    def wait(self, job: int, timeout: float | None = None) -> Done | None:
        """The finished job, or None if it takes longer than `timeout` seconds (its buffers are then still in use)."""
        self._check_process()
        with self._change:
            self._awaited[job] += 1
            try:
                over = self._change.wait_for(lambda: job not in self._open, timeout)
            finally:
                self._awaited[job] -= 1
                self._awaited += Counter()  # without those that nobody waits for
            if over and job not in self._finished:
                raise ValueError(f"job {job} was never submitted, or has been handed out or forgotten")
            return self._finished.pop(job, None)

    def drain(self) -> None:
        """Waits for all jobs; they stay there for `poll`."""
        self._check_process()
        with self._change:
            self._change.wait_for(lambda: not self._open)

    def pin(self, keys: Sequence[str], pinned: bool = True) -> list[bool]:
        """Keeps values from eviction, or no longer; whether each is there."""

        def pin(key: str) -> int:
            self.backend.pin(key, pinned)
            return 0

        self._check_open()
        return [self._guarded(key, pin, key, "pin") is not None for key in keys]

    def delete(self, keys: Sequence[str]) -> list[bool]:
        """Whether each was there, and is gone."""
        self._check_open()
        return [bool(self._guarded(key, self.backend.delete, key, "delete")) for key in keys]

    def entries(self) -> list[Entry]:
        """What is stored. Raises StoreError or OSError if the backend cannot say."""
        self._check_open()
        return list(self.backend.entries())

    def usage(self) -> dict[str, int]:
        """Values and payload bytes stored, and jobs open."""
        entries = self.entries()
        return {"values": len(entries), "bytes": sum(e.size for e in entries), "open": len(self._open)}

    def events(self) -> list[Event]:
        """What went wrong since the last call, the last 1000; `counts` has the totals."""
        with self._change:
            found = list(self._events)
            self._events.clear()
        return found

    def close(self) -> None:
        """Waits for open jobs and releases the backend. Again is no harm, nor is it in a process that was forked off."""
        if os.getpid() != self._process:  # what is under way is the other one's, and so are connections
            return
        with self._change:
            if self._closed:
                return
            self._closed = True
        self._asking.shutdown()
        self._pool.shutdown()
        self.backend.close()
