"""Recorded steps of models that name the tokens they read by an index of their own: the text is that of decoding without."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from families.configs import padded_batch
from families.test_indexed import NAMES as EVERY
from families.test_indexed import build, generated
from support_device import Device, moved_by_steps, there
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import kvengine
from kvengine import EngineCache
from kvengine.errors import CacheError, UnsupportedPolicy
from kvengine.hf import held_index
from kvengine.hf.compiled import CompiledDecode
from kvengine.hf.fused import Fused
from kvengine.hf.held_index import HeldIndex
from kvengine.hf.names import CACHE, passed
from kvengine.hf.steps import WARM, Steps

NAMES = [name for name in EVERY if build(name).config.get_text_config(decoder=True).model_type in held_index.FAMILIES]
EXACT = ["full", "host"]
CODED = ["kivi(bits=4, group=8, residual=8)", "turboquant(residual=8) + host"]
pytestmark = pytest.mark.skipif(not NAMES, reason="this transformers has no such model")


def say(model: Any, batch: dict[str, Tensor] | None = None, count: int = 16, **options: Any) -> Tensor:
    """Without the padding's token: nothing is embedded for it, all its scores are zero, and which of equals is named depends on
    how many tokens are scored at once."""
    return generated(model, batch, count, **{"suppress_tokens": [0]} | options)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("text", EXACT + CODED)
@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_that_of_decoding_without(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a padded batch, past the end of the room, and in the next turn, whose rows begin with padding; exact, the unpatched
    model's too."""
    monkeypatch.setattr("kvengine.hf.compiled.ROOM", 7)
    model, batch = build(name), padded_batch(41)
    exact = say(model)
    kvengine.patch(model, text)
    decoder = kvengine.compile_decode(model)
    eager, held = EngineCache(model), EngineCache(model)
    want = say(model, **{CACHE: eager})
    assert torch.equal(say(model, **{CACHE: held}, custom_generate=decoder), want)
    assert text in CODED or torch.equal(want, exact)
    assert torch.equal(held.stats().attended, eager.stats().attended)
    for mine, its in zip(held.layers, eager.layers, strict=True):
        if getattr(its, "index_keys", None) is not None:
            torch.testing.assert_close(mine.indexed[:, :-1], its.indexed[:, :-1], rtol=1e-3, atol=1e-3)
    new = torch.randint(1, 99, (3, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, 25), value=1)
    mask[0, 57:60] = 0
    more = {"input_ids": torch.cat([want, new], 1), "attention_mask": mask}
    again = [say(model, more, 9, **{CACHE: cache}, **kind) for cache, kind in (
        (eager, {}), (held, {"custom_generate": decoder})
    )]  # fmt: skip
    assert torch.equal(*again)


@pytest.mark.slow
@pytest.mark.parametrize("text", ["full", CODED[0]])
@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_model_speaks_the_same_text(name: str, text: str) -> None:
    """Pages are sealed meanwhile."""
    layers = 1 if name in NAMES[:2] else 3  # others say of each what it is
    model = kvengine.patch(build(name, num_hidden_layers=layers), text)
    assert torch.equal(say(model, custom_generate=kvengine.compile_decode(model, "trace")), say(model))


@pytest.mark.parametrize("text", EXACT)
def test_fewer_tokens_than_are_named(text: str) -> None:
    """Eight are: a prompt of three, and a row that is padding but for one token."""
    model = build()
    ids = padded_batch(41)["input_ids"][:2, :3]
    batch = {"input_ids": ids, "attention_mask": torch.tensor([[1, 1, 1], [0, 0, 1]])}
    want = say(model, batch)
    kvengine.patch(model, text)
    assert torch.equal(say(model, batch, custom_generate=kvengine.compile_decode(model)), want)


@pytest.mark.parametrize("text", ["full", CODED[0]])
def test_rows_that_end_early_have_a_later_turn(text: str) -> None:
    model, batch = kvengine.patch(build(), text), padded_batch(41)
    options = {"eos_token_id": list(range(1, 128, 9)), "pad_token_id": 0}
    first, texts = say(model, batch, 9, **options), []
    said = first[:, 41:]
    ended = ((said % 9 == 1).cumsum(1) > 0).roll(1, 1)
    ended[:, 0] = False
    assert bool(ended.any()) and not bool(ended.all())
    more = torch.randint(1, 99, (3, 5), generator=torch.Generator().manual_seed(5))
    mask = torch.cat([batch["attention_mask"], ~ended, torch.ones_like(more)], 1).long()
    for kind in ({}, {"custom_generate": kvengine.compile_decode(model)}):
        cache = EngineCache(model)
        out = say(model, batch, 9, **{CACHE: cache}, **options, **kind)
        later = {"input_ids": torch.cat([out, more], 1), "attention_mask": mask}
        texts.append(say(model, later, 9, **{CACHE: cache}, **kind))
    assert torch.equal(texts[0][:, : first.shape[1]], first) and torch.equal(*texts)


def warmed(steps: Steps) -> Any:
    """As the steps are with which a graph warms up."""
    changed = steps.changed()
    before = [x.clone() for x in changed]
    for _ in range(WARM):
        steps.run()
        for x, old in zip(changed, before, strict=True):
            x.copy_(old)
    return steps.run, steps.run()


@torch.no_grad()
@pytest.mark.parametrize("text", ["full", CODED[1]])
def test_nothing_moves_and_what_warms_up_is_undone(text: str) -> None:
    model, batch = kvengine.patch(build(), text), padded_batch(41)
    caches = [EngineCache(model) for _ in range(2)]
    for cache in caches:
        model(**batch, **passed(model, cache))
    decoder = kvengine.compile_decode(model)
    first, second = (decoder.open(cache, 12) for cache in caches)
    second.eager = partial(warmed, second)  # type: ignore[method-assign]
    places = []
    for i in range(12):
        token, place = torch.full((3, 1), 5 + i), batch["attention_mask"].sum(1, keepdim=True) + i
        assert torch.equal(first(token, place), second(token, place))
        places.append([p for x in second.state() for p in (x.data_ptr(), *x.shape, *x.stride())])
    assert all(x == places[0] for x in places)
    first.close(), second.close()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", ["full", CODED[0]])
@pytest.mark.parametrize("name", NAMES[:1] + NAMES[-1:])
def test_what_a_graph_would_record_waits_for_nothing(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the model's own code look at what a GPU computes."""
    monkeypatch.setattr("kvengine.kernels.dispatch._best", lambda inputs, native: "reference")
    model, batch = build(name), padded_batch(41)
    model.set_experts_implementation("batched_mm")  # the default counts in a way that a CPU, here below, does not
    want, device = say(kvengine.patch(model, text), count=4), Device(monkeypatch)
    found = moved_by_steps(device, monkeypatch)
    with device:
        kvengine.patch(there(kvengine.unpatch(model)), text)
        given = {key: there(x) for key, x in batch.items()}
        got = say(model, given, 4, custom_generate=CompiledDecode(model, "eager"))
        assert got.tolist() == want.tolist()
    assert found == [{}] * 3


@torch.no_grad()
def test_a_number_of_the_hosts_in_the_recording_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a token's place as the host counts it is right at the recorded step, and wrong at all others."""

    def take(self: HeldIndex, layer: Any, new: Tensor) -> Tensor:
        held = self.keys[self.layers.index(layer)]
        held[:, layer.cache.seen] = new[:, 0]
        return held

    model = kvengine.patch(build(num_hidden_layers=1), "full")
    want = say(model)
    monkeypatch.setattr(HeldIndex, "take", take)
    assert not torch.equal(say(model, custom_generate=kvengine.compile_decode(model, "trace")), want)


@torch.no_grad()
def test_a_cache_held_still_takes_nothing_beside_its_steps() -> None:
    model, batch = kvengine.patch(build(), "full"), padded_batch(41)
    cache = EngineCache(model)
    model(**batch, **passed(model, cache))
    steps = kvengine.compile_decode(model).open(cache, 4)
    for ids in (torch.full((3, 1), 5), torch.full((3, 2), 5)):
        with pytest.raises(CacheError, match="held still"):
            model(ids, **passed(model, cache))
    with pytest.raises(CacheError, match="held still"):
        cache.reorder_cache(torch.tensor([0, 1]))
    place = batch["attention_mask"].sum(1, keepdim=True)
    found = steps(torch.full((3, 1), 7), place)
    steps.close()
    twin = EngineCache(model)
    model(**batch, **passed(model, twin))
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, 1), value=1)
    want = model(torch.full((3, 1), 7), attention_mask=mask, position_ids=place, **passed(model, twin)).logits
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        model(torch.full((3, 1), 7), attention_mask=mask, **passed(model, twin))  # index keys lie where they did
    kvengine.compile_decode(model).open(twin, 4).close()
    twin.layers[1].index_keys = None
    steps = kvengine.compile_decode(model).open(twin, 4)
    with pytest.raises(CacheError, match="no index keys of the 43 tokens"):
        steps(torch.full((3, 1), 7), place)
    steps.close()


@pytest.mark.slow
def test_layers_may_be_fused(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Once for all of them: none is compiled for its number."""
    if request.config.getoption("jaxtyping_packages", None):
        pytest.skip("the compiler meets what checks signatures")
    counter, counts = CompileCounter(), []
    monkeypatch.setattr("kvengine.hf.compiled.Fused", partial(Fused, backend=counter))
    for layers in (3, 5):
        torch._dynamo.reset()
        counter.frame_count = 0
        model = kvengine.patch(build(num_hidden_layers=layers, mlp_layer_types=["sparse"] * layers), "host")
        want = say(model, count=4)
        assert torch.equal(say(model, count=4, custom_generate=kvengine.compile_decode(model, fuse=True)), want)
        counts.append(counter.frame_count)
    assert counts[0] and counts[0] == counts[1]
    torch._dynamo.reset()


def test_what_cannot_be_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model = kvengine.patch(build(), "full")
    with monkeypatch.context() as patch:
        patch.setattr(held_index, "FAMILIES", frozenset())
        with pytest.raises(UnsupportedPolicy, match="an index of its own that a recorded step does not know"):
            kvengine.patch(model, "full", record=True)
    kvengine.patch(model, "full", record=True)
    for module in model.modules():
        if hasattr(module, "kv_b_proj"):
            own = module.kv_b_proj
            module.kv_b_proj = torch.nn.Sequential(own)
    with pytest.raises(UnsupportedPolicy, match="no recording: the weights that make keys of latents"):
        kvengine.compile_decode(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("text", EXACT + CODED)
@pytest.mark.parametrize("name", NAMES)
def test_a_graph_speaks_the_same_text(name: str, text: str) -> None:
    model = build(name).cuda()
    batch = {key: x.cuda() for key, x in padded_batch(41).items()}
    with kvengine.patched(model, text):
        want, decoder = say(model, batch, 24), kvengine.compile_decode(model)
        assert decoder.how == "graph"
        assert torch.equal(say(model, batch, 24, custom_generate=decoder), want)
