"""Time, of a sequence decoded alone or beside others."""

from __future__ import annotations

import time

Seconds = tuple[float, float]
"""On the wall, and of this process's CPU time."""


class Watch:
    """A sequence's own time. It runs from the start; sequences decoded together stop it while others compute."""

    def __init__(self) -> None:
        self.spent: Seconds = (0.0, 0.0)
        self.since: Seconds | None = now()

    def __call__(self) -> Seconds:
        if self.since is None:
            return self.spent
        return plus(self.spent, now(), self.since)

    def stop(self) -> None:
        self.spent, self.since = self(), None

    def go(self) -> None:
        self.since = now()

    def charge(self, seconds: Seconds) -> None:
        """Add a share of what was computed for several sequences."""
        self.spent = plus(self.spent, seconds)

    def wall(self) -> float:
        return self()[0]

    def cpu(self) -> float:
        return self()[1]


class Clock:
    def __init__(self, watch: Watch) -> None:
        self.watch, self.last = watch, watch()

    def lap(self) -> Seconds:
        """Seconds since the last call."""
        before, self.last = self.last, self.watch()
        return plus((0.0, 0.0), self.last, before)


def now() -> Seconds:
    return time.perf_counter(), time.process_time()


def plus(a: Seconds, b: Seconds, less: Seconds = (0.0, 0.0)) -> Seconds:
    """a + b - less.

    >>> plus((1.0, 2.0), (3.0, 4.0), (0.5, 0.5))
    (3.5, 5.5)
    """
    return a[0] + b[0] - less[0], a[1] + b[1] - less[1]
