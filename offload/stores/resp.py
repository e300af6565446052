"""Values on Redis or Valkey, through redis-py and hiredis: a RAM tier that several machines share.

A value is split into parts of at most 4 MiB (one huge value stalls the server's single thread), written before the
manifest that names them; the manifest carries the record's header, so a value is seen whole or not at all. Until it
is there its parts expire, so that a writer that is killed leaves nothing for ever. Where several write different values
under one key at the same time, their parts may mix: its digest tells, and the value is gone. Expiry is the server's. Eviction
is the server's too (`maxmemory-policy`): pinning removes the expiry, and protects from eviction only under a
`volatile-*` policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvengine.errors import CorruptBitstream, IncompatibleCache, StoreError
from kvengine.offload.stores import keys, record
from kvengine.offload.stores.reached import reached, reached_each, shown
from kvengine.offload.stores.record import Buffer, Entry

PART = 4 << 20
UNFINISHED = 3_600_000  # milliseconds that parts without a manifest stay
TOGETHER = 100  # parts that are deleted at once


class Resp:
    """A Redis-compatible server.

    url:      as redis-py takes it: redis://, rediss:// or unix://
    prefix:   of all names used on the server
    timeout:  seconds for connecting and for each reply

    Raises StoreError if redis-py is not installed, and wherever the server does not answer or refuses.
    """

    def __init__(self, url: str, *, prefix: str = "kvengine", timeout: float = 2.0) -> None:
        try:
            import redis
        except ImportError as error:
            raise StoreError("Redis and Valkey need redis-py: pip install 'kvengine[stores]'") from error
        self.client: Any = redis.Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)
        self.prefix, self.place, self.raises = prefix, f"the store at {shown(url)}", (redis.RedisError,)

    def _name(self, key: str, part: int | str = "head") -> str:
        return f"{self.prefix}:{keys.check(key)}:{part}"

    @reached
    def put(self, key: str, payload: Sequence[Buffer], ttl: float | None = None) -> None:
        front = record.header(key, payload, ttl)
        there = self._there(key)
        if there is not None and there.serves(record.parse(front)) and self._whole(there):
            return
        whole = memoryview(b"".join(payload) if len(payload) != 1 else payload[0]).cast("B")
        expiry, parts = None if ttl is None else max(int(ttl * 1000), 1), count(len(whole))
        until = self._life(key, expiry or UNFINISHED) if there is not None else expiry or UNFINISHED
        for number, start in enumerate(range(0, len(whole), PART)):
            self.client.set(self._name(key, number), bytes(whole[start : start + PART]), px=until)
        with self.client.pipeline() as together:  # a manifest without the life of its parts would outlive them
            together.set(self._name(key), front, px=expiry)
            for number in range(parts if until != expiry else 0):
                name = self._name(key, number)
                together.persist(name) if expiry is None else together.pexpire(name, expiry)
            for number in range(parts, 0 if there is None else count(there.size)):  # of a longer value that was there
                together.delete(self._name(key, number))
            together.execute()

    def _life(self, key: str, least: int) -> int | None:
        """Milliseconds for the parts of a value while its new manifest is not there: as long as the old one is to live."""
        left = self.client.pttl(self._name(key))
        return None if left == -1 else max(left, least)

    def _whole(self, entry: Entry) -> bool:
        """Whether all parts of a value are there: the server may have evicted some."""
        names = [self._name(entry.key, part) for part in range(count(entry.size))]
        return not names or self.client.exists(*names) == len(names)

    def _there(self, key: str) -> Entry | None:
        try:
            return self._head(key)
        except (KeyError, CorruptBitstream, IncompatibleCache):
            return None

    def _head(self, key: str) -> Entry:
        front = self.client.get(self._name(key))
        if front is None:
            raise KeyError(key)
        try:
            return record.parse(front, key)
        except CorruptBitstream:
            self.delete(key)
            raise

    @reached
    def read(self, key: str, into: memoryview, offset: int = 0) -> int:
        entry = self._head(key)
        want, done = max(min(len(into), entry.size - offset), 0), 0
        while done < want:
            number, start = divmod(offset + done, PART)
            stop = min(PART, start + want - done)
            piece = self.client.getrange(self._name(key, number), start, stop - 1)
            if len(piece) != stop - start:  # the server evicted a part
                self.delete(key)
                raise CorruptBitstream(f"part {number} of {key[:12]}... is gone")
            into[done : done + len(piece)] = piece
            done += len(piece)
        if want == entry.size:
            self._check(entry, into[:want])
        return done

    def _check(self, entry: Entry, payload: memoryview) -> None:
        try:
            record.check_payload(entry, payload)
        except CorruptBitstream:
            self.delete(entry.key)
            raise

    @reached
    def size(self, key: str) -> int | None:
        try:
            return self._head(key).size
        except KeyError:
            return None

    @reached
    def delete(self, key: str) -> bool:
        front, parts = self.client.get(self._name(key)), 0
        try:
            parts = count(record.parse(front or b"", key).size)
        except (CorruptBitstream, IncompatibleCache):
            pass  # then those that follow one another
        there = bool(self.client.delete(self._name(key)))
        for number in range(0, parts, TOGETHER):
            self.client.delete(*(self._name(key, part) for part in range(number, min(number + TOGETHER, parts))))
        while self.client.delete(self._name(key, parts)):
            parts += 1
        return there

    @reached_each
    def entries(self) -> Iterator[Entry]:
        for name in self.client.scan_iter(f"{self.prefix}:*:head", count=1000):
            key, front = bytes(name).decode(errors="replace").split(":")[-2], self.client.get(name)
            if front is None or not keys.KEY.fullmatch(key):  # gone since, or not ours
                continue
            try:
                yield record.parse(front, key)
            except (CorruptBitstream, IncompatibleCache):
                yield Entry(key, 0, 0.0)  # it takes its room, and what is wrong with it is told where it is read

    @reached
    def pin(self, key: str, pinned: bool = True) -> None:
        """Removes the expiry. It cannot be given back, so unpinning only makes sure that the value is there."""
        entry = self._head(key)
        for part in ["head", *range(count(entry.size))] if pinned else []:
            self.client.persist(self._name(key, part))

    @reached
    def verify(self, key: str) -> None:
        self.read(key, memoryview(bytearray(self._head(key).size)))

    @reached
    def gc(self) -> int:
        """Nothing to do but to see that the server is there: it expires and evicts by itself."""
        self.client.ping()
        return 0

    def close(self) -> None:
        self.client.close()


def count(size: int) -> int:
    """The parts of a value of so many bytes."""
    return -(-size // PART)
