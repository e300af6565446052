"""Whatever goes wrong with a store, the text is that of a cold run, and the event is counted; servers that die included.

The file store's own faults are in test_crash.py: killed at every step, every call failing, every state after a power loss.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import greedy, llama, one
from support_redis import Redis

import kvengine
from kvengine.errors import CorruptBitstream
from kvengine.offload import cachegen, stores
from kvengine.offload.stores import record
from kvengine.prefix import Prefix

CHUNK = 16
KEYS = [f"{i:064x}" for i in range(10)]


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    with kvengine.patched(llama(), "full") as model:
        yield model


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    server = Redis(tmp_path)
    yield server
    server.kill()


def text(model: Any, ids: torch.Tensor, cache: Any) -> list[int]:
    return greedy(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 12, cache=cache)[0].tolist()


def kept(reuse: Prefix, model: Any, ids: torch.Tensor) -> list[int]:
    """The text of a cold run, whose chunks are then given to the store."""
    cache = kvengine.EngineCache(model)
    found = text(model, ids, cache)
    reuse.keep(ids, cache)
    reuse.store.drain()
    return found


def chunks(reuse: Prefix, ids: torch.Tensor) -> list[str]:
    return stores.chain(ids[0].tolist(), reuse.start, reuse.chunk)


Spoil = Callable[[Prefix, Any, list[str]], None]


def half_written(reuse: Prefix, files: Any, keys: list[str]) -> None:
    """As a file system without journal may leave it."""
    path = files.path(keys[2])
    path.write_bytes(path.read_bytes()[:-40])


def missing(reuse: Prefix, files: Any, keys: list[str]) -> None:
    files.path(keys[2]).unlink()


def another_key(reuse: Prefix, files: Any, keys: list[str]) -> None:
    shutil.copy(files.path(keys[1]), files.path(keys[2]))


def another_model(reuse: Prefix, files: Any, keys: list[str]) -> None:
    """A whole chunk, under the right key, of other weights."""
    buffer = bytearray(files.size(keys[2]))
    files.read(keys[2], memoryview(buffer))
    kv = cachegen.decode(buffer, reuse.whose)
    foreign = cachegen.KV([(k + 1, v) for k, v in kv.layers], kv.positions, cachegen.Identity(model="other"))
    files.delete(keys[2])
    files.put(keys[2], [cachegen.encode(foreign, "lossless")])


def another_version(reuse: Prefix, files: Any, keys: list[str]) -> None:
    body = files.path(keys[2]).read_bytes()[record.SIZE :]
    front = bytearray(record.header(keys[2], [body], None)[: record.HEADER.size])
    front[8] = 99
    files.path(keys[2]).write_bytes(bytes(front) + record.digest(bytes(front)) + body)


def disk_error(reuse: Prefix, files: Any, keys: list[str]) -> None:
    real = files.files.read

    def read(handle: int, into: memoryview, offset: int) -> int:
        if offset >= record.SIZE and len(into) and os.readlink(f"/proc/self/fd/{handle}").endswith(f"{keys[2]}.kv"):
            raise OSError(errno.EIO, "a bad block")
        return int(real(handle, into, offset))

    files.files.read = read


@pytest.mark.parametrize(
    ("spoil", "count"),
    [(half_written, "miss"), (missing, "miss"), (another_key, "miss"), (another_model, None), (another_version, "incompatible"),
     (disk_error, "failed")],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_what_is_wrong_with_a_chunk_costs_its_computing(
    model: Any, tmp_path: Path, spoil: Spoil, count: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    ids = one(100)["input_ids"]
    reuse = Prefix(model, stores.Store(stores.Files(tmp_path, sync="none"), pause=0), chunk=CHUNK)
    cold = kept(reuse, model, ids)
    before = reuse.store.counts.copy()
    spoil(reuse, reuse.store.backend, chunks(reuse, ids))
    cache = reuse.fetch(ids)
    assert cache.seen == 2 * CHUNK and text(model, ids, cache) == cold
    after = reuse.store.counts - before
    if count is None:
        assert "a stored chunk is recomputed" in caplog.text
    else:
        assert after[count] > 0
    reuse.store.close()


def test_a_full_disk_stores_nothing_and_loses_nothing(model: Any, tmp_path: Path) -> None:
    ids, other = one(100)["input_ids"], one(100, seed=9)["input_ids"]
    files = stores.Files(tmp_path, sync="none")
    reuse = Prefix(model, stores.Store(files, pause=0), chunk=CHUNK)
    cold = kept(reuse, model, ids)
    for key in chunks(reuse, ids):
        files.pin(key)  # what is pinned makes no room

    def write(handle: int, data: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    files.files.write = write  # type: ignore[method-assign]
    expected = kept(reuse, model, other)
    assert reuse.store.counts["failed"] > 0 and not list((tmp_path / "tmp").iterdir())
    assert reuse.fetch(other).seen == 0 and text(model, other, reuse.fetch(other)) == expected
    warm = reuse.fetch(ids)
    assert warm.seen == 96 and text(model, ids, warm) == cold
    reuse.store.close()


def test_a_server_that_dies_and_comes_back(model: Any, redis: Redis) -> None:
    """Killed after the chunks were stored: computed instead, counted; empty when it is back, and filled again."""
    ids = one(100)["input_ids"]
    reuse = Prefix(model, stores.Store(stores.Resp(redis.url, timeout=1.0), pause=0.05), chunk=CHUNK, timeout=5)
    cold = kept(reuse, model, ids)
    assert reuse.fetch(ids).seen == 96
    redis.kill()
    cache = reuse.fetch(ids)
    assert cache.seen == 0 and text(model, ids, cache) == cold and reuse.store.counts["failed"] > 0
    reuse.keep(ids, cache)
    reuse.store.drain()
    redis.start()
    threading.Event().wait(0.1)
    assert kept(reuse, model, ids) == cold and reuse.fetch(ids).seen == 96
    reuse.store.close()


def test_a_server_without_memory_left(model: Any, redis: Redis) -> None:
    ids = one(100)["input_ids"]
    reuse = Prefix(model, stores.Store(backend := stores.Resp(redis.url), pause=0), chunk=CHUNK)
    backend.client.config_set("maxmemory-policy", "noeviction")
    backend.client.config_set("maxmemory", backend.client.info("memory")["used_memory"] + 12_000)
    cold = kept(reuse, model, ids)
    assert reuse.store.counts["failed"] > 0
    warm = reuse.fetch(ids)
    assert warm.seen < 96 and text(model, ids, warm) == cold
    reuse.store.close()


def test_nothing_is_left_of_what_was_deleted_or_never_finished(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvengine.offload.stores.resp.PART", 64)
    store = stores.Resp(redis.url)
    store.put(KEYS[0], [bytes(250)])
    assert all(store.client.ttl(name) == -1 for name in store.client.keys())
    store.client.delete(store._name(KEYS[0], 1))
    assert store.delete(KEYS[0]) and not store.client.keys()
    with monkeypatch.context() as patch:
        failing(store.client, ("set",), 3)
        with pytest.raises(Broken):
            store.put(KEYS[0], [bytes(250)])
        patch.undo()
    assert len(store.client.keys()) == 2 and all(store.client.ttl(name) > 0 for name in store.client.keys())
    store.close()


def test_a_damaged_manifest_is_put_out_of_the_way(redis: Redis) -> None:
    store = stores.Resp(redis.url)
    for key in KEYS[:2]:
        store.put(key, [b"value"])
    store.client.set(store._name(KEYS[0]), b"damaged")
    assert [entry.key for entry in store.entries()] == [KEYS[1]]
    with pytest.raises(CorruptBitstream):
        store.read(KEYS[0], memoryview(bytearray(5)))
    assert len(store.client.keys()) == 2
    store.close()


@pytest.fixture
def hanging() -> Iterator[str]:
    """An address where connections are taken and nothing is said."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_bucket_that_says_nothing_costs_no_more_than_the_timeout(model: Any, hanging: str) -> None:
    """It took the client's half minute, though another time was given."""
    pytest.importorskip("obstore")
    bucket = stores.backend(
        "s3://bucket/x", endpoint=hanging, region="us-east-1", access_key_id="a", secret_access_key="b",
        client_options={"allow_http": True, "timeout": "4 seconds"}, retry_config={"max_retries": 0},
    )  # fmt: skip
    reuse = Prefix(model, stores.Store(bucket), chunk=CHUNK, timeout=0.2)
    ids = one(100)["input_ids"]
    start = time.monotonic()
    cache = reuse.fetch(ids)
    assert cache.seen == 0 and time.monotonic() - start < 2
    assert reuse.store.counts["failed"] == 1 and "no answer within 0.2 seconds" in reuse.store.events()[0].detail
    text(model, ids, cache)
    start = time.monotonic()
    reuse.keep(ids, cache)
    assert time.monotonic() - start < 2
    reuse.store.close()


def test_a_value_that_says_it_is_huge_is_computed(model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ids = one(100)["input_ids"]
    reuse = Prefix(model, stores.Store(files := stores.Files(tmp_path, sync="none")), chunk=CHUNK)
    cold = kept(reuse, model, ids)
    size = files.size
    files.size = lambda key: 1 << 62 if key == chunks(reuse, ids)[2] else size(key)  # type: ignore[method-assign]
    cache = reuse.fetch(ids)
    assert cache.seen == 2 * CHUNK and text(model, ids, cache) == cold and "says that it has" in caplog.text
    reuse.store.close()


class Broken(ConnectionError):
    pass


def failing(target: Any, names: tuple[str, ...], at: int) -> list[int]:
    """Makes the N-th call of these methods fail, as a connection that breaks; how many calls there were."""
    calls = [0]
    for name in names:
        real = getattr(target, name)

        def call(*arguments: Any, real: Any = real, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] == at:
                raise Broken(f"call {at}")
            return real(*arguments, **named)

        setattr(target, name, call)
    return calls


def test_every_call_to_a_server_may_fail(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put, a read and a delete of several parts, the N-th call failing, for every N: whole or not there."""
    monkeypatch.setattr("kvengine.offload.stores.resp.PART", 64)
    whole = stores.Resp(redis.url)
    value = bytes(range(250))
    for at in range(1, 100):
        whole.client.flushall()
        whole.put(KEYS[0], [value])
        store = stores.Store(made := stores.Resp(redis.url), threads=1, pause=0)
        calls = failing(made.client, ("set", "get", "getrange", "delete"), at)
        put = store.wait(store.submit_put([KEYS[1]], [value]))
        into = bytearray(250)
        got = store.wait(store.submit_get([KEYS[0]], [into]))
        store.delete([KEYS[2]])
        store.close()
        assert put is not None and got is not None and (not got.ok[0] or bytes(into) == value)
        for key, there in ((KEYS[0], True), (KEYS[1], put.ok[0])):
            size, back = whole.size(key), bytearray(250)
            assert size == (250 if there else None)
            assert size is None or (whole.read(key, memoryview(back)) == 250 and bytes(back) == value)
        whole.put(KEYS[1], [value])
        assert whole.size(KEYS[1]) == 250
        if calls[0] < at:
            assert at > 10 and put.ok[0] and got.ok[0]
            break
    whole.close()


def test_every_call_to_a_bucket_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    obstore = pytest.importorskip("obstore")
    names = [name for name in ("put", "get", "get_range", "head", "delete", "list") if hasattr(obstore, name)]
    value = bytes(range(250))
    for at in range(1, 100):
        with monkeypatch.context() as patch:
            whole = stores.backend("memory://")
            whole.put(KEYS[0], [value])
            for name in names:
                patch.setattr(obstore, name, getattr(obstore, name))
            store = stores.Store(whole, threads=1, pause=0)
            calls = failing(obstore, tuple(names), at)
            put = store.wait(store.submit_put([KEYS[1]], [value]))
            into = bytearray(250)
            got = store.wait(store.submit_get([KEYS[0]], [into]))
            assert put is not None and got is not None and (not got.ok[0] or bytes(into) == value)
        back = bytearray(250)
        assert whole.read(KEYS[0], memoryview(back)) == 250 and bytes(back) == value
        assert whole.size(KEYS[1]) == 250 or not put.ok[0]
        store.close()
        if calls[0] < at:
            assert at > 2 and put.ok[0] and got.ok[0]
            break


@pytest.mark.parametrize("kind", ["files", "redis", "memory"])
def test_two_writers_of_one_key(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Writers of one key write the same value: whoever reads meanwhile sees it whole, or not at all."""
    if kind == "redis":
        server: Redis = request.getfixturevalue("redis")
        made = [stores.Resp(server.url) for _ in range(3)]
    elif kind == "files":
        made = [stores.Files(tmp_path, sync="none") for _ in range(3)]
    else:
        made = [stores.backend("memory://")] * 3
    value, wrong = bytes(range(256)) * 400, list[str]()

    def write(store: Any) -> None:
        for key in KEYS * 4:
            store.put(key, [value])

    threads = [threading.Thread(target=write, args=(store,)) for store in made[:2]]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for key in KEYS:
            into = bytearray(len(value))
            try:
                if made[2].read(key, memoryview(into)) != len(value) or bytes(into) != value:
                    wrong.append(key)
            except KeyError:
                pass
    assert not wrong and all(made[2].size(key) == len(value) for key in KEYS)
    for store in {id(s): s for s in made}.values():
        store.close()
