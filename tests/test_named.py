"""Tokens that a model names itself: a decoded token reads these and no others, wherever they lie."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_layer import draw
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from kvengine.cache import LayerCache
from kvengine.errors import UnsupportedPolicy
from kvengine.fixed import FixedLayer, refusal
from kvengine.named import among, slots
from kvengine.session import Call
from kvengine.stack import Stack

STACKS = [
    "full", "host", "kivi(bits=4, group=8, residual=8)", "turboquant(residual=8)", "quantspec(group=8, residual=8)",
    "kivi(bits=2, group=8, residual=0) + host", "disk(device=2048, host=2048)",
]  # fmt: skip
PROMPT, CHOSEN = 61, 6


def names(seen: int, queries: int, rows: int = 2, chosen: int = CHOSEN, seed: int = 0) -> Tensor:
    """Numbers of tokens so far, some of them twice or none; the newest among them, so that there is something to read."""
    rng = torch.Generator().manual_seed(seed)
    found = torch.randint(-1, seen, (rows, queries, chosen), generator=rng)
    found[..., 0] = torch.arange(seen - queries, seen)
    return found


@given(st.integers(1, 3), st.integers(1, 12), st.integers(1, 9), st.integers(0, 1 << 16))
@settings(max_examples=40)
def test_slots_hold_what_is_named(rows: int, seen: int, chosen: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    named = torch.randint(-1, seen + 2, (rows, 2, chosen), generator=rng)
    position = torch.stack([torch.randperm(seen + 3, generator=rng) for _ in range(rows)]) - 3
    position = position.clamp(min=-1).int()
    found = among(named, position, seen)
    for r, q, s in torch.cartesian_prod(torch.arange(rows), torch.arange(2), torch.arange(seen + 3)).tolist():
        at = int(position[r, s])
        assert bool(found[r, q, s]) == (0 <= at < seen and at in named[r, q].tolist())
    where = slots(named[:, 0], position, seen)
    for r in range(rows):
        mine = [s for s in where[r].tolist() if s >= 0]
        assert sorted(mine) == found[r, 0].nonzero()[:, 0].tolist()


def wanted(cache: LayerCache, q: Tensor, k: Tensor, v: Tensor, named: Tensor, scale: float) -> Tensor:
    """Plain attention of one token over what is held before it and itself, where it is named."""
    held_k, held_v, position, _ = cache.parts[0].lane.everything()
    keys, values = (torch.cat([x.float(), new.flatten(0, 1)], 1) for x, new in ((held_k, k), (held_v, v)))
    position = torch.cat([position, torch.full((len(position), 1), cache.seen)], 1)
    heads = k.shape[1]
    out = []
    for row in range(len(keys)):
        sequence, head = divmod(row, heads)
        read = [i for i, at in enumerate(position[row].tolist()) if at >= 0 and at in named[sequence, 0].tolist()]
        for query in q[sequence].unflatten(0, (heads, -1))[head, :, 0]:
            weights = (keys[row, read] @ query * scale).softmax(0)
            out.append(weights @ values[row, read])
    return torch.stack(out).unflatten(0, (len(q), -1))[:, None]


@pytest.mark.parametrize("text", STACKS)
def test_a_decoded_token_reads_what_is_named(text: str) -> None:
    """A row with padding among them; whether the tail is short, and read under a mask, or long."""
    tokens = draw(PROMPT + 40, sequences=2)
    cache = LayerCache(Stack.parse(text), 0, 1)
    valid = torch.arange(PROMPT) >= torch.tensor([0, 23])[:, None]
    cache.forward(*tokens.part(0, PROMPT), Call(0.25, named=names(PROMPT, PROMPT)), valid)
    for i in range(PROMPT, PROMPT + 40):
        q, k, v = tokens.part(i, i + 1)
        asked = names(i + 1, 1, chosen=CHOSEN if i % 3 else 50, seed=i)
        want = wanted(cache, q, k, v, asked, 0.25)
        got = cache.forward(q, k, v, Call(0.25, named=asked))
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-4)
        lane = cache.parts[0].lane
        read = [sorted(at for at in row if at >= 0) for row in lane.reach().tolist()]
        padding = [[], list(range(23))]
        for row, found in enumerate(read):
            assert found == sorted(set(asked[row // 2, 0].tolist()) - {-1} - set(padding[row // 2]))


@pytest.mark.parametrize("text", STACKS)
def test_several_tokens_name_each_for_itself(text: str) -> None:
    tokens = draw(PROMPT + 30, sequences=2)
    cache = LayerCache(Stack.parse(text), 0, 1)
    cache.forward(*tokens.part(0, PROMPT), Call(0.25, named=names(PROMPT, PROMPT)))
    alone = copy.deepcopy(cache)
    cache.session.following = True
    asked = names(PROMPT + 30, 30)
    for a, b in ((0, 11), (11, 30)):
        got = cache.forward(*tokens.part(PROMPT + a, PROMPT + b), Call(0.25, named=asked[:, a:b]))
        steps = range(PROMPT + a, PROMPT + b)
        want = [
            alone.forward(*tokens.part(i, i + 1), Call(0.25, named=asked[:, i - PROMPT : i - PROMPT + 1]))
            for i in steps
        ]
        torch.testing.assert_close(got, torch.cat(want, 1), rtol=2e-4, atol=2e-5)


def test_a_later_prompt_reads_what_each_of_its_queries_names() -> None:
    """Over pages, which the model's own attention cannot read."""
    tokens = draw(PROMPT + 20, sequences=2)
    cache = LayerCache(Stack.parse("host"), 0, 1)
    cache.forward(*tokens.part(0, PROMPT), Call(0.25, named=names(PROMPT, PROMPT)))
    asked = names(PROMPT + 20, 20)
    alone = copy.deepcopy(cache)
    got = cache.forward(*tokens.part(PROMPT, PROMPT + 20), Call(0.25, named=asked))
    for i in range(20):
        q, k, v = tokens.part(PROMPT + i, PROMPT + i + 1)
        want = wanted(alone, q, k, v, asked[:, i : i + 1], 0.25)
        torch.testing.assert_close(got[:, i : i + 1], want, rtol=2e-4, atol=2e-5)
        alone.forward(q, k, v, Call(0.25, named=asked[:, i : i + 1]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", [text for text in STACKS if refusal(Stack.parse(text)) is None])
def test_a_recorded_step_reads_what_is_named_then(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row with padding among them. Some of what is named is yet to come, as where fewer may be read than are named."""
    monkeypatch.setattr("kvengine.kernels.dispatch._best", lambda inputs, native: "reference")
    tokens, steps = draw(PROMPT + 20, sequences=2), 20
    valid = torch.arange(PROMPT) >= torch.tensor([0, 23])[:, None]
    eager, held = (LayerCache(Stack.parse(text), 0, 1) for _ in range(2))
    for cache in (eager, held):
        cache.forward(*tokens.part(0, PROMPT), Call(0.25, named=names(PROMPT, PROMPT)), valid)
    now, replay = torch.tensor([PROMPT]), None
    found: list[Tensor] = []
    fixed = FixedLayer(held, steps, now)
    for i in range(steps):
        asked = names(PROMPT + i + 1, 1, seed=i)
        asked[..., -1] = PROMPT + i + 3
        given = [x.clone() for x in tokens.part(PROMPT + i, PROMPT + i + 1)]
        want = eager.forward(*given, Call(0.25, named=asked))
        if replay is None:
            state = [now, *fixed.state()]

            def step(q: Tensor, k: Tensor, v: Tensor, asked: Tensor, *state: Tensor) -> Tensor:
                found.append(fixed.step(q, k, v, Call(0.25, named=asked)))
                now.add_(1)
                return found[0]

            replay = make_fx(step)(*given, asked, *state)
            got = found[0]
        else:
            got = replay(*given, asked, *state)
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
        fixed.advance()
    fixed.release()
    asked = names(PROMPT + steps, 1)
    given = [x[:, :, -1:] for x in (tokens.part(0, PROMPT + steps))]
    want, got = (cache.forward(*given, Call(0.25, named=asked)) for cache in (eager, held))
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)


def test_trees_are_refused() -> None:
    cache = LayerCache(Stack(), 0, 1)
    cache.named = True
    cache.session.tree = torch.ones(1, 1, dtype=torch.bool)
    tokens = draw(4)
    with pytest.raises(UnsupportedPolicy, match="drafts that are trees"):
        cache.forward(*tokens.part(0, 4), Call(0.25))
