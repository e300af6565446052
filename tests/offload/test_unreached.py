"""A store that is down, refuses or breaks off in the middle: a typed error that says what to do, and nothing stored is lost."""

from __future__ import annotations

import importlib
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support_offload import cache
from support_resp import Pretended
from support_s3 import Bucket
from typer.testing import CliRunner

from kvengine.errors import CorruptBitstream, StoreError
from kvengine.offload import cachegen, stores
from kvengine.offload.commands import app
from kvengine.offload.stores import record, resp

KEYS = [f"{i:02d}".ljust(64, "a") for i in range(3)]
VALUE = cachegen.encode(cache(tokens=20), "low")


@pytest.fixture
def server() -> Iterator[Pretended]:
    pytest.importorskip("redis")
    made = Pretended()
    yield made
    made.close()


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    file = tmp_path / "one.kv"
    file.write_bytes(record.header(KEYS[0], [VALUE], None) + VALUE)
    return file


def run(*words: object, status: int) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    assert result.exit_code == status, (result.output, result.exception)
    assert status == 0 or isinstance(result.exception, SystemExit), result.exception
    return result.output


def commands(file: Path) -> list[list[object]]:
    return [["ls"], ["ls", "--json"], ["info", KEYS[0]], ["info", "00"], ["verify"], ["verify", KEYS[0]],
            ["export", KEYS[0], file.with_name("out.kv")], ["import", file], ["gc"]]  # fmt: skip


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("at", range(9))
def test_every_command_says_that_nothing_listens(exported: Path, at: int) -> None:
    """`gc` said "0 values removed"."""
    pytest.importorskip("redis")
    url = f"redis://me:secret@127.0.0.1:{closed_port()}/0"
    said = run(*commands(exported)[at], "-s", url, status=2)
    assert "the store at redis://***@127.0.0.1" in said and "secret" not in said
    assert "start it, or check its address" in said and "values" not in said
    assert not exported.with_name("out.kv").exists()


@pytest.mark.parametrize("fault", ["close", "hang", "LOADING Redis is loading the dataset in memory", "NOAUTH no"])
def test_a_server_that_breaks_off_after_any_command_loses_nothing(
    server: Pretended, exported: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command with the N-th request failing, for every N."""
    monkeypatch.setattr("redis.retry.sleep", lambda _: None)  # between its tries
    whole = stores.Resp(server.url)
    for key in KEYS:
        whole.put(key, [VALUE])
    before, server.fault = dict(server.values), fault
    for words in [["gc"]] if fault == "hang" else commands(exported):
        server.asked.clear()
        run(*words, "-s", server.url, status=0)
        for left in range(len(server.asked) if fault == "close" else 1):
            server.left = left
            said = run(*words, "-s", server.url, status=2)
            server.left = 1 << 30
            assert "the store at redis://127.0.0.1" in said and server.values == before, said
    whole.close()


CALLS: dict[str, Callable[[Any], Any]] = {
    "put": lambda store: store.put(KEYS[0], [b"x"]), "size": lambda store: store.size(KEYS[0]),
    "read": lambda store: store.read(KEYS[0], memoryview(bytearray(1))), "delete": lambda store: store.delete(KEYS[0]),
    "entries": lambda store: list(store.entries()), "pin": lambda store: store.pin(KEYS[0]),
    "verify": lambda store: store.verify(KEYS[0]), "gc": lambda store: store.gc(),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_library_raises_store_errors(name: str) -> None:
    """As the protocol of a backend says; a client library's own were raised, which are no OSError."""
    pytest.importorskip("redis")
    store = stores.Resp(f"redis://127.0.0.1:{closed_port()}/0")
    with pytest.raises(StoreError, match="start it, or check its address"):
        CALLS[name](store)
    store.close()


@pytest.mark.parametrize("name", CALLS)
def test_the_library_raises_store_errors_for_buckets(name: str) -> None:
    pytest.importorskip("obstore")
    store = stores.backend(
        "s3://bucket/x", endpoint=f"http://127.0.0.1:{closed_port()}", region="us-east-1", access_key_id="a",
        secret_access_key="b", client_options={"allow_http": True}, retry_config={"max_retries": 0},
    )  # fmt: skip
    with pytest.raises(StoreError, match="start it, or check its address"):
        CALLS[name](store)


def test_a_bucket_that_breaks_off_loses_nothing(monkeypatch: pytest.MonkeyPatch, exported: Path) -> None:
    obstore = pytest.importorskip("obstore")
    store = stores.backend("memory://")
    for key in KEYS:
        store.put(key, [VALUE])
    before = store.size(KEYS[0]), sorted(entry.key for entry in store.entries())
    monkeypatch.setattr("kvengine.offload.stores.urls._bucket", lambda *_: store.store)  # type: ignore[attr-defined]
    names = ("put", "get_range", "head", "delete", "list")
    for words in commands(exported):
        for at in range(99):
            calls = 0
            with monkeypatch.context() as patch:
                for name in names:
                    real = getattr(obstore, name)

                    def call(*arguments: Any, real: Any = real, at: int = at, **named: Any) -> Any:
                        nonlocal calls
                        calls += 1
                        if calls == at + 1:
                            raise obstore.exceptions.GenericError("HTTP error: connection reset\n\nDebug source: pages")
                        return real(*arguments, **named)

                    patch.setattr(obstore, name, call)
                result = CliRunner().invoke(app, [*map(str, words), "-s", "s3://bucket"])
            assert (store.size(KEYS[0]), sorted(entry.key for entry in store.entries())) == before
            if calls <= at:
                assert result.exit_code == 0 and at > 0
                break
            assert result.exit_code == 2 and "connection reset; start it" in result.output.replace("\n", " ")
            assert "Debug source" not in result.output


def test_a_put_that_breaks_off_leaves_the_life_of_what_was_there(
    server: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parts were set to go in an hour, and the value that was to live for days went with them."""
    monkeypatch.setattr("redis.retry.sleep", lambda _: None)
    store, day = stores.Resp(server.url), 86_400.0
    store.put(KEYS[0], [VALUE], 10 * day)
    server.asked.clear()
    store.put(KEYS[0], [VALUE], None)
    steps = len(server.asked)
    for left in range(1, steps):
        server.left = 1 << 30
        store.delete(KEYS[0])
        store.put(KEYS[0], [VALUE], 10 * day)
        server.left = left
        with pytest.raises(StoreError):
            store.put(KEYS[0], [VALUE], None)
        # nor did it make them stay for ever, whom nobody would be left to delete
        assert all(life is not None and life > 9 * day * 1000 for life in server.life.values())
    server.left = 1 << 30
    store.put(KEYS[0], [VALUE], None)
    assert {server.life[name] for name in server.values} == {None}
    other = cachegen.encode(cache(tokens=21), "low")
    store.put(KEYS[0], [other], 60)  # not equal: it takes the place of what was to stay for ever, and goes whole
    assert {server.life[name] for name in server.values} == {60_000}
    store.close()


def test_a_shorter_value_leaves_no_parts_of_the_longer_one(server: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    """No manifest named them any more, so that they took the server's memory for ever."""
    monkeypatch.setattr(resp, "PART", 10)
    store = stores.Resp(server.url)
    for length, ttl in ((45, None), (30, None), (25, 60.0), (0, None)):
        store.put(KEYS[0], [bytes(length)], ttl)
        names = {store._name(KEYS[0], part).encode() for part in ("head", *range(-(-length // 10)))}
        assert server.values.keys() == names and {server.life[name] for name in names} == {ttl and 60_000}
        into = bytearray(length)
        assert store.read(KEYS[0], memoryview(into)) == length
    store.close()


def test_what_is_listed_is_json_or_an_error(server: Pretended) -> None:
    stores.Resp(server.url).put(KEYS[0], [VALUE])
    assert len(json.loads(run("ls", "--json", "-s", server.url, status=0))) == 1
    assert "0 values removed" in run("gc", "-s", server.url, status=0)


def test_a_manifest_that_says_its_value_is_huge_holds_nobody_up(server: Pretended) -> None:
    """Each part that there might have been was asked for, one after the other: for years."""
    store = stores.Resp(server.url)
    store.put(KEYS[1], [VALUE])
    front = record.HEADER.pack(record.MAGIC, record.VERSION, bytes.fromhex(KEYS[0]), 1 << 62, 1.0, 0.0, bytes(8))
    for call in (store.delete, store.pin, store.size, lambda key: store.read(key, memoryview(bytearray(9)))):
        store.client.set(store._name(KEYS[0]), front + record.digest(front))
        with suppress(CorruptBitstream):
            call(KEYS[0])
        assert not store.delete(KEYS[0])
    assert [entry.key for entry in store.entries()] == [KEYS[1]]
    store.close()


def test_an_object_that_ends_too_early_is_put_out_of_the_way() -> None:
    """A server says of a range behind the end that it cannot be had, which was taken for a failure, each time anew."""
    pytest.importorskip("obstore")
    bucket = Bucket()
    store = stores.Objects(bucket.store())
    for body in (b"", record.header(KEYS[0], [VALUE], None)):
        store.api.put(store.store, store._name(KEYS[0]), body)
        with pytest.raises(CorruptBitstream):
            store.read(KEYS[0], memoryview(bytearray(len(VALUE))))
        assert not store.delete(KEYS[0])
    bucket.close()


def test_a_bucket_that_says_so_of_what_is_not_there_takes_a_pin_back_twice(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    local = importlib.import_module("obstore.store").LocalStore(str(tmp_path))
    store = stores.Objects(local)
    store.put(KEYS[0], [VALUE])
    for pinned in (False, True, False, False):
        store.pin(KEYS[0], pinned)
        assert [entry.pinned for entry in store.entries()] == [pinned]


@pytest.mark.parametrize("kind", ["redis", "bucket"])
def test_values_with_damaged_headers_are_listed_and_taken_out(
    server: Pretended, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`verify` called all values whole, and they took their room for ever."""
    url, store = server.url, stores.backend(server.url if kind == "redis" else "memory://")
    if isinstance(store, stores.Objects):
        url, place, api = "s3://bucket", store.store, store.api
        monkeypatch.setattr("kvengine.offload.stores.urls._bucket", lambda *_: place)
    for key in KEYS:
        store.put(key, [VALUE])
    front = bytearray(record.header(KEYS[1], [VALUE], None))
    front[20] ^= 1
    newer = bytearray(record.header(KEYS[2], [VALUE], None)[: record.HEADER.size])
    newer[8] = 99
    for key, head in ((KEYS[1], bytes(front)), (KEYS[2], bytes(newer) + record.digest(bytes(newer)))):
        if isinstance(store, stores.Objects):
            api.put(place, store._name(key), head + VALUE)
        else:
            store.client.set(store._name(key), head)  # type: ignore[attr-defined]
    assert {row["key"] for row in json.loads(run("ls", "--json", "-s", url, status=0))} == set(KEYS)
    said = run("verify", "-s", url, status=1)
    assert (
        "1 of 3 values are whole" in said and f"{KEYS[1]} a record's header is damaged" in said and "version 99" in said
    )
    assert "1 of 2 values are whole" in run("verify", "-s", url, status=0)
    assert [entry.key for entry in store.entries()] == [KEYS[0], KEYS[2]]
    assert not any(KEYS[1] in str(name) for name in server.values)


def test_a_value_whose_part_the_server_evicted_is_put_anew(server: Pretended, exported: Path) -> None:
    """`import` said that it was there, and nobody could read it."""
    store = stores.Resp(server.url)
    for _ in range(2):
        run("import", exported, "-s", server.url, status=0)
        store.verify(KEYS[0])
        assert store.client.delete(store._name(KEYS[0], 0))
    store.close()


def test_parts_on_a_server_are_read_pinned_and_given_up_together(
    server: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests with a real server say of parts, where there is none."""
    monkeypatch.setattr(resp, "PART", 4)
    store, into = stores.Resp(server.url), bytearray(10)
    server.values[b"kvengine:notes:head"] = b"not ours"
    store.put(KEYS[0], [b"0123", b"456789"], 60)
    assert store.read(KEYS[0], memoryview(into)[:5], 3) == 5 and into[:5] == b"34567"
    store.pin(KEYS[0], False)
    assert list(server.life.values()) == [60_000] * 4
    store.pin(KEYS[0])
    assert list(server.life.values()) == [None] * 4
    part, ours = store._name(KEYS[0], 1).encode(), [name for name in server.values if b"notes" not in name]
    for found in (None, b"45", b"4x67"):  # evicted, torn, damaged
        store.put(KEYS[0], [b"0123456789"])
        assert [entry.key for entry in store.entries()] == [KEYS[0]]
        server.values.pop(part) if found is None else server.values.update({part: found})
        with pytest.raises(CorruptBitstream):
            store.read(KEYS[0], memoryview(into))
        assert not server.values.keys() & set(ours)
    store.close()
