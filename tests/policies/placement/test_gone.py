"""What a cache holds beside memory goes when it does: threads, and files that are open."""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from support import one, patched

import kvengine


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("kvpages")}


def files(folder: Path) -> int:
    """Open ones in a folder."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sum(Path(path).is_relative_to(folder) for path in found)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="no /proc")
@pytest.mark.parametrize("tier", ["disk(folder='{}', host=2000)", "remote(url='{}', host=2000)"])
def test_threads_and_files_go_with_their_caches(tier: str, tmp_path: Path) -> None:
    model, ids = patched(f"quest(budget=16, page=4) + {tier.format(tmp_path)}"), one()["input_ids"]
    caches, before = [], threads()
    for _ in range(5):
        caches.append(kvengine.EngineCache(model))
        with torch.no_grad():
            for tokens in (ids, ids[:, :1], ids[:, :1]):
                model(tokens, cache=caches[-1])
    caches[0].itself = caches[0]  # a circle, which only the collector finds
    mine = threads() - before
    assert len(mine) >= 5 and files(tmp_path) >= 5
    del caches
    gc.collect()
    end = time.monotonic() + 10
    while (any(thread.is_alive() for thread in mine) or files(tmp_path)) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(thread.is_alive() for thread in mine) and not files(tmp_path)
    assert not list(tmp_path.glob("*.kvpages"))
