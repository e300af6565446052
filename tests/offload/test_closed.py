"""A store after `close`, and calls while it closes."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from support import greedy, llama, one

import kvengine
from kvengine.errors import StoreError
from kvengine.offload import stores
from kvengine.prefix import Prefix

KEY = "a" * 64


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = stores.Store(stores.Files(tmp_path / "kv"))
    store.wait(store.submit_put([KEY], [b"a"]))
    store.close()
    store.close()  # twice is no harm
    calls: list[Any] = [
        lambda: store.lookup([KEY]), lambda: store.sizes([KEY]), lambda: store.submit_put([KEY], [b"b"]),
        lambda: store.submit_get([KEY], [bytearray(1)]), lambda: store.pin([KEY]), lambda: store.delete([KEY]),
        store.entries, store.usage,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(StoreError, match="the store is closed; make another"):
            call()
    store.drain()  # nothing hangs on what was refused
    assert store.poll() == [] and store.counts["failed"] == 0
    again = stores.Store(stores.Files(tmp_path / "kv"))
    assert again.lookup([KEY]) == 1
    again.close()


def test_a_prefix_over_a_closed_store_says_so(tmp_path: Path) -> None:
    with kvengine.patched(llama(), "full") as model:
        store = stores.Store(stores.Files(tmp_path / "kv"))
        reuse, ids = Prefix(model, store, chunk=16), one()["input_ids"]
        cache = reuse.fetch(ids)
        greedy(model, {"input_ids": ids}, cache=cache)
        store.close()
        with pytest.raises(StoreError, match="the store is closed"):
            reuse.fetch(ids)
        with pytest.raises(StoreError, match="the store is closed"):
            reuse.keep(ids, cache)


def test_closing_waits_for_what_was_taken_and_takes_no_more(tmp_path: Path) -> None:
    store = stores.Store(stores.Files(tmp_path / "kv"), threads=2)
    keys, taken = [f"{i:064x}" for i in range(20000)], 0

    def fill() -> None:
        nonlocal taken
        for key in keys:
            try:
                store.submit_put([key], [key.encode()])
            except StoreError:
                return
            taken += 1
            time.sleep(0.001)  # not so many that closing takes long

    writer = threading.Thread(target=fill)
    writer.start()
    while taken < 20:
        assert writer.is_alive()
    store.close()
    writer.join()
    again = stores.Files(tmp_path / "kv")
    assert {entry.key for entry in again.entries()} == set(keys[:taken])
    again.close()


@pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="open files are not listed on this system")
def test_a_store_that_nobody_holds_any_more_leaves_no_file_open(tmp_path: Path) -> None:
    """At once, as under `remote` every cache has one: programs that must not pause run the garbage collector seldom, or never."""
    stores.Files(tmp_path).close()
    before = len(os.listdir("/dev/fd"))
    gc.disable()
    try:
        for _ in range(3):
            stores.Files(tmp_path)
        assert len(os.listdir("/dev/fd")) == before
    finally:
        gc.enable()
