"""Models made of several: the decoder alone is patched, wherever `generate` begins and whoever else attends in them."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families.configs import BASE, VOCABULARY
from torch import Tensor

import kvengine
from kvengine import EngineCache
from kvengine.errors import CacheError, ModelError, UnsupportedPolicy
from kvengine.hf.cache import STATE
from kvengine.hf.names import CACHE
from kvengine.offload import stores
from kvengine.prefix import Prefix

IMAGE = VOCABULARY - 1
SEEING = {"intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 1}
CODEC: dict[str, Any] = {
    "model_type": "mimi", "num_filters": 4, "hidden_size": 16, "intermediate_size": 16, **HEADS, "codebook_size": 64,
    "codebook_dim": 8, "num_quantizers": 4, "vector_quantization_hidden_dimension": 8, "upsampling_ratios": [2, 2],
    "upsample_groups": 16,
}  # fmt: skip


def without(*names: str) -> dict[str, Any]:
    return {k: v for k, v in BASE.items() if k not in names}


def prompt(rows: int = 2) -> dict[str, Tensor]:
    ids = torch.randint(2, VOCABULARY - 10, (rows, 24), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[-1, :3] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def blip() -> tuple[Any, dict[str, Any]]:
    """Its `generate` asks that of the language model inside."""
    text = transformers.OPTConfig(
        vocab_size=VOCABULARY, hidden_size=64, word_embed_proj_dim=64, num_hidden_layers=2, num_attention_heads=4,
        ffn_dim=96, max_position_embeddings=128, init_std=0.15, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    asking = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = transformers.Blip2Config(
        vision_config=SEEING | {"hidden_size": 32}, text_config=text, num_query_tokens=4, image_token_index=IMAGE,
        qformer_config=asking | {"vocab_size": VOCABULARY, "encoder_hidden_size": 32},
    )  # fmt: skip
    inputs = prompt()
    inputs["input_ids"][:, 4:8] = IMAGE
    return transformers.Blip2ForConditionalGeneration(config), inputs | {"pixel_values": torch.randn(2, 3, 16, 16)}


def idefics() -> tuple[Any, dict[str, Any]]:
    """It is its own text model, with a vision model inside."""
    config = transformers.IdeficsConfig(
        **without("num_key_value_heads", "head_dim"), additional_vocab_size=10, cross_layer_interval=1,
        vision_config=SEEING | {"embed_dim": 32}, use_resampler=False,
    )  # fmt: skip
    seen = {"pixel_values": torch.randn(2, 1, 3, 16, 16), "image_attention_mask": torch.ones(2, 24, 1)}
    return transformers.IdeficsForVisionText2Text(config), prompt() | seen


def csm() -> tuple[Any, dict[str, Any]]:
    """A second decoder, with caches of its own, says what follows each token."""
    options = {**BASE, "vocab_size": 65, "num_codebooks": 4}
    config = transformers.CsmConfig(
        **options, text_vocab_size=VOCABULARY, codebook_pad_token_id=64, codebook_eos_token_id=63, codec_config=CODEC,
        depth_decoder_config=options | {"backbone_hidden_size": 64, "max_position_embeddings": 33},
    )  # fmt: skip
    return transformers.CsmForConditionalGeneration(config), prompt() | {"depth_decoder_do_sample": False}


def smolvlm() -> tuple[Any, dict[str, Any]]:
    """The part around its text model makes that one's cache."""
    config = transformers.SmolVLMConfig(
        text_config={**BASE, "model_type": "llama"}, vision_config=SEEING | {"hidden_size": 32}, scale_factor=2,
        image_token_id=IMAGE, pad_token_id=0,
    )  # fmt: skip
    inputs = prompt()
    inputs["input_ids"][:, 4:8] = IMAGE
    return transformers.SmolVLMForConditionalGeneration(config), inputs | {"pixel_values": torch.randn(2, 1, 3, 16, 16)}


MODELS = {
    "around its text model": smolvlm,
    "another one generates": blip,
    "vision beside text": idefics,
    "two decoders": csm,
}


def made(name: str) -> tuple[Any, Callable[[], Any]]:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.float().eval().generation_config.eos_token_id = None
    options = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    return model, lambda: model.generate(**inputs, **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
def test_a_composed_model_says_what_it_did(name: str) -> None:
    model, run = made(name)
    want = run().sequences
    for text, same in (("full", True), ("quest(budget=500)", True), ("streaming(sinks=1, recent=1)", False)):
        found = kvengine.patch(model, text) and run()
        assert type(found[CACHE]) is EngineCache, "the policy was not asked"
        assert torch.equal(found.sequences, want) == same
    kvengine.unpatch(model)
    assert torch.equal(run().sequences, want)


@pytest.mark.parametrize("name", MODELS)
def test_a_pass_of_a_composed_model_makes_the_engines_cache(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    inputs = {k: v for k, v in inputs.items() if not k.startswith("depth")}
    found = []
    with torch.no_grad():
        for each in (model.float().eval(), kvengine.patch(model, "streaming(sinks=1, recent=1)")):
            out = each(**inputs, use_cache=True)
            found.append((out.logits, out.get(CACHE) or out.language_model_outputs[CACHE]))
    torch.testing.assert_close(found[0][0], found[1][0])
    assert type(found[1][1]) is EngineCache and (found[1][1].stats().held == 2).all()


@pytest.mark.parametrize("name", ["around its text model", "another one generates", "vision beside text"])
@pytest.mark.parametrize("way", ["generate", "pass"])
def test_a_prompt_with_an_image_is_no_prefix(name: str, way: str, tmp_path: Path) -> None:
    """Two images have the same ids in their place."""
    model, inputs = MODELS[name]()
    inputs = {key: x[:1] for key, x in inputs.items()}
    cache = EngineCache(kvengine.patch(model.float().eval()))
    with torch.no_grad():
        model.generate(**inputs, max_new_tokens=2, cache=cache) if way == "generate" else model(**inputs, cache=cache)
    reuse = Prefix(model, stores.Store(stores.Files(tmp_path, sync="none")), chunk=4)
    with pytest.raises(CacheError, match="no ids.*of ids alone"):
        reuse.keep(inputs["input_ids"], cache)
    if name == "around its text model":  # which is given vectors always, also of a text alone
        ids = inputs["input_ids"].clamp(max=IMAGE - 1)
        cache.reset()
        model.generate(input_ids=ids, max_new_tokens=2, cache=cache)
        assert reuse.keep(ids, cache) == 6
    reuse.store.close()


def test_who_generates_inside_is_patched_and_restored_with_the_model() -> None:
    model, run = made("another one generates")
    inside, want = model.language_model, run().sequences
    before = set(vars(inside))
    kvengine.patch(model, "streaming(sinks=1, recent=1)")
    assert EngineCache(inside).stack == EngineCache(model).stack
    kvengine.patch(inside, "full")
    assert str(EngineCache(model).stack) == "full"
    twin = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    kvengine.unpatch(twin)
    assert not hasattr(twin.language_model, STATE) and hasattr(inside, STATE)
    kvengine.unpatch(inside)
    assert not hasattr(model, STATE) and set(vars(inside)) == before and torch.equal(run().sequences, want)


KOSMOS = {"vocab_size": VOCABULARY, "embed_dim": 64, "layers": 2, "ffn_dim": 96, "attention_heads": 4, "init_std": 0.3}


def test_attention_without_an_index_is_the_models_own() -> None:
    """Kosmos-2 has the text's attention sum up an image, without a cache; its text is read under masks of its own."""
    config = transformers.Kosmos2Config(
        text_config=KOSMOS | {"dropout": 0.0, "pad_token_id": 0, "eos_token_id": None},
        vision_config=SEEING | {"hidden_size": 32}, latent_query_num=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model, at = transformers.Kosmos2ForConditionalGeneration(config).float().eval(), torch.zeros(1, 24)
    at[:, 2:6] = 1
    inputs = {name: x[:1] for name, x in prompt().items()} | {"pixel_values": torch.randn(1, 3, 16, 16)}
    inputs |= {"image_embeds_position_mask": at, "max_new_tokens": 12, "do_sample": False}
    want = model.generate(**inputs)
    assert torch.equal(kvengine.patch(model).generate(**inputs), want)
    with pytest.raises(UnsupportedPolicy, match="a mask given as a tensor"):
        kvengine.patch(model, "quest(budget=500)").generate(**inputs)


def test_a_model_that_lends_its_methods_lends_its_own() -> None:
    """Kyutai's has its codec prepare a cache as it would itself."""
    options = without("intermediate_size") | {"sliding_window": 64, "ffn_dim": 96}
    tokens = {"codebook_vocab_size": 65, "audio_bos_token_id": 64, "audio_pad_token_id": 63}
    torch.manual_seed(0)
    model = transformers.KyutaiSpeechToTextForConditionalGeneration(
        transformers.KyutaiSpeechToTextConfig(**options, **tokens, num_codebooks=4, codec_config=CODEC)
    ).eval()
    sound = torch.randn(1, 1, 60)
    want = model.generate(input_values=sound, max_new_tokens=8, do_sample=False)
    kvengine.patch(model)
    assert torch.equal(model.generate(input_values=sound, max_new_tokens=8, do_sample=False), want)


def test_a_loop_that_reads_more_of_a_step_than_logits_is_not_recorded() -> None:
    """A second decoder goes on from the first one's vectors."""
    model, _ = made("two decoders")
    decoder = kvengine.compile_decode(kvengine.patch(model))
    with pytest.raises(ModelError, match="yields logits only, and output_hidden_states is asked of it"):
        model.generate(**prompt(), max_new_tokens=3, custom_generate=decoder, depth_decoder_do_sample=False)


def test_who_counts_tokens_from_elsewhere_is_not_recorded() -> None:
    """Kosmos-2.5 leaves so many places free before a text, and is told nothing of places."""
    config = transformers.Kosmos2_5Config(
        text_config=KOSMOS | {"dropout": 0.0, "pad_token_id": 1, "eos_token_id": None}, latent_query_num=4,
        vision_config=HEADS | {"hidden_size": 32, "intermediate_size": 32, "patch_embed_hidden_size": 12, "max_num_patches": 16},
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Kosmos2_5ForConditionalGeneration(config).float().eval()
    inputs = prompt() | {"max_new_tokens": 12, "do_sample": False}
    want = model.generate(**inputs)
    for policy in ("full", "quest(budget=500)"):
        assert torch.equal(kvengine.patch(model, policy).generate(**inputs), want)
        for decoder in (kvengine.compile_decode(model, how) for how in ("eager", "trace")):  # type: ignore[arg-type]
            with pytest.raises(UnsupportedPolicy, match="Kosmos2_5ForCond.* counts by itself where its tokens stand"):
                model.generate(**inputs, custom_generate=decoder)


@pytest.mark.skipif(transformers.__version__.startswith("5.17."), reason="Janus makes no images there")
def test_a_generate_that_makes_a_cache_of_fixed_size_is_told_to_take_the_engines() -> None:
    """Janus, for images."""
    seeing = SEEING | {"hidden_size": 32, "projection_dim": 64, "mlp_ratio": 1.0, "num_image_tokens": 4}
    codes = {"embed_dim": 8, "num_embeddings": 64, "base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1}
    codes |= {"latent_channels": 32, "projection_dim": 64, "image_token_embed_dim": 64, "num_patches": 2}
    config = transformers.JanusConfig(text_config=BASE | {"model_type": "llama"}, vision_config=seeing, vq_config=codes)
    torch.manual_seed(0)
    model = transformers.JanusForConditionalGeneration(config).float().eval()
    model.generation_config.generation_kwargs = {"boi_token_id": 20}
    model.generation_config.pad_token_id = 0
    inputs = prompt() | {"generation_mode": "image", "guidance_scale": 3.0, "do_sample": False}
    want = model.generate(**inputs)
    kvengine.patch(model, "quest(budget=500)")
    with pytest.raises(
        ModelError, match="Janus.* makes a cache of fixed size by itself.*Pass cache=kvengine.EngineCache"
    ):
        model.generate(**inputs)
    assert torch.equal(model.generate(**inputs, **{CACHE: EngineCache(model)}), want)
    assert torch.equal(kvengine.unpatch(model).generate(**inputs), want)
