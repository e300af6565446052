"""Speculation on models some of whose layers keep states: what a draft has put into them must come out again."""

import copy
import itertools
from itertools import product
from typing import Any

import pytest
import torch
from families import configs

import kvengine
from kvengine.errors import ModelError, UnsupportedPolicy
from kvengine.hf.states import Kept, has_states, held_states
from kvengine.speculative import TriForce
from kvengine.speculative.accept import rule
from kvengine.speculative.clock import Watch
from kvengine.speculative.law import Law, Text
from kvengine.speculative.session import LATE
from kvengine.speculative.stateful import StatefulSession, session_of

FAMILIES = ("qwen3_next", "qwen3_5", "lfm2", "falcon_h1", "zamba2", "zaya", "lara_mini")
"""Recurrent states, some beside the tokens of a layer; convolutions alone; beside windows, in a layer (zaya) or in others."""
MIDDLES = [None, "quest(budget=24, page=4)", "streaming(sinks=2, recent=20)", "kvzip(budget=24, chunk=16, carry=3)"]
STACKS = ["full", "h2o(budget=24)", "snapkv(budget=16, window=4)", "quest(budget=24, page=4)"]
LENGTH = 24


def prompt(rows: int = 1) -> torch.Tensor:
    return configs.padded_batch()["input_ids"][:1].repeat(1, 2).repeat(rows, 1)


def built(name: str, seed: int = 0, policy: str = "full") -> Any:
    if not configs.exists(name):
        pytest.skip(f"this transformers has no {name}")
    return kvengine.patch(configs.build(name, seed), policy)


def blurred(model: Any, by: float = 0.01) -> Any:
    """A draft that often agrees, and often does not."""
    twin, noise = copy.deepcopy(model), torch.Generator().manual_seed(4)
    for weight in twin.parameters():
        weight.data += by * torch.randn(weight.shape, generator=noise)
    return twin


def generated(decoder: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.as_tensor(decoder.generate(ids, max_new_tokens=LENGTH, **options))


def combinations() -> list[Any]:
    """All; most of them are slow, together."""
    found = list(product(FAMILIES, MIDDLES, STACKS))
    return [pytest.param(*some, marks=[] if i % 13 == 0 else [pytest.mark.slow]) for i, some in enumerate(found)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "middle", "stack"), combinations())
def test_the_text_is_the_models_own(name: str, middle: str | None, stack: str) -> None:
    model, ids = built(name, policy=stack), prompt()
    want = generated(model, ids, do_sample=False)
    draft = blurred(model) if middle is None else "lookup"
    decoder = TriForce(model, draft, middle, (2, 5), stack=stack, draft_stack="full")
    assert torch.equal(generated(decoder, ids, do_sample=False), want)
    target = decoder.report.tiers[0]
    assert 0 < sum(target.tested) and (middle in (None, stack) or sum(target.stood) < sum(target.tested))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("middle", [None, "h2o(budget=500)", "quest(budget=400, page=4)", "full"])
@pytest.mark.parametrize("name", FAMILIES[::2])
def test_a_draft_that_reads_all_is_always_right(name: str, middle: str | None) -> None:
    """So its states are the target's, whatever was drafted and taken back: behind a wrong draft too."""
    model = built(name)
    decoder = TriForce(
        model, built(name) if middle is None else built(name, seed=3), middle, (2, 3), draft_stack="full"
    )
    generated(decoder, prompt(), do_sample=False)
    target = decoder.report.tiers[0]
    assert sum(target.tested) > 10 and sum(target.tested) == sum(target.stood)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("middle", [None, "streaming(sinks=2, recent=20)"])
def test_rows_of_a_batch_and_sampled_text_are_as_without_drafts(middle: str | None) -> None:
    model, ids = built("qwen3_next"), prompt(2)
    ids[1] = ids[1].roll(3)
    plain, drafted = (
        TriForce(model, None, None),
        TriForce(model, "lookup" if middle else blurred(model), middle, (2, 3)),
    )
    options = {"temperature": 0.9, "seed": 5, "coupled": True}
    assert torch.equal(generated(drafted, ids, **options), generated(plain, ids, **options))


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_logits_behind_a_draft_that_fell_are_as_if_there_had_been_none(name: str) -> None:
    model = built(name)
    text = Text(prompt()[0].tolist())
    session, plain = (session_of(model, kvengine.EngineCache(model)) for _ in range(2))
    assert isinstance(session, StatefulSession)
    for one in (session, plain):
        one.prefill(text.tokens)
    for new, drafted in ((3, [4, 5, 6]), (7, []), (8, [9, 10]), (11, [12] * 9), (13, [14])):
        text.tokens.append(new)
        for one in (session, plain):
            one.settle(text)
        got = session.feed([*session.align(text, ()), *drafted])[-1 - len(drafted)]
        session.forget(len(drafted))
        want = plain.feed(plain.align(text, ()))[-1]
        torch.testing.assert_close(got, want, rtol=5e-3, atol=5e-3)
    assert session.settled < len(text) - 1 == plain.settled


@torch.no_grad()
def test_what_stood_beside_what_fell_is_read_with_the_next_draft_and_no_later() -> None:
    """Every pass has what is missing and the draft; when much is missing, it is read by itself."""
    model = built("qwen3_next")
    text, counted = Text(prompt()[0].tolist()), []
    session = session_of(model, kvengine.EngineCache(model))
    session.prefill(text.tokens)
    for new in range(3 * LATE):
        text.tokens.append(3 + new)
        session.settle(text)
        missing = session.align(text, ())
        session.feed([*missing, 50, 51])
        session.forget(2)
        assert session.cache.seen == session.settled and not session.open
        counted.append(len(missing))
    assert counted == list(range(1, LATE + 1)) * 3


def test_what_all_stands_is_read_once() -> None:
    model = built("lfm2")
    decoder = TriForce(model, built("lfm2"), None, (2, 5), draft_stack="full")
    generated(decoder, prompt(), do_sample=False)
    target = decoder.report.tiers[0]
    assert target.fed == LENGTH - 1 and target.passes < LENGTH // 4


@torch.no_grad()
def test_states_are_kept_in_memory_of_their_own_that_is_taken_once() -> None:
    model, ids = built("falcon_h1"), prompt()
    cache = kvengine.EngineCache(model)
    model(ids, cache=cache)
    kept = Kept(cache.layers)
    before, places = [x.clone() for x in kept.now()], [x.data_ptr() for x in kept.states]
    mine = {x.data_ptr() for layer in cache.layers for x in held_states(layer)}
    assert before and not mine & set(places)
    model(ids[:, :3], cache=cache)
    assert any(not torch.equal(a, b) for a, b in zip(kept.now(), before, strict=True))
    kept.put_back()
    assert all(torch.equal(a, b) for a, b in zip(kept.now(), before, strict=True))
    model(ids[:, :3], cache=cache)
    kept.take()
    assert [x.data_ptr() for x in kept.states] == places
    assert all(torch.equal(a, b) for a, b in zip(kept.now(), kept.states, strict=True))


def test_a_middles_states_are_its_own() -> None:
    model = built("falcon_h1")
    decoder = TriForce(model, "lookup", "streaming(sinks=2, recent=20)", (2, 3))
    caches = []
    echo = decoder._echo

    def seen(top: Any, middle: Any) -> Any:
        caches.extend([top.cache, (mine := echo(top, middle)).cache])
        return mine

    decoder._echo = seen  # type: ignore[method-assign]
    generated(decoder, prompt(), do_sample=False)
    target, own = (
        {x.data_ptr() for layer in cache.layers if has_states(layer) for x in held_states(layer)} for cache in caches
    )
    assert target and own and not target & own


def test_what_a_state_cannot_do_is_refused() -> None:
    with pytest.raises(UnsupportedPolicy, match="states, which hold no tokens"):
        TriForce(built("qwen3_next"), "lookup", "quest(budget=24, page=4)", in_place=True)
    with pytest.raises(ModelError, match="window or states"):
        TriForce(built("qwen3_next"), "recycling", None)
    with pytest.raises(ModelError, match="window or states"):
        TriForce(built("llama"), built("falcon_h1"), None, widths=(2, 2))


@pytest.mark.parametrize(("name", "ticks"), [("qwen3_next", 1), ("llama", 0)])
def test_what_is_read_while_settling_is_on_the_clock(name: str, ticks: int) -> None:
    """Or `gamma="auto"` would take drafts that fall for cheaper than they are."""
    model, text = built(name), Text(prompt()[0].tolist())
    tier = TriForce(model, "lookup", None).tiers(Law([], greedy=True), rule(0, 0, coupled=False), frozenset(), Watch())
    tier.session.prefill(text.tokens)
    text.tokens += range(2, 3 + LATE)
    tier.clock = map(float, itertools.count()).__next__
    tier.settle(text)
    assert (tier.session.passes, tier.session.fed) == (ticks, ticks * LATE)
    assert tier.other == ticks and tier.session.settled == len(text) - 1 - (0 if ticks else LATE)


def test_a_model_that_forgets_its_states_is_refused() -> None:
    """In a pass of several tokens, which is what judges; transformers' own text of several turns is wrong there too."""
    with pytest.raises(ModelError, match="jamba over several tokens behind others begins with empty states"):
        TriForce(configs.build("jamba"), "lookup", None)
