"""What names a store, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvengine.errors import PolicyError, StoreError
from kvengine.offload import stores
from kvengine.stack import Stack


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(("url", "folder"), [
    ("{}/kv", "kv"), ("./kv", "kv"), ("runs/kv", "runs/kv"), ("file://{}/my%20kv", "my kv"), ("~/kv", "home/kv"),
    ("FILE://{}/kv", "kv"),
])  # fmt: skip
def test_folders(url: str, folder: str, tmp_path: Path) -> None:
    made = stores.backend(url.format(tmp_path))
    assert isinstance(made, stores.Files) and (tmp_path / folder / "objects").is_dir()
    made.close()


def test_a_name_alone_is_a_folder_if_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    stores.backend("kv").close()


@pytest.mark.parametrize(("url", "says"), [
    ("", "is no store: give a folder, or a URL"),
    ("a\0b", "is no store"),
    ("kv", r"redis://kv:6379/0 for a server, \./kv for a new folder"),
    ("localhost:6379", "write redis://host:6379/0"),
    ("localhost:6379/0", "write redis://host:6379/0"),
    ("redis:/localhost", "write redis://host:6379/0"),
    ("file://", "file:///with/its/whole/path"),
    ("file://kv", "file:///with/its/whole/path"),
    ("ftp://x", "no store is known for 'ftp://x'"),
    ("n" * 5000, "for a new folder"),
])  # fmt: skip
def test_what_is_no_store_makes_no_folder(url: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=says):
        stores.backend(url)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("url", "says"), [
    ("redis://host:port/0", "cannot be used: Port"),
    ("redis://host:6379/kv", "number of a database"),
    ("redis://me:secret@host:port/0", r"redis://\*\*\*@host:port/0"),
    ("rediss://host/0?password=secret&db=x", r"password=\*\*\*&db=x"),
    ("redis://me:secret#secret@host:6379/0", r"'redis://\*\*\*@host:6379/0' has a password in which # must be written as %23"),
    ("redis://:secret?/secret@host", r"'redis://\*\*\*@host' has a password in which"),
])  # fmt: skip
def test_addresses_of_servers_are_read_at_once_and_passwords_are_not_shown(url: str, says: str) -> None:
    pytest.importorskip("redis")
    with pytest.raises(StoreError, match=says) as caught:
        stores.backend(url)
    assert "secret" not in str(caught.value)


def test_buckets() -> None:
    pytest.importorskip("obstore")
    assert isinstance(stores.backend("memory://"), stores.Objects)
    for url in ("s3://", "az://container", "s3://a bucket/x"):
        with pytest.raises(StoreError, match=f"the store at '{url}' cannot be used") as caught:
            stores.backend(url)
        assert "\n" not in str(caught.value)  # obstore adds a page of its own state


def test_a_cap_is_bytes_and_of_stores_that_have_one() -> None:
    pytest.importorskip("redis")
    with pytest.raises(StoreError, match="maxmemory"):
        stores.backend("redis://host:6379/0", cap=1 << 20)
    for cap in (-1, "1G", 0.5, True):
        with pytest.raises(StoreError, match="not a number of bytes"):
            stores.backend("./kv", cap=cap)  # type: ignore[arg-type]


@pytest.mark.parametrize(("url", "user"), [
    ("redis://me:${KV_WORD}@host:6379/0", "me"), ("rediss://:${KV_WORD}@host/0", None),
    ("redis://${KV_USER}:${KV_WORD}@host/0", "a/b"), ("unix:///run/kv.sock?password=${KV_WORD}&db=1", None),
])  # fmt: skip
def test_a_password_comes_from_the_environment(url: str, user: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("redis")
    monkeypatch.setenv("KV_USER", "a/b")
    with pytest.raises(StoreError, match=r"environment has no KV_WORD; set it"):
        stores.backend(url)
    monkeypatch.setenv("KV_WORD", "p@ss/w:rd ${KV_USER}")
    made = stores.backend(url)
    assert isinstance(made, stores.Resp)
    asked = made.client.connection_pool.connection_kwargs
    assert (asked["password"], asked.get("username")) == ("p@ss/w:rd ${KV_USER}", user)
    made.close()


@pytest.mark.parametrize("url", [
    "redis://me:secret@host:6379/0", "redis://:secret@host/0", "unix:///kv.sock?password=secret", "redis://:se/secret@host/0",
    "REDIS://:secret${KV_WORD}@host/0", "redis://:secret#${KV_WORD}@host/0",
])  # fmt: skip
def test_a_policy_takes_no_password(url: str) -> None:
    """Its text is shown in errors and reports, and saved with sessions."""
    with pytest.raises(PolicyError) as caught:
        Stack.parse(f"quest + remote(url={url!r})")
    assert "secret" not in str(caught.value) and "KV_WORD" not in str(caught.value).replace("${KV_WORD}", "")


@pytest.mark.parametrize("url", ["redis://me:${KV_WORD}@host:6379/0", "redis://me@host", "s3://bucket/a:b@c"])
def test_a_policy_keeps_a_variables_name(url: str) -> None:
    assert url in Stack.parse(f"remote(url={url!r})").spelled()
