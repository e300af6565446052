"""What nobody holds any more goes at once: programs that must not pause run the garbage collector seldom, or never."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from families.configs import build
from support import llama, one, patched
from transformers.masking_utils import causal_mask_function

import kvengine
from kvengine.errors import StoreError
from kvengine.hf.cache import EngineCache
from kvengine.hf.mask import LazyMask
from kvengine.offload.links import SimulatedLink, Trace
from kvengine.offload.placement._packed import Packed
from kvengine.offload.streaming import TEXT, Bandwidth, Chunk, Controller, stream
from kvengine.policies.retention import Retention, Seen
from kvengine.speculative import TriForce, noise
from kvengine.stack import Stack


class Broken(Exception):
    """As where memory is short, or somebody interrupts."""


@pytest.fixture(autouse=True)
def _uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[EngineCache]]:
    """The caches that are made."""
    found: list[weakref.ref[EngineCache]] = []
    fill = EngineCache.fill

    def noted(self: EngineCache, *args: Any) -> None:
        found.append(weakref.ref(self))
        fill(self, *args)

    monkeypatch.setattr(EngineCache, "fill", noted)
    return found


@pytest.mark.parametrize("passes", [None, 0, 1], ids=["to the end", "broken off in the prompt", "and behind it"])
@pytest.mark.parametrize("options", [
    {"middle": "retrieval(budget=24, chunk=4)"},
    {"middle": "snapkv(budget=24, window=6)"},
    {"middle": "snapkv(budget=24, window=6)", "in_place": True},
    {"middle": "quantspec(bits=4, group=8, residual=8)", "stack": "quantspec(group=8, residual=8)"},
], ids=["a view", "another cache", "in place", "a guest"])  # fmt: skip
def test_caches_of_a_speculative_call_go_with_it(
    options: dict[str, Any], passes: int | None, made: list[weakref.ref[EngineCache]]
) -> None:
    model = llama()
    decoder, left = TriForce(model, "lookup", gamma=(1, 3), **options), passes
    made.clear()

    def count(*_: Any) -> None:
        nonlocal left
        if left is not None:
            left -= 1
            if left < 0:
                raise Broken

    model.model.layers[1].register_forward_pre_hook(count)
    try:
        decoder.generate(**one(), max_new_tokens=8)
    except Broken:
        assert passes is not None
    assert made and not any(cache() for cache in made)


def test_noise_of_a_speculative_call_is_made_once_and_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stayed for as long as the process, on the device, also when its model was gone."""
    made: dict[tuple[int, int, str], weakref.ref[torch.Tensor]] = {}
    gumbel = noise.gumbel

    def noted(*place: Any) -> torch.Tensor:
        assert place not in made
        made[place] = weakref.ref(found := gumbel(*place))
        return found

    monkeypatch.setattr(noise, "gumbel", noted)
    decoder = TriForce(llama(), "lookup", gamma=(1, 3), middle="retrieval(budget=24, chunk=4)")
    decoder.generate(one()["input_ids"], max_new_tokens=12, do_sample=True, seed=1, coupled=True)
    assert len(made) >= 12 and not any(left() is not None for left in made.values())


def files() -> int:
    """How many this process has open; 0 where nobody tells."""
    here = Path("/proc/self/fd")
    return len(os.listdir(here)) if here.is_dir() else 0


@pytest.mark.parametrize("file", ["disk(device=0, host=0)", "disk(device=4096, host=0)"])
def test_a_cache_whose_pages_cannot_be_read_goes_when_it_is_given_up(
    file: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Else who computes it again needs room for two of them, and its files stay open. What is logged, and kept, holds nothing."""
    model, before = patched("full"), files()
    cache = kvengine.EngineCache(model, f"quest(budget=24, page=4) + {file}")
    with torch.no_grad():
        for ids in (one(200)["input_ids"], one(1)["input_ids"], one(1)["input_ids"]):
            model(ids, cache=cache)
        shelves = [shelf for layer in cache.engines for shelf in layer.parts[0].lane.pages.pool.shelves]  # type: ignore[union-attr]
        for level in (level for shelf in shelves for level in shelf.levels if isinstance(level, Packed)):  # type: ignore[attr-defined]
            level.flush()
            os.ftruncate(level.handle, 0)  # type: ignore[attr-defined]
        gone = [weakref.ref(x) for x in (cache, *shelves)]
        try:
            model(one(1)["input_ids"], cache=cache)
        except StoreError as error:  # which pytest would keep too
            told = str(error)
    del cache, shelves, level
    end = time.monotonic() + 10  # a thread may still be at a read ahead
    while (any(x() for x in gone) or files() > before) and time.monotonic() < end:
        time.sleep(0.01)
    assert "could not be read" in told and "could not be read" in caplog.text and not any(x() for x in gone)
    assert files() <= before


def test_a_mask_of_layers_on_several_devices_goes_with_its_pass() -> None:
    rule = {
        "batch_size": 1, "q_length": 5, "kv_length": 5, "q_offset": 0, "kv_offset": 0, "attention_mask": None,
        "mask_function": causal_mask_function, "allow_is_causal_skip": False, "device": torch.device("cpu"),
    }  # fmt: skip
    mask = LazyMask(rule)
    there = mask.on(torch.device("meta"))
    assert mask.on(torch.device("meta")) is there and there.make("sdpa").is_meta
    assert mask.made and there.found is mask.found  # what one has found out the other knows
    gone = weakref.ref(mask)
    del mask, there
    assert gone() is None


def test_what_was_to_be_computed_of_a_chunk_goes_where_another_could_not_be() -> None:
    class Held:
        """What a chunk is entered into."""

    held = Held()
    gone = weakref.ref(held)

    def work(chunk: int, option: str, payload: bytes | None, into: Held = held) -> None:
        if chunk:
            raise Broken

    link = SimulatedLink(Trace((0.0,), (1.0,)))
    with contextlib.suppress(Broken):
        stream([Chunk({}, 1.0)] * 3, Controller(9.0, [TEXT], 1e9, Bandwidth(1e9)), link, work)
    del held, work
    assert gone() is None


def broken_off(run: Any, layer: Any, cache: EngineCache) -> list[weakref.ref[Any]]:
    """What of a cache is to go with it, after a run that broke off before this layer of the model."""

    def stop(*_: Any) -> None:
        raise Broken

    hook = layer.register_forward_pre_hook(stop)
    try:
        with torch.no_grad(), contextlib.suppress(Broken):
            run()
    finally:
        hook.remove()
    held = [part.lane for engine in cache.engines for part in engine.parts]
    return [weakref.ref(x) for x in (cache, cache.session, *cache.layers, *cache.engines, *held)]


@pytest.mark.parametrize(("family", "text", "before"), [
    ("", "kvzip(budget=24)", 1),
    ("", "d2o(budget=24, shares='measured')", 1),
    ("gemma3n", "full", 3),
    ("gemma3n", "snapkv(budget=24, window=6)", 3),
    ("falcon_h1", "snapkv(budget=24, window=6)", 1),
])  # fmt: skip
def test_a_cache_whose_prompt_broke_off_goes_when_it_is_given_up(family: str, text: str, before: int) -> None:
    """Layers wait for each other or read what an earlier one took, or a pass of several parts was in the middle of them."""
    model = kvengine.patch(build(family) if family else llama())
    layers, ids = model.get_decoder().layers, one(40)["input_ids"].repeat(2, 1)
    cache = kvengine.EngineCache(model, text)
    options = {}
    if family == "falcon_h1":
        with torch.no_grad():
            model(ids, cache=cache, use_cache=True)
        options["attention_mask"] = torch.ones(2, 80, dtype=torch.long)
        options["attention_mask"][1, 50:] = 0
    gone = broken_off(partial(model, ids, cache=cache, use_cache=True, **options), layers[before], cache)
    del cache
    assert not any(x() for x in gone)


def test_a_draft_behind_a_prompt_that_broke_off_goes_with_its_cache() -> None:
    """It waits in the session until the prompt is judged."""
    model, ids = patched("kvzip(budget=24)"), torch.arange(2, 12).repeat(1, 6)
    cache = kvengine.EngineCache(model)
    run = partial(model.generate, ids, cache=cache, max_new_tokens=4, prompt_lookup_num_tokens=3)
    gone = broken_off(run, model.model.layers[1], cache)
    assert cache.session.rest is not None
    del cache, run
    assert not any(x() for x in gone)


@dataclass(frozen=True)
class Reads(Retention):
    """A retention of one's own that looks at keys at every token."""

    decodes: ClassVar[bool] = True

    def keep(self, seen: Seen) -> torch.Tensor:
        return seen.valid & (seen.read()[0].norm(dim=-1) > 0)


def test_what_a_retention_of_ones_own_is_shown_goes_when_it_has_judged() -> None:
    """All keys and values, at every token."""
    model = patched(Stack(retention=Reads()))
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(one()["input_ids"], cache=cache)
        held = [weakref.ref(engine.parts[0].lane.tail.position) for engine in cache.engines]
        shown = [weakref.ref(part.lane) for engine in cache.engines for part in engine.parts]
        for _ in range(3):
            model(one(1)["input_ids"], cache=cache)
    del cache
    assert not any(x() for x in (*held, *shown))
