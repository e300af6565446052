"""What breaks off around a recorded step is undone, or noticed; and what is let go can be saved, and held again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import configs
from support import llama, one, patched
from test_compiled import KIVI, STEPS, at, layer, tokens

import kvengine
from kvengine import saved
from kvengine.errors import CacheError
from kvengine.fixed import FixedLayer
from kvengine.fixed_lane import FixedLane
from kvengine.session import Call


@pytest.mark.parametrize("text", [KIVI, f"duo(sinks=2, recent=10) + {KIVI}"])
def test_a_layer_that_cannot_be_held_goes_on_as_it_was(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where memory runs short when everything else has moved."""
    qkv = tokens()
    eager, held = layer(text, qkv), layer(text, qkv)
    pinned, lanes = FixedLane.pinned, len(held.parts)

    def short(lane: FixedLane) -> Any:
        if lane.number == lanes - 1:
            raise MemoryError
        return pinned(lane)

    monkeypatch.setattr(FixedLane, "pinned", short)
    with pytest.raises(MemoryError):
        FixedLayer(held, STEPS, torch.tensor([held.seen]))
    for i in range(STEPS):
        torch.testing.assert_close(held.forward(*at(qkv, i), Call(0.25)), eager.forward(*at(qkv, i), Call(0.25)))


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_cache_whose_holding_broke_off_goes_on_as_it_was(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two layers: the first is held already."""
    model, ids, held = llama(), torch.ones(1, 1, dtype=torch.long), []

    def second(layer: Any, *arguments: Any) -> FixedLayer:
        held.append(layer)
        if len(held) == 2:
            raise error
        return FixedLayer(layer, *arguments)

    with kvengine.patched(model, KIVI), torch.no_grad():
        cache, twin = kvengine.EngineCache(model), kvengine.EngineCache(model)
        for each in (cache, twin):
            model(one()["input_ids"], cache=each)
        monkeypatch.setattr("kvengine.hf.steps.FixedLayer", second)
        with pytest.raises(error):
            kvengine.compile_decode(model, "eager").open(cache, 4)
        assert torch.equal(model(ids, cache=cache).logits, model(ids, cache=twin).logits)


def test_a_step_that_broke_off_is_noticed() -> None:
    """Control-C between two layers: the first has put the token where one was dropped, and does not count it."""
    model = llama()
    with kvengine.patched(model, "h2o(budget=24)"), torch.no_grad():
        cache, ids = kvengine.EngineCache(model), torch.ones(1, 1, dtype=torch.long)
        model(one()["input_ids"], cache=cache)
        steps = kvengine.compile_decode(model, "eager").open(cache, 4)
        steps(ids, 61 * ids)
        hook = model.model.layers[0].mlp.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            steps(ids, 62 * ids)
        hook.remove()
        with pytest.raises(CacheError, match="broke off"):
            steps(ids, 62 * ids)
        steps.close()
        with pytest.raises(CacheError, match="broke off"):
            model(ids, cache=cache)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("where", ["replay", "count"])
def test_a_replay_that_broke_off_is_noticed(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows how far the device has come; or one layer has counted the token, and the next has not."""
    model, ids = llama(), torch.ones(1, 1, dtype=torch.long)
    with kvengine.patched(model, "h2o(budget=24)"), torch.no_grad():
        cache = kvengine.EngineCache(model)
        model(one()["input_ids"], cache=cache)
        steps = kvengine.compile_decode(model, "trace").open(cache, 4)
        steps(ids, 61 * ids)
        owner, name = (steps, "replay") if where == "replay" else (steps.layers[1], "advance")
        with monkeypatch.context() as broken, pytest.raises(ZeroDivisionError):
            broken.setattr(owner, name, lambda: 1 / 0)
            steps(ids, 62 * ids)
        with pytest.raises(CacheError, match="broke off"):
            steps(ids, 62 * ids)
        steps.close()
        with pytest.raises(CacheError, match="broke off"):
            model(ids, cache=cache)


@pytest.mark.parametrize("text", ["full", "h2o(budget=24)", "streaming(sinks=2, recent=14)", KIVI, "d2o(budget=24)"])
def test_what_was_held_gives_back_no_more_than_eager_steps_would(text: str) -> None:
    """What a policy has dropped or sealed meanwhile is not there to return to."""
    qkv, found = tokens(), []
    for holding in (False, True):
        cache = layer(text, qkv)
        now = torch.tensor([cache.seen])
        fixed = FixedLayer(cache, 12, now) if holding else None
        for i in range(12):
            cache.forward(*at(qkv, i), Call(0.25))
            if fixed is not None:
                now.add_(1)
                fixed.advance()
        if fixed is not None:
            fixed.release()
        try:
            cache.rollback(11)
            found.append("given back")
        except CacheError as error:
            found.append(str(error))
        found.append(str(cache.seen))
    assert found[:2] == found[2:] and (found[0] == "given back") == (text == "full")


@torch.no_grad()
def test_what_a_loop_gave_is_left_alone() -> None:
    """The first token and its place are not where later ones are written; windows alone count too."""
    model, batch = kvengine.patch(configs.build("mistral_window"), "full"), configs.padded_batch()
    ids = [torch.full((1, 1), n) for n in (5, 6, 7, 8)]
    places, prompt = [x - 5 + 17 for x in ids], batch["input_ids"][:1, :17]
    cache = kvengine.EngineCache(model)
    model(prompt, cache=cache)
    steps = kvengine.compile_decode(model, "eager").open(cache, 4)
    found = [steps(*given) for given in zip(ids, places, strict=True)]
    assert [int(x) for x in ids + places] == [5, 6, 7, 8, 17, 18, 19, 20]
    want = kvengine.unpatch(model)(torch.cat([prompt, *ids], 1)).logits[:, 17:]
    torch.testing.assert_close(torch.cat(found, 1), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", ["h2o(budget=200)", "streaming(recent=100)"])
def test_what_was_held_twice_is_saved_and_loaded(text: str, tmp_path: Path) -> None:
    """The first hold leaves as many slots as the budget has, most of which have never held a token."""
    model, ids = patched(text), one(20)["input_ids"]
    cache, decoder = kvengine.EngineCache(model), kvengine.compile_decode(model, "eager")
    for _ in range(2):
        ids = model.generate(ids, cache=cache, max_new_tokens=4, do_sample=False, custom_generate=decoder)
    saved.save(cache, tmp_path / "session.kv", model)
    found = saved.load(model, tmp_path / "session.kv")
    texts = [model.generate(ids, cache=x, max_new_tokens=4, do_sample=False) for x in (cache, found)]
    assert torch.equal(*texts)


def test_a_row_without_padding_needs_no_mask() -> None:
    """The others of its batch had some. `generate` leaves out a mask of ones, and layers with a window ask for one."""
    model, batch = kvengine.patch(configs.build("gemma3"), "full"), configs.padded_batch()
    texts = []
    for options in ({}, {"custom_generate": kvengine.compile_decode(model, "eager")}):
        cache = kvengine.EngineCache(model)
        ids = model.generate(**batch, cache=cache, max_new_tokens=3, do_sample=False)[:1]
        cache.batch_select_indices(torch.tensor([0]))
        given = {"attention_mask": torch.ones_like(ids), "cache": cache, "max_new_tokens": 12, "do_sample": False}
        texts.append(model.generate(ids, **given, **options))
    assert torch.equal(*texts)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "do",
    [
        copy.deepcopy,
        lambda cache: cache.crop(-1),
        lambda cache: cache.batch_select_indices(torch.tensor([1, 0])),
        lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
        lambda cache: cache.batch_repeat_interleave(2),
        lambda cache: saved.save(cache, Path("never written"), cache.model),
    ],
    ids=["copy", "crop", "select", "reorder", "repeat", "save"],
)
@pytest.mark.parametrize(
    ("family", "window"), [("llama", 8), ("gemma3", 8), ("mistral_window", 8), ("mistral_window", 64)]
)
def test_a_cache_held_still_is_neither_moved_nor_copied(family: str, window: int, do: Callable[[Any], Any]) -> None:
    """`mistral_window` has layers with windows alone. Before a window is full, it could give tokens back."""
    model, batch = configs.build(family), configs.padded_batch()
    if family != "llama":
        model.config.sliding_window = window
    kvengine.patch(model, "full" if family == "mistral_window" else "quest(budget=12, page=4)")
    ids, place = torch.full((3, 1), 5), batch["attention_mask"].cumsum(1) - 1
    logits = []
    for held in (False, True):
        cache = kvengine.EngineCache(model)
        cache.model = model
        with torch.no_grad():
            model(**batch, position_ids=place.clamp(min=0), cache=cache)
            steps = kvengine.compile_decode(model, "eager").open(cache, 2, batch["attention_mask"])
            steps(ids, place[:, -1:] + 1)
            if held:
                with pytest.raises(CacheError, match="held still"):
                    do(cache)
            logits.append(steps(ids, place[:, -1:] + 2).clone())
            steps.close()
    torch.testing.assert_close(*logits, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_cache_whose_steps_were_never_closed_says_so_and_begins_anew(family: str) -> None:
    """As where Control-C came before the end of `generate`; a pass of another loop would write over the last step's token."""
    model, batch = kvengine.patch(configs.build(family), "streaming(sinks=2, recent=14)"), configs.padded_batch()
    cache, ids = kvengine.EngineCache(model), torch.ones(3, 1, dtype=torch.long)
    want = model(**batch, cache=cache).logits
    steps = kvengine.compile_decode(model).open(cache, 4, batch["attention_mask"])
    steps(ids, batch["attention_mask"].sum(1, keepdim=True))
    with pytest.raises(CacheError, match="held still.*close.*reset"):
        model(ids, cache=cache)
    cache.reset()
    assert torch.equal(model(**batch, cache=cache).logits, want)
    with pytest.raises(CacheError, match="broke off"):
        steps(ids, 20 * ids)
    steps.close()
    model(ids, cache=cache)
    assert cache.seen == batch["input_ids"].shape[1] + 1
