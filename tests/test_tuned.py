"""Models that were tuned by PEFT: adapters in their layers, and prefixes, whose keys and values no text has."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import MIXED, SMALL, WIDE, greedy, llama, one, prompts
from torch import Tensor
from transformers import DynamicCache

import kvengine
from kvengine import EngineCache
from kvengine.errors import ModelError
from kvengine.hf.names import CACHE

PREFIX = 5


def prefix(config: Any, rows: int) -> DynamicCache:
    cache, rng = DynamicCache(config=config), torch.Generator().manual_seed(3)
    for layer in range(config.num_hidden_layers):
        k, v = (torch.randn(1, config.num_key_value_heads, PREFIX, 16, generator=rng) for _ in range(2))
        cache.update(k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1), layer)
    return cache


def tuned(model: Any) -> Any:
    """What PEFT does to `generate` for prefix tuning: a cache of its own in place of one that is empty."""
    prepare = model.prepare_inputs_for_generation

    def inputs(ids: Tensor, **kwargs: Any) -> Any:
        found = prepare(ids, **kwargs)
        rows = len(found["input_ids"])
        cache = found[CACHE]
        if not isinstance(cache, DynamicCache):
            assert cache.max_cache_len == -1
        if cache.get_seq_length() >= found["input_ids"].shape[1]:
            found["input_ids"] = found["input_ids"][:, -1:]
        if (mask := found.get("attention_mask")) is not None:
            found["attention_mask"] = torch.cat([torch.ones(rows, PREFIX), mask], 1)
        found["position_ids"] = None
        if not cache.get_seq_length():
            found[CACHE] = prefix(model.config, rows)
        return found

    model.prepare_inputs_for_generation = inputs
    return model


def text(model: Any, batch: dict[str, Tensor], **options: Any) -> Any:
    return model.generate(**batch, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, **options)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", WIDE)
def test_a_prefix_is_read_as_before_where_nothing_is_lost(name: str) -> None:
    want = text(tuned(llama()), one()).sequences
    found = text(tuned(kvengine.patch(llama(), WIDE[name])), one())
    assert type(found[CACHE]) is EngineCache and found[CACHE].seen == PREFIX + 61 + 11
    assert torch.equal(found.sequences, want) and not torch.equal(want[:, 61:], greedy(llama(), one(), 12))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", [SMALL["snapkv"], SMALL["h2o"], SMALL["tidal"], *MIXED])
def test_a_prefix_is_judged_with_its_prompt(policy: str) -> None:
    found = text(tuned(kvengine.patch(llama(), policy)), prompts())
    assert type(found[CACHE]) is EngineCache and found[CACHE].seen == PREFIX + 61 + 11
    if policy == SMALL["snapkv"]:
        assert int(found[CACHE].stats().held.max()) == 24 + 11


@pytest.mark.parametrize("policy", ["full", SMALL["snapkv"], SMALL["quest"], SMALL["streaming"]])
@pytest.mark.parametrize("length", [1, 61])
def test_a_loop_of_ones_own_begins_with_a_prefix(policy: str, length: int) -> None:
    ids = one(length)["input_ids"]
    want = text(tuned(kvengine.patch(llama(), policy)), one(length)).sequences[:, length:]
    model, found = kvengine.patch(llama(), policy), []
    cache = EngineCache(model)
    cache.adopt(prefix(model.config, 1))
    for _ in range(12):
        with torch.no_grad():
            ids = model(ids, cache=cache).logits[:, -1:].argmax(-1)
        found.append(ids)
    assert torch.equal(torch.cat(found, 1), want)


def test_a_prefix_follows_the_rows_of_a_beam_search() -> None:
    want = text(tuned(llama()), prompts(), num_beams=3).sequences
    assert torch.equal(text(tuned(kvengine.patch(llama())), prompts(), num_beams=3).sequences, want)


@pytest.mark.parametrize("policy", ["full", SMALL["snapkv"]])
@pytest.mark.parametrize("how", ["prefix", "vectors"])
def test_a_recorded_step_follows_what_is_no_text(how: str, policy: str) -> None:
    """Which is not in the length that `generate` counts to."""
    model, batch = kvengine.patch(llama(), policy), prompts()
    if how == "prefix":
        model = tuned(model)
    else:
        batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids")).detach()
    found = text(model, batch, custom_generate=kvengine.compile_decode(model)).sequences
    assert torch.equal(found, text(model, batch).sequences)


class Tuner:
    """What PEFT has generate ask instead of the model."""

    def __init__(self, model: Any) -> None:
        self.active_peft_config, self.own = (
            SimpleNamespace(is_prompt_learning=True),
            model.prepare_inputs_for_generation,
        )

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return self.own(*args, **kwargs)


@pytest.mark.parametrize("policy", ["full", SMALL["snapkv"]])
def test_a_later_turn_behind_what_was_tuned_is_refused(policy: str) -> None:
    """Of such a turn PEFT reads the last token, and the cache holds what the text has not."""
    model = kvengine.patch(llama(), policy)
    cache = EngineCache(model)
    cache.adopt(prefix(model.config, 1))
    with torch.no_grad():
        model(**one(), cache=cache)
    model.prepare_inputs_for_generation = Tuner(model).prepare_inputs_for_generation
    with pytest.raises(ModelError, match=r"before a text's first turn.*seen 66.*whole text with a new cache"):
        text(model, one(80), cache=cache)
    assert cache.seen == PREFIX + 61


def test_latents_take_no_prefix() -> None:
    model = kvengine.patch(llama())
    cache = EngineCache(model)
    model.config.kv_lora_rank = 8
    with pytest.raises(ModelError, match="latents.*which a prefix.*kvengine.unpatch"):
        cache.adopt(prefix(model.config, 1))


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks for it
@pytest.mark.filterwarnings("ignore:Position ids are not supported")
@pytest.mark.parametrize("kind", ["prefix", "prompt", "adapter"])
def test_peft(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    virtual = {"task_type": "CAUSAL_LM", "num_virtual_tokens": PREFIX}
    how = {
        "prefix": lambda: peft.PrefixTuningConfig(**virtual),
        "prompt": lambda: peft.PromptTuningConfig(**virtual),
        "adapter": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False),
    }
    model = peft.get_peft_model(llama(), how[kind]()).eval()
    if kind != "adapter" and CACHE == "cache" and peft.__version__ == "0.21.2":
        kvengine.patch(model.get_base_model(), "quest(budget=500)")
        with pytest.raises(ModelError, match=r"PEFT 0\.21\.2 does not find .*before every token.*transformers < 5\.24"):
            text(model, prompts())
        return
    want = text(model, prompts()).sequences
    for policy, same in (("quest(budget=500)", True), ("streaming(sinks=2, recent=6)", False)):
        kvengine.patch(model.get_base_model(), policy)
        found = text(model, prompts())
        assert type(found[CACHE]) is EngineCache and torch.equal(found.sequences, want) == same
        caplog.clear()
        with caplog.at_level(logging.WARNING), torch.no_grad():
            model(**prompts())
        assert any("peft_model.get_prompt" in x.message for x in caplog.records) == (kind == "prefix" and same)  # once
