"""Likelihoods of continuations: what decoding would say of them, token by token."""

from typing import Any

import pytest
import torch
from support import SMALL, llama, one, patched

import kvengine
from kvengine.errors import EvaluationError, ModelError
from kvengine.evals.likelihood import loglikelihoods

CONTEXT, OTHER = one(61)["input_ids"][0].tolist(), one(40, seed=2)["input_ids"][0].tolist()
SAID = one(9, seed=3)["input_ids"][0].tolist()
PAIRS = [(CONTEXT, SAID), (CONTEXT, SAID[:1]), (OTHER, SAID[:4]), (OTHER[:1], SAID)]


@torch.no_grad()
def by_hand(model: Any, context: list[int], said: list[int]) -> tuple[float, bool]:
    """The context but for its last token is a prompt; everything after it comes alone."""
    cache = kvengine.EngineCache(model)
    first = max(1, len(context) - 1)
    logits = model(torch.tensor([context[:first]]), cache=cache).logits[0, -1]
    for token in context[first:]:
        logits = model(torch.tensor([[token]]), cache=cache).logits[0, -1]
    total, right = 0.0, True
    for token in said:
        total, right = total + float(logits.log_softmax(-1)[token]), right and int(logits.argmax()) == token
        logits = model(torch.tensor([[token]]), cache=cache).logits[0, -1]
    return total, right


@pytest.mark.parametrize("name", ["full", "streaming", "h2o", "kivi", "quest", "snapkv"])
def test_a_likelihood_is_what_decoding_gives(name: str) -> None:
    model = patched(SMALL[name])
    for (score, right), pair in zip(loglikelihoods(model, PAIRS), PAIRS, strict=True):
        want, too = by_hand(model, *pair)
        assert score == pytest.approx(want, abs=1e-4) and right == too


def test_contexts_are_judged_in_parts_where_the_model_is_to() -> None:
    """As `generate` judges them: they were judged at their end, whatever `kvengine.patch` had been told."""
    model = kvengine.patch(llama(), "streaming(sinks=0, recent=14)", judge_every=16)
    passes = list[int]()
    hook = model.register_forward_pre_hook(lambda m, a, kw: passes.append(kw["input_ids"].shape[1]), with_kwargs=True)
    loglikelihoods(model, [(CONTEXT, SAID)])
    hook.remove()
    assert passes[:4] == [12, 16, 16, 16]


def test_without_a_policy_it_is_what_one_pass_says_and_with_one_it_is_not() -> None:
    """The first is how other tools score a text; it is all the same to them which policy there is."""
    with torch.no_grad():
        said = torch.tensor(SAID)
        logits = llama()(torch.tensor([CONTEXT + SAID[:-1]])).logits[0, -len(SAID) :].log_softmax(-1)
        want = float(logits.gather(1, said[:, None]).sum())
        blind = patched("h2o(budget=24)")(torch.tensor([CONTEXT + SAID[:-1]])).logits[0, -len(SAID) :].log_softmax(-1)
    assert float(blind.gather(1, said[:, None]).sum()) == pytest.approx(want, abs=1e-4)
    found = [loglikelihoods(patched(text), PAIRS[:1])[0][0] for text in ("full", "h2o(budget=24)")]
    assert found[0] == pytest.approx(want, abs=1e-4) and abs(found[1] - want) > 0.1


def test_what_greedy_decoding_says_is_known() -> None:
    model = patched("quest(budget=24, page=4)")
    cache = kvengine.EngineCache(model)
    model.generate(torch.tensor([CONTEXT[:-1]]), max_new_tokens=1, cache=cache)
    text = model.generate(torch.tensor([CONTEXT]), max_new_tokens=6, do_sample=False, cache=cache)
    said = text[0, len(CONTEXT) :].tolist()
    other = [*said[:-1], (said[-1] + 1) % 128]
    assert [right for _, right in loglikelihoods(model, [(CONTEXT, said), (CONTEXT, other)])] == [True, False]


def test_long_contexts_lose_their_beginning() -> None:
    model = patched("h2o(budget=24)")
    assert loglikelihoods(model, [(CONTEXT, SAID)], longest=40) == loglikelihoods(model, [(CONTEXT[-32:], SAID)])


@pytest.mark.parametrize("pair", [([], SAID), (CONTEXT, []), (CONTEXT, SAID * 6)])
def test_what_cannot_be_scored_is_refused(pair: tuple[list[int], list[int]]) -> None:
    with pytest.raises(EvaluationError, match="need a token each|does not fit into 50"):
        loglikelihoods(patched("full"), [pair], longest=50)


def test_a_model_without_a_policy_is_refused() -> None:
    with pytest.raises(ModelError, match="needs a patched model"):
        loglikelihoods(llama(), PAIRS)
