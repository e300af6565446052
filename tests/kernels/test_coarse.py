"""Choosing units through 8-bit bounds is choosing them by the bounds."""

from __future__ import annotations

import math
from copy import copy

import pytest
import support_kernels as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_layer import draw, run
from torch import Tensor

from kvengine.kernels.page_scores import best_units, page_bounds, page_scores, top_units
from kvengine.kernels.page_scores.coarse import Coarse
from kvengine.policies.selection.quest import Quest
from kvengine.stack import Stack

pytestmark = pytest.mark.skipif("native" not in oracle.backends(), reason="no C compiler")
UNITS = 700


def bounds(dim: int, seed: int = 0, units: int = UNITS) -> tuple[Tensor, Tensor, Tensor]:
    """Of keys with outlying channels, as models have them; dead units hold NaN."""
    rng = torch.Generator().manual_seed(seed)
    k = torch.randn(3, units * 4, dim, generator=rng)
    k[..., :2] = k[..., :2] * 5 + 80
    low, high = page_bounds(k, torch.ones(3, units * 4, dtype=torch.bool), 4)
    alive = torch.rand(3, units, generator=rng) < 0.9
    alive[1, 64:128] = False
    low[~alive], high[~alive] = math.nan, math.nan
    return low, high, alive


def plain(q: Tensor, low: Tensor, high: Tensor, alive: Tensor, count: int, reduce: str = "max") -> Tensor:
    return top_units(page_scores(q, low, high, alive, reduce=reduce), count)  # type: ignore[arg-type]


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (3, 40), (4, 128), (9, 72)], ids=str)
def test_chooses_what_the_plain_scan_chooses(shape: tuple[int, int], dtype: torch.dtype, reduce: str) -> None:
    group, dim = shape
    low, high, alive = bounds(dim)
    low, high, coarse = low.to(dtype), high.to(dtype), Coarse()
    for seed in range(3):
        q = torch.randn(3, group, dim, generator=torch.Generator().manual_seed(seed)) * 10**seed
        got = best_units(q, low, high, alive, 60, reduce=reduce, coarse=coarse)  # type: ignore[arg-type]
        assert torch.equal(got, plain(q, low, high, alive, 60, reduce))
    assert coarse.done == 640
    assert coarse.refined < UNITS / 2  # or nothing was saved


def test_it_is_the_codes_that_decide() -> None:
    low, high, alive = bounds(32)
    q, coarse = torch.randn(3, 2, 32), Coarse()
    want = best_units(q, low, high, alive, 60, coarse=coarse)
    coarse.tensors["code"].copy_(coarse.tensors["code"].flip(1))
    assert not torch.equal(best_units(q, low, high, alive, 60, coarse=coarse), want)


@given(st.lists(st.tuples(st.integers(1, 200), st.booleans()), min_size=1, max_size=5), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_follows_growth_rollback_and_change(steps: list[tuple[int, bool]], seed: int) -> None:
    low, high, alive = bounds(16, seed, 1600)
    rng = torch.Generator().manual_seed(seed)
    units, coarse, q = 512, Coarse(), torch.randn(3, 2, 16, generator=rng)
    for more, back in steps:
        twin, before = copy(coarse), units
        units += more
        at = (low[:, :units], high[:, :units], alive[:, :units])
        assert torch.equal(best_units(q, *at, 50, coarse=coarse), plain(q, *at, 50))
        if back:  # as when a draft is taken back, and other tokens come: the twin must not see what came since
            coarse, units = twin, before
            low[:, before:] -= torch.rand(16, generator=rng)
            coarse.changed(before)
            at = (low[:, :units], high[:, :units], alive[:, :units])
            assert torch.equal(best_units(q, *at, 50, coarse=coarse), plain(q, *at, 50))


def test_a_change_that_is_not_announced_is_missed() -> None:
    low, high, alive = bounds(16)
    q, coarse = torch.ones(3, 1, 16), Coarse()
    best_units(q, low, high, alive, 20, coarse=coarse)
    worst = int(page_scores(q, low, high, alive)[0, :640].masked_fill(~alive[0, :640], math.inf).argmin())
    high[0, worst] += 1000
    assert worst not in best_units(q, low, high, alive, 20, coarse=coarse)[0]
    coarse.changed(worst)
    assert worst in best_units(q, low, high, alive, 20, coarse=coarse)[0]


def test_a_choice_that_broke_off_leaves_none_to_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the codes are gone that the one before it was described by."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    low, high, alive = bounds(16, units=1600)
    q, coarse, fewer = torch.ones(3, 1, 16), Coarse(), (low[:, :640], high[:, :640], alive[:, :640])
    best_units(q, *fewer, 20, coarse=coarse)
    assert coarse.again(q, *fewer, 20, "max") is not None
    with monkeypatch.context() as patch:
        patch.setattr("kvengine.kernels.page_scores.coarse.Ready", stop)
        with pytest.raises(KeyboardInterrupt):
            best_units(q, low, high, alive, 20, coarse=coarse)
    coarse.changed(640)
    assert coarse.again(q, *fewer, 20, "max") is None
    assert torch.equal(best_units(q, *fewer, 20, coarse=coarse), plain(q, *fewer, 20))


@pytest.mark.parametrize("odd", [math.inf, -math.inf, 3e38, 1e-42])
def test_values_without_a_code_are_scored_exactly(odd: float) -> None:
    low, high, alive = bounds(16)
    alive[0, 70] = True
    low[0, 70], high[0, 70] = low[0, 0].nan_to_num(), high[0, 0].nan_to_num()
    (high if odd > 0 else low)[0, 70, 3] = odd
    q = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(best_units(q, low, high, alive, 60, coarse=Coarse()), plain(q, low, high, alive, 60))


def test_fewer_alive_than_wanted_and_equal_scores() -> None:
    low, high, alive = torch.zeros(2, UNITS, 16), torch.ones(2, UNITS, 16), torch.zeros(2, UNITS, dtype=torch.bool)
    alive[0, 5::90], alive[1] = True, True
    for q in (torch.ones(2, 1, 16), torch.zeros(2, 1, 16)):
        got = best_units(q, low, high, alive, 100, coarse=Coarse())
        assert torch.equal(got, plain(q, low, high, alive, 100))
        assert got[1].tolist() == list(range(100))


@pytest.mark.parametrize("reduce", ["max", "mean"])
def test_quest_decodes_alike_with_and_without(reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, stack = draw(1400, 2, 2), Stack(selection=Quest(budget=200, page=2, reduce=reduce))  # type: ignore[arg-type]
    found = run(stack, tokens, 1240)
    assert found.lane.pages is not None and found.lane.pages.bounds.done >= 576  # and it grew while decoding
    monkeypatch.setattr("kvengine.kernels.page_scores.LEAST", 1 << 30)
    other = run(stack, tokens, 1240)
    assert other.lane.pages is not None and not other.lane.pages.bounds.done
    assert torch.equal(found.out, other.out)
