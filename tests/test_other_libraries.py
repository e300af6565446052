"""Models as other libraries leave them: wrapped, with adapters, with weights of types of their own.

What needs a library that is no dependency of ours, in no extra either, runs where it is installed:
`pip install peft torchao bitsandbytes optimum-quanto`. Passed with peft 0.21.2, torchao 0.18.0, bitsandbytes 0.50.2,
optimum-quanto 0.2.7, torch 2.13.0, transformers 5.24.0.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support import SMALL, WIDE, greedy, llama, one, prompts
from torch import Tensor, nn

import kvengine
from kvengine import EngineCache, saved
from kvengine.errors import IncompatibleCache, ModelError
from kvengine.offload import stores
from kvengine.prefix import Prefix

pytestmark = pytest.mark.filterwarnings("default")  # these libraries use what others have deprecated


class Halves(Tensor):
    """A weight of two tensors, which knows how to multiply and no more, as torchao's do."""

    high: Tensor
    low: Tensor

    @staticmethod
    def __new__(cls, high: Tensor, low: Tensor) -> "Halves":
        made = torch.Tensor._make_wrapper_subclass(cls, high.shape, dtype=high.dtype)  # type: ignore[attr-defined]
        made.high, made.low = high, low
        return made  # type: ignore[no-any-return]

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["high", "low"], None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            return nn.functional.linear(args[0], args[1].high + args[1].low, *args[2:])
        if func is Tensor.flatten:
            raise NotImplementedError("unimplemented operator: aten.view")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Halves(args[0].high, args[0].low)
        raise NotImplementedError(f"unimplemented operator: {func}")


def halved(seed: int = 0) -> Any:
    model = llama(seed)
    for module in model.model.layers.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            module.weight = nn.Parameter(
                Halves(weight.half().float(), weight - weight.half().float()), requires_grad=False
            )
    return model


def goes_on(model: Any, folder: Path) -> None:
    """From a stored prefix and a saved session, as without."""
    ids = one()["input_ids"]
    want = greedy(model, {"input_ids": ids}, 8)
    reuse = Prefix(model, stores.Store(stores.Files(folder / "store", sync="none")), chunk=16)
    cache = reuse.fetch(ids)
    assert torch.equal(greedy(model, {"input_ids": ids}, 4, cache=cache), want[:, :4]) and reuse.keep(ids, cache) == 3
    reuse.store.drain()
    warm = reuse.fetch(ids)
    assert warm.seen == 48 and torch.equal(greedy(model, {"input_ids": ids}, 8, cache=warm), want)
    saved.save(cache, folder / "session", model)
    longer = torch.cat([ids, want[:, :4]], 1)
    again = saved.load(model, folder / "session")
    assert torch.equal(greedy(model, {"input_ids": longer}, 4, cache=again), want[:, 4:])
    reuse.store.close()


def test_weights_that_hold_several_tensors_have_a_fingerprint(tmp_path: Path) -> None:
    model = kvengine.patch(halved())
    goes_on(model, tmp_path)
    before = saved.identity(model)
    assert saved.identity(halved()) == before != saved.identity(halved(1))
    model.model.layers[1].mlp.up_proj.weight.low[0, 0] += 1
    assert saved.identity(model) != before


def torchao(folder: Path) -> Any:
    kinds = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = llama()
    kinds.quantize_(model, kinds.Int8WeightOnlyConfig())
    return model


def quanto(folder: Path) -> Any:
    kinds = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    model = llama()
    kinds.quantize(model, weights=kinds.qint8)
    kinds.freeze(model)
    return model


def bitsandbytes(folder: Path) -> Any:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    llama(hidden_size=128, intermediate_size=256).save_pretrained(folder)  # whose blocks have 64 numbers
    how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=how).eval()


@pytest.mark.parametrize("load", [torchao, quanto, bitsandbytes])
def test_quantised_weights(load: Any, tmp_path: Path) -> None:
    model = load(tmp_path / "model")
    want = greedy(model, prompts(), 12)
    for policy in ("full", WIDE["snapkv"], WIDE["quest"], WIDE["kivi"], WIDE["h2o"]):
        assert torch.equal(greedy(kvengine.patch(model, policy), prompts(), 12), want)
    assert not torch.equal(greedy(kvengine.patch(model, SMALL["streaming"]), prompts(), 12), want)
    goes_on(kvengine.patch(model), tmp_path)
    assert torch.equal(greedy(kvengine.unpatch(model), prompts(), 12), want)


class Wrapper(nn.Module):
    """What PEFT puts around a model: every attribute that it lacks is the model's."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.base_model = model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)

    def get_base_model(self) -> Any:
        return self.base_model


def test_a_wrapped_model_is_the_model_inside(tmp_path: Path) -> None:
    model = kvengine.patch(llama())
    whole, ids = Wrapper(model), one()["input_ids"]
    assert saved.identity(whole) == saved.identity(model)
    cache = EngineCache(model)
    greedy(model, one(), 4, cache=cache)
    saved.save(cache, tmp_path / "session", whole)
    assert saved.load(model, tmp_path / "session").seen == saved.load(whole, tmp_path / "session").seen == cache.seen
    store = stores.Store(stores.Files(tmp_path / "store", sync="none"))
    assert Prefix(whole, store, chunk=16).keep(ids, cache) == 3
    store.drain()
    assert Prefix(model, store, chunk=16).fetch(ids).seen == 48
    store.close()
    whole.prompt = nn.Parameter(torch.zeros(3))  # a tuned prompt, before every text that comes through the wrapper
    assert saved.identity(whole) != saved.identity(model)


def test_who_gives_a_wrapper_is_told_what_to_give(tmp_path: Path) -> None:
    whole = Wrapper(llama())
    with pytest.raises(ModelError, match=r"give the LlamaForCausalLM inside it: model\.get_base_model\(\)"):
        kvengine.patch(whole)  # type: ignore[arg-type]
    model = kvengine.patch(whole.get_base_model())
    for call in (kvengine.unpatch, kvengine.compile_decode):
        with pytest.raises(ModelError, match=r"Wrapper wraps a patched model; .*inside it: model\.get_base_model\(\)"):
            call(whole)  # type: ignore[operator]
    cache = EngineCache(model)
    greedy(model, one(), 4, cache=cache)
    saved.save(cache, tmp_path / "session", model)
    with torch.no_grad():
        model.lm_head.weight += 1
    with pytest.raises(IncompatibleCache, match="session: .*stored for model '.*weights and adapters in use"):
        saved.load(model, tmp_path / "session")


ADAPTERS = {
    "lora": lambda peft: peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False),
    "ia3": lambda peft: peft.IA3Config(task_type="CAUSAL_LM", init_ia3_weights=False),
    "dora": lambda peft: peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, use_dora=True),
    "adaption prompt": lambda peft: peft.AdaptionPromptConfig(task_type="CAUSAL_LM", adapter_len=4, adapter_layers=1),
}


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("order", ["patched first", "adapted first"])
def test_adapters(kind: str, order: str) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = llama()
    plain = greedy(base, prompts(), 12)
    if order == "patched first":
        kvengine.patch(base)
    model = peft.get_peft_model(base, ADAPTERS[kind](peft)).eval()
    want = greedy(kvengine.unpatch(base) and model, prompts(), 12)
    for policy, same in (("full", True), (WIDE["snapkv"], True), (SMALL["streaming"], False)):
        kvengine.patch(base, policy)
        assert torch.equal(greedy(model, prompts(), 12), want) == same
    kvengine.patch(base)
    with model.disable_adapter():
        assert torch.equal(greedy(model, prompts(), 12), plain)
    kvengine.unpatch(base)
    assert torch.equal(greedy(model, prompts(), 12), want)


def two_adapters() -> tuple[Any, Any]:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    base = kvengine.patch(llama())
    model = peft.get_peft_model(base, ADAPTERS["lora"](peft), "a")
    model.add_adapter("b", ADAPTERS["lora"](peft))
    return base, model.eval()


def test_adapters_that_take_turns() -> None:
    """On one cache, as with transformers' own; in one batch; merged."""
    base, model = two_adapters()

    def turns(cache: Any) -> Tensor:
        text = one()["input_ids"]
        for name in ("a", "b"):
            model.set_adapter(name)
            text = model.generate(input_ids=text, max_new_tokens=8, do_sample=False, past_key_values=cache)
            text = torch.cat([text, one(9)["input_ids"]], 1)
        return text  # type: ignore[no-any-return]

    found, mixed = turns(EngineCache(base)), greedy(model, prompts(), 8, adapter_names=["a", "b", "__base__"])
    kvengine.unpatch(base)
    assert torch.equal(found, turns(transformers.DynamicCache(config=base.config)))
    assert torch.equal(mixed, greedy(model, prompts(), 8, adapter_names=["a", "b", "__base__"]))
    kvengine.patch(base, SMALL["snapkv"])
    want = greedy(model, prompts(), 8)
    merged = model.merge_and_unload()
    assert merged is base and torch.equal(greedy(merged, prompts(), 8), want)


def test_what_one_adapter_stored_another_does_not_find(tmp_path: Path) -> None:
    base, model = two_adapters()
    ids, cache = one()["input_ids"], EngineCache(base)
    greedy(model, one(), 4, cache=cache)
    store = stores.Store(stores.Files(tmp_path / "store", sync="none"))
    reuse = Prefix(model, store, chunk=16)
    assert reuse.keep(ids, cache) == 3
    saved.save(cache, tmp_path / "session", model)
    store.drain()
    for name, seen in (("b", 0), ("a", 48)):
        model.set_adapter(name)
        assert reuse.fetch(ids).seen == seen
    with model.disable_adapter(), pytest.raises(IncompatibleCache, match="adapters in use"):
        saved.load(base, tmp_path / "session")
    assert saved.load(base, tmp_path / "session").seen == cache.seen
    store.close()


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_step_of_training_is_that_of_the_model_without_us(checkpoints: bool) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    found = []
    for patched in (False, True):
        base = kvengine.patch(llama(), SMALL["snapkv"]) if patched else llama()
        torch.manual_seed(5)
        model = peft.get_peft_model(base, ADAPTERS["lora"](peft)).train()
        if checkpoints:
            model.gradient_checkpointing_enable()
        model(**prompts(), labels=prompts()["input_ids"]).loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == 8 and all(map(torch.equal, *found))
