"""How one stored value looks on any store: a fixed header, then the payload.

Header, little-endian, 96 bytes: magic `8s`, version `u16`, 6 zero bytes, key `32s`, payload bytes `u64`, created and
expires (seconds since 1970, 0 for never) `f64`, payload digest `8s`, 8 zero bytes, digest of all before `8s`. The key
is repeated inside, so a value that ends up under another name is not served under it.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from kvengine.errors import CorruptBitstream, IncompatibleCache, StoreError
from kvengine.offload.container import digest
from kvengine.offload.stores.keys import check

MAGIC = b"\x93KVREC\r\n"
VERSION = 1
HEADER = struct.Struct("<8sH6x32sQdd8s8x")
SIZE = HEADER.size + 8
MOST = 1 << 38
"""Bytes: a header that says more of its payload is not to be believed."""

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True)
class Entry:
    """What a store knows about one value.

    size:     payload bytes
    created, expires, accessed: seconds since 1970; expires 0 means never
    pinned:   not evicted
    """

    key: str
    size: int
    created: float
    expires: float = 0.0
    accessed: float = 0.0
    pinned: bool = False
    mark: bytes = b""

    def expired(self, now: float) -> bool:
        return 0 < self.expires <= now

    def serves(self, new: Entry) -> bool:
        """Whether it is equal to a new one, and lives at least as long."""
        lives = self.expires == 0 or 0 < new.expires <= self.expires
        return lives and (self.size, self.mark) == (new.size, new.mark)


def check_ttl(ttl: float | None) -> float | None:
    """Raises StoreError unless it is a positive number of seconds: a value that is expired as it comes would be lost."""
    if ttl is not None:
        check_seconds("ttl", ttl, ", or None for ever")
    return ttl


def check_seconds(name: str, value: float, otherwise: str = "") -> None:
    """Raises StoreError unless it is a positive number of seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        raise StoreError(f"{name}={value!r} must be a positive number of seconds{otherwise}")


def header(key: str, payload: Sequence[Buffer], ttl: float | None) -> bytes:
    """The header of a new record. `ttl` is in seconds, None for ever. Raises ValueError for what is not a key, StoreError
    for what is no time."""
    now = time.time()
    size = sum(memoryview(part).nbytes for part in payload)
    if size > MOST:
        raise StoreError(f"a value of {size} bytes is more than the {MOST} that a store takes")
    expires = 0.0 if check_ttl(ttl) is None else now + (ttl or 0.0)
    front = HEADER.pack(
        MAGIC, VERSION, bytes.fromhex(check(key)), size, now, expires, digest(*(memoryview(part) for part in payload))
    )
    return front + digest(front)


def parse(front: Buffer, key: str | None = None) -> Entry:
    """Reads a header. Raises CorruptBitstream (damaged, or of another key) or IncompatibleCache (other version)."""
    front = bytes(front)
    if len(front) < SIZE or front[:8] != MAGIC:
        raise CorruptBitstream("not a stored record (too short or wrong magic)")
    if digest(front[: HEADER.size]) != front[HEADER.size : SIZE]:
        raise CorruptBitstream("a record's header is damaged")
    _, version, name, size, created, expires, mark = HEADER.unpack_from(front)
    if version != VERSION:
        raise IncompatibleCache(f"record version {version}; this kvengine reads version {VERSION}")
    if size > MOST:
        raise CorruptBitstream(f"a record says that it has {size} bytes, more than any value")
    if key is not None and name.hex() != key:
        raise CorruptBitstream(f"a record of key {name.hex()[:12]}... lies under the name {key[:12]}...")
    return Entry(name.hex(), size, created, expires, created, False, mark)


def check_payload(entry: Entry, payload: Buffer) -> None:
    """Raises CorruptBitstream unless the payload is the one the header was made for."""
    if memoryview(payload).nbytes != entry.size or digest(memoryview(payload)) != entry.mark:
        raise CorruptBitstream(f"the payload of {entry.key[:12]}... is torn or damaged")
