"""Links that chunks come over: a simulated one that replays a bandwidth trace, and a socket.

The socket's protocol, little-endian: request chunk `u32`, length of the level's name `u8`, the name; reply bytes
`u64`, then the payload.
"""

from __future__ import annotations

import bisect
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvengine.errors import StoreError
from kvengine.offload.streaming import Fetched

PIECE = 1 << 16
REQUEST, REPLY = struct.Struct("<IB"), struct.Struct("<Q")


@dataclass(frozen=True)
class Trace:
    """Bandwidth over time: from each start (seconds, first 0) on, so many bytes per second; the last for ever."""

    starts: tuple[float, ...]
    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.starts or self.starts[0] != 0 or list(self.starts) != sorted(set(self.starts)):
            raise ValueError(f"a trace's starts must grow from 0, got {self.starts}")
        if len(self.starts) != len(self.rates) or min(self.rates) < 0:
            raise ValueError(f"{len(self.starts)} starts need as many rates of at least 0, got {self.rates}")

    def rate(self, at: float) -> float:
        return self.rates[bisect.bisect_right(self.starts, at) - 1]

    def change(self, at: float) -> float:
        """When the rate changes next; never is infinity."""
        after = bisect.bisect_right(self.starts, at)
        return self.starts[after] if after < len(self.starts) else float("inf")

    @classmethod
    def random(cls, seed: int, *, low: float, high: float, step: float, count: int = 1000) -> Trace:
        """Uniform rates between `low` and `high`, a new one every `step` seconds (CacheGen's simulation)."""
        dice = random.Random(seed)
        return cls(tuple(i * step for i in range(count)), tuple(dice.uniform(low, high) for _ in range(count)))

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps({"starts": self.starts, "rates": self.rates}))

    @classmethod
    def load(cls, path: str | Path) -> Trace:
        data = json.loads(Path(path).read_text())
        return cls(tuple(data["starts"]), tuple(data["rates"]))


@dataclass
class SimulatedLink:
    """Transfers at the trace's rate, one after the other, on a clock of its own."""

    trace: Trace
    clock: float = 0.0

    def now(self) -> float:
        return self.clock

    def fetch(self, chunk: int, level: str, size: int, patience: float) -> Fetched:
        start, until, left = self.clock, self.clock + patience, float(size)
        while left > 0 and self.clock < until:
            end = min(self.trace.change(self.clock), until)
            rate = self.trace.rate(self.clock)
            if rate > 0 and left / rate <= end - self.clock:
                self.clock, left = self.clock + left / rate, 0.0
            elif end == float("inf"):
                raise StoreError("the trace ends at rate 0 and the transfer has no limit")
            else:
                self.clock, left = end, left - rate * (end - self.clock)
        return Fetched(self.clock - start, size - int(left), left <= 0)


class SocketLink:
    """A connection to a `Server`; `fetch` gives up by closing and connecting anew. Raises StoreError if it cannot."""

    def __init__(self, address: tuple[str, int], timeout: float = 5.0) -> None:
        self.address, self.timeout, self.began = address, timeout, time.monotonic()
        self.socket = self._connect()

    def _connect(self) -> socket.socket:
        try:
            return socket.create_connection(self.address, self.timeout)
        except OSError as error:
            raise StoreError(f"no chunk server at {self.address}: {error}") from error

    def now(self) -> float:
        return time.monotonic() - self.began

    def fetch(self, chunk: int, level: str, size: int, patience: float) -> Fetched:
        start, into = time.monotonic(), bytearray(size)
        got = 0
        try:
            name = level.encode()
            self.socket.sendall(REQUEST.pack(chunk, len(name)) + name)
            (length,) = REPLY.unpack(self._exactly(memoryview(bytearray(REPLY.size)), start + patience))
            if length != size:
                raise OSError(f"the server sends {length} bytes for chunk {chunk} at {level!r}, expected {size}")
            while got < size:
                got += self._some(memoryview(into)[got:], start + patience)
        except OSError:
            self.socket.close()
            self.socket = self._connect()
        seconds = time.monotonic() - start
        return Fetched(seconds, got, got == size, bytes(into) if got == size else None)

    def _exactly(self, view: memoryview, until: float) -> memoryview:
        done = 0
        while done < len(view):
            done += self._some(view[done:], until)
        return view

    def _some(self, view: memoryview, until: float) -> int:
        left = min(until - time.monotonic(), self.timeout)
        if left <= 0:
            raise TimeoutError("out of patience")
        self.socket.settimeout(left)
        if (got := self.socket.recv_into(view, min(len(view), PIECE))) == 0:
            raise ConnectionError("the server closed the connection")
        return got

    def close(self) -> None:
        self.socket.close()


class Server:
    """Serves chunks on the loopback, as fast as a trace says: for tests and demonstrations.

    source:  gives the payload of (chunk, level)
    trace:   None sends at full speed
    """

    def __init__(self, source: Callable[[int, str], bytes], trace: Trace | None = None) -> None:
        self.source, self.trace, self.began = source, trace, time.monotonic()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self.listener.getsockname()[:2]
        self.thread = threading.Thread(target=self._accept, daemon=True)
        self.thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                while head := connection.recv(REQUEST.size, socket.MSG_WAITALL):
                    chunk, length = REQUEST.unpack(head)
                    self._send(connection, self.source(chunk, connection.recv(length, socket.MSG_WAITALL).decode()))
            except (OSError, struct.error):
                return  # the client left

    def _send(self, connection: socket.socket, payload: bytes) -> None:
        connection.sendall(REPLY.pack(len(payload)))
        due = time.monotonic()
        for at in range(0, len(payload), PIECE):
            piece = payload[at : at + PIECE]
            if self.trace is not None:
                due = max(due, time.monotonic() - 0.05)
                due += _seconds(self.trace, len(piece), due - self.began)
                time.sleep(max(due - time.monotonic(), 0.0))
            connection.sendall(piece)

    def close(self) -> None:
        try:
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        except OSError:
            pass  # not everywhere possible on a listener
        self.listener.close()


def _seconds(trace: Trace, nbytes: int, at: float) -> float:
    """How long the trace takes for so many bytes, from `at` on."""
    return SimulatedLink(trace, clock=max(at, 0.0)).fetch(0, "", nbytes, 3600.0).seconds
