"""The engine gives what the stock cache gives, on every family, and refuses what a family cannot do."""

import pytest
import torch
from families import configs

import kvengine
from kvengine.errors import UnsupportedPolicy
from kvengine.hf.names import CACHE

TOKENS = 64
FEW = 24  # three windows


@pytest.fixture(params=configs.FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    if not configs.exists(request.param):
        pytest.skip(f"this transformers has no {configs.FAMILIES[request.param].model}")
    return str(request.param)


def greedy(model: torch.nn.Module, count: int = TOKENS, **options: object) -> torch.Tensor:
    return model.generate(**configs.padded_batch(), max_new_tokens=count, do_sample=False, **options)


def has_plain_layers(name: str) -> bool:
    return name not in (
        "inkling",
        "mistral_window",
        "ministral",
        "phi3_window",
    )  # inkling: its scores have a bias


@pytest.mark.sampled(12)
@pytest.mark.parametrize("count", [FEW, pytest.param(TOKENS, marks=pytest.mark.slow)])
def test_full_gives_the_stock_tokens_on_a_padded_batch(name: str, count: int) -> None:
    want = greedy(configs.build(name), count)
    model = kvengine.patch(configs.build(name))
    cache = kvengine.EngineCache(model)
    assert torch.equal(greedy(model, count, cache=cache), want)
    assert bool(cache.engines) == has_plain_layers(name)
    after = greedy(kvengine.unpatch(model), 4)
    assert torch.equal(after, want[:, : after.shape[1]])


@pytest.mark.sampled(6)
def test_a_policy_runs_or_is_refused_with_a_reason(name: str) -> None:
    model = configs.build(name)
    if has_plain_layers(name):
        kvengine.patch(model, "snapkv(budget=12, window=4)")
        cache = kvengine.EngineCache(model)
        assert greedy(model, cache=cache, count=8).shape == (3, 28)
        assert int(cache.stats().held.max()) == 12 + 8 - 1
    else:
        with pytest.raises(UnsupportedPolicy, match="full"):
            kvengine.patch(model, "snapkv(budget=12, window=4)")


@pytest.mark.sampled(4)
def test_a_loop_of_ones_own_is_under_the_engine(name: str) -> None:
    ids, logits = configs.padded_batch()["input_ids"][:1], []
    asked = {"use_cache": True} if name == "inkling" else {}  # which makes none by itself
    for model in (configs.build(name), kvengine.patch(configs.build(name))):
        with torch.no_grad():
            out = model(ids, **asked)
            step = model(ids[:, :1], **{CACHE: out[CACHE]})
        logits.append((out.logits, step.logits))
    assert type(step[CACHE]) is kvengine.EngineCache
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)
