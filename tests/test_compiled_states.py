"""A recorded step on models with layers that keep states (linear attention, state spaces, convolutions)."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from families import configs
from support_device import Device, moved_by_steps, there
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import kvengine
from kvengine.errors import CacheError, UnsupportedPolicy
from kvengine.hf.compiled import CompiledDecode
from kvengine.hf.fused import Fused
from kvengine.hf.states import has_states, held_states
from kvengine.hf.steps import WARM, Steps

FAMILIES = ("qwen3_next", "qwen3_5", "lfm2", "falcon_h1", "zamba2")
STACKS = ["full", "snapkv(budget=12, window=4)", "quest(budget=12, page=4) + kivi(bits=4, group=4)", "h2o(budget=12)"]


def cases() -> list[Any]:
    """Some of them, so that each family and each stack is among them; the others are slow."""
    every = list(product(FAMILIES, STACKS, ("eager", "trace")))
    return [pytest.param(*some, marks=[] if i % 11 == 0 else [pytest.mark.slow]) for i, some in enumerate(every)]


def built(name: str, text: str = "full") -> Any:
    if not configs.exists(name):
        pytest.skip(f"this transformers has no {configs.FAMILIES[name].model}")
    return kvengine.patch(configs.build(name), text)


def say(model: Any, count: int, **options: Any) -> Tensor:
    return model.generate(**options, max_new_tokens=count, do_sample=False)  # type: ignore[no-any-return]


def states(cache: Any) -> list[Tensor]:
    return [x for layer in cache.layers for x in held_states(layer)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "text", "how"), cases())
def test_the_text_is_that_of_eager_decoding_and_the_next_turns_too(name: str, text: str, how: Any) -> None:
    model, batch = built(name, text), configs.padded_batch()
    eager, held = kvengine.EngineCache(model), kvengine.EngineCache(model)
    want = say(model, 12, **batch, cache=eager)
    decoder = kvengine.compile_decode(model, how)
    assert torch.equal(say(model, 12, **batch, cache=held, custom_generate=decoder), want)
    for mine, its in zip(states(held), states(eager), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)
    more = {
        "input_ids": torch.cat([want, want[:, 3:9]], 1),
        "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (0, 18), value=1),
    }
    again = [say(model, 6, **more, cache=cache) for cache in (eager, held)]
    assert torch.equal(*again)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "falcon_h1"])
def test_what_a_step_does_to_states_can_be_undone(name: str) -> None:
    """As the steps are with which a graph warms up: all that they change is named, and lies where it did."""
    model, batch = built(name, "h2o(budget=12)"), configs.padded_batch()
    caches = [kvengine.EngineCache(model) for _ in range(2)]

    def warmed(steps: Steps) -> Any:
        changed = steps.changed()
        before = [x.clone() for x in changed]
        for _ in range(WARM):
            steps.run()
            assert all(not torch.equal(x, y) for x, y in zip(steps.states, before[1:], strict=False))
            for x, old in zip(changed, before, strict=True):
                x.copy_(old)
        return steps.run, steps.run()

    with torch.no_grad():
        for cache in caches:
            model(**batch, cache=cache)
        decoder = kvengine.compile_decode(model)
        first, second = (decoder.open(cache, 4) for cache in caches)
        where = [x.data_ptr() for x in states(caches[1])]
        second.eager = partial(warmed, second)  # type: ignore[method-assign]
        for i in range(3):
            token, place = torch.full((3, 1), 5 + i), batch["attention_mask"].sum(1, keepdim=True) + i
            assert torch.equal(first(token, place), second(token, place))
        assert where and [x.data_ptr() for x in states(caches[1])] == where
        first.close(), second.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "falcon_h1", "zamba2"])
def test_what_a_graph_would_record_moves_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the model's own code look at what a GPU computes."""
    monkeypatch.setattr("kvengine.kernels.dispatch._best", lambda inputs, native: "reference")
    text = "quest(budget=12, page=4)"
    model, batch = built(name, text), configs.padded_batch()
    if name == "qwen3_next":
        model.set_experts_implementation("batched_mm")  # the default counts in a way that a CPU, here below, does not
    want, device = say(model, 4, **batch), Device(monkeypatch)
    found = moved_by_steps(device, monkeypatch)
    with device:
        kvengine.patch(there(kvengine.unpatch(model)), text)
        decoder = CompiledDecode(model, "eager")
        got = say(model, 4, **{name: there(x) for name, x in batch.items()}, custom_generate=decoder)
        assert got.tolist() == want.tolist()
    assert found == [{}] * 3


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("place", ["self_attn", "mlp"])
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_a_step_that_broke_off_is_noticed(name: str, place: str, recorded: bool) -> None:
    """States have taken its token, be it the first step or one behind others."""
    model, ids = built(name), configs.padded_batch()["input_ids"][:1]
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(ids, cache=cache)
        steps = kvengine.compile_decode(model).open(cache, 4)
        token = torch.full((1, 1), 5)
        if recorded:
            steps(token, torch.tensor([[20]]))
        layer = model.model.layers[1]
        part = layer.self_attn if place == "self_attn" else getattr(layer, "mlp", None) or layer.feed_forward
        hook = part.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            steps(token, torch.tensor([[20 + recorded]]))
        hook.remove()
        with pytest.raises(CacheError, match="broke off"):
            steps(token, torch.tensor([[20 + recorded]]))
        steps.close()
        with pytest.raises(CacheError, match="broke off"):
            model(token, cache=cache)
        cache.reset()
        assert model(ids, cache=cache).logits.isfinite().all()


def test_padding_has_not_to_be_told_of_where_there_are_no_windows() -> None:
    model, batch = built("qwen3_next"), configs.padded_batch()
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(**batch, cache=cache)
    kvengine.compile_decode(model).open(cache, 4).close()


def test_what_records_the_past_is_refused() -> None:
    model, ids = built("lfm2"), configs.padded_batch()["input_ids"]
    cache = kvengine.EngineCache(model)
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids, cache=cache)
    with pytest.raises(CacheError, match="records states to return to"):
        kvengine.compile_decode(model).open(cache, 4)


def test_a_window_beside_states_is_refused() -> None:
    with pytest.raises(UnsupportedPolicy, match="a window beside states"):
        kvengine.compile_decode(built("zaya"))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["qwen3_next", "falcon_h1"])
def test_layers_may_be_fused(name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("jaxtyping_packages", None):
        pytest.skip("the compiler meets what checks signatures")
    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr("kvengine.hf.compiled.Fused", partial(Fused, backend=counter))
    model, batch = built(name, "h2o(budget=12)"), configs.padded_batch()
    want = say(model, 6, **batch)
    assert torch.equal(say(model, 6, **batch, custom_generate=kvengine.compile_decode(model, fuse=True)), want)
    assert counter.frame_count
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("text", STACKS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_graph_speaks_the_same_text(name: str, text: str) -> None:
    model = kvengine.unpatch(built(name)).cuda()
    batch = {name: x.cuda() for name, x in configs.padded_batch().items()}
    with kvengine.patched(model, text):
        want, decoder = say(model, 24, **batch), kvengine.compile_decode(model)
        assert decoder.how == "graph"
        cache = kvengine.EngineCache(model)
        assert torch.equal(say(model, 24, **batch, cache=cache, custom_generate=decoder), want)
        assert any(has_states(layer) for layer in cache.layers)
