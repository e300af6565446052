"""Gradients through a cache that a model goes on from: those of plain autograd, or refused by the backward pass."""

import copy
from typing import Any

import pytest
import torch
from support import MIXED, SMALL, every, one, patched
from torch import Tensor

from kvengine import EngineCache, memory
from kvengine.cache import LayerCache
from kvengine.errors import CacheError, ModelError
from kvengine.hf.names import CACHE
from kvengine.kernels.span_attention import causal_spans, span_attention
from kvengine.session import Call, Session
from kvengine.stack import Stack

STACKS = {name: text for name, text in SMALL.items() if text not in ("uniform", "exact", "dense", "all", "device")}
READ, ALL = 60, 80


def vectors(model: Any) -> tuple[Tensor, Tensor]:
    """What is read first, and what follows."""
    found = model.get_input_embeddings()(one(ALL)["input_ids"]).detach()
    return found[:, :READ].clone(), found[:, READ:].clone()


def frozen(text: str) -> Any:
    return patched(text).requires_grad_(False)


def loss(model: Any, before: Tensor, after: Tensor, steps: bool = False, follow: bool = False) -> Tensor:
    """Of what follows. `steps`: token by token. `follow`: in one pass, taken one by one."""
    cache = EngineCache(model)
    with torch.set_grad_enabled(before.requires_grad):
        model(inputs_embeds=before, cache=cache)
    cache.follow_up(follow)
    parts = after.split(1, 1) if steps else [after]
    found = [model(inputs_embeds=x, cache=cache).logits for x in parts]
    return torch.cat(found, 1).log_softmax(-1)[..., :5].sum()


def slope(model: Any, before: Tensor, after: Tensor, first: bool) -> tuple[float, float]:
    """How the loss changes along its gradient for what came before (or after), by that gradient and by two passes.

    Of three step sizes, the one that agrees more: a verdict may change between two points.
    """
    x = before if first else after
    loss(model, before, after).backward()
    assert x.grad is not None
    want, way = float(x.grad.norm()), x.grad / x.grad.norm()
    found = []
    with torch.no_grad():
        for step in (3e-4, 1e-3, 3e-3):
            ends = [x.detach() + sign * step * way for sign in (1, -1)]
            up, down = (float(loss(model, e, after) if first else loss(model, before, e)) for e in ends)
            found.append((up - down) / (2 * step))
    return want, min(found, key=lambda y: abs(y - want))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("length", [1, ALL - READ])
@pytest.mark.parametrize("text", every(3, [*STACKS.values(), *MIXED]))
def test_a_pass_over_what_was_read_without_gradients_has_the_right_ones(text: str, length: int) -> None:
    model = frozen(text)
    before, after = vectors(model)
    after = after[:, :length].clone().requires_grad_()
    try:
        want, found = slope(model, before, after, first=False)
    except CacheError as refusal:
        assert length == 1 and "d2o" in text and "has written there since" in str(refusal)  # it merges in place
    else:
        assert found == pytest.approx(want, rel=2e-3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", every(3, [*STACKS.values(), *MIXED], 1))
def test_gradients_of_two_passes_are_right_or_refused(text: str) -> None:
    model = frozen(text)
    before, after = vectors(model)
    before.requires_grad_()
    try:
        want, found = slope(model, before, after, first=True)
    except CacheError as refusal:
        lost = ("kivi", "quantspec", "turboquant", "zipcache", "host", "disk", "remote")
        assert any(x in text for x in lost) and "quantised or moved away" in str(refusal)
    else:
        assert found == pytest.approx(want, rel=2e-3)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", ["steps", "follow"])
@pytest.mark.parametrize("name", ["full", "h2o", "quantspec", "quest", "streaming", "duo", "lowrank", "disk"])
def test_a_backward_pass_over_what_has_changed_says_so(name: str, way: str) -> None:
    model = frozen(STACKS[name])
    before, after = vectors(model)
    found = loss(model, before, after.requires_grad_(), **{way: True})
    if way == "follow" and name in ("full", "lowrank"):
        found.backward()  # whose tokens are taken at once
    else:
        with pytest.raises(CacheError, match=r"(has written there since|moved away).*no_grad.*without follow_up"):
            found.backward()


@pytest.mark.parametrize(
    "text", ["streaming(sinks=2, recent=8)", "h2o(budget=10)", "tova(budget=10)", "elastic(budget=10)"]
)
def test_a_token_without_gradients_in_the_slot_of_one_that_was_read_is_noticed(text: str) -> None:
    model, ids = frozen(text), one(ALL)["input_ids"]
    cache, soft = EngineCache(model), vectors(model)[1][:, :1].clone().requires_grad_()
    with torch.no_grad():
        model(ids[:, :READ], cache=cache)
    found = model(inputs_embeds=soft, cache=cache).logits.sum()
    with torch.no_grad():
        for i in range(10):
            model(ids[:, i : i + 1], cache=cache)
    with pytest.raises(CacheError, match="has written there since"):
        found.backward()


def test_frozen_tokens_are_read_with_the_gradients_of_earlier_ones() -> None:
    """After steps of the C kernels, a soft prompt; then a token that needs no gradient itself."""
    model, ids = frozen("full"), one(ALL)["input_ids"]
    cache, soft = EngineCache(model), vectors(model)[1][:, :1].clone().requires_grad_()
    with torch.no_grad():
        model(ids[:, :READ], cache=cache)
        for i in range(3):
            model(ids[:, READ + i : READ + i + 1], cache=cache)
    model(inputs_embeds=soft, cache=cache)
    layer = cache.engines[0].parts[0].lane
    assert layer.tail.k.requires_grad
    with pytest.raises(CacheError, match="has written there since"):
        model(ids[:, -1:], cache=cache).logits.sum().backward()


def test_a_loop_that_forgot_its_gradients_goes_on_and_its_cache_is_not_copied() -> None:
    model, ids = patched(SMALL["snapkv"]), one()["input_ids"]
    out = model(ids, use_cache=True)
    model(ids[:, :1], cache=out[CACHE])
    with pytest.raises(CacheError, match=r"gradients, which cannot be copied.*no_grad"):
        copy.deepcopy(out[CACHE])


def test_a_page_sealed_with_gradients_is_chosen_among_those_that_were_without() -> None:
    """Of a shorter row: what is known of pages has room for it, and was looked at under no_grad()."""
    rng = torch.Generator().manual_seed(0)
    feed = lambda n: [torch.randn(2, heads, n, 16, generator=rng) for heads in (4, 2, 2)]  # noqa: E731
    valid = torch.ones(2, 400, dtype=torch.bool)
    valid[1, :10] = False
    layer = LayerCache(Stack.parse("quest(budget=24, page=4)"), 0, 1, Session())
    with torch.no_grad():
        layer.forward(*feed(400), Call(0.25), valid)
        layer.forward(*feed(1), Call(0.25))
    twin, pages = copy.deepcopy(layer), layer.parts[0].lane.pages
    assert pages is not None and pages.filled.tolist() == [25, 25, 24, 24]
    for _ in range(11):
        token = feed(1)
        out = layer.forward(*(x.requires_grad_() for x in token), Call(0.25))
        with torch.no_grad():
            want = twin.forward(*(x.detach() for x in token), Call(0.25))
        torch.testing.assert_close(out.detach(), want)
    assert pages.filled.tolist() == [25, 25, 25, 25]
    assert not any(x.requires_grad for x in pages.summary.values())  # nobody asks for the gradient of a choice


def test_a_sink_alone_may_want_its_gradient() -> None:
    q, k, v = (torch.randn(2, *n, 16) for n in ((2, 4), (4,), (4,)))
    place, spans = torch.arange(4).expand(2, -1), causal_spans(4, 4, q.device)
    sinks = torch.zeros(2, 2, requires_grad=True)
    span_attention(q, k, v, place, spans, scale=1.0, sinks=sinks).sum().backward()
    assert sinks.grad is not None and bool(sinks.grad.any())


@pytest.mark.parametrize("name", ["full", "h2o", "quest"])
def test_blocks_of_memory_of_their_own_take_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt's keys and values lie in one."""
    found = []
    for size in (memory.HUGE, 4096):
        monkeypatch.setattr(memory, "HUGE", size)
        model, ids = patched(STACKS[name]), one(ALL)["input_ids"]
        model(ids, use_cache=True).logits.log_softmax(-1)[..., :5].sum().backward()
        found.append([x.grad for x in model.parameters()])
    for ours, mapped in zip(*found, strict=True):
        torch.testing.assert_close(mapped, ours, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own way there
@pytest.mark.parametrize(("tokens", "way"), [(1, "dual"), (ALL, "jvp")])
def test_derivatives_that_go_forward_are_refused_and_the_cache_goes_on(tokens: int, way: str) -> None:
    """They were dropped at the first kernel, and the model's answer had others than its own, in silence."""
    model = frozen("full")
    before, after = vectors(model)
    x = torch.cat([before, after], 1)[:, -tokens:]
    cache, fresh = EngineCache(model), EngineCache(model)
    with torch.no_grad():
        if tokens < ALL:
            model(inputs_embeds=before, cache=cache), model(inputs_embeds=before, cache=fresh)
        with pytest.raises(ModelError, match="do not pass through an engine cache"):
            if way == "jvp":
                torch.func.jvp(lambda x: model(inputs_embeds=x, cache=cache).logits, (x,), (x,))
            else:
                with torch.autograd.forward_ad.dual_level():
                    model(inputs_embeds=torch.autograd.forward_ad.make_dual(x, x), cache=cache)
        with torch.autograd.forward_ad.dual_level():  # what carries none is no matter
            found = [model(inputs_embeds=x, cache=one).logits for one in (cache, fresh)]
    assert torch.equal(*found)
