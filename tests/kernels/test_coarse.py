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


@pytest.mark.parametrize("dim", [576, 1024])
def test_sums_over_many_channels_that_agree(dim: int) -> None:
    """Of the largest codes and weights there are, in every channel: where both are whole numbers, 31 bits do not hold the sum."""
    high = torch.rand(2, UNITS, dim, generator=torch.Generator().manual_seed(dim))
    high[:, ::64] = 1
    low, alive, q = torch.zeros_like(high), torch.ones(2, UNITS, dtype=torch.bool), torch.ones(2, 3, dim)
    for sign in (1, -1):
        got = best_units(sign * q, *((low, high) if sign > 0 else (-high, low)), alive, 8, coarse=Coarse())
        assert got.tolist() == [list(range(0, 8 * 64, 64))] * 2


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


def agrees(q: Tensor, low: Tensor, high: Tensor, alive: Tensor, count: int, reduce: str = "max") -> Tensor:
    got = best_units(q, low, high, alive, count, reduce=reduce, coarse=Coarse())  # type: ignore[arg-type]
    assert torch.equal(got, plain(q, low, high, alive, count, reduce))
    return got


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("coded", "exact"), [(10.49, 10.4), (10.51, 10.6), (10.99, 10.8), (10.01, 10.2)])
def test_what_a_code_cannot_tell_does_not_decide(coded: float, exact: float, sign: int, reduce: str) -> None:
    """One unit lies in a block with a step of 1, and is off by as much in every channel; another block has no step."""
    x = torch.zeros(1, UNITS, 16)
    x[0, :16] = 255 * torch.eye(16)
    x[0, 20] = coded
    x[0, 64:128] = exact
    best = agrees(torch.full((1, 3, 16), float(sign)), sign * x, sign * x, torch.ones(1, UNITS).bool(), 17, reduce)
    assert best[0].tolist() == [*range(16), 20 if coded > exact else 64]


def test_what_a_rounded_weight_cannot_tell_does_not_decide() -> None:
    """Next to a large channel the weights of the others become 0, which may make as much of a difference."""
    x, q = torch.zeros(1, UNITS, 128), torch.full((1, 1, 128), 0.49)
    q[..., 0] = 16000
    x[0, 0, 0], x[0, 1], x[0, 1, 0] = 255, 255, 10.49
    x[0, 64:128, 0] = 11.3
    best = agrees(q, x, x, torch.ones(1, UNITS).bool(), 2)
    assert best[0].tolist() == [0, 1]


def test_what_rounding_makes_does_not_decide() -> None:
    """Of large numbers that are about the same, for queries that cancel them."""
    x = 1000 + 1e-4 * torch.randn(3, UNITS, 128, generator=torch.Generator().manual_seed(0))
    q = torch.randn(3, 2, 128, generator=torch.Generator().manual_seed(1))
    q -= q.mean(2, keepdim=True)
    for reduce in ("max", "mean"):
        agrees(q, x, x, torch.ones(3, UNITS).bool(), 60, reduce)


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("group", [1, 3])
def test_scores_that_are_all_negative(group: int, reduce: str) -> None:
    low, high, alive = bounds(16)
    q = torch.rand(3, group, 16, generator=torch.Generator().manual_seed(2)) + 0.1
    agrees(q, low - 200, high - 200, alive, 60, reduce)


@pytest.mark.parametrize("size", [1e-37, 1e-43, 3e-44, 0.0])
def test_queries_that_are_almost_nothing(size: float) -> None:
    low, high, alive = bounds(16)
    q = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(3)) * size
    agrees(q, low, high, alive, 60)


def test_a_channel_that_spans_more_than_a_float() -> None:
    low, high, alive = bounds(16)
    alive[0, 70:72] = True
    low[0, 70:72], high[0, 70:72] = low[0, :1].nan_to_num(), high[0, :1].nan_to_num()
    high[0, 70, 3], high[0, 71, 3] = 3e38, -3e38
    agrees(torch.rand(3, 2, 16, generator=torch.Generator().manual_seed(1)), low, high, alive, 60)


def test_scores_next_to_which_rounding_is_large() -> None:
    """The border is found by counting from the lowest score, which is far below those that are chosen."""
    for lowest in range(1, 20):
        x = torch.full((1, UNITS, 16), -1e4 * lowest)
        x[0, 64:128] = 0.01 * torch.rand(64, 16, generator=torch.Generator().manual_seed(5))
        agrees(torch.ones(1, 1, 16), x, x, torch.ones(1, UNITS).bool(), 30)


def test_more_are_wanted_than_have_codes() -> None:
    x, coarse, alive = torch.zeros(2, UNITS, 16), Coarse(), torch.ones(2, UNITS).bool()
    x[1], q = 5, torch.ones(2, 1, 16)
    for _ in range(2):  # the second time, limits of the first are in the way of who looks too far
        got = coarse.top(q, x, x, alive, 690, "max")
        assert coarse.done == 640 and got.tolist() == [list(range(690))] * 2


def test_a_score_of_minus_infinity_is_not_chosen() -> None:
    x, alive = torch.zeros(1, UNITS, 16), torch.ones(1, UNITS).bool()
    x[0, 5, 2], x[0, 680, 3] = -math.inf, -math.inf
    got = Coarse().top(torch.ones(1, 1, 16), x, x, alive, UNITS - 1, "max")
    assert got[0].tolist() == [u for u in range(UNITS) if u not in (5, 680)] + [-1]


@pytest.mark.parametrize("units", [1, 40, 64])
def test_a_choice_among_few(units: int) -> None:
    """Which is asked for by nobody who knows that it saves nothing."""
    low, high, alive = (x[:, :units] for x in bounds(16))
    q = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(4))
    got = Coarse().top(q, low, high, alive, 1, "max")
    assert torch.equal(got.long(), plain(q, low, high, alive, 1))


def test_rows_are_chosen_from_side_by_side() -> None:
    """By several threads, and none writes limits where another row's are."""
    low, high, alive = bounds(128)
    before, coarse = torch.get_num_threads(), Coarse()
    q = torch.randn(3, 1, 128, generator=torch.Generator().manual_seed(0))
    try:
        torch.set_num_threads(4)
        for _ in range(5):
            assert torch.equal(best_units(q, low, high, alive, 60, coarse=coarse), plain(q, low, high, alive, 60))
    finally:
        torch.set_num_threads(before)
    for row in range(3):
        one, alone, size = slice(row, row + 1), Coarse(), 2 * coarse.done
        best_units(q[one], low[one], high[one], alive[one], 60, coarse=alone)
        found = coarse.tensors["limits"].flatten()[row * size : (row + 1) * size]
        assert torch.equal(found, alone.tensors["limits"].flatten()[:size])


def test_a_copy_and_what_it_is_of_both_go_on() -> None:
    """With other units each, in the room that there was for both."""
    low, high, alive = bounds(16, units=768)
    others = [low.clone(), high.clone(), alive]
    for x in others[:2]:
        x[:, 640:] = -x[:, 640:].flip(1)
    others[1] = torch.maximum(others[0], others[1])
    q = torch.randn(3, 2, 16, generator=torch.Generator().manual_seed(6))
    want = [plain(q, *at, 60) for at in ((low, high, alive), others)]  # type: ignore[arg-type]
    assert not torch.equal(*want)
    for turns in (0, 1, 0, 1), (1, 0, 0, 1):
        coarse = Coarse()
        best_units(q, low[:, :640], high[:, :640], alive[:, :640], 60, coarse=coarse)
        both = coarse, copy(coarse)
        for who in turns:
            at = others if who else (low, high, alive)
            assert torch.equal(best_units(q, *at, 60, coarse=both[who]), want[who])  # type: ignore[misc]
            assert both[who].again(q, *at, 60, "max") is not None  # type: ignore[misc]


def test_rows_widths_and_queries_may_be_others_the_next_time() -> None:
    coarse, wide = Coarse(), torch.randn(3, 2, 96, generator=torch.Generator().manual_seed(7))
    for dim, rows, seed in ((16, 3, 0), (16, 2, 0), (40, 2, 1), (40, 3, 1), (16, 3, 2)):
        low, high, alive = (x[:rows] for x in bounds(dim, seed))
        gaps = torch.stack([alive, ~alive], 2)[..., 0]
        one, two, three = wide[:rows, :, :dim].contiguous(), wide[:rows, :, :dim], wide[:rows, :, ::2][..., :dim]
        asked = [(one, "max"), (one, "mean"), (two, "mean"), (two, "max"), (three, "max"), (three, "mean")]
        for there in (alive, gaps):
            for q, reduce in asked:  # of which each differs in one thing from the one before it
                got = best_units(q, low, high, there, 60, reduce=reduce, coarse=coarse)  # type: ignore[arg-type]
                assert torch.equal(got, plain(q, low, high, alive, 60, reduce))


def test_what_is_read_is_counted_and_nothing_is_kept_of_what_is_cleared() -> None:
    low, high, alive = bounds(16)
    coarse, exact = Coarse(), 7_000_000
    assert coarse.reads(UNITS, exact) == exact and coarse.tensors == {}
    best_units(torch.ones(3, 1, 16), low, high, alive, 60, coarse=coarse)
    codes = 3 * (
        640 * 64 + 2 * 10 * 32 * 4
    )  # a byte each of 2 * 16 channels, in lines of 64; a scale and a zero per block
    assert coarse.reads(UNITS, exact) == codes + int(coarse.refined * exact / UNITS)
    coarse.remembered.of = (low,)
    coarse.clear()
    assert coarse.tensors == {} and coarse.reads(UNITS, exact) == exact and coarse.remembered.of == ()


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
