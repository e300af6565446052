"""Models whose generation_config turns caches off: a policy is applied where asked for, or it is said that it would not be."""

from typing import Any

import pytest
import torch
import transformers
from families.configs import BASE, build, padded_batch

import kvengine
from kvengine.errors import ModelError
from kvengine.hf.names import CACHE

POLICY = "snapkv(budget=12, window=4)"
SAYS = r"Llama.*says use_cache=False.*'snapkv\(budget=12, window=4\)' would do nothing.*Pass use_cache=True"


def uncached() -> Any:
    model = build("llama")
    model.generation_config.use_cache = False
    return model


def greedy(model: Any, **options: Any) -> Any:
    return model.generate(**padded_batch(), max_new_tokens=8, do_sample=False, return_dict_in_generate=True, **options)


def test_a_model_that_is_made_without_caches_says_so() -> None:
    """Evolla's configuration has use_cache=False, and its class knows of no cache but what it passes on."""
    if not hasattr(transformers, "EvollaForProteinText2Text"):
        pytest.skip("this transformers has no EvollaForProteinText2Text")
    one = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 32,
    }
    some = {"resampler_depth": 1, "resampler_dim_head": 8, "resampler_heads": 2, "resampler_num_latents": 4}
    base = {k: v for k, v in BASE.items() if k != "head_dim"}
    config = transformers.EvollaConfig(**base, **some, aligner_num_add_layers=1, protein_encoder_config=one)
    torch.manual_seed(0)
    model = transformers.EvollaForProteinText2Text(config).float().eval()
    protein = {"protein_input_ids": torch.arange(5, 12)[None], "protein_attention_mask": torch.ones(1, 7).long()}
    given = {"input_ids": padded_batch()["input_ids"][:1], "max_new_tokens": 8, "do_sample": False, **protein}
    want = model.generate(**given)
    kvengine.patch(model, POLICY)
    with pytest.raises(ModelError, match="this EvollaForProteinText2Text says use_cache=False"):
        model.generate(**given)
    cache = kvengine.EngineCache(model)
    model.generate(**given, use_cache=True, cache=cache)
    assert int(cache.stats().held.max()) == 12 + 7
    assert torch.equal(model.generate(**given, use_cache=False), want)
    assert torch.equal(kvengine.patch(model).generate(**given), want)
    assert torch.equal(model.generate(**given, use_cache=True), want)


@pytest.mark.parametrize("own", [False, True], ids=["by itself", "given"])
def test_a_policy_that_nobody_turned_off_is_not_passed_over(own: bool) -> None:
    model = kvengine.patch(uncached(), POLICY)
    with pytest.raises(ModelError, match=SAYS):
        greedy(model, **({"generation_config": model.generation_config} if own else {}))
    assert type(greedy(model, use_cache=True)[CACHE]) is kvengine.EngineCache


def test_who_asks_for_no_cache_gets_none() -> None:
    want = greedy(build("llama")).sequences
    for model, options in (
        (uncached(), {"use_cache": False}),
        (
            uncached(),
            {"generation_config": transformers.GenerationConfig(use_cache=False, eos_token_id=None, pad_token_id=0)},
        ),
        (build("llama"), {"use_cache": False}),
    ):
        found = greedy(kvengine.patch(model, POLICY), **options)
        assert found.get(CACHE) is None and torch.equal(found.sequences, want)


def test_an_engine_cache_that_would_hold_its_text_many_times_is_refused() -> None:
    model = kvengine.patch(build("llama"))
    with pytest.raises(ModelError, match="whole text again at every token.*Pass use_cache=True"):
        greedy(model, cache=kvengine.EngineCache(model), use_cache=False)
