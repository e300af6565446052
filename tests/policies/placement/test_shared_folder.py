"""Tiers in folders that others write to, as the system's for temporary files is, and on disks that are full."""

from __future__ import annotations

import copy
import errno
import fcntl
import gc
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import one, patched
from support_layer import draw, run

import kvengine
from kvengine.errors import StoreError
from kvengine.offload.placement import _file
from kvengine.offload.placement._ahead import Ahead
from kvengine.offload.placement._file import File
from kvengine.offload.placement._levels import Layout
from kvengine.offload.stores.filesystem import FileSystem
from kvengine.stats import measure


def test_what_others_put_there_is_left_alone(tmp_path: Path) -> None:
    """Leftovers go, but no link is followed: a lock is not laid on the file that it names, nor is the link removed."""
    folder, target = tmp_path / "pages", tmp_path / "mine"
    folder.mkdir()
    target.write_bytes(b"mine")
    link, left = folder / "kvengine-link.kvpages", folder / "kvengine-left.kvpages"
    link.symlink_to(target)
    left.write_bytes(b"of a process that was killed")
    held = os.open(folder / "kvengine-held.kvpages", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    file = File(Layout.of({"k": torch.zeros(1, 4)}), str(folder), 8)
    assert link.is_symlink() and target.read_bytes() == b"mine" and not left.exists()
    assert (folder / "kvengine-held.kvpages").exists()
    os.close(held)
    file.close()
    assert sorted(path.name for path in folder.iterdir()) == ["kvengine-held.kvpages", "kvengine-link.kvpages"]


def test_leftovers_are_looked_for_once_for_each_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for every lane of it, nor for those of a copy: all files are tried, of other caches too."""
    swept: list[Path] = []
    monkeypatch.setattr(_file, "sweep", swept.append)
    model = patched(f"quest(budget=16, page=4) + disk(folder='{tmp_path}')")
    caches = [kvengine.EngineCache(model) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(one()["input_ids"], cache=cache)
    caches.append(copy.deepcopy(caches[0]))
    assert len(list(tmp_path.iterdir())) == 6 and swept == [tmp_path] * 2


def test_a_folder_that_pages_go_to_gives_none_up_for_others_when_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store, keys = Ahead().backend(str(tmp_path / "pages")), ["0" * 64, "1" * 64]
    store.put(keys[0], [bytes(300)])
    monkeypatch.setattr(FileSystem, "write", full)
    with pytest.raises(StoreError, match="No space left"):
        store.put(keys[1], [bytes(300)])
    assert store.size(keys[0]) == 300


def test_where_files_cannot_be_locked_none_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    before = os.listdir("/proc/self/fd") if sys.platform == "linux" else []
    with pytest.raises(StoreError, match="no locks available; give another folder"):
        File(Layout.of({"k": torch.zeros(1, 4)}), str(tmp_path), 8)
    assert not list(tmp_path.iterdir())
    assert not before or len(os.listdir("/proc/self/fd")) == len(before)


def test_a_copy_for_which_the_disk_has_no_room_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    like = {"k": torch.arange(8.0).reshape(2, 4)}
    file = File(Layout.of(like), str(tmp_path), 8)
    file.write(file.slots.take(2), like)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StoreError, match="could not be copied: .*no space left"):
            copy.deepcopy(file)
    gc.collect()
    assert len(list(tmp_path.iterdir())) == 1
    assert torch.equal(copy.deepcopy(file).read(np.arange(2), ())["k"], like["k"])


def test_a_full_disk_makes_no_room_of_the_pages_that_are_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store gives up what was used longest ago for what is new; but under `remote` that is this very cache."""
    tokens, policy = draw(160), f"quest(budget=40) + remote(url='{tmp_path}/kv', host=4096)"
    want = run(policy, tokens, 80).out
    write, left = FileSystem.write, [24_000]

    def full(self: FileSystem, handle: int, data: Any) -> None:
        left[0] -= len(data)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "no space left")
        write(self, handle, data)

    monkeypatch.setattr(FileSystem, "write", full)
    found = run(policy, tokens, 80)
    stats = measure([found.cache])
    assert stats.faults > 0 < stats.tier("remote")
    assert torch.equal(found.out, want)
