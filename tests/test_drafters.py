"""Drafters of transformers' that are made from the model itself, or read what it has cached."""

from typing import Any

import pytest
import torch
import transformers
from families.configs import BASE, FAMILIES, FULL, SLIDING, build
from support import greedy, one

import kvengine
from kvengine.errors import UnsupportedPolicy
from kvengine.hf.names import CACHE

layers = pytest.importorskip("transformers.modeling_layers")
SNAP = "snapkv(budget=24, window=6)"


def predictive(name: str) -> Any:
    """A model whose checkpoint would have layers that predict two more tokens (MTP)."""
    family = FAMILIES[name]
    found = getattr(transformers, family.model)
    options = {k: v for k, v in BASE.items() if k not in family.without} | family.options
    torch.manual_seed(0)
    model = found(found.config_class(**options)).float().eval()
    model.config.num_mtp_layers = 2
    return model


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The drafting layers that were made, with random weights instead of a checkpoint's."""
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this transformers has no MtpModel")
    made: list[Any] = []

    def load(main: Any, **_: Any) -> Any:
        torch.manual_seed(3)
        made.append(layers.MtpModel(main, 2).float().eval())
        return made[-1]

    monkeypatch.setattr(layers.MtpModel, "from_pretrained", load)
    return made


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_layers_that_predict_more_tokens_draft_for_any_policy(name: str, loaded: list[Any]) -> None:
    model, attention = predictive(name), {}
    for text in (None, "full", SNAP, "quest(budget=24, page=4) + kivi(group=8, residual=8)"):
        if text is not None and not (name == "deepseek_v3" and "kivi" in text):
            kvengine.patch(model, text)
        want = greedy(model, one())
        assert torch.equal(greedy(model, one(), use_mtp=True), want)
        attention[text] = loaded[-1].config._attn_implementation
    assert set(attention.values()) == {attention[None]}
    assert model.config._attn_implementation == "kvengine", "what the layers share is the model's own"


def assistant() -> Any:
    """A tiny one that reads the keys and values of Gemma 4."""
    found = getattr(transformers, "Gemma4AssistantForCausalLM", None)
    if found is None:
        pytest.skip("this transformers has no Gemma4AssistantForCausalLM")
    text = BASE | {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": 8, "global_head_dim": 32}
    text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "model_type": "gemma4_text"}
    torch.manual_seed(1)
    model = found(found.config_class(text_config=text, backbone_hidden_size=64)).float().eval()
    model.generation_config.num_assistant_tokens = 3
    return model


def test_an_assistant_that_reads_the_models_keys_has_them_all() -> None:
    """The engine is handed the new ones only, and the model handed these on: no draft was ever right, and nobody was told."""
    drafter, drafts = assistant(), []
    drafter.register_forward_hook(lambda _, __, out: drafts.append(out.logits.detach()))
    texts = []
    for model in (build("gemma4"), kvengine.patch(build("gemma4"))):
        texts.append(greedy(model, one(), 12, assistant_model=drafter))
    half = len(drafts) // 2
    assert torch.equal(*texts)
    torch.testing.assert_close(torch.cat(drafts[:half], 1), torch.cat(drafts[half:], 1), atol=1e-4, rtol=1e-4)


def test_keys_given_out_stay_what_they_were() -> None:
    assistant()  # skips where models give none out
    model, ids = kvengine.patch(build("gemma4")), one()["input_ids"]
    cache = kvengine.EngineCache(model)
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids[:, :50], cache=cache)
        given = model(ids[:, 50:53], cache=cache, return_shared_kv_states=True).shared_kv_states["full_attention"]
        kept = [x.clone() for x in given]
        cache.crop(-3)
        model(ids[:, 58:], cache=cache)
        want = build("gemma4")(ids[:, :53], return_shared_kv_states=True).shared_kv_states["full_attention"]
    for mine, before, stock in zip(given, kept, want, strict=True):
        assert torch.equal(mine, before)
        torch.testing.assert_close(mine, stock)


@pytest.mark.parametrize("text", [SNAP, "quest(budget=24, page=4)", "kivi(group=8, residual=8)"])
def test_keys_that_a_policy_has_changed_are_not_given_out(text: str) -> None:
    model, drafter = kvengine.patch(build("gemma4"), text), assistant()
    with pytest.raises(UnsupportedPolicy, match="all keys and values of a layer.*prompt_lookup_num_tokens"):
        greedy(model, one(), assistant_model=drafter)
    with torch.no_grad(), pytest.raises(UnsupportedPolicy, match="all keys and values"):
        model(**one(), return_shared_kv_states=True)
    with torch.no_grad():  # nobody goes on from it
        assert model(**one(), use_cache=False, return_shared_kv_states=True).get(CACHE) is None


def test_an_early_exit_that_is_refused_leaves_the_model_its_layers() -> None:
    """transformers takes them away while it drafts, and an error found them gone: all later texts were of the first alone."""
    try:
        greedy(build("gemma3"), one(), assistant_early_exit=2)
    except TypeError:
        pytest.skip("this release of transformers cannot leave a model with windows early")
    model = kvengine.patch(build("gemma3"), SNAP)
    want = greedy(model, one())
    with pytest.raises(UnsupportedPolicy, match="no layer with a plain, growing"):  # the first has a window
        greedy(model, one(), assistant_early_exit=1)
    assert model.config.num_hidden_layers == 4
    assert torch.equal(greedy(model, one(), assistant_early_exit=2), want)
    assert torch.equal(greedy(model, one()), want)
