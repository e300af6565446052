"""The target's keys and values in host memory, brought layer by layer; the draft stays on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support_spec import llama, prompt
from torch import Tensor

import kvengine
from kvengine.offload.placement import Fields
from kvengine.offload.placement.host import Fetched
from kvengine.speculative.triforce import TriForce

LAYERS = 3
MIDDLES = ["quest(budget=24, page=4)", "snapkv(budget=24, window=4)", "streaming(sinks=4, recent=20)", "kivi(bits=4)"]


@pytest.fixture(scope="module")
def model() -> Any:
    return kvengine.patch(llama(layers=LAYERS))


def decoded(model: Any, middle: str, **options: Any) -> tuple[list[list[int]], TriForce, Any]:
    """The text, the decoder, and the tiers that made it."""
    decoder = TriForce(model, "lookup", middle, gamma=(2, 4), stack="host")
    kept: list[Any] = []
    tiers = decoder.tiers
    decoder.tiers = lambda *a: kept.append(tiers(*a)) or kept[-1]  # type: ignore[method-assign, func-returns-value]
    return decoder.generate(prompt(240), max_new_tokens=12, **options).tolist(), decoder, kept[0]


def storages(lane: Any) -> dict[str, dict[int, int]]:
    """Bytes of every storage that a lane's tail, tables and stores refer to, by where they are meant to be."""
    found: dict[str, dict[int, int]] = {"device": {}, "host": {}}
    for x in (*lane.tail.tensors().values(), *lane.pages.tensors().values()):
        found["device"][x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    for shelf in lane.pages.pool.shelves:
        for store in shelf.stores.values():
            found[shelf.tier][store.data.untyped_storage().data_ptr()] = store.data.untyped_storage().nbytes()
    return found


@pytest.mark.parametrize("middle", MIDDLES)
def test_the_text_is_the_same_and_the_bytes_are_where_the_report_says(model: Any, middle: str) -> None:
    text, decoder, tiers = decoded(model, middle, do_sample=False)
    assert text == model.generate(prompt(240), max_new_tokens=12, do_sample=False).tolist()
    top, mine = decoder.report.tiers
    lanes = [part.lane for layer in tiers.session.cache.engines for part in layer.parts]
    counted = [storages(lane) for lane in lanes]
    assert top.device_bytes == sum(sum(one["device"].values()) for one in counted)
    assert top.cache_bytes - top.device_bytes == sum(sum(one["host"].values()) for one in counted)
    assert top.device_bytes < 0.35 * top.cache_bytes and "on the device" in str(decoder.report)
    assert mine.device_bytes == mine.cache_bytes < top.cache_bytes


def test_coupled_text_is_the_same(model: Any) -> None:
    options = {"temperature": 1.0, "seed": 5, "coupled": True}
    for middle in MIDDLES[:2]:
        near = TriForce(model, "lookup", middle, gamma=(2, 4)).generate(prompt(240), max_new_tokens=12, **options)
        assert decoded(model, middle, **options)[0] == near.tolist()


def test_one_layer_comes_at_a_time(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of the target brings every page once, never more than a layer's in one go; a draft's pass brings none."""
    brought: list[int] = []
    real = Fetched.start

    def start(self: Fetched, at: Tensor, without: tuple[str, ...] = ()) -> Callable[[], Fields]:
        fetched = real(self, at, without)
        brought.extend(x.nbytes for x in fetched().values())
        return fetched

    _, _, tiers = decoded(model, MIDDLES[0], do_sample=False)
    monkeypatch.setattr(Fetched, "start", start)
    monkeypatch.setattr(Fetched, "resident", lambda *_: None)  # on a CPU pages are read in place
    tiers.session.feed([5, 6, 7])
    lanes = [part.lane for layer in tiers.session.cache.engines for part in layer.parts]
    by_layer = [2 * lane.pages.table.numel() * lane.pages.page * 8 * 4 for lane in lanes]  # keys and values, fp32
    assert sum(brought) == sum(by_layer) and max(brought) <= max(by_layer) / 2  # keys, then values
    assert len(brought) == 2 * LAYERS
    tiers.session.forget(3)
    brought.clear()
    tiers.below.session.feed([5, 6])
    assert not brought


def test_a_batch_of_off_loaded_rows(model: Any) -> None:
    ids = torch.cat([prompt(200), prompt(200, seed=3)])
    decoder = TriForce(model, "lookup", MIDDLES[0], gamma=(2, 4), stack="host")
    out = decoder.generate(ids, max_new_tokens=12, do_sample=False)
    assert out.tolist() == model.generate(ids, max_new_tokens=12, do_sample=False).tolist()
