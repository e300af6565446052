"""Layers with a sliding window: their prompts are read by the window, or by the model where that is not all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families.configs import build, padded_batch
from torch import Tensor
from transformers.masking_utils import and_masks, causal_mask_function, or_masks, sliding_window_causal_mask_function

import kvengine
from kvengine.errors import CacheError
from kvengine.hf.attention import Stock
from kvengine.hf.names import CACHE
from kvengine.hf.window import window_of

WINDOW = 8
FAMILIES = ["mistral_window", "gemma2", "gemma3", "gpt_oss"]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of queries that a model's own attention got."""
    found: list[int] = []
    run = Stock.run

    def listening(self: Stock, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        found.append(self.query.shape[2])
        return run(self, key, value)

    monkeypatch.setattr(Stock, "run", listening)
    return found


def logits(model: Any, batch: dict[str, Tensor], cuts: tuple[int, ...] = ()) -> Tensor:
    """Of a prompt that comes in pieces, with transformers' cache of layers or with ours."""
    ours = isinstance(model.config._attn_implementation, str) and "kvengine" in model.config._attn_implementation
    cache = kvengine.EngineCache(model) if ours else None
    n = batch["input_ids"].shape[1]
    if cache is not None:
        cache.announce(n)
    out = []
    for a, b in zip((0, *cuts), (*cuts, n), strict=True):
        with torch.no_grad():
            found = model(batch["input_ids"][:, a:b], attention_mask=batch["attention_mask"][:, :b], **{CACHE: cache},
                          use_cache=True)  # fmt: skip
        cache = found[CACHE]
        out.append(found.logits)
    return torch.cat(out, 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cuts", [(), (7,), (18, 21), (30,)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_read_by_the_window(family: str, cuts: tuple[int, ...], asked: list[int]) -> None:
    batch, plain = padded_batch(41), build(family)
    want, real = logits(plain, batch, cuts), batch["attention_mask"].bool()
    model = kvengine.patch(build(family), "full")
    got = logits(model, batch, cuts)
    torch.testing.assert_close(got[real], want[real], rtol=1e-4, atol=1e-4)
    short = {b - a for a, b in zip((0, *cuts), (*cuts, 41), strict=True) if min(a, WINDOW - 1) + b - a <= 2 * WINDOW}
    if family == "mistral_window":
        assert set(asked) == short
    if family in ("gemma2", "gpt_oss"):
        assert asked == []  # all scores would have been made of short ones too


@pytest.mark.parametrize("family", FAMILIES)
def test_a_window_keeps_nothing_else_of_a_prompt(family: str) -> None:
    """transformers' layers keep views, and with them the whole prompt until the next token."""
    model, batch = kvengine.patch(build(family), "full"), padded_batch(41)
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(**batch, cache=cache)
        windows = [layer for layer in cache.layers if layer.is_sliding]
        one = windows[0].keys.nbytes + windows[0].values.nbytes
        assert windows[0].keys.shape[2] == WINDOW - 1
        assert cache.stats().bytes["device"]["stock"] == len(windows) * one and cache.stats().seen == 41
        assert cache.stats().read_per_token >= len(windows) * one
        model(batch["input_ids"][:, :1], cache=cache)
    assert cache.stats().bytes["device"]["stock"] == len(windows) * one * WINDOW // (
        WINDOW - 1
    )  # the oldest's place too


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_states_are_counted(family: str) -> None:
    model, batch = kvengine.patch(build(family), "full"), padded_batch(41)
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(**batch, cache=cache)
    found = [x for layer in cache.layers if hasattr(layer, "recurrent_states")
             for name in ("conv_states", "recurrent_states") for x in getattr(layer, name).values() if x is not None]  # fmt: skip
    assert found and cache.stats().bytes["device"]["stock"] == sum(x.untyped_storage().nbytes() for x in found)


def test_what_is_not_only_a_window_is_the_models_own(asked: list[int]) -> None:
    model, batch = kvengine.patch(build("mistral_window"), "full"), padded_batch(41)
    model(**batch)  # gradients
    assert set(asked) == {41}
    short = {name: x[:, -2 * WINDOW :] for name, x in batch.items()}
    asked.clear()
    logits(model, short)
    assert set(asked) == {2 * WINDOW}


def test_the_rule_is_known_by_what_it_is() -> None:
    window = sliding_window_causal_mask_function(5)
    assert window_of(window) == 5
    others = (
        None, causal_mask_function, and_masks(window, causal_mask_function), or_masks(window, causal_mask_function),
        and_masks(causal_mask_function, causal_mask_function), and_masks(causal_mask_function), lambda b, h, q, k: k > q - 5,
    )  # fmt: skip
    assert [window_of(rule) for rule in others] == [None] * len(others)


@pytest.mark.parametrize("family", ["gemma3", "mistral_window"])
def test_a_window_that_did_not_record_is_not_cut(family: str) -> None:
    """And the cache is as it was; nothing to take back is nothing to refuse."""
    model, ids = kvengine.patch(build(family)), padded_batch()["input_ids"][:1]
    cache, twin = kvengine.EngineCache(model), kvengine.EngineCache(model)
    with torch.no_grad():
        for each in (cache, twin):
            model(ids, cache=each)
        cache.crop(0)
        with pytest.raises(CacheError, match="a layer with a window of 8.*activate_past_recording"):
            cache.crop(-2)
        assert torch.equal(model(ids[:, :1], cache=cache).logits, model(ids[:, :1], cache=twin).logits)


@pytest.mark.parametrize("family", ["gemma3", "mistral_window"])
@pytest.mark.parametrize("to", [-3, 22])
def test_a_window_that_recorded_is_cut(family: str, to: int) -> None:
    model, ids = kvengine.patch(build(family)), padded_batch()["input_ids"][:1]
    cache, twin = kvengine.EngineCache(model), kvengine.EngineCache(model)
    with torch.no_grad():
        for each in (cache, twin):
            model(ids, cache=each)
            each.activate_past_recording()
            model(ids[:, :2], cache=each)
        model(ids[:, 5:8], cache=cache)
        cache.crop(to)
        again = [model(ids[:, :1], cache=each).logits for each in (cache, twin)]
    assert cache.seen == 23
    torch.testing.assert_close(*again, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gemma3", "mistral_window"])
def test_a_prompt_that_was_recorded_is_let_go_of(family: str) -> None:
    """A view of it would hold it until the next token, be that the next turn's."""
    model = kvengine.patch(build(family))
    cache = kvengine.EngineCache(model)
    cache.activate_past_recording()
    with torch.no_grad():
        model(**padded_batch(41), **{CACHE: cache})
    cache.commit()
    held = [x for layer in cache.layers if layer.is_sliding for x in (layer.keys, layer.values)]  # type: ignore[union-attr]
    assert [x.shape[2] for x in held] == [WINDOW - 1] * len(held) != []
    assert [x.untyped_storage().nbytes() for x in held] == [x.nbytes for x in held]
