"""A cache is handed over as `cache` or as `past_key_values`, whatever the version of transformers calls it."""

import copy
import warnings
from typing import Any

import pytest
import torch
from families import configs
from support import SMALL, llama, prompts
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM

import kvengine
from kvengine.errors import ModelError
from kvengine.hf.names import CACHE, NAMES, OTHER, passed

POLICY = SMALL["snapkv"]


@pytest.fixture(autouse=True)
def the_older_name_is_deprecated() -> Any:
    """`generate` of transformers says so before a patched model is asked."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
        yield


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma3"])
def test_generate_takes_it_by_either_name(name: str, family: str) -> None:
    model = kvengine.patch(configs.build(family))
    ids = configs.padded_batch()["input_ids"][:1]
    want = model.generate(ids, max_new_tokens=5, do_sample=False)
    cache = kvengine.EngineCache(model)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False, **{name: cache}), want)
    assert cache.seen == want.shape[1] - 1


@pytest.mark.parametrize("name", NAMES)
def test_a_pass_takes_it_by_either_name(name: str) -> None:
    model, batch = kvengine.patch(llama(), POLICY), prompts(2, 40)
    logits = []
    for word in (CACHE, name):
        cache = kvengine.EngineCache(model)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("error")
            first = model(**batch, **{word: cache})
            assert first[CACHE] is cache and cache.seen == 40
            logits.append(model(first.logits[:, -1:].argmax(-1), **{word: cache}).logits)
            model.model(batch["input_ids"][:, :1], **{word: cache})
        assert cache.seen == 42
    assert torch.equal(*logits)


def test_two_are_refused() -> None:
    model, batch = kvengine.patch(llama()), prompts(1, 12)
    both = {name: kvengine.EngineCache(model) for name in NAMES}
    with pytest.raises(ModelError, match="give one of the two"):
        model(**batch, **both)
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(**batch, **dict.fromkeys(NAMES, cache))
    assert cache.seen == batch["input_ids"].shape[1]
    with torch.no_grad():
        nothing = model(**batch, **{CACHE: None, OTHER[CACHE]: None}, use_cache=True)
    assert type(nothing[CACHE]) is kvengine.EngineCache


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_is_no_cache(name: str) -> None:
    model, ids = kvengine.patch(llama()), prompts()["input_ids"][:1]
    for run in (model, model.model, lambda *a, **k: model.generate(*a, **k, max_new_tokens=2)):
        with pytest.raises(ModelError, match=r"pass cache=kvengine.EngineCache\(model, 'quest\(budget=8\)'\)"):
            run(ids, **{name: "quest(budget=8)"})


def test_a_stock_cache_has_either_name_too() -> None:
    model, batch = kvengine.patch(llama()), prompts(1, 12)
    for name in NAMES:
        given = DynamicCache(config=model.config)
        with torch.no_grad():
            assert model(**batch, **{name: given})[CACHE] is given


class Older(LlamaForCausalLM):
    """A model of one's own, written when caches had the older name."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids, **{CACHE: past_key_values}, **kwargs)


class Newer(LlamaForCausalLM):
    def forward(self, input_ids: Any = None, cache: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().forward(input_ids, **{CACHE: cache}, **kwargs)


@pytest.mark.parametrize("kind", [Older, Newer])
def test_models_written_for_either_name(kind: type) -> None:
    plain, batch = llama(), prompts(1, 40)
    model = kind(copy.deepcopy(plain.config)).eval()
    model.load_state_dict(plain.state_dict())
    assert list(passed(model, 1)) == ["past_key_values" if kind is Older else "cache"]
    kvengine.patch(model, POLICY)
    kvengine.patch(plain, POLICY)
    for name in NAMES:
        caches = [kvengine.EngineCache(one) for one in (model, plain)]
        with torch.no_grad():
            for one, cache in zip((model, plain), caches, strict=True):
                one(**batch, **{name: cache})
            logits = [
                one(batch["input_ids"][:, :1], **{name: x}).logits
                for one, x in zip((model, plain), caches, strict=True)
            ]
        assert torch.equal(*logits) and [cache.seen for cache in caches] == [41, 41]
        caches = [kvengine.EngineCache(one) for one in (model, plain)]
        pairs, how = list(zip((model, plain), caches, strict=True)), {"max_new_tokens": 6, "do_sample": False}
        some = [one.generate(**batch, **{name: x}, **how) for one, x in pairs]
        assert torch.equal(*some) and [cache.seen for cache in caches] == [45, 45]
    assert torch.equal(*(one.generate(**batch, **how) for one in (model, plain)))


def test_what_has_no_forward_of_its_own_is_given_transformers_name() -> None:
    assert list(passed(nn.Identity(), 1)) == [CACHE] and list(passed(object(), 1)) == [CACHE]
