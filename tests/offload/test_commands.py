"""The `kvengine cache` commands on a real store."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from support_offload import cache
from typer.testing import CliRunner

from kvengine.errors import CorruptBitstream
from kvengine.offload import cachegen, commands, stores
from kvengine.offload.commands import app
from kvengine.offload.stores import record

KEYS = [f"{i:02d}".ljust(64, "a") for i in range(3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = stores.Files(tmp_path / "kv")
    for i, key in enumerate(KEYS):
        store.put(key, [cachegen.encode(cache(tokens=20 + i), "low")], None if i else 1000)
    store.pin(KEYS[1])
    store.close()
    return tmp_path / "kv"


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return result.output


def test_list_and_info(folder: Path) -> None:
    rows = json.loads(run("ls", "--json", "-s", folder))
    assert {row["key"] for row in rows} == set(KEYS) and sum(row["pinned"] for row in rows) == 1
    text = run("ls", "-s", folder)
    assert KEYS[0][:16] in text and "3 values" in text and "never" in text
    told = json.loads(run("info", "01", "-s", folder))
    assert told["tokens"] == 21 and told["level"] == "low" and told["kind"] == "kv"
    assert "3 keys begin with" in run("info", "0", "-s", folder, status=2)
    assert "keys begin with 'zz'" in run("info", "zz", "-s", folder, status=2)
    assert "has no value" in run("info", "f" * 64, "-s", folder, status=2)


def test_a_value_is_a_line_however_narrow_the_terminal(folder: Path) -> None:
    """At 80 columns keys were cut, and what was left of one named no value."""
    result = CliRunner().invoke(app, ["ls", "-s", str(folder)], env={"COLUMNS": "40"})
    lines = result.stdout.splitlines()
    assert len(lines) == 5 and {line[:16] for line in lines[1:4]} == {key[:16] for key in KEYS}
    assert "tokens" in run("info", lines[1].split()[0], "-s", folder)


def test_what_is_no_encoded_cache_is_told_as_what_it_is(folder: Path) -> None:
    store = stores.Files(folder)
    store.put("e" * 64, [bytes(5000)], 1000)
    store.close()
    said = run("info", "ee", "-s", folder, status=2)
    assert "eeeeeeeeeeee... has no header: it is 5,000 bytes of a generation's pages" in said


def test_a_value_that_is_named_twice_is_checked_once(folder: Path) -> None:
    assert run("verify", "00", KEYS[0], "01", "-s", folder) == "2 of 2 values are whole\n"


def test_verify_finds_and_removes_damage(folder: Path) -> None:
    assert "3 of 3" in run("verify", "-s", folder)
    path = folder / "objects" / "0" / f"{KEYS[2]}.kv"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert "2 of 3" in run("verify", "-s", folder, status=1)
    assert "2 of 2" in run("verify", "-s", folder)
    assert "1 of 1" in run("verify", "00", "-s", folder)


def test_verify_leaves_the_order_in_which_values_make_room(folder: Path) -> None:
    """It read them by name, and what had been used last made room before all others."""
    for age, key in enumerate(KEYS, 1):
        os.utime(folder / "objects" / "0" / f"{key}.kv", (time.time() - 100 * age,) * 2)
    for _ in range(2):
        assert [row["key"] for row in json.loads(run("ls", "--json", "-s", folder))] == KEYS[::-1]
        run("verify", "-s", folder)


def test_verify_tells_of_damage_that_opening_the_store_found(folder: Path) -> None:
    """Values in each other's place, and one that is cut: their headers say so, and all that was left was whole."""
    paths = [folder / "objects" / "0" / f"{key}.kv" for key in KEYS]
    bodies = [path.read_bytes() for path in paths]
    paths[0].write_bytes(bodies[1]), paths[1].write_bytes(bodies[0])
    text = run("verify", "-s", folder, status=1)
    assert "1 of 3 values are whole" in text and "2 were found damaged when the store was opened" in text
    assert "1 of 1 values are whole" in run("verify", "-s", folder)
    paths[2].write_bytes(bodies[2][:100])
    assert "0 of 1 values are whole" in run("verify", "-s", folder, status=1)


def test_gc_counts_what_opening_the_store_removed(folder: Path) -> None:
    store = stores.Files(folder)
    store.put("d" * 64, [b"x"], 0.01)
    store.close()
    time.sleep(0.02)
    assert "1 values removed" in run("gc", "-s", folder) and "0 values removed" in run("gc", "-s", folder)


def test_verify_leaves_what_it_cannot_judge(folder: Path) -> None:
    """Pages of a generation that is under way were deleted as if damaged."""
    store = stores.Files(folder)
    store.put("e" * 64, [bytes(5000)], 1000)
    for key, body in (("b" * 64, b"x"), ("c" * 64, cachegen.encode(cache(tokens=9), "low"))):
        store.put(key, [body])
    front = bytearray(store.path("b" * 64).read_bytes()[: record.HEADER.size])
    front[8] = 99
    store.path("b" * 64).write_bytes(bytes(front) + record.digest(bytes(front)) + b"x")
    newer = bytearray(cachegen.encode(cache(tokens=9), "low"))
    newer[8] = 99
    store.put("c" * 64, [newer])
    store.close()
    text = run("verify", "-s", folder)
    assert "4 of 6" in text and text.count("is left as it is") == 2 and "version 99" in text
    assert "4 of 6" in run("verify", "-s", folder)


def test_verify_keeps_what_is_replaced_while_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of one value and half of the next, as a server gives them: it was deleted."""
    read, torn = commands._read, [KEYS[1]]

    def between(source: commands.Backend, key: str) -> bytes:
        body = read(source, key)
        if key in torn:
            torn.remove(key)
            body = body[: len(body) // 2] + bytes(len(body) - len(body) // 2)
        return body

    monkeypatch.setattr(commands, "_read", between)
    assert "3 of 3" in run("verify", "-s", folder) and not torn
    torn += [KEYS[1], KEYS[1]]
    assert "2 of 3" in run("verify", "-s", folder, status=1) and not torn


def test_a_value_that_says_it_is_huge_is_damaged() -> None:
    class Huge:
        def size(self, key: str) -> int:
            return 1 << 62

    with pytest.raises(CorruptBitstream, match="fit into no memory"):
        commands._read(Huge(), KEYS[0])  # type: ignore[arg-type]


def test_export_and_import(folder: Path, tmp_path: Path) -> None:
    out, other = tmp_path / "one.kv", tmp_path / "other"
    mine = tmp_path / "one.kv.part"
    mine.write_text("a file of the user's")
    run("export", "02", out, "-s", folder)
    assert mine.read_text() == "a file of the user's"
    run("import", out, "-s", other)
    assert json.loads(run("info", out)) == json.loads(run("info", KEYS[2], "-s", other))
    out.write_bytes(out.read_bytes()[:-1])
    assert "torn or damaged" in run("import", out, "-s", other, status=2)
    assert "torn" in run("info", out, status=2)


def test_what_is_imported_takes_the_place_of_what_is_damaged(folder: Path, tmp_path: Path) -> None:
    """It was taken for the same value by its header, and stayed damaged."""
    run("export", KEYS[2], tmp_path / "one.kv", "-s", folder)
    path = folder / "objects" / "0" / f"{KEYS[2]}.kv"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"?")
    run("import", tmp_path / "one.kv", "-s", folder)
    assert "3 of 3" in run("verify", "-s", folder) and path.read_bytes()[record.SIZE :] == whole[record.SIZE :]
    before = path.stat().st_ino
    run("import", tmp_path / "one.kv", "-s", folder)
    assert path.stat().st_ino == before  # what is whole is not written again


def test_gc_removes_what_is_expired(folder: Path) -> None:
    store = stores.Files(folder)
    store.put("f" * 64, [b"soon gone"], 0.01)
    store.close()
    time.sleep(0.05)
    run("gc", "-s", folder)  # opening collects already
    assert len(json.loads(run("ls", "--json", "-s", folder))) == 3


def test_who_has_named_no_store_is_told_how(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but `import` writes to the store that is used then: whose is elsewhere was told to import."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("KVENGINE_STORE", raising=False)
    assert "; name yours with --store FOLDER|URL; `kvengine cache import` makes one" in run("ls", status=2)


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "there is no store at" in run("ls", "-s", tmp_path / "file", status=2)
    (tmp_path / "round").symlink_to(tmp_path / "round")  # what cannot be looked into may well be one
    assert "Too many levels of symbolic links" in run("ls", "-s", tmp_path / "round", status=2)
    (one := tmp_path / "one.kv").write_bytes(record.header(KEYS[0], [b"x"], None) + b"x")
    assert "cannot be opened" in run("import", one, "-s", tmp_path / "file", status=2)
    for wrong in ("nothing.kv", "file"):
        assert "was not imported" in run("import", tmp_path / wrong, "-s", tmp_path / "nothing", status=2)
    (tmp_path / "mine").mkdir()
    for words in (["ls"], ["info", "00"], ["verify"], ["gc"], ["export", "00", tmp_path / "out"]):
        for place in ("mine", "nothing"):
            assert "there is no store at" in run(*words, "-s", tmp_path / place, status=2)
    assert not list((tmp_path / "mine").iterdir()) and not (tmp_path / "nothing").exists()
    assert "no store is known" in run("ls", "-s", "ftp://x", status=2)


def test_a_server_that_is_not_there_is_said_in_a_line() -> None:
    pytest.importorskip("redis")
    result = CliRunner().invoke(app, ["ls", "-s", "redis://127.0.0.1:1/0"])
    assert result.exit_code == 2 and "the store at redis://127.0.0.1:1/0 cannot be used" in result.output


def test_a_time_beyond_all_calendars_is_listed(folder: Path) -> None:
    """An OverflowError."""
    store = stores.Files(folder)
    for key, ttl in (("d" * 64, 1e300), ("e" * 64, 1e18)):
        store.put(key, [b"x"], ttl)
    store.close()
    text = run("ls", "-s", folder)
    assert "1e+300" in text and "1e+18" in text and "5 values" in text


def test_what_expired_in_a_bucket_is_not_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    store: Any = stores.backend("memory://")
    monkeypatch.setattr("kvengine.offload.stores.urls._bucket", lambda *_: store.store)
    store.put(KEYS[0], [b"x"], 0.01)
    store.put(KEYS[1], [b"x"])
    time.sleep(0.02)
    assert "1 of 1 values are whole" in run("verify", "-s", "s3://bucket")
    text = run("verify", "00", "01", "-s", "s3://bucket", status=1)
    assert "1 of 2 values are whole" in text and f"{KEYS[0]} is not there" in text
