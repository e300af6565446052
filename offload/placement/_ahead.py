"""What the lanes of one cache share: the order in which they read, and the threads that fetch and write for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvengine.offload.stores.backend import Backend

if TYPE_CHECKING:
    from kvengine.offload.placement._tiered import Tiered

THREADS = 2


class Ahead:
    """The tiered shelves of a cache, in the order of their layers.

    While one is read, the next is told to fetch what it read at the last step. Each holds at most one such load, and
    gives it up when it is read: so two are there at a time, one being used and one being filled.
    """

    def __init__(self) -> None:
        self.shelves: dict[tuple[int, int], weakref.ref[Tiered]] = {}
        self.order: list[tuple[int, int]] = []
        self.backends: dict[str, Backend] = {}
        self.threads: dict[str, ThreadPoolExecutor] = {}
        self.swept: set[Path] = set()  # folders in which files of killed processes were looked for

    def __deepcopy__(self, memo: dict[int, Any]) -> Ahead:
        """For a copied cache: its shelves join as they are copied, and talk to the same stores."""
        twin = Ahead()
        twin.backends = self.backends
        return twin

    def join(self, at: tuple[int, int], shelf: Tiered) -> None:
        """Take a shelf into the order, in place of one that was there."""
        self.shelves[at] = weakref.ref(shelf)
        self.order = sorted(self.shelves)

    def after(self, at: tuple[int, int]) -> Tiered | None:
        """The shelf that is read next; after the last one the first, for the next token."""
        i = self.order.index(at)
        found = self.shelves[self.order[(i + 1) % len(self.order)]]()
        return found

    def run(self, work: Callable[[], None], what: str = "fetch") -> Future[None]:
        """Do it on another thread; each kind of work has its own, so that none waits for another."""
        if what not in self.threads:
            self.threads[what] = ThreadPoolExecutor(THREADS, thread_name_prefix=f"kvpages-{what}")
        return self.threads[what].submit(work)

    def backend(self, url: str) -> Backend:
        """The store at a URL, one for all lanes."""
        if url not in self.backends:
            from kvengine.offload.stores.files import Files  # and client libraries, only where they are used
            from kvengine.offload.stores.urls import backend

            self.backends[url] = made = backend(url)
            if isinstance(made, Files):
                made.spares = True  # what was used longest ago may be pages of this very cache
        return self.backends[url]
