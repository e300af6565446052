"""Decoders of models with an encoder, by themselves: BART's, Whisper's and their kin."""

import logging
from typing import Any

import pytest
import torch
import transformers
from families.configs import VOCABULARY, padded_batch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, RobertaConfig, RobertaForCausalLM
from transformers.modeling_outputs import BaseModelOutput

import kvengine
from kvengine import EngineCache, saved
from kvengine.errors import ModelError, UnsupportedPolicy
from kvengine.evals.engine import CacheSession
from kvengine.hf.names import CACHE
from kvengine.speculative import TriForce

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "d_model": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
    "decoder_start_token_id": 1, "decoder_attention_heads": 4, "encoder_attention_heads": 4, "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96, "init_std": 0.15,
}  # fmt: skip


def built(name: str, encoder: int, decoder: int) -> Any:
    torch.manual_seed(0)
    found = getattr(transformers, name)
    model = found(found.config_class(**SHAPE, encoder_layers=encoder, decoder_layers=decoder)).eval()
    model.generation_config.eos_token_id = model.generation_config.forced_eos_token_id = None
    return model


def turns(model: Any, cache: Any) -> Tensor:
    """The text of two turns."""
    batch = padded_batch()
    options = {"max_new_tokens": 6, "do_sample": False, CACHE: cache}
    ids = torch.cat([model.generate(**batch, **options), batch["input_ids"][:, -4:]], 1)
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, 10), value=1)
    text: Tensor = model.generate(ids, attention_mask=mask, **options)
    return text


@pytest.mark.parametrize("policy", ["full", "kvzip(budget=500)"])
@pytest.mark.parametrize("name", ["BartForCausalLM", "PegasusForCausalLM"])
def test_a_cache_has_the_decoders_layers(name: str, policy: str, tmp_path: Any) -> None:
    """And not as many as the encoder, by which their configurations count: none would ever take a token of the others."""
    model = built(name, 3, 2)
    want = turns(model, DynamicCache(config=model.config))
    cache = EngineCache(kvengine.patch(model, policy))
    assert torch.equal(turns(model, cache), want)
    assert len(cache.layers) == len(cache.engines) == 2
    saved.save(cache, tmp_path / "s.kv", model)
    assert saved.load(model, tmp_path / "s.kv").seen == cache.seen
    cache.reset()
    assert torch.equal(turns(model, cache), want)


def test_so_it_has_where_they_are_more_than_the_encoders() -> None:
    """There transformers' own cache has too few."""
    model = built("BartForCausalLM", 1, 3)
    text = turns(model, EngineCache(kvengine.patch(model, "full")))
    wide = turns(model, EngineCache(kvengine.patch(model, "h2o(budget=500)")))
    without = kvengine.unpatch(model).generate(**padded_batch(), max_new_tokens=6, do_sample=False, use_cache=False)
    assert torch.equal(text, wide) and torch.equal(text[:, :26], without)


SOME = [pytest.param(name, marks=pytest.mark.slow) for name in ("PegasusForCausalLM", "WhisperForCausalLM")]


@pytest.mark.parametrize("name", ["BartForCausalLM", *SOME])
def test_who_counts_tokens_in_the_hosts_numbers_is_not_recorded(name: str) -> None:
    """The number of the first recorded step would come with every further one. Whisper's goes by the places it is given."""
    model, ids = built(name, 2, 2), padded_batch()["input_ids"][:1]
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    want = model.generate(ids, **options)
    decoder = kvengine.compile_decode(kvengine.patch(model), "trace")
    if name == "WhisperForCausalLM":
        assert torch.equal(model.generate(ids, custom_generate=decoder, **options), want)
        return
    cache = EngineCache(model)
    with pytest.raises(UnsupportedPolicy, match=f"{name} counts by itself where its tokens stand"):
        model.generate(ids, custom_generate=decoder, **options, **{CACHE: cache})
    assert cache.seen == ids.shape[1]
    assert torch.equal(model.generate(want[:, :-5], max_new_tokens=5, do_sample=False, **{CACHE: cache}), want)


def rows() -> Tensor:
    """Two prompts with something to look up."""
    return padded_batch()["input_ids"][:1].reshape(2, 10).repeat(1, 3)


@pytest.mark.parametrize("name", ["BartForCausalLM", *SOME])
def test_drafts_stand_where_their_tokens_do(name: str) -> None:
    """Rows in one pass, and a tree's branches, would stand one behind the other where a model counts by itself."""
    model, ids = built(name, 2, 2), rows()
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    want = model.generate(ids, **options)
    decoder = TriForce(kvengine.patch(model), "lookup", "quest(budget=500)", (1, 3))
    assert torch.equal(decoder.generate(ids, **options), want) and decoder.report.tiers[0].acceptance
    if name == "WhisperForCausalLM":  # goes by the places it is given
        assert torch.equal(TriForce(model, "recycling", None).generate(ids, **options), want)
        return
    for draft, widths in (("recycling", None), (built(name, 2, 2), (2, 1))):
        with pytest.raises(ModelError, match=f"{name} counts by itself where its tokens stand"):
            TriForce(model, draft, None, widths=widths)


def test_drafts_have_the_places_that_generate_says() -> None:
    """RoBERTa begins to count behind its padding token's number, if it is told nothing."""
    torch.manual_seed(0)
    model = RobertaForCausalLM(RobertaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=128, initializer_range=0.15, is_decoder=True, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
    )).eval()  # fmt: skip
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    want = model.generate(rows(), **options)
    for draft in ("lookup", "recycling"):
        assert torch.equal(TriForce(kvengine.patch(model), draft, None).generate(rows(), **options), want)
    found = model.generate(rows(), **options, output_logits=True, return_dict_in_generate=True)
    cache = kvengine.EngineCache(model)
    model.generate(rows(), **options, cache=cache)
    end = rows().shape[1]
    with torch.no_grad():
        again = cache.correct(model, found.sequences[:, end + 8 : end + 11]).logits
        torch.testing.assert_close(again, torch.stack(found.logits[9:], 1), rtol=1e-4, atol=1e-4)
        session = CacheSession(model, kvengine.EngineCache(model))
        said = [session.rows(ids) for ids in found.sequences.split([end, *[1] * 12], 1)][:-1]
    torch.testing.assert_close(torch.stack(said), torch.stack(found.logits), rtol=1e-4, atol=1e-4)


def test_what_is_not_text_is_not_cached_with_it(caplog: pytest.LogCaptureFixture) -> None:
    """In a loop that leaves the cache to the model, that makes one of two, as ever; who has chosen a policy is told, once."""
    model, ids = built("WhisperForCausalLM", 2, 2), padded_batch()["input_ids"]
    beside = {"encoder_outputs": BaseModelOutput(last_hidden_state=torch.randn(3, 7, 64))}  # type: ignore[arg-type]

    @torch.no_grad()
    def loop() -> Tensor:
        out = model(ids, **beside, use_cache=True)
        assert type(out[CACHE]) is EncoderDecoderCache
        again: Tensor = model(ids[:, :1], **beside, use_cache=True, **{CACHE: out[CACHE]}).logits
        return again

    want = loop()
    with caplog.at_level(logging.WARNING, "kvengine"):
        torch.testing.assert_close(kvengine.patch(model, "full") and loop(), want)
        assert not caplog.records
        torch.testing.assert_close(kvengine.patch(model, "h2o(budget=8)") and loop(), want)
    assert ["'h2o(budget=8)' is not applied" in x.getMessage() for x in caplog.records] == [True]
    mine = EncoderDecoderCache(EngineCache(model), DynamicCache(config=model.config))
    for cache in (EngineCache(model), mine):
        with torch.no_grad(), pytest.raises(ModelError, match="given encoder_.* beside its text"):
            model(ids, **beside, use_cache=True, **{CACHE: cache})
    with pytest.raises(ModelError, match="given encoder_.* beside its text"):
        model.generate(input_ids=ids, **beside, max_new_tokens=2)
