"""What is done to a patched model: copied, pickled, saved, wrapped, given another attention, sharing what it has."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import MIXED, SHAPE, SMALL, greedy, llama, one, patched, prompts
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, StaticCache

import kvengine
from kvengine.errors import CacheError, ModelError
from kvengine.hf.cache import STATE
from kvengine.hf.names import CACHE

POLICY = "streaming(sinks=2, recent=14)"


def test_a_pickled_model_is_patched_where_it_is_read() -> None:
    model = patched(POLICY)
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(greedy(twin, prompts()), greedy(model, prompts()))
    kvengine.unpatch(twin)
    assert torch.equal(greedy(twin, prompts()), greedy(llama(), prompts()))
    assert hasattr(model, STATE)


def test_a_pickled_model_is_patched_in_a_process_that_has_patched_none(tmp_path: Path) -> None:
    model, path = patched(POLICY), tmp_path / "model.pt"
    want = greedy(model, one(), 6)
    torch.save({"model": model, "ids": one()["input_ids"], "want": want}, path)
    script = (
        "import sys, torch\n"
        "found = torch.load(sys.argv[1], weights_only=False)\n"
        "text = found['model'].generate(found['ids'], max_new_tokens=6, do_sample=False)\n"
        "print(torch.equal(text[:, 61:], found['want']))\n"
    )
    run = subprocess.run([sys.executable, "-P", "-c", script, path], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "True", run.stderr


@pytest.mark.parametrize("text", ["full", "lowrank(rank=4)"])
def test_a_cache_that_is_pickled_says_how_to_save_it(text: str) -> None:
    """It would come back as another model's."""
    model = patched(text)
    cache = kvengine.EngineCache(model)
    model(**one(), cache=cache)
    for way in (pickle.dumps, copy.copy, lambda x: torch.save(x, io.BytesIO())):
        with pytest.raises(CacheError, match=r"kvengine\.saved\.save"):
            way(cache)


def test_a_saved_model_knows_nothing_of_the_engine(tmp_path: Path) -> None:
    patched(POLICY).save_pretrained(tmp_path)
    assert "kvengine" not in (tmp_path / "config.json").read_text()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(greedy(loaded, one()), greedy(llama(), one()))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("text", ["full", POLICY])
def test_a_model_given_another_attention_is_not_run_on_an_engine_cache(text: str, attention: str) -> None:
    """The other would be handed the newest keys and values, and take them for all there are."""
    model = patched(text)
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(**one(), cache=cache)
        model.set_attn_implementation(attention)
        with pytest.raises(ModelError, match="see the newest tokens only.*kvengine.patch"):
            model(one(1)["input_ids"], cache=cache)
    with pytest.raises(ModelError, match="see the newest tokens only"):
        greedy(model, one())
    assert torch.equal(greedy(model, one(), use_cache=False), greedy(llama(), one()))
    assert torch.equal(greedy(kvengine.patch(model, text), one()), greedy(patched(text), one()))
    assert len(model.model.layers[0].self_attn._forward_pre_hooks) == 1
    kvengine.unpatch(model)
    assert model.config._attn_implementation == attention


def test_what_was_chosen_since_outlives_the_patch() -> None:
    model = patched(POLICY)
    model.set_attn_implementation("eager")
    kvengine.unpatch(model)
    assert model.config._attn_implementation == "eager" and not hasattr(model, STATE)


@pytest.mark.parametrize("copied", [False, True])
def test_another_model_with_a_patched_ones_configuration_says_so(copied: bool) -> None:
    model = patched(POLICY)
    other = type(model)(copy.deepcopy(model.config) if copied else model.config).eval()
    other.load_state_dict(model.state_dict())
    with pytest.raises(ModelError, match="came to the engine without its hook.*give it its own"):
        greedy(other, one())
    for policy in ("full", "lowrank(rank=8)"):
        with pytest.raises(ModelError, match="configuration of a model that is patched"):
            kvengine.patch(other, policy)
    if copied:
        other.set_attn_implementation("sdpa")
        assert torch.equal(greedy(kvengine.patch(other, POLICY), one()), greedy(model, one()))


def test_a_model_and_a_part_of_it_are_not_both_patched() -> None:
    model = llama()
    kvengine.patch(model.model, POLICY)
    with pytest.raises(ModelError, match="configuration of a model that is patched"):
        kvengine.patch(model, POLICY)
    kvengine.unpatch(model.model)
    assert torch.equal(greedy(kvengine.patch(model, POLICY), one()), greedy(patched(POLICY), one()))


@pytest.mark.parametrize("first", [True, False])
def test_a_shallow_copy_is_the_same_model_patched_or_not(first: bool) -> None:
    """Its modules are the other's."""
    model = patched(POLICY)
    twin = copy.copy(model)
    assert torch.equal(greedy(twin, one()), greedy(model, one()))
    for each in (twin, model) if first else (model, twin):
        kvengine.unpatch(each)
    for each in (twin, model):
        assert torch.equal(greedy(each, one()), greedy(llama(), one()))
        assert torch.equal(greedy(kvengine.patch(each, POLICY), one()), greedy(patched(POLICY), one()))
        kvengine.unpatch(each)


class Wrapper(nn.Module):
    """Passes on what it does not know, as wrappers for fine-tuning and compiled modules do."""

    def __init__(self, inside: Any) -> None:
        super().__init__()
        self.inside = inside

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inside"), name)


def test_a_wrapped_model_works_and_is_patched_inside() -> None:
    wrapper = Wrapper(patched(POLICY))
    assert torch.equal(greedy(wrapper, one()), greedy(wrapper.inside, one()))
    assert torch.equal(greedy(wrapper, one(), cache=kvengine.EngineCache(wrapper)), greedy(wrapper, one()))
    with pytest.raises(ModelError, match="got Wrapper; give the LlamaForCausalLM inside it"):
        kvengine.patch(wrapper, POLICY)
    with pytest.raises(ModelError, match="Wrapper wraps a patched model; unpatch the LlamaForCausalLM inside it"):
        kvengine.unpatch(wrapper)
    assert hasattr(wrapper.inside, STATE)


def test_a_static_cache_on_a_patched_model_is_read_as_before_or_refused() -> None:
    """It counts in a tensor that has moved on when the mask is made: slots beyond the text were read."""
    model, found = patched(POLICY), []
    for each in (model, llama()):
        cache = StaticCache(config=each.config, max_cache_len=128)
        with torch.no_grad():
            for ids in (one()["input_ids"], one(1)["input_ids"], one(5)["input_ids"]):
                found.append(each(ids, **{CACHE: cache}).logits)
    for here, there in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(here, there, rtol=0, atol=0)
    with pytest.raises(ModelError, match="StaticCache on a patched model.*Leave the cache out"):
        greedy(model, one(), cache=StaticCache(config=model.config, max_cache_len=128))


@pytest.mark.parametrize("text", ["full", POLICY])
def test_a_model_that_nobody_has_any_more_is_gone_at_once(text: str) -> None:
    """Its weights are not left to the garbage collector, as on a GPU there may be no room for the next ones until then."""
    model = patched(text)
    greedy(model, one(), 3)
    gone = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


class Own(LlamaForCausalLM):
    """Makes a cache that is not the library's."""

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: Any, *args: Any) -> None:
        model_kwargs["states"] = torch.zeros(1)


class Returning(LlamaForCausalLM):
    """Is asked for a cache in another way."""

    def _prepare_cache_for_generation(self, generation_config: Any, *args: Any) -> Any:  # type: ignore[override]
        return None

    def generate(self, *args: Any, generation_config: Any = None, **kwargs: Any) -> Any:
        return self._prepare_cache_for_generation(self.generation_config)


@pytest.mark.parametrize("made", [Own, Returning])
def test_a_model_that_makes_its_cache_itself_is_not_given_one(made: Any) -> None:
    model = kvengine.patch(made(LlamaConfig(**SHAPE)), POLICY)
    with pytest.raises(ModelError, match=r"makes caches in a way of its own.*kvengine.unpatch"):
        greedy(model, one())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", [SMALL["h2o"], SMALL["disk"], MIXED[0], SMALL["tidal"]])
def test_threads_share_a_model(text: str) -> None:
    """As a server's do: what belongs to a text is its cache's."""
    model, batches = patched(text), [prompts(seed=seed) for seed in range(3)]
    want = [greedy(model, batch) for batch in batches]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda batch: [greedy(model, batch) for _ in range(2)], batches))
    assert all(torch.equal(one, right) for both, right in zip(found, want, strict=True) for one in both)


def attends_by_itself(self: Any, hidden_states: torch.Tensor, **given: Any) -> tuple[torch.Tensor, None]:
    """An attention of somebody's own, as other libraries put in: right with a cache of transformers', for one row."""
    x = hidden_states.unflatten(1, (-1, 1))
    q, k, v = (
        f(x).unflatten(-1, (-1, self.head_dim))[:, :, 0].transpose(1, 2)
        for f in (self.q_proj, self.k_proj, self.v_proj)
    )
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in given[CACHE].update(k, v, self.layer_idx))
    out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
    return self.o_proj(out.transpose(1, 2).flatten(2)), None


@pytest.mark.parametrize("text", ["full", POLICY])
@pytest.mark.parametrize("way", ["its class", "one module", "a module of another class"])
def test_an_attention_that_does_not_ask_the_engine_is_refused(
    way: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was handed the newest tokens alone, as if these were all: text that depends on nothing else."""
    model = llama()
    attention = model.model.layers[1].self_attn
    if way == "its class":
        monkeypatch.setattr(type(attention), "forward", attends_by_itself)
        with pytest.raises(ModelError, match=r"LlamaAttention attends by itself.*forward\(\) was replaced"):
            kvengine.patch(model, text)
        monkeypatch.undo()
        kvengine.patch(model, text)
        monkeypatch.setattr(type(attention), "forward", attends_by_itself)
    elif way == "one module":
        monkeypatch.setattr(attention, "forward", attends_by_itself.__get__(attention))
        kvengine.patch(model, text)
    else:
        kvengine.patch(model, text)
        model.model.layers[1].self_attn = copy.copy(attention)
        model.model.layers[1].self_attn.__class__ = type("Own", (nn.Module,), {"forward": attends_by_itself})
    layers = "0, 1" if way == "its class" else "1"
    with pytest.raises(ModelError, match=f"layer {layers} of this LlamaModel attends by itself.*kvengine.unpatch"):
        greedy(model, one())
    greedy(kvengine.unpatch(model), one(), 3)


def test_a_class_of_caches_of_ones_own_is_a_cache() -> None:
    """The prompt was not noted of what is read a second time, and what hybrid models' caches are refused was not."""
    own, model = type("Own", (kvengine.EngineCache,), {}), patched(SMALL["kvzip"])
    assert torch.equal(greedy(model, prompts(), 4, cache=own(model)), greedy(model, prompts(), 4))


def test_a_generate_that_was_put_in_by_others_stays() -> None:
    model = llama()
    model.generate = own = partial(type(model).generate, model)
    with pytest.raises(ModelError, match=r"has a generate\(\) of its own"):
        kvengine.patch(model, record="eager")
    assert model.generate is own and not hasattr(model, STATE)
    assert kvengine.unpatch(kvengine.patch(model)).generate is own
