"""What a process that was forked off has of a cache or a store: copies, without the threads that do their work."""

from __future__ import annotations

import copy
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import greedy, llama, one

import kvengine
from kvengine.errors import StoreError
from kvengine.offload import stores
from kvengine.prefix import Prefix

KEY = "a" * 64


def forked(work: Callable[[], Any]) -> str:
    """What `work` says in a process of its own: its StoreError, or what it returned; nothing, if it hangs and is killed."""
    receive, send = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside threads is what this is about
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            said = f"returned {work()}"
        except StoreError as error:
            said = str(error)
        except BaseException as error:
            said = repr(error)
        os.write(send, said.encode()[:4096])
        os._exit(0)
    os.close(send)
    os.waitpid(child, 0)
    with os.fdopen(receive) as told:
        return told.read()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", ["disk(device=4096, host=4096)", "remote(url='memory://', device=4096, host=4096)"])
def test_pages_below_memory_belong_to_the_process_that_wrote_them(policy: str) -> None:
    batch, more = one(), torch.tensor([[7, 8, 9]])
    with kvengine.patched(llama(), policy) as model:

        def turn(cache: Any) -> list[int]:
            ids = torch.cat([text, more], 1)
            found: list[int] = model.generate(
                ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=6, do_sample=False
            )[0].tolist()
            return found

        alone, cache = kvengine.EngineCache(model), kvengine.EngineCache(model)
        text = model.generate(**batch, cache=alone, max_new_tokens=6, do_sample=False)
        model.generate(**batch, cache=cache, max_new_tokens=6, do_sample=False)
        want = turn(alone)
        assert f"by process {os.getpid()}, of which this one is a fork" in forked(lambda: turn(cache))
        assert "of which this one is a fork" in forked(lambda: copy.deepcopy(cache))
        fresh = greedy(model, batch, 6)[0].tolist()
        assert forked(lambda: greedy(model, batch, 6)[0].tolist()) == f"returned {fresh}"
        assert turn(cache) == want  # what the forks tried has changed nothing here


def test_a_cache_that_is_all_in_memory_goes_on_in_a_fork() -> None:
    batch = one()
    with kvengine.patched(llama(), "kivi(bits=4, group=8, residual=8) + disk") as model:
        cache, alone = kvengine.EngineCache(model), kvengine.EngineCache(model)
        model.generate(**batch, cache=alone, max_new_tokens=6, do_sample=False)
        text = model.generate(**batch, cache=cache, max_new_tokens=6, do_sample=False)

        def turn(of: Any) -> list[int]:
            found: list[int] = greedy(model, {"input_ids": text, "attention_mask": torch.ones_like(text)}, 6, cache=of)[
                0
            ].tolist()
            return found

        want = turn(alone)
        assert forked(lambda: turn(cache)) == f"returned {want}" and turn(cache) == want


def test_a_store_is_opened_by_each_process(tmp_path: Path) -> None:
    ids = one()["input_ids"]
    with kvengine.patched(llama(), "full") as model:
        store = stores.Store(stores.Files(tmp_path / "kv"))
        reuse = Prefix(model, store, chunk=16)
        cache = reuse.fetch(ids)
        greedy(model, {"input_ids": ids}, cache=cache)
        reuse.keep(ids, cache)
        job = store.submit_put([KEY], [b"a"])
        calls: list[Callable[[], Any]] = [
            lambda: reuse.fetch(ids), lambda: reuse.keep(ids, cache), lambda: store.lookup([KEY]), store.drain,
            lambda: store.wait(job), lambda: store.submit_get([KEY], [bytearray(1)]),
        ]  # fmt: skip
        for call in calls:
            assert f"opened by process {os.getpid()}, of which this one is a fork" in forked(call)
        assert forked(store.close) == "returned None"
        store.wait(job)
        assert store.lookup([KEY]) == 1 and reuse.fetch(ids).seen == 48
        store.close()
