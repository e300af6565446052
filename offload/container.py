"""The container every stored cache travels in: a checked header, an index, checked sections.

    magic | version | sizes | header (JSON) | index | digest | section 0 | section 1 | ...

Header and index are covered by one digest and each section has its own, so a reader may fetch any section alone
(`Container.section`) and still knows that it is whole. Nothing is unpickled and nothing is allocated on the word of an
unchecked length.

Layout, little-endian: magic `8s`, format version `u16`, flags `u16` (0), header bytes `u32`, sections `u32`, file bytes
`u64`; then the header, the index (per section: offset `u64`, bytes `u64`, digest `8s`), and the digest of all before.
Digests are the first 8 bytes of SHA-256: a damaged file goes unnoticed with probability 2^-64. They detect damage, not
malice; a reader that must not trust the writer still gets no crash and no oversized allocation.
"""

from __future__ import annotations

import json
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

from kvengine.errors import CacheError, CorruptBitstream, IncompatibleCache, StoreError

MAGIC = b"\x93KVENG\r\n"  # the high byte and the line ends show a transfer that was not binary-safe
VERSION = 1
MAX_HEADER = 64 << 20
PREAMBLE = struct.Struct("<8sHHIIQ")
ENTRY = struct.Struct("<QQ8s")

Fetch = Callable[[int, int], bytes]


def digest(*parts: bytes | memoryview) -> bytes:
    """The 8-byte checksum used all over the format."""
    state = sha256()
    for part in parts:
        state.update(part)
    return state.digest()[:8]


def plain(given: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What was given, if it is plain JSON: it then comes back as it is (a tuple as a list).

    Raises CacheError that says where something is not.
    """
    if not isinstance(given, Mapping):
        raise CacheError(f"{name} is a {type(given).__name__}; give a dict")
    value = dict(given)
    try:
        for place, item in _leaves(value, name):
            if not (item is None or isinstance(item, str | int | float)):
                raise CacheError(f"{place} is a {type(item).__name__}; only plain JSON can be kept there")
            if isinstance(item, float) and not isfinite(item):
                raise CacheError(f"{place} is {item}, which JSON has no number for")
        json.dumps(value)
    except RecursionError as error:
        raise CacheError(f"{name} is nested too deeply to be kept as JSON, or holds itself") from error
    except ValueError as error:
        raise CacheError(f"{name} cannot be kept as JSON: {error}") from error
    return value


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CacheError(f"{name} has the key {key!r}, a {type(key).__name__}; keys of JSON are text")
            yield from _leaves(item, f"{name}[{key!r}]")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _leaves(item, f"{name}[{i}]")
    else:
        yield name, value


def pack(header: Mapping[str, Any], sections: Sequence[bytes]) -> bytes:
    """One container as bytes. `header` must be plain JSON; equal arguments give equal bytes."""
    return b"".join(parts(header, sections))


def parts(header: Mapping[str, Any], sections: Sequence[bytes]) -> Iterable[bytes]:
    """The pieces of a container in file order, for a writer that streams them."""
    text = json.dumps(header, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    if len(text) > MAX_HEADER:
        raise CacheError(
            f"a container's header may hold {MAX_HEADER} bytes, this one has {len(text)}; keep less beside it"
        )
    front = PREAMBLE.size + len(text) + ENTRY.size * len(sections) + 8
    index, offset = [], front
    for body in sections:
        index.append(ENTRY.pack(offset, len(body), digest(body)))
        offset += len(body)
    head = PREAMBLE.pack(MAGIC, VERSION, 0, len(text), len(sections), offset) + text + b"".join(index)
    return [head, digest(head), *sections]


@dataclass(frozen=True)
class Container:
    """An opened container: the header is read and checked, sections are fetched on demand.

    header:   what the writer said, as plain JSON values
    entries:  (offset, bytes, digest) of each section
    size:     bytes of the whole file
    fetch:    reads `length` bytes at `offset`
    """

    header: dict[str, Any]
    entries: tuple[tuple[int, int, bytes], ...]
    size: int
    fetch: Fetch

    def section(self, number: int) -> bytes:
        """The bytes of one section. Raises CorruptBitstream if they are not those that were written."""
        offset, length, expected = self.entries[number]
        body = self.fetch(offset, length)
        if len(body) != length or digest(body) != expected:
            raise CorruptBitstream(f"section {number} of {len(self.entries)} is damaged; delete it and recompute")
        return body

    def verify(self) -> None:
        """Reads and checks every section. Raises CorruptBitstream."""
        for number in range(len(self.entries)):
            self.section(number)


def read_bytes(data: bytes | bytearray | memoryview) -> Container:
    """Opens a container held in memory. Raises CorruptBitstream or IncompatibleCache."""
    view = memoryview(data).cast("B")
    return _open(lambda offset, length: bytes(view[offset : offset + length]), len(view))


def read_file(path: str | Path) -> Container:
    """Opens a container on disk; sections are read only when asked for. Raises CorruptBitstream, IncompatibleCache or
    FileNotFoundError, which name the file."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))  # one, since the name may be given to another file

    def fetch(offset: int, length: int) -> bytes:
        pieces: list[bytes] = []
        while length and (piece := os.pread(handle, length, offset)):
            pieces, offset, length = [*pieces, piece], offset + len(piece), length - len(piece)
        return b"".join(pieces)

    try:
        held = _open(fetch, os.fstat(handle).st_size)
    except BaseException as error:
        os.close(handle)
        if isinstance(error, StoreError):
            raise type(error)(f"{path}: {error}") from error
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)  # reading by a handle does not say: a folder, a broken disk
        raise
    weakref.finalize(held, os.close, handle)
    return held


def _open(fetch: Fetch, available: int) -> Container:
    length, count, size = _preamble(fetch(0, PREAMBLE.size))
    front = PREAMBLE.size + length + ENTRY.size * count
    if size != available or front + 8 > size:
        raise CorruptBitstream(f"the container says it has {size} bytes, {available} are here: torn or truncated")
    head = fetch(0, front + 8)
    if digest(memoryview(head)[:front]) != head[front:]:
        raise CorruptBitstream("the container's header is damaged; delete it and recompute")
    index = tuple(ENTRY.iter_unpack(head[front - ENTRY.size * count : front]))
    _check_index(index, front + 8, size)
    return Container(_json(head[PREAMBLE.size : PREAMBLE.size + length]), index, size, fetch)


def _preamble(head: bytes) -> tuple[int, int, int]:
    if len(head) < PREAMBLE.size or head[:8] != MAGIC:
        raise CorruptBitstream("not a kvengine container (wrong magic or too short)")
    _, version, flags, length, count, size = PREAMBLE.unpack(head)
    if version != VERSION or flags:
        raise IncompatibleCache(f"container version {version}, flags {flags}; this kvengine reads version {VERSION}")
    if length > MAX_HEADER:
        raise CorruptBitstream(f"a header of {length} bytes; at most {MAX_HEADER} are allowed")
    return length, count, size


def _check_index(index: tuple[tuple[int, int, bytes], ...], start: int, size: int) -> None:
    """Sections must tile the rest of the file: no overlap, no gap, nothing left over."""
    for offset, length, _ in index:
        if offset != start:
            raise CorruptBitstream(f"a section starts at byte {offset}, expected {start}")
        start += length
    if start != size:
        raise CorruptBitstream(f"the sections end at byte {start}, the file at {size}")


def _json(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptBitstream(f"the container's header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CorruptBitstream(f"the container's header is a {type(header).__name__}, not an object")
    return header
