"""Families that do with their caches what the engine cannot follow: they say so, and run as ever without it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from families.configs import BASE, LATENTS, NOT_GROUPED, build, padded_batch

import kvengine
from kvengine.errors import ModelError
from kvengine.hf import trial
from kvengine.hf.attention import Seam, engine_attention
from kvengine.hf.cache import STATE
from kvengine.hf.mask import LazyMask
from kvengine.hf.names import CACHE

DSA = {**LATENTS, "num_key_value_heads": 4, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
JET = {"kv_channels": 16, "num_local_experts": 2, "num_experts_per_tok": 2}
GIT = {"vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}}
LOOPED = {
    "loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_num_passes": 2, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2, "swa_head_dim": 16, "sliding_window_size": 8, "rel_extent": 32, "d_rel": 4,
    "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "unpadded_vocab_size": 99,
    "loop_gate_rank": 4, "n_layers_per_attn_res_block": 1,
}  # fmt: skip

# The class, what differs from BASE, what of it is unknown there, and what is said.
REFUSED: dict[str, tuple[str, dict[str, Any], tuple[str, ...], str]] = {
    "compressed": ("DeepseekV4ForCausalLM", DSA, (), "caches of kinds of its own .DeepseekV4HCACache."),
    "cache of its own": ("MiniMaxForCausalLM", {"num_local_experts": 2}, (), "takes no caches but its own"),
    "and in its part": ("MiniMaxModel", {"num_local_experts": 2}, (), "MiniMaxModel takes no caches but its own"),
    "no layer index": ("GitForCausalLM", GIT, NOT_GROUPED, "no attention module with a layer index"),
    "two softmaxes": ("DiffLlamaForCausalLM", {}, (), "DiffLlamaAttention changes its keys or values"),
    "heads repeated": ("JetMoeForCausalLM", JET, ("num_attention_heads", "head_dim"), "JetMoeAttention changes"),
    "layers run twice": (
        "DoryForCausalLM",
        {"n_input_layers": 1, "n_output_layers": 1, "sliding_window": 8},
        (),
        "runs layers several times over",
    ),
    "and states beside": ("Inkling2LoopForCausalLM", LOOPED, (), "runs layers several times over"),
    "states beside its weights": (  # of Griffin's recurrence, which no cache gets to see
        "RecurrentGemmaForCausalLM",
        {"lru_width": 64, "attention_window_size": 8},
        (),
        "keeps states beside its weights",
    ),
    "mask of its own": ("DogeForCausalLM", {}, (), "reads or changes its mask itself.*cannot enter it$"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    model_class, options, without, match = REFUSED[name]
    if not hasattr(transformers, model_class):
        pytest.skip(f"this transformers has no {model_class}")
    found = getattr(transformers, model_class)
    torch.manual_seed(0)
    model = found(found.config_class(**{k: v for k, v in BASE.items() if k not in without} | options)).float().eval()

    def generate() -> torch.Tensor:
        if not isinstance(model, transformers.GenerationMixin):
            return torch.Tensor(model(**padded_batch()).last_hidden_state.detach())
        text: torch.Tensor = model.generate(**padded_batch(), max_new_tokens=12, do_sample=False)
        return text

    want, before = generate(), model.config._attn_implementation
    for policy in ("quest(budget=500)", "full"):  # no policy is advised that is refused as well
        with pytest.raises(ModelError, match=match):
            kvengine.patch(model, policy)
    assert not hasattr(model, STATE) and model.config._attn_implementation == before
    assert torch.equal(generate(), want)


def stacked(*order: int, config: bool = True) -> Any:
    """Three layers in this order, copies of those that come again: with the model's own configuration, or a copy of it too."""
    model, seen = build("llama"), set()
    layers = [
        copy.deepcopy(model.model.layers[i]) if i in seen or seen.add(i) else model.model.layers[i] for i in order
    ]
    model.model.layers = torch.nn.ModuleList(layers)
    for layer in layers if config else ():
        layer.self_attn.config = model.config
    return model


@pytest.mark.parametrize(
    ("order", "match"),
    [
        ((0, 1), "no layer of number 2, and by its configuration"),
        ((0, 2), "no layer of number 1, and by its configuration"),
        ((0, 2, 1), r"the numbers \[0, 2, 1\]"),
        ((0, 1, 2, 2), r"the numbers \[0, 1, 2, 2\]"),
    ],
)
def test_layers_that_are_not_numbered_anew_are_refused(order: tuple[int, ...], match: str) -> None:
    """Pruned, moved or repeated ones, which another layer's verdict would wait for, or whose tokens would go to one cache."""
    model = stacked(*order)
    model.config.num_hidden_layers = max(3, len(order))
    with pytest.raises(ModelError, match=f"{match}.*num_hidden_layers"):
        kvengine.patch(model, "d2o(budget=8, shares='measured')")
    model.config.num_hidden_layers = len(order)
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    want = model.generate(**padded_batch(), max_new_tokens=4, do_sample=False)
    assert torch.equal(kvengine.patch(model).generate(**padded_batch(), max_new_tokens=4, do_sample=False), want)
    kvengine.patch(model, "d2o(budget=8, shares='measured')").generate(**padded_batch(), max_new_tokens=4)


def test_a_copied_layer_with_a_configuration_of_its_own_is_refused() -> None:
    model = stacked(0, 1, 2, 2, config=False)
    with pytest.raises(ModelError, match="a layer of this LlamaForCausalLM has a configuration of its own"):
        kvengine.patch(model)


def test_layers_that_the_configuration_no_longer_runs_may_stay() -> None:
    """As an early exit has it."""
    model = build("llama")
    model.config.num_hidden_layers = 2
    kvengine.patch(model, "d2o(budget=8, shares='measured')").generate(**padded_batch(), max_new_tokens=4)


@pytest.mark.skipif(not hasattr(transformers, "DoryForCausalLM"), reason="this transformers has no Dory")
def test_layers_that_a_model_adds_are_refused_by_the_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its attention did not tell by an argument that it is run several times over."""
    monkeypatch.setattr("kvengine.hf.patching.check_layers", lambda *_: None)
    found: Any = transformers.DoryForCausalLM
    loops = {"n_input_layers": 1, "n_output_layers": 1, "layer_types": ["full_attention"] * 3}
    model = found(found.config_class(**BASE | loops)).eval()
    kvengine.patch(model, "full")
    with pytest.raises(ModelError, match=r"layer \d of this cache is a copy of layer \d.*several times over"):
        model.generate(**padded_batch(), max_new_tokens=2, do_sample=False)


ENCODERS = {
    "an encoder": ("BertModel", {}, "is an encoder.*caches none.*is_decoder=True"),
    "an encoder that fills gaps": ("RobertaForMaskedLM", {}, "is an encoder"),
    "not told to decode": ("BertLMHeadModel", {}, "built with is_decoder=True"),
    "one that is no decoder's kin": ("EuroBertModel", {}, "would do nothing$"),
    "a decoder made one": (
        "Gemma3TextModel",
        {"use_bidirectional_attention": True},
        "encoder.*use_bidirectional.*=True in",
    ),
    "and its newer kin": (
        "Gemma4TextModel",
        {"use_bidirectional_attention": "all"},
        "is an encoder.*is_causal=False in",
    ),
    "by its masks": ("Qwen3Model", {"is_causal": False}, "is an encoder.*: is_causal=False in its configuration"),
    "one that generates": ("LlamaForCausalLM", {"is_causal": False}, "is an encoder.*: is_causal=False"),
    "images": ("ViTModel", {}, "no attention module with a layer index"),
}


@pytest.mark.parametrize("able", [(), ("LlamaModel",)], ids=["none", "the part that attends"])
def test_who_cannot_switch_its_attention_is_refused(able: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the part that has the layers can."""
    model = build("llama")
    can = classmethod(lambda kind: kind.__name__ in able)
    monkeypatch.setattr(transformers.PreTrainedModel, "_can_set_attn_implementation", can)
    if able:
        kvengine.unpatch(kvengine.patch(model))
    else:
        with pytest.raises(ModelError, match="LlamaForCausalLM cannot switch its attention implementation"):
            kvengine.patch(model)
        assert not hasattr(model, STATE)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_are_refused(name: str) -> None:
    model_class, options, match = ENCODERS[name]
    found = getattr(transformers, model_class)
    grouped = any(x in model_class for x in ("Euro", "Gemma", "Qwen", "Llama"))
    known = {k: v for k, v in BASE.items() if k not in NOT_GROUPED or grouped}
    model = found(found.config_class(**known | options))
    with pytest.raises(ModelError, match=match):
        kvengine.patch(model, "snapkv(budget=12, window=4)")
    assert not hasattr(model, STATE)


@pytest.mark.parametrize("model_class", ["BertLMHeadModel", "BertModel"])
def test_what_an_encoders_class_makes_of_a_decoder_works(model_class: str) -> None:
    torch.manual_seed(0)
    found = getattr(transformers, model_class)
    config = found.config_class(**{k: v for k, v in BASE.items() if k not in NOT_GROUPED}, is_decoder=True)
    model, batch = found(config).eval(), padded_batch()
    with torch.no_grad():
        cache = kvengine.patch(model, "snapkv(budget=12, window=4)")(**batch)[CACHE]
    assert type(cache) is kvengine.EngineCache and int(cache.stats().held.max()) == 12


@pytest.mark.parametrize("name", ["two softmaxes", "heads repeated", "mask of its own"])
def test_what_cannot_be_tried_is_refused_by_the_first_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model_class, options, without, match = REFUSED[name]
    found = getattr(transformers, model_class)
    model = found(found.config_class(**{k: v for k, v in BASE.items() if k not in without} | options)).float().eval()
    monkeypatch.setattr(trial, "attempt", lambda *_: None)
    kvengine.patch(model, "full")
    with pytest.raises(ModelError, match=match.removesuffix("$") + ".*call kvengine.unpatch"):
        model.generate(**padded_batch(), max_new_tokens=12, do_sample=False)


def test_heads_that_are_repeated_once_are_not_refused() -> None:
    """What a module does to its keys counts only where it changes them."""
    found = transformers.JetMoeForCausalLM
    base = {k: v for k, v in BASE.items() if k not in ("num_attention_heads", "head_dim")}
    torch.manual_seed(0)
    model = found(found.config_class(**base | JET | {"num_experts_per_tok": 1})).float().eval()
    ids = padded_batch()["input_ids"][:1]
    want = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert torch.equal(kvengine.patch(model).generate(ids, max_new_tokens=12, do_sample=False), want)


def test_a_trial_leaves_no_trace() -> None:
    """Not in the random numbers to come, nor where the weights are not there yet."""
    model = build("llama")
    torch.manual_seed(3)
    want = torch.rand(2)
    torch.manual_seed(3)
    kvengine.patch(model)
    assert torch.equal(torch.rand(2), want)
    with torch.device("meta"):
        empty = type(model)(build("llama").config)
    assert kvengine.patch(empty) is empty


def test_keys_that_no_layer_has_taken_are_refused() -> None:
    """A module that names a layer of the cache and attends to keys of its own would be answered from what others hold."""
    model = kvengine.patch(build("llama"))
    cache, module = kvengine.EngineCache(model), model.model.layers[0].self_attn
    with torch.no_grad():
        model(padded_batch()["input_ids"], cache=cache)
    q, k = torch.randn(3, 4, 1, 16), torch.randn(3, 2, 1, 16)
    mask = LazyMask({"batch_size": 3, "q_length": 1, "q_offset": 20, "kv_length": 21})
    with pytest.raises(ModelError, match="has not given to its layer of the cache"):
        engine_attention(module, q, k, k, mask, kvengine=Seam(cache.layer_for(module), "sdpa"))


def test_layers_without_a_configuration_are_left_alone() -> None:
    """Linear attention beside attention whose caches are plain."""
    if not hasattr(transformers, "KimiLinearForCausalLM"):
        pytest.skip("this transformers has no KimiLinearForCausalLM")
    found = transformers.KimiLinearForCausalLM
    types = ["linear_attention", "full_attention"] * 2
    heads = {"linear_head_dim": 16, "linear_num_heads": 4, "linear_conv_kernel_dim": 4}
    options = {**BASE, **LATENTS, "num_key_value_heads": 4, "num_hidden_layers": 4, "layer_types": types, **heads}
    options.pop("head_dim")
    torch.manual_seed(0)
    model = found(found.config_class(**options)).float().eval()
    want = model.generate(**padded_batch(), max_new_tokens=12, do_sample=False)
    cache = kvengine.EngineCache(kvengine.patch(model))
    assert torch.equal(model.generate(**padded_batch(), max_new_tokens=12, do_sample=False, cache=cache), want)
    assert len(cache.engines) == 2


@pytest.mark.parametrize("text", ["full", "quest(budget=500)", "lowrank(rank=8)"])
def test_a_configuration_without_layers_is_no_decoders(text: str) -> None:
    """Of models of bytes, only the parts have layers."""
    if not hasattr(transformers, "BltForCausalLM"):
        pytest.skip("this transformers has no BltForCausalLM")
    part = {
        "vocab_size": 260,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    more = {"encoder_config": part, "decoder_config": part, "global_config": part, "encoder_hash_byte_group_vocab": 50}
    model = transformers.BltForCausalLM(transformers.BltConfig(vocab_size=260, patcher_config=part, **more))
    with pytest.raises(ModelError, match="no attention module with a layer index"):
        kvengine.patch(model, text)


@pytest.mark.parametrize(
    "use",
    [
        lambda mask: mask.dtype,
        lambda mask: torch.zeros(1) + mask,
        lambda mask: torch.where(mask, 0.0, 1.0),
        lambda mask: mask[:, 0],
        lambda mask: mask[:, :, :, :3],
    ],
)
def test_a_mask_that_is_looked_at_says_so(use: Callable[[Any], Any]) -> None:
    mask = LazyMask({"q_length": 4, "q_offset": 0})
    with pytest.raises(ModelError, match="reads or changes its mask itself"):
        use(mask)
    assert not hasattr(mask, "to") and len(range(4)[mask[:, :, -1:, :].kwargs["q_offset"] :]) == 1
