"""`kvengine.patch(model, policy, record=True)`: `generate` records its steps by itself, as with a decoder given to it."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import configs
from support import greedy, llama, one, prompts
from transformers import GenerationMixin, LlamaForCausalLM

import kvengine
from kvengine.errors import CacheError, ModelError, UnsupportedPolicy
from kvengine.hf import compiled
from kvengine.hf.compiled import CompiledDecode
from kvengine.hf.steps import Steps
from kvengine.speculative import TriForce

NEEDS_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
QUEST = "quest(budget=24, page=4)"
STACKS = [QUEST, "full", f"duo(sinks=2, recent=10) + {QUEST} + kivi(bits=4, group=8, residual=8)", "h2o(budget=24)"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For how many tokens caches were held still, one after the other."""
    found: list[int] = []
    make = Steps.__init__

    def noted(self: Steps, model: Any, cache: Any, more: int, *rest: Any) -> None:
        found.append(more)
        make(self, model, cache, more, *rest)

    monkeypatch.setattr(Steps, "__init__", noted)
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", STACKS)
@pytest.mark.parametrize("room", [1024, 7, 1])
def test_the_text_is_that_without(text: str, room: int, opened: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is room for fewer tokens than come, a recording follows the other."""
    monkeypatch.setattr(compiled, "ROOM", room)
    model = kvengine.patch(llama(), text)
    want = greedy(model, prompts(2), 24)
    assert not opened
    kvengine.patch(model, text, record="eager")
    assert torch.equal(greedy(model, prompts(2), 24), want)
    assert opened == ([24] if room == 1024 else [7, 7, 7, 3] if room == 7 else [1] * 23)


@pytest.mark.parametrize(
    ("device", "record"),
    [
        pytest.param("cpu", "trace", marks=pytest.mark.slow),
        pytest.param("cuda", True, marks=[pytest.mark.gpu, NEEDS_A_GPU]),
    ],
)
def test_one_thread_records_while_another_fetches_from_the_host(device: str, record: Any) -> None:
    """A recording on a GPU forbids much to its own thread, and nothing to others."""
    models = [kvengine.patch(llama().to(device), text) for text in (QUEST, f"host + {QUEST}")]
    batch = {name: x.to(device) for name, x in prompts(2).items()}
    want = [greedy(model, batch, 24) for model in models]
    kvengine.patch(models[0], QUEST, record=record)
    with ThreadPoolExecutor(2) as pool:
        said = [pool.submit(lambda model: [greedy(model, batch, 24) for _ in range(4)], model) for model in models]
        for texts, alone in zip(said, want, strict=True):
            assert all(torch.equal(text, alone) for text in texts.result())


@pytest.mark.parametrize("record", ["eager", pytest.param("trace", marks=pytest.mark.slow)])
@pytest.mark.parametrize("room", [1024, 7])
def test_what_is_recorded_goes_on_in_the_next_turn(room: int, record: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "ROOM", room)
    model, texts = llama(), []
    for how in (False, record):
        kvengine.patch(model, STACKS[2], record=how)
        cache, ids = kvengine.EngineCache(model), one()["input_ids"]
        for question in ([], [[5, 6, 7]]):
            ids = torch.cat([ids, torch.tensor(question, dtype=torch.long).view(1, -1)], 1)
            ids = model.generate(ids, cache=cache, max_new_tokens=12, do_sample=False)
        texts.append(ids)
    assert torch.equal(*texts)


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_layers_with_a_window_are_held_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "ROOM", 5)
    model, batch = kvengine.patch(configs.build(family)), configs.padded_batch()
    want = greedy(model, batch, 24)
    assert torch.equal(greedy(kvengine.patch(model, record="eager"), batch, 24), want)


def test_where_nothing_is_gained_nothing_is_recorded(opened: list[int]) -> None:
    """On a CPU. `record=True` is for the model that it is put on later, too."""
    greedy(kvengine.patch(llama(), QUEST, record=True), one(), 5)
    assert not opened


def test_on_a_gpu_a_graph_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kvengine.patch(llama(), QUEST, record=True)
    monkeypatch.setattr(type(model), "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(GenerationMixin, "generate", lambda self, *args, **kwargs: (args, kwargs))
    (ids,), options = model.generate(3, max_new_tokens=5)
    decoder = options.pop("custom_generate")
    assert (ids, options, type(decoder), decoder.how) == (3, {"max_new_tokens": 5}, CompiledDecode, "graph")
    assert model.generate(3, custom_generate="mine")[1] == {"custom_generate": "mine"}


def test_a_decoder_that_is_given_goes_first() -> None:
    model = kvengine.patch(llama(), record="eager")
    decoder = TriForce(model, draft="lookup", middle=None)
    want = greedy(kvengine.patch(llama()), one(), 12)
    assert torch.equal(decoder.generate(one()["input_ids"], max_new_tokens=12, do_sample=False)[:, 61:], want)


def test_what_cannot_be_recorded_is_refused() -> None:
    model = llama()
    with pytest.raises(UnsupportedPolicy, match="cannot be recorded"):
        kvengine.patch(model, "ann(budget=24)", record=True)
    assert not hasattr(model, "_kvengine")
    kvengine.patch(model, QUEST, record="eager")
    with pytest.raises(UnsupportedPolicy, match="cannot be recorded"):
        kvengine.patch(model, "ann(budget=24)", record=True)
    assert str(kvengine.EngineCache(model).stack).startswith("quest") and "generate" in vars(model)
    with pytest.raises(ModelError, match="'graph', 'trace' or 'eager'"):
        kvengine.patch(model, QUEST, record="fast")
    with pytest.raises(ModelError, match="beam search.*record"):
        greedy(model, one(), 3, num_beams=2)


class Own(LlamaForCausalLM):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return super().generate(*args, **kwargs)


def test_a_model_that_generates_in_its_own_way_is_refused() -> None:
    model = Own(llama().config)
    with pytest.raises(ModelError, match="generate\\(\\) of its own"):
        kvengine.patch(model, QUEST, record=True)
    assert not hasattr(model, "_kvengine")


def test_it_ends_with_the_patch_and_goes_with_copies(opened: list[int]) -> None:
    model = llama()
    own = dict(vars(model))
    with kvengine.patched(model, QUEST, record="eager"):
        with kvengine.patched(model, "full"):
            greedy(model, one(), 3)
            assert not opened
        with kvengine.patched(copy.deepcopy(model), QUEST) as twin:
            greedy(twin, one(), 3)
            assert not opened
        for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            before = len(opened)
            greedy(twin, one(), 3)
            assert len(opened) == before + 1
    assert vars(model).keys() == own.keys()
    kvengine.patch(model, QUEST, record="eager")
    kvengine.patch(model, QUEST)
    assert "generate" not in vars(model)


def test_a_model_that_nothing_holds() -> None:
    assert kvengine.patch(llama(), QUEST).generate(**one(), max_new_tokens=2).shape[1] > 2
    method = kvengine.patch(llama(), QUEST, record="eager").generate
    with pytest.raises(ModelError, match="keep it in a variable"):
        method(**one(), max_new_tokens=2)


def test_who_records_states_is_told_how_to_go_on() -> None:
    """In a turn that follows one of drafts, say."""
    model = kvengine.patch(llama(), record="eager")
    cache = kvengine.EngineCache(model)
    cache.activate_past_recording()
    with pytest.raises(CacheError, match="call deactivate_past_recording"):
        model.generate(**one(), max_new_tokens=3, cache=cache)
    cache.deactivate_past_recording()
    ids = torch.cat([one()["input_ids"], torch.tensor([[5]])], 1)
    assert model.generate(ids, max_new_tokens=3, cache=cache).shape[1] == ids.shape[1] + 3
