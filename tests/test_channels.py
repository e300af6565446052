"""Codes that do not fill whole bytes of a model's heads are refused when the model is patched, not at the first sealed page."""

from typing import Any

import pytest
import torch
import transformers
from families import configs
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

import kvengine
from kvengine.errors import PolicyError, UnsupportedPolicy
from kvengine.hf.cache import STATE, EngineCache
from kvengine.stack import Stack
from tests.support import SHAPE, SMALL, Bare, greedy, llama, methods, one

UNFIT = [  # of heads of 20 channels, and of 18
    (20, "turboquant(bits=3)"),
    (20, "turboquant(values=3)"),
    (20, "turboquant(bits=1) + quest"),
    (20, "kivi(bits=1, group=8) + snapkv"),
    (20, "zipcache(low=1)"),
    (18, "kivi(bits=2)"),
    (18, "turboquant(bits=2) + host"),
    (18, "zipcache"),
    (17, "quantspec"),
]


def latents(**options: Any) -> Any:
    torch.manual_seed(0)
    shape = {name: x for name, x in SHAPE.items() if name != "num_key_value_heads"}
    own = dict(
        num_key_value_heads=4, kv_lora_rank=20, q_lora_rank=16, qk_rope_head_dim=10, qk_nope_head_dim=12, v_head_dim=12,
        n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=2,
        moe_intermediate_size=16,
    )  # fmt: skip
    return DeepseekV3ForCausalLM(DeepseekV3Config(**(shape | own | options))).eval()


@pytest.mark.parametrize(("dim", "text"), UNFIT)
def test_codes_that_do_not_fit_a_head_are_refused_by_patch(dim: int, text: str) -> None:
    # 17 channels cannot be rotated by halves, so that such a model brings its keys itself.
    if dim % 2:
        with pytest.raises(UnsupportedPolicy, match=f"keys of {dim} and values of {dim} channels"):
            Stack.parse(text).check_channels(dim, dim)
        return
    model = llama(head_dim=dim)
    with pytest.raises(UnsupportedPolicy, match=f"keys of {dim} and values of {dim} channels") as refused:
        kvengine.patch(model, text)
    assert "whole bytes" in str(refused.value)
    assert not hasattr(model, STATE)
    kvengine.patch(model)
    with pytest.raises(UnsupportedPolicy, match="whole bytes"):  # of a patched model, and of a cache
        kvengine.patch(model, text)
    with pytest.raises(UnsupportedPolicy, match="whole bytes"):
        EngineCache(model, text)


@pytest.mark.parametrize("family", ["gpt_oss", "gemma3n", "gemma4", "qwen3_5"])
def test_attention_that_wants_more_than_most_is_tried_too(family: str) -> None:
    """Cosines for half of the channels or of another width in some layers, and a place to leave keys for later layers."""
    if not configs.exists(family):
        pytest.skip(f"this transformers has no {family}")
    found = configs.FAMILIES[family]
    wide = {"head_dim": 20} | ({"global_head_dim": 36} if family == "gemma4" else {})
    model_class = getattr(transformers, found.model)
    model = model_class(model_class.config_class(**configs.BASE | found.options | wide)).eval()
    with pytest.raises(UnsupportedPolicy, match="whole bytes"):
        kvengine.patch(model, "turboquant(bits=1)")


def test_codes_that_do_not_fit_latents_are_refused_by_patch() -> None:
    model = latents()
    for text in ("kivi(bits=2)", "turboquant(bits=2)", "turboquant(values=3)", "zipcache"):
        with pytest.raises(UnsupportedPolicy, match="keys of 30 and values of 20 channels"):
            kvengine.patch(model, text)
    with pytest.raises(PolicyError, match="no page field is called 'v'"):  # values are a part of the keys
        kvengine.patch(model, "quest + host(fields=('v',))")
    batch = one(40)
    for text in ("kivi(group=8, residual=8)", "turboquant(residual=8) + host(fields=('v_code',))"):
        assert greedy(kvengine.patch(model, text), batch, 8).shape == (1, 8)


@pytest.mark.parametrize("text", ["turboquant(bits=3)", "kivi(bits=1, group=8)"])
def test_where_the_model_cannot_be_tried_its_first_tokens_are(text: str) -> None:
    bare = Bare(text, dim=20)
    with pytest.raises(UnsupportedPolicy, match="whole bytes"):
        bare.feed(1)  # less than a page
    assert not bare.cache.parts and not bare.cache.seen


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", methods())
def test_what_a_model_of_odd_heads_is_not_refused_it_generates_with(name: str) -> None:
    model = llama(head_dim=20, hidden_size=48, num_attention_heads=3, num_key_value_heads=3)
    try:
        kvengine.patch(model, SMALL[name])
    except UnsupportedPolicy:
        return
    assert greedy(model, one(40), 30).shape == (1, 30)
