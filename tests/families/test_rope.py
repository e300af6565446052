"""A model's rotation, found by trying: turning cached keys back gives the keys before the model rotated them."""

import sys
from typing import Any

import pytest
import torch
import transformers
from families.configs import BASE, LINEAR_HEADS, VOCABULARY, build, padded_batch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

import kvengine
from kvengine.errors import ModelError, UnsupportedPolicy
from kvengine.evals import bundled_model
from kvengine.hf.names import CACHE
from kvengine.hf.rope import rope_of
from kvengine.rope import Rope

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def llama(rope: dict[str, Any]) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**BASE, rope_parameters=rope)).eval()


def cached_and_raw(model: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Keys [seq, head, token, dim] of the plain layers as cached, and as they were before rotation."""
    module = sys.modules[type(model).__module__]
    raw: list[torch.Tensor] = []
    apply = module.apply_rotary_pos_emb

    def spy(q: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
        raw.append(rest[0] if rest[0].dim() == 4 and rest[0].shape[-1] == q.shape[-1] else q)
        return apply(q, *rest, **kwargs)

    monkeypatch.setattr(module, "apply_rotary_pos_emb", spy)
    text = model.config.get_text_config()
    cache = DynamicCache(config=text)
    ids = torch.randint(2, VOCABULARY, (2, 23), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        model(input_ids=ids, **{CACHE: cache})
    if type(model).__name__ == "Gemma2ForCausalLM":
        assert len(raw) == len(cache.layers)
    plain = [i for i, layer in enumerate(cache.layers) if type(layer) is DynamicLayer]
    return [cache.layers[i].keys for i in plain], [raw[i] for i in plain]


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3", "glm4", "gemma2", "glm", "llama_mqa"])
def test_turning_back_gives_the_keys_before_rotation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(name)
    rope = rope_of(model)
    assert rope is not None
    found, raw = cached_and_raw(model, monkeypatch)
    assert found
    at = torch.arange(23)
    for k, plain in zip(found, raw, strict=True):
        torch.testing.assert_close(rope.turn(k, -at.expand(k.shape[:3])), plain, atol=2e-5, rtol=1e-4)
        assert not torch.allclose(k, plain, atol=0.1)  # the control: they had been rotated
        other = Rope(rope.frequency, not rope.interleaved)
        assert not torch.allclose(other.turn(k, -at.expand(k.shape[:3])), plain, atol=0.1)


@pytest.mark.parametrize("kind", [LINEAR, LLAMA3, YARN], ids=lambda k: k["rope_type"])
def test_scaled_rotations(kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(kind)
    rope = rope_of(model)
    assert rope is not None
    factor = model.model.rotary_emb.attention_scaling
    assert (factor != 1) == (kind is YARN)
    found, raw = cached_and_raw(model, monkeypatch)
    for k, plain in zip(found, raw, strict=True):
        turned = rope.turn(k, -torch.arange(23).expand(k.shape[:3]))
        torch.testing.assert_close(turned, plain * factor, atol=2e-5, rtol=1e-4)


def test_frequencies_that_change_are_not_known() -> None:
    assert rope_of(llama(DYNAMIC)) is None


SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}


@pytest.mark.parametrize(
    ("model_class", "options"),
    [
        ("Qwen3_5ForCausalLM", LINEAR_HEADS | {"layer_types": ["linear_attention", "full_attention"] * 2}),
        ("CohereCompassForCausalLM", {"layer_types": ["full_attention"] * 2, "rope_parameters": {"full_attention": SECTIONS}}),
    ],
    ids=["by default", "by layer type"],
)  # fmt: skip
def test_positions_of_images_are_no_one_rotation(model_class: str, options: dict[str, Any]) -> None:
    """An image's tokens have three positions each, so turning keys by their place in the text would be wrong."""
    if not hasattr(transformers, model_class):
        pytest.skip(f"this transformers has no {model_class}")
    found = getattr(transformers, model_class)
    model = found(found.config_class(**BASE | options | {"num_hidden_layers": len(options["layer_types"])})).eval()
    if not any(getattr(m, "mrope_section", None) for m in model.modules()):
        pytest.skip("this transformers gives it one position for each token")
    assert rope_of(model) is None


@pytest.mark.parametrize("name", ["gpt2", "opt", "smollm3", "cohere2"])
def test_models_without_one_rotation_in_all_layers(name: str) -> None:
    """Learnt positions, or layers that do not rotate among those that do."""
    assert rope_of(build(name)) is None


def test_a_bf16_model_is_recognised() -> None:
    assert rope_of(build("llama").bfloat16()) is not None


def test_a_policy_that_turns_keys_is_refused_where_the_rotation_is_unknown() -> None:
    model = build("gpt2")
    with pytest.raises(UnsupportedPolicy, match="'expected_attention' turns keys or queries"):
        kvengine.patch(model, "expected_attention")
    assert not hasattr(model, "_kvengine")


def test_a_model_without_weights_is_not_judged_by_them() -> None:
    with torch.device("meta"):
        model = llama(LINEAR)
    kvengine.patch(model, "full")
    with pytest.raises(ModelError, match="on the meta device.*Load them"):
        kvengine.patch(model, "expected_attention")
    there = llama(LINEAR)
    model.load_state_dict(there.state_dict(), assign=True)
    model.model.rotary_emb.inv_freq = there.model.rotary_emb.inv_freq
    kvengine.patch(model, "expected_attention")


def test_trying_leaves_no_trace() -> None:
    model = build("llama").train()
    state = {name: x.clone() for name, x in model.state_dict().items()}
    rope_of(model)
    assert model.training and all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert isinstance(model, transformers.PreTrainedModel)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", ["qwen3", "phi3", "glm4", "gemma2", "gemma3"])
@pytest.mark.parametrize("policy", ["expected_attention", "streaming", "d2o"])
def test_methods_that_need_it_run_on_these_families(name: str, policy: str) -> None:
    """A wide budget changes nothing; a narrow one holds what it says in the layers that the engine serves."""
    wide, small = {
        "expected_attention": ("expected_attention(budget=99)", "expected_attention(budget=12)"),
        "streaming": (
            "streaming(recent=99, positions='in-cache')",
            "streaming(sinks=2, recent=10, positions='in-cache')",
        ),
        "d2o": ("d2o(budget=99)", "d2o(budget=12)"),
    }[policy]
    batch = padded_batch()
    options = dict(max_new_tokens=12, do_sample=False, return_dict_in_generate=True)
    stock = build(name).generate(**batch, **options)
    model = build(name)
    assert torch.equal(kvengine.patch(model, wide).generate(**batch, **options).sequences, stock.sequences)
    found = kvengine.patch(model, small).generate(**batch, **options)
    served = len(found[CACHE].engines)
    held = found[CACHE].stats().held.float()
    assert held.shape[0] == served and (policy == "expected_attention" or abs(held.mean(0)[0].mean() - 12) < 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_hides_no_rotation(dtype: torch.dtype) -> None:
    """The bundled model's attention is sharp: in half precision the same text at another place has other keys."""
    model = AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=dtype)
    rope = rope_of(model)
    assert rope is not None and not rope.interleaved and len(rope.frequency) == 32


@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")  # transformers 5.17, of the weights away
def test_weights_that_are_brought_when_they_are_needed_tell_as_well() -> None:
    """Where accelerate offloads them, the parameters at hand have no device to run on."""
    model, batch = llama(LINEAR), padded_batch()
    want = kvengine.patch(llama(LINEAR), "expected_attention(budget=12)").generate(**batch, max_new_tokens=12)
    table = model.get_input_embeddings()
    held = table.weight.data

    def bring(module: nn.Module, *args: Any) -> None:
        module.weight = nn.Parameter(held)

    def leave(module: nn.Module, *args: Any) -> None:
        module.weight = nn.Parameter(held.to("meta"))

    leave(table)
    table.register_forward_pre_hook(bring)
    table.register_forward_hook(leave)
    kvengine.patch(model, "expected_attention(budget=12)")
    assert torch.equal(model.generate(**batch, max_new_tokens=12), want)
