"""Forward passes of a patched model that are given no cache: a loop of one's own is under the policy, training is not."""

import copy
import logging
import os
import pickle
from typing import Any

import pytest
import torch
from support import SMALL, greedy, llama, one, patched
from torch import Tensor
from torch._dynamo.exc import Unsupported
from transformers import DynamicCache

import kvengine
from kvengine import EngineCache, saved
from kvengine.hf.names import CACHE

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
            out = model(found[-1], cache=out[CACHE])
    return torch.cat(found, 1), out[CACHE]


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
    cache = out[1] if isinstance(out, tuple) else out[CACHE]
    assert type(cache) is EngineCache and (cache.stats().held == 24).all()
    with torch.no_grad():
        model(one(1)["input_ids"], cache=cache)
    assert cache.seen == 62


def test_a_prompts_logits_are_the_models() -> None:
    batch = one()
    with torch.no_grad():
        torch.testing.assert_close(patched(POLICY)(**batch).logits, llama()(**batch).logits)


def test_training_and_gradients_and_who_wants_none_are_left_alone() -> None:
    model, ids = patched(POLICY), one()["input_ids"]
    assert type(model(ids)[CACHE]) is DynamicCache
    assert type(patched(POLICY).train()(ids, use_cache=True)[CACHE]) is DynamicCache
    assert model(ids, use_cache=False).get(CACHE) is None
    given = DynamicCache(config=model.config)
    with torch.no_grad():
        assert model(ids, cache=given)[CACHE] is given
        assert model(ids, None, None, given)[CACHE] is given
        model.config.use_cache = False
        assert model(ids).get(CACHE) is None
        model.set_attn_implementation("sdpa")
        assert type(model(ids, use_cache=True)[CACHE]) is DynamicCache


def test_a_loop_that_forgot_its_gradients_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    ids = one()["input_ids"]
    for text, told in ((POLICY, 1), ("full", 0)):
        caplog.clear()
        model = patched(text)
        out = model(ids)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                out = model(ids[:, :1], cache=out[CACHE])
        assert [("no_grad" in x.message, text in x.message) for x in caplog.records] == [(True, True)] * told


def test_who_goes_on_from_another_cache_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """As PEFT does in each pass of a model with a tuned prefix, outside of `generate`."""
    ids = one()["input_ids"]
    for text, told in ((POLICY, 1), ("full", 0)):
        caplog.clear()
        model, given = patched(text), DynamicCache(config=llama().config)
        with caplog.at_level(logging.WARNING), torch.no_grad():
            for _ in range(3):
                model(ids, cache=given)
        assert [("cache of transformers'" in x.message, text in x.message) for x in caplog.records] == [
            (True, True)
        ] * told


def test_copies_and_what_was_unpickled_follow_their_own_policy() -> None:
    model, ids = patched(POLICY), one()["input_ids"]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        kvengine.patch(twin, "full")
        assert [str(loop(each, ids, 1)[1].stack) for each in (twin, model)] == ["full", POLICY]
        assert type(loop(kvengine.unpatch(twin), ids, 1)[1]) is DynamicCache


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", ["the model's cache", "a given cache", "no cache"])
def test_one_graph_is_refused_with_what_to_do(way: str, pytestconfig: pytest.Config) -> None:
    if way != "the model's cache" and pytestconfig.getoption("jaxtyping_packages", None):
        pytest.skip("the compiler meets what checks signatures before it meets the engine")
    model, ids = patched(POLICY), one()["input_ids"]
    cache = EngineCache(model) if way == "a given cache" else None
    torch._dynamo.reset()  # what broke a graph before is not compiled again, and models share the function around `forward`
    run = torch.compile(model.forward, backend="eager", fullgraph=True)
    with (
        torch.no_grad(),
        pytest.raises(Unsupported, match=r"patched by kvengine.*leave fullgraph=True out, or.*unpatch"),
    ):
        run(ids, cache=cache, use_cache=way != "no cache")


@pytest.mark.slow
def test_a_compiled_loop_has_the_engines_cache() -> None:
    model, ids = patched(POLICY), one()["input_ids"]
    want = loop(model, ids)[0]
    model.forward = torch.compile(model.forward, backend="eager")
    found, cache = loop(model, ids)
    assert torch.equal(found, want) and type(cache) is EngineCache


def read(model: Any, ids: Tensor, **options: Any) -> Any:
    with torch.no_grad():
        return model(ids, **options).get(CACHE)


def scored(model: Any, ids: Tensor, cache: EngineCache | None = None) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(ids, cache=cache).logits
    return found


USES: dict[str, Any] = {
    "gone on with": lambda model, ids: loop(model, ids, 2),
    "counted": lambda model, ids: read(model, ids).stats(),
    "copied": lambda model, ids: scored(model, ids[:, :1], copy.deepcopy(read(model, ids))),
    "saved": lambda model, ids: saved.save(read(model, ids), os.devnull, model),
    "not made": lambda model, ids: read(model, ids, use_cache=False),
    "given": lambda model, ids: scored(model, ids, EngineCache(model)),
    "generated": lambda model, ids: greedy(model, {"input_ids": ids}, 1),
}


@pytest.mark.parametrize(("text", "told"), [(POLICY, 1), (SMALL["kivi"], 1), ("full", 0), (SMALL["ashape"], 0)])
def test_who_scores_whole_texts_is_told_once_that_this_measures_no_policy(
    text: str, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As lm-evaluation-harness does: all policies had the same score, that of the full cache."""
    model, ids = patched(text), one()["input_ids"]
    with caplog.at_level(logging.WARNING):
        found = [scored(model, ids) for _ in range(2)]
        assert not caplog.records
        found += [scored(model, ids) for _ in range(5)]
    name = str(kvengine.Stack.parse(text))
    assert [("nobody went on" in x.message, name in x.message) for x in caplog.records] == [(True, True)] * told
    same = torch.allclose(found[0], scored(llama(), ids), atol=1e-4)
    assert same == (text != SMALL["ashape"]), "where the logits say something of the policy, nobody is told otherwise"


@pytest.mark.parametrize("way", USES)
def test_who_uses_a_passes_cache_is_told_nothing(way: str, caplog: pytest.LogCaptureFixture) -> None:
    model, ids = patched(POLICY), one()["input_ids"]
    with caplog.at_level(logging.WARNING):
        for i in range(8):
            USES[way](model, ids)
            if i % 2 and way == "gone on with":
                scored(model, ids)  # now and then is not in a row
    assert not caplog.records


def test_passes_that_broke_off_are_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = patched(POLICY), one()["input_ids"]
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            with pytest.raises(ZeroDivisionError):
                scored(model, ids)
        hook.remove()
    assert not caplog.records


@pytest.mark.parametrize("text", ["snapkv(budget=24, window=6)", "zipcache(block=16)"])
@torch.no_grad()
def test_padding_among_a_first_chunks_tokens_does_not_count_in_the_next_chunk(text: str) -> None:
    """What the row had so far lies in another order than it came in: the model's own attention would look by its mask."""
    model, ids, real = patched(text), one(60)["input_ids"], torch.ones(2, 66, dtype=torch.long)
    real[0, 20:26] = 0
    batch = one(66, seed=2)["input_ids"].repeat(2, 1)
    batch[0, real[0] > 0] = ids[0]
    at, found = (real.cumsum(1) - 1).clamp(min=0), []
    for given, mask, place in ((batch, real, at), (ids, real[:1, :60] * 0 + 1, torch.arange(60)[None])):
        cache, n = kvengine.EngineCache(model), given.shape[1]
        cache.announce(n - 5)
        spans = [(0, 30), (30, n - 5), *((i, i + 1) for i in range(n - 5, n))]
        out = [
            model(given[:, a:b], attention_mask=mask[:, :b], position_ids=place[:, a:b], cache=cache) for a, b in spans
        ]
        found.append(torch.cat([x.logits for x in out], 1)[:1, mask[0] > 0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
