"""Positions are stored only where somebody asks for more than the order of tokens, and nobody can tell the difference."""

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
import torch
from support import SMALL, Bare, one, patched, prompts
from torch import Tensor

import kvengine
from kvengine import tail
from kvengine.errors import CacheError
from kvengine.evals import maps
from kvengine.policies.retention.streaming import Streaming
from kvengine.stack import Stack

ONCE = [
    "streaming(sinks=3, recent=14, decode=False)",
    "streaming(sinks=3, recent=0.3, decode=False)",
    "h2o(budget=24, decode=False)",
    "h2o(budget=0.4, recent=0.7, decode=False)",
    "h2o(budget=24, recent=0, average=True, decode=False)",
    "tova(budget=24, recent=5, decode=False)",
    "snapkv(budget=0.1, window=12)",
    "pyramidkv(budget=0.3, window=12)",
    "keydiff(budget=20, recent=9)",
    "expected_attention(budget=3)",
    "expected_attention(budget=0.4, sinks=6)",
]
BANDED = "ashape(sinks=2, local=12) + snapkv(budget=24, window=6)"  # whose next prompt asks where everything is
ORDERED = [*(t for t in SMALL.values() if Stack.parse(t).retention.order is not None), *ONCE, BANDED]


def turns(seed: int) -> Iterator[tuple[int, bool]]:
    """Prompts of all lengths, decoded tokens and follow-ups, 200 tokens in all."""
    draw, left = Random(seed), 200
    while left:
        n = min(left, draw.choice([1, 1, 1, 2, 5, 17, 60]))
        yield n, draw.random() < 0.3
        left -= n


def run(text: str, positions: bool, seed: int) -> tuple[list[Tensor], Bare]:
    fed = Bare(text, seed=seed)
    fed.cache.session.positions = positions
    outs = []
    for n, follows in turns(seed):
        fed.cache.session.following = follows
        outs.append(fed.feed(n))
    return outs, fed


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("text", ORDERED)
def test_order_tells_enough(text: str, seed: int) -> None:
    (mine, without), (theirs, with_them) = run(text, False, seed), run(text, True, seed)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    bare, placed = (fed.cache.parts[0].lane.tail for fed in (without, with_them))
    assert len(bare) == len(placed) and torch.equal(bare.held()[0], placed.held()[0])
    assert placed.exact and (bare.count() == placed.count()).all()
    if not without.cache.parts[0].lane.retention.decodes and not bare.exact:
        assert bare.tensors()["position"].numel() == 0 < placed.tensors()["position"].numel()


def test_a_method_that_claims_too_much_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: sinks that are not declared are lost among the newest."""
    monkeypatch.setattr(Streaming, "order", 0)
    found = [run(ONCE[0], positions, 0)[0] for positions in (False, True)]
    assert not all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("text", ["full", "snapkv(budget=24, window=6)", ONCE[0]])
def test_a_cache_holds_keys_and_values_and_nothing_else(text: str) -> None:
    model = patched(text)
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(**one(), cache=cache)
    held = cache.stats().bytes["device"]
    assert held["tail.position"] == held["tail.score"] == 0
    assert held["tail.k"] == int(cache.stats().held.sum()) * 16 * 4


def test_padding_and_pictures_ask_for_positions() -> None:
    model = patched("snapkv(budget=24, window=6)")
    padded, asked, plain = (kvengine.EngineCache(model, positions=wanted) for wanted in (False, True, False))
    with torch.no_grad():
        model(**prompts(), cache=padded)
        for cache in (asked, plain):
            model(**one(), cache=cache)
    assert maps.held(padded).sum() == 2 * 3 * 2 * 24 and maps.held(asked).sum() == 2 * 2 * 24
    with pytest.raises(CacheError, match=r"EngineCache\(model, positions=True\)"):
        maps.held(plain)
    asked.reset()
    assert asked.session.positions


def test_growing_is_cheap_and_spares_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """n appended tokens: PART copies of each on average at most, and less than a PART-th (or GROWTH slots) to spare."""
    copied, moved = [0], tail.moved

    def counted(x: Tensor, slots: int) -> Tensor:
        copied[0] += x.shape[1]
        return moved(x, slots)

    monkeypatch.setattr(tail, "moved", counted)
    token: Any = torch.zeros(1, 1, 1)
    some = tail.Tail(token, token, scored=False, placed=False)
    for n in range(1, 4001):
        some.append(token, token, torch.zeros(1, 1, dtype=torch.int32), True)
        assert copied[0] <= 2 * tail.PART * n  # keys and values
        assert 0 <= some.capacity - n < max(tail.GROWTH, n / tail.PART + 1)
