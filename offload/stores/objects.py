"""Values on an object store (S3-compatible, GCS, Azure, a folder, memory), through obstore.

An object is written by one atomic PUT, in the place of one that is there, whose life is then the new one's. It is read by
byte range, so a part of a value costs a part of the transfer. The expiry is in the record's header and honoured on reading;
space is given back by `gc` or by a lifecycle rule of the bucket. Pins are empty objects beside the values.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from kvengine.errors import CorruptBitstream, IncompatibleCache, StoreError
from kvengine.offload.stores import keys, record
from kvengine.offload.stores.reached import reached, reached_each
from kvengine.offload.stores.record import Buffer, Entry


class Objects:
    """A bucket.

    store:   an obstore store, for instance from `obstore.store.from_url("s3://bucket", endpoint=...)`
    prefix:  of all names used in the bucket
    cap:     most bytes of payload that `gc` leaves, None without limit

    Raises StoreError if obstore is not installed, and wherever the bucket does not answer or refuses.
    """

    def __init__(self, store: Any, *, prefix: str = "kvengine", cap: int | None = None) -> None:
        try:
            import obstore
            from obstore.exceptions import BaseError
        except ImportError as error:
            raise StoreError("object stores need obstore: pip install 'kvengine[stores]'") from error
        self.api, self.store, self.prefix, self.cap = obstore, store, prefix, cap
        self.place, self.raises = "the object store", (BaseError,)

    def _name(self, key: str) -> str:
        return f"{self.prefix}/objects/{key[:2]}/{keys.check(key)}.kv"

    def _pin_name(self, key: str) -> str:
        return f"{self.prefix}/pins/{keys.check(key)}"

    @reached
    def put(self, key: str, payload: Sequence[Buffer], ttl: float | None = None) -> None:
        front = record.header(key, payload, ttl)
        self.api.put(self.store, self._name(key), b"".join([front, *payload]))

    def _range(self, name: str, start: int, length: int) -> memoryview:
        if length <= 0:
            return memoryview(b"")
        try:
            return memoryview(self.api.get_range(self.store, name, start=start, length=length)).cast("B")
        except FileNotFoundError:
            raise KeyError(name) from None
        except self.raises:
            if self.api.head(self.store, name)["size"] > start:
                raise
            return memoryview(b"")  # it ends before, which a server may call an error

    def _head(self, key: str) -> Entry:
        try:
            entry = record.parse(bytes(self._range(self._name(key), 0, record.SIZE)), key)
        except CorruptBitstream:
            self.delete(key)
            raise
        if entry.expired(time.time()):
            raise KeyError(key)
        return entry

    @reached
    def read(self, key: str, into: memoryview, offset: int = 0) -> int:
        entry = self._head(key)
        want = max(min(len(into), entry.size - offset), 0)
        piece = self._range(self._name(key), record.SIZE + offset, want)
        try:
            if len(piece) != want:
                raise CorruptBitstream(f"the object of {key[:12]}... is torn")
            if want == entry.size:
                record.check_payload(entry, piece)
        except CorruptBitstream:
            self.delete(key)
            raise
        into[:want] = piece
        return want

    @reached
    def size(self, key: str) -> int | None:
        try:
            return self._head(key).size
        except KeyError:
            return None

    @reached
    def delete(self, key: str) -> bool:
        try:
            self.api.head(self.store, self._name(key))
            there = True
        except FileNotFoundError:
            there = False
        for name in (self._name(key), self._pin_name(key)):
            self._remove(name)
        return there

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):  # some say so
            self.api.delete(self.store, name)

    def _list(self, folder: str) -> Iterator[dict[str, Any]]:
        pages: Any = self.api.list(self.store, prefix=f"{self.prefix}/{folder}")
        for page in pages:
            yield from page

    @reached_each
    def entries(self) -> Iterator[Entry]:
        """One small read per value: the size and expiry are in its header."""
        pinned = {str(item["path"]).rsplit("/", 1)[-1] for item in self._list("pins")}
        for item in self._list("objects"):
            key, size = str(item["path"]).rsplit("/", 1)[-1].removesuffix(".kv"), max(0, item["size"] - record.SIZE)
            if not item["size"] or not keys.KEY.fullmatch(key):  # not ours, as what a console puts for a folder
                continue
            changed = item["last_modified"].timestamp()
            try:
                found = record.parse(bytes(self._range(item["path"], 0, record.SIZE)), key)
            except KeyError:
                continue
            except (CorruptBitstream, IncompatibleCache):  # it takes its room, until `gc` wants that
                found = Entry(key, size, changed)
            yield Entry(key, found.size, found.created, found.expires, changed, key in pinned, found.mark)

    @reached
    def pin(self, key: str, pinned: bool = True) -> None:
        self._head(key)
        if pinned:
            self.api.put(self.store, self._pin_name(key), b"")
        else:
            self._remove(self._pin_name(key))

    @reached
    def verify(self, key: str) -> None:
        self.read(key, memoryview(bytearray(self._head(key).size)))

    @reached
    def gc(self) -> int:
        """Deletes what is expired, then the oldest that are not pinned until the rest is below the cap."""
        now, found = time.time(), list(self.entries())
        gone = [entry for entry in found if entry.expired(now)]
        kept = sorted((e for e in found if not e.expired(now) and not e.pinned), key=lambda e: e.accessed)
        over = -1 if self.cap is None else sum(e.size for e in found) - sum(e.size for e in gone) - self.cap
        for entry in kept:
            if over <= 0:
                break
            gone.append(entry)
            over -= entry.size
        for entry in gone:
            self.delete(entry.key)
        return len(gone)

    def close(self) -> None:
        """Nothing is held open."""
