"""Drafts that read the target's own rows: the same tokens as a copy would hold, for four bytes each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_spec import llama, prompt
from torch import Tensor

import kvengine
from kvengine.errors import UnsupportedPolicy
from kvengine.hf.cache import EngineCache
from kvengine.speculative.echo import Echo, Refresh
from kvengine.speculative.law import Text
from kvengine.speculative.places import LayerPlaces, why_not
from kvengine.speculative.session import Session
from kvengine.speculative.triforce import TriForce
from kvengine.speculative.view import ViewCache, can_view
from kvengine.stack import Stack

MIDDLES = [
    "full",
    "quest(budget=24, page=4)",
    "retrieval(budget=24, chunk=4)",
    "tidal(budget=24, start=0, reselect=0)",
    "landmarks(budget=40, chunk=4)",
    "streaming(sinks=4, recent=20)",
    "snapkv(budget=24, window=4)",
    "pyramidkv(budget=24, window=6)",
    "adakv(budget=24, window=6)",
    "keydiff(budget=24)",
    "chunkkv(budget=24, window=4)",
    "expected_attention(budget=24)",
]
ONCE = [
    "h2o(budget=24, decode=False)",
    "tova(budget=24, decode=False)",
    "streaming(sinks=4, recent=20, decode=False)",
]


@pytest.fixture(scope="module")
def model() -> Any:
    return kvengine.patch(llama())


def beside(model: Any, middle: str, in_place: bool) -> tuple[Session, Echo, Text]:
    """A target that has read a prompt, and its draft."""
    whole, stack = Session(model, EngineCache(model, "full")), Stack.parse(middle)
    if in_place:
        cache: EngineCache = ViewCache(model, whole.cache, stack, LayerPlaces)
    else:
        cache = ViewCache(model, whole.cache, stack) if can_view(stack) else EngineCache(model, stack)
    mine, text = Echo(model, cache, whole=whole, refresh=Refresh(every=3, below=0.0)), Text(prompt(120)[0].tolist())
    whole.prefill(text.tokens)
    mine.prefill(text.tokens)
    text.tokens.append(3)
    return whole, mine, text


@pytest.mark.parametrize("middle", [*MIDDLES, *ONCE])
def test_it_reads_what_a_copy_holds(model: Any, middle: str) -> None:
    """The logits of drafts agree round after round; a stream's window may be wider by the tokens drafted."""
    pairs = [beside(model, middle, in_place) for in_place in (False, True)]
    for stand in (2, 0, 4, 1):
        drafts: list[Tensor] = []
        for whole, mine, text in pairs:
            drafted = [5, 6, 7, 8]
            drafts.append(mine.feed([text.tokens[-1], *drafted[:-1]]))
            whole.feed([*text.since(whole.settled, ()), *drafted])
            whole.forget(len(drafted) - stand)
            text.tokens += [*drafted[:stand], 9]
            whole.settle(text)
            mine.settle(text)
        if middle in ONCE or not middle.startswith("streaming"):
            torch.testing.assert_close(drafts[0], drafts[1], rtol=1e-4, atol=1e-4)
        else:
            torch.testing.assert_close(drafts[0][:1], drafts[1][:1], rtol=0.2, atol=1.0)


@pytest.mark.parametrize("middle", MIDDLES)
def test_greedy_text_and_bytes(model: Any, middle: str) -> None:
    """The text is the target's, and a token costs a row four bytes; what a selection remembers of units comes on top."""
    ids = prompt(200)
    decoder = TriForce(model, "lookup", middle, gamma=(2, 4), in_place=True)
    kept: list[Any] = []
    tiers = decoder.tiers
    decoder.tiers = lambda *a: kept.append(tiers(*a)) or kept[-1]  # type: ignore[method-assign, func-returns-value]
    out = decoder.generate(ids, max_new_tokens=8, do_sample=False)
    assert out.tolist() == model.generate(ids, max_new_tokens=8, do_sample=False).tolist()
    top, mine = decoder.report.tiers
    views = kept[0].below.session.cache.views.values()
    tensors = [x for view in views for x in (view.index, *view.summary.values(), *view.tail.tensors().values())]
    assert mine.cache_bytes == sum(x.untyped_storage().nbytes() for x in tensors)
    assert not {x.data_ptr() for x in tensors} & {
        e.parts[0].lane.tail.k.data_ptr() for e in kept[0].session.cache.engines
    }
    longest = max(view.index.shape[1] for view in views)
    assert sum(view.index.untyped_storage().nbytes() for view in views) <= 4 * 2 * 2 * longest < top.cache_bytes / 8


@pytest.mark.parametrize(
    "middle, stack, reason",
    [
        ("kivi(bits=4)", "full", "its codes"),
        ("zipcache", "full", "its codes"),
        ("shadowkv", "full", "its codes"),
        ("h2o(budget=24)", "full", "judges while decoding"),
        ("tova(budget=24)", "full", "judges while decoding"),
        ("d2o(budget=24)", "full", "merges tokens"),
        ("duo(sparsity=0.5)", "full", "sets of different sizes"),
        ("streaming(positions='in-cache')", "full", "other positions"),
        ("snapkv(budget=64) + quest(budget=24, page=4)", "full", "nobody holds"),
        ("host", "full", "a place of its own"),
        ("quest(budget=64)", "host", "side by side"),
        ("quest(budget=64)", "quantspec", "side by side"),
    ],
)
def test_what_cannot_be_read_in_place_is_refused(model: Any, middle: str, stack: str, reason: str) -> None:
    assert reason in str(why_not(Stack.parse(middle), Stack.parse(stack)))
    with pytest.raises(UnsupportedPolicy, match=reason):
        TriForce(model, "lookup", middle, stack=stack, in_place=True)
