"""Streaming a stored prompt: per chunk the best level that still meets the deadline, or recomputing from text.

    observe (what the link did) -> choose (the next chunk's option) -> fetch or recompute -> observe ...

CacheGen (Liu et al., SIGCOMM 2024, arXiv 2310.07240, section 5.3) adapts per chunk to the throughput of the chunk
before. Differs from its released code, which reads the current chunk's bandwidth from the trace, gives every chunk an
equal share of the deadline and never carries slack over; here only the past is known, decoding overlaps with the next
transfer, and a transfer that stalls is given up in time to recompute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from kvengine.errors import StoreError

TEXT = "text"
"""The option of recomputing a chunk from its tokens: exact, no transfer, costs prefill time."""


@dataclass(frozen=True)
class Chunk:
    """What may be done about one chunk.

    sizes:      bytes at each stored level
    recompute:  seconds to prefill it given all chunks before; None if that cannot be done
    """

    sizes: Mapping[str, int]
    recompute: float | None = None


@dataclass(frozen=True)
class Fetched:
    """One transfer: seconds it took, bytes that arrived, the payload (None if it was given up or only simulated)."""

    seconds: float
    nbytes: int
    complete: bool
    payload: bytes | None = None


@runtime_checkable
class Link(Protocol):
    """A way to get chunks, with a clock."""

    def now(self) -> float:
        """Seconds, from whenever on."""

    def fetch(self, chunk: int, level: str, size: int, patience: float) -> Fetched:
        """Gets a chunk, or gives up after `patience` seconds."""


@dataclass
class Bandwidth:
    """Bytes per second to expect: the harmonic mean of the last transfers, but no more than the newest one's.

    The mean smooths; the newest bound reacts at once to a drop, and a rise is believed when it has lasted.
    """

    prior: float
    memory: int = 3
    seen: deque[tuple[int, float]] = field(default_factory=deque)

    def observe(self, nbytes: int, seconds: float) -> None:
        if seconds > 0:
            self.seen.append((nbytes, seconds))
            while len(self.seen) > self.memory:
                self.seen.popleft()

    def estimate(self) -> float:
        if not self.seen:
            return max(self.prior, 1.0)
        newest = self.seen[-1][0] / self.seen[-1][1]
        return max(min(sum(n for n, _ in self.seen) / sum(s for _, s in self.seen), newest), 1.0)


@dataclass
class Controller:
    """Chooses for chunk after chunk.

    deadline:      seconds until all chunks must be usable (the TTFT target, less what follows)
    options:       level names and TEXT, most wanted first
    decode_speed:  encoded bytes decoded per second
    bandwidth:     what is known of the link; its `prior` serves the first chunk
    margin:        part of the remaining time that is kept for surprises
    doubt:         part of the expected bandwidth that must still do: lower is safer and takes lower levels
    """

    deadline: float
    options: Sequence[str]
    decode_speed: float
    bandwidth: Bandwidth
    margin: float = 0.1
    doubt: float = 0.3

    def choose(self, rest: Sequence[Chunk], now: float, backlog: float = 0.0) -> str:
        """The option for rest[0]: the first that all remaining chunks could take in time, else the first that it could
        take if the others then took their fastest, else its fastest. Either way only an option after which the others'
        fastest still meets the deadline should the link drop to `doubt` of what is expected of it.

        `backlog` is compute already queued, in seconds.

        >>> fast = Controller(1.0, ["high", "low", TEXT], 1e9, Bandwidth(1000.0), margin=0.0, doubt=1.0)
        >>> chunks = [Chunk({"high": 600, "low": 200}, recompute=5.0)] * 2
        >>> fast.choose(chunks, now=0.0), fast.choose(chunks[:1], now=0.3)
        ('low', 'high')
        """
        rate, left = self.bandwidth.estimate(), self.deadline - now
        possible = [o for o in self.options if self._cost(rest[0], o, rate) is not None]
        safe = [o for o in possible if self._quickest(rest, o, backlog, rate * self.doubt) <= left]
        for option in safe:
            if self._finish(rest, [option] * len(rest), backlog, rate) <= left * (1 - self.margin):
                return option
        for option in safe:
            if self._quickest(rest, option, backlog, rate) <= left * (1 - self.margin):
                return option
        return self._fastest(rest, 0.0, backlog, rate)[0]

    def patience(self, chunk: Chunk, option: str, rest: Sequence[Chunk], now: float) -> float:
        """Seconds a transfer may take: until only recomputing it and the `rest` still meets the deadline, should the
        link be dead. If that is too late already, twice the expected time; for ever if it cannot be recomputed."""
        if chunk.recompute is None:
            return float("inf")
        rate = self.bandwidth.estimate()
        expected = chunk.sizes[option] / rate
        others = sum(min(c.sizes.values()) / rate if c.recompute is None else c.recompute for c in rest)
        latest = (self.deadline - now) * (1 - self.margin) - chunk.recompute - others
        return latest if latest > expected else 2 * expected

    def _cost(self, chunk: Chunk, option: str, rate: float) -> tuple[float, float] | None:
        """(seconds of link, seconds of compute) at `rate`; None if the chunk does not have the option."""
        if option == TEXT:
            return None if chunk.recompute is None else (0.0, chunk.recompute)
        if option not in chunk.sizes:
            return None
        return chunk.sizes[option] / rate, chunk.sizes[option] / self.decode_speed

    def seconds(self, chunk: Chunk, option: str) -> float:
        """Compute an option takes; 0 if the chunk does not have it."""
        cost = self._cost(chunk, option, self.bandwidth.estimate())
        return cost[1] if cost else 0.0

    def _after(self, chunk: Chunk, option: str, free: tuple[float, float], rate: float) -> tuple[float, float]:
        """When link and compute are free again: transfers follow one another, computing follows them."""
        cost = self._cost(chunk, option, rate)
        if cost is None:
            return float("inf"), float("inf")
        link = free[0] + cost[0]
        return link, (free[1] if option == TEXT else max(free[1], link)) + cost[1]

    def _finish(self, rest: Sequence[Chunk], plan: Sequence[str], backlog: float, rate: float) -> float:
        """Seconds until the plan is done."""
        free = (0.0, backlog)
        for chunk, option in zip(rest, plan, strict=True):
            free = self._after(chunk, option, free, rate)
        return max(free)

    def _quickest(self, rest: Sequence[Chunk], option: str, backlog: float, rate: float) -> float:
        """Seconds until all is done if the first chunk takes `option` and the others their fastest."""
        others = self._fastest(rest[1:], *self._after(rest[0], option, (0.0, backlog), rate), rate)
        return self._finish(rest, [option, *others], backlog, rate)

    def _fastest(self, rest: Sequence[Chunk], link: float, compute: float, rate: float) -> list[str]:
        """A quick plan: per chunk what is usable first. It recomputes one chunk while the next is on its way."""
        plan = []
        for chunk in rest:
            ends = [(self._after(chunk, option, (link, compute), rate), option) for option in self.options]
            (link, compute), option = min(ends, key=lambda end: (end[0][1], end[0][0]))
            if compute == float("inf"):
                raise ValueError(f"a chunk has none of the options {list(self.options)}: it has {list(chunk.sizes)}")
            plan.append(option)
        return plan


@dataclass(frozen=True)
class Outcome:
    """How a stream went: the option of each chunk, seconds until the last was usable, bytes moved (wasted ones too)."""

    options: tuple[str, ...]
    seconds: float
    nbytes: int
    given_up: int

    def quality(self, scores: Mapping[str, float]) -> float:
        """Mean score over chunks."""
        return sum(scores[option] for option in self.options) / max(len(self.options), 1)


Work = Callable[[int, str, bytes | None], float | None]
"""Makes chunk `i` usable under an option: decodes the payload or recomputes (payload None). A simulation returns the
seconds it would have taken, real work None."""


def stream(chunks: Sequence[Chunk], controller: Controller, link: Link, work: Work) -> Outcome:
    """Gets all chunks in order. Transfers run here, `work` beside them on one thread, each chunk after the one before,
    since recomputing a chunk needs those before it. Raises StoreError if a chunk that cannot be recomputed does not arrive."""
    began, chosen, moved, given_up, busy = link.now(), [], 0, 0, 0.0

    def now() -> float:
        return link.now() - began

    with ThreadPoolExecutor(1) as pool:
        jobs: deque[Future[float | None]] = deque()
        for i, chunk in enumerate(chunks):
            option = controller.choose(chunks[i:], now(), max(busy - now(), 0.0))
            payload = None
            if option != TEXT:
                patience = controller.patience(chunk, option, chunks[i + 1 :], now())
                got = link.fetch(i, option, chunk.sizes[option], patience)
                controller.bandwidth.observe(got.nbytes, got.seconds)
                moved, payload = moved + got.nbytes, got.payload
                if not got.complete:
                    if chunk.recompute is None:
                        raise StoreError(f"chunk {i} at {option!r} did not arrive, and it cannot be recomputed")
                    option, payload, given_up = TEXT, None, given_up + 1
            chosen.append(option)
            jobs.append(pool.submit(work, i, option, payload))
            busy = max(busy, now()) + controller.seconds(chunk, option)
        # Taken out one by one: one that failed keeps an error, which knows this frame, and so would they all stay.
        spent = [jobs.popleft().result() for _ in chunks]
    simulated = all(seconds is not None for seconds in spent)
    return Outcome(tuple(chosen), busy if simulated else now(), moved, given_up)


def expected(chunks: Sequence[Chunk], controller: Controller) -> Work:
    """Work for a simulation: takes as long as the controller expects it to."""

    return lambda i, option, payload: controller.seconds(chunks[i], option)
