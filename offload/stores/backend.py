"""What a store must be able to do, blocking; `Store` makes it non-blocking.

    put read size delete entries pin verify gc close

A backend promises: a value is served whole or not at all, under its own key only, until it expires; what `put` returned
for is there until it is evicted or deleted. It may raise KeyError (not there), CorruptBitstream (was there, is damaged
and now out of the way), and StoreError or OSError (cannot tell).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from kvengine.offload.stores.record import Buffer, Entry


@runtime_checkable
class Backend(Protocol):
    def put(self, key: str, payload: Sequence[Buffer], ttl: float | None = None) -> None:
        """Stores the joined parts for `ttl` seconds, None for ever. What is there already, whole, and lives as long is not
        written again, but in a bucket, where to ask would be a request for each value."""

    def read(self, key: str, into: memoryview, offset: int = 0) -> int:
        """Fills `into` from `offset` of the payload; returns the bytes read. A read of the whole payload is checked."""

    def size(self, key: str) -> int | None:
        """Bytes of the payload, None if it is not there."""

    def delete(self, key: str) -> bool:
        """Whether there was something to delete."""

    def entries(self) -> Iterable[Entry]:
        """What is stored, as far as the backend can list it."""

    def pin(self, key: str, pinned: bool = True) -> None:
        """Keeps a value from eviction, or no longer. Raises KeyError if it is not there."""

    def verify(self, key: str) -> None:
        """Reads and checks a value. Raises as `read` does."""

    def gc(self) -> int:
        """Removes what is expired, left over or above the cap; returns the values removed."""

    def close(self) -> None: ...
