"""Forward passes of a patched model that are given no cache: a loop of one's own is under the policy, training is not."""

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from support import SMALL, greedy, llama, one, patched
from torch import Tensor
from torch._dynamo.exc import Unsupported
from transformers import DynamicCache

import kvengine
from kvengine import EngineCache

POLICY = SMALL["snapkv"]
PASSES: dict[str, Any] = {
    "use_cache": lambda model, ids: model(ids, use_cache=True),
    "by its configuration": torch.no_grad()(lambda model, ids: model(ids)),
    "in inference mode": torch.inference_mode()(lambda model, ids: model(input_ids=ids)),
    "by position": torch.no_grad()(lambda model, ids: model(ids, None, None, None)),
    "vectors": torch.no_grad()(lambda model, ids: model(inputs_embeds=model.get_input_embeddings()(ids))),
    "the decoder alone": torch.no_grad()(lambda model, ids: model.model(ids)),
    "a tuple": torch.no_grad()(lambda model, ids: model(ids, return_dict=False)),
}


def loop(model: Any, ids: Tensor, count: int = 24) -> tuple[Tensor, Any]:
    """Greedy text as a loop from transformers' pages would have it, and the cache that it went on with."""
    found = []
    with torch.no_grad():
        out = model(ids)
        for _ in range(count):
            found.append(out.logits[:, -1:].argmax(-1))
            out = model(found[-1], past_key_values=out.past_key_values)
    return torch.cat(found, 1), out.past_key_values


@pytest.mark.parametrize("text", ["full", POLICY, SMALL["lowrank"], SMALL["quest"]])
def test_a_loop_of_ones_own_gives_the_text_of_generate(text: str) -> None:
    model = patched(text)
    found, cache = loop(model, one()["input_ids"])
    assert type(cache) is EngineCache and cache.stack == kvengine.Stack.parse(text)
    assert torch.equal(found, greedy(model, one()))
    assert torch.equal(found, greedy(llama(), one())) == (text == "full")


@pytest.mark.parametrize("way", PASSES)
def test_a_pass_that_wants_a_cache_has_the_engines(way: str) -> None:
    model, ids = patched(POLICY), one()["input_ids"]
    out = PASSES[way](model, ids)
    cache = out[1] if isinstance(out, tuple) else out.past_key_values
    assert type(cache) is EngineCache and (cache.stats().held == 24).all()
    with torch.no_grad():
        model(one(1)["input_ids"], past_key_values=cache)
    assert cache.seen == 62


def test_a_prompts_logits_are_the_models() -> None:
    batch = one()
    with torch.no_grad():
        torch.testing.assert_close(patched(POLICY)(**batch).logits, llama()(**batch).logits)


def test_training_and_gradients_and_who_wants_none_are_left_alone() -> None:
    model, ids = patched(POLICY), one()["input_ids"]
    assert type(model(ids).past_key_values) is DynamicCache
    assert type(patched(POLICY).train()(ids, use_cache=True).past_key_values) is DynamicCache
    assert model(ids, use_cache=False).past_key_values is None
    given = DynamicCache(config=model.config)
    with torch.no_grad():
        assert model(ids, past_key_values=given).past_key_values is given
        assert model(ids, None, None, given).past_key_values is given
        model.config.use_cache = False
        assert model(ids).past_key_values is None
        model.set_attn_implementation("sdpa")
        assert type(model(ids, use_cache=True).past_key_values) is DynamicCache


def test_a_loop_that_forgot_its_gradients_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    ids = one()["input_ids"]
    for text, told in ((POLICY, 1), ("full", 0)):
        caplog.clear()
        model = patched(text)
        out = model(ids)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                out = model(ids[:, :1], past_key_values=out.past_key_values)
        assert [("no_grad" in x.message, text in x.message) for x in caplog.records] == [(True, True)] * told


def test_who_goes_on_from_another_cache_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """As PEFT does in each pass of a model with a tuned prefix, outside of `generate`."""
    ids = one()["input_ids"]
    for text, told in ((POLICY, 1), ("full", 0)):
        caplog.clear()
        model, given = patched(text), DynamicCache(config=llama().config)
        with caplog.at_level(logging.WARNING), torch.no_grad():
            for _ in range(3):
                model(ids, past_key_values=given)
        assert [("cache of transformers'" in x.message, text in x.message) for x in caplog.records] == [
            (True, True)
        ] * told


def test_copies_and_what_was_unpickled_follow_their_own_policy() -> None:
    model, ids = patched(POLICY), one()["input_ids"]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        kvengine.patch(twin, "full")
        assert [str(loop(each, ids, 1)[1].stack) for each in (twin, model)] == ["full", POLICY]
        assert type(loop(kvengine.unpatch(twin), ids, 1)[1]) is DynamicCache


@pytest.mark.parametrize("way", ["the model's cache", "a given cache", "no cache"])
def test_one_graph_is_refused_with_what_to_do(way: str) -> None:
    model, ids = patched(POLICY), one()["input_ids"]
    cache = EngineCache(model) if way == "a given cache" else None
    run = torch.compile(model.forward, backend="eager", fullgraph=True)
    with (
        torch.no_grad(),
        pytest.raises(Unsupported, match=r"patched by kvengine.*leave fullgraph=True out, or.*unpatch"),
    ):
        run(ids, past_key_values=cache, use_cache=way != "no cache")


@pytest.mark.slow
def test_a_compiled_loop_has_the_engines_cache() -> None:
    model, ids = patched(POLICY), one()["input_ids"]
    want = loop(model, ids)[0]
    model.forward = torch.compile(model.forward, backend="eager")
    found, cache = loop(model, ids)
    assert torch.equal(found, want) and type(cache) is EngineCache
