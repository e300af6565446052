from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import Bare
from support_layer import Tokens, draw, plain, run

from kvengine.kernels.page_scores import page_scores
from kvengine.policies.selection import Where
from kvengine.policies.selection.quest import Quest
from kvengine.stack import Stack


def scores(q: torch.Tensor, k: torch.Tensor, page: int) -> torch.Tensor:
    """The bound of every query head, [row, group, unit], as the policy would reduce it for a group of one."""
    units = k.unflatten(1, (-1, page))
    made = Quest(page=page).summarise(units.flatten(0, 1), torch.ones(units.shape[0] * units.shape[1], page).bool())
    low, high = (made[name].unflatten(0, units.shape[:2]).contiguous() for name in ("low", "high"))
    alive = torch.ones(units.shape[:2], dtype=torch.bool)
    return torch.stack([page_scores(q[:, g : g + 1], low, high, alive) for g in range(q.shape[1])], 1)


@given(st.integers(0, 10**6), st.sampled_from([1, 2, 5, 16]), st.sampled_from([0.1, 1.0, 30.0]))
def test_the_bound_is_never_below_a_logit(seed: int, page: int, size: float) -> None:
    g = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 3, 8, generator=g) * size, torch.randn(2, 4 * page, 8, generator=g)
    most = (q @ k.transpose(1, 2)).unflatten(2, (4, page)).amax(3)
    assert (scores(q, k, page) >= most - 1e-4 * size).all()


def test_the_bound_is_the_logit_for_one_token_and_for_equal_ones() -> None:
    q, k = torch.randn(1, 2, 8), torch.randn(1, 4, 8)
    torch.testing.assert_close(scores(q, k, 1), q @ k.transpose(1, 2))
    torch.testing.assert_close(scores(q, k.repeat_interleave(3, 1), 3), q @ k.transpose(1, 2))


def test_the_official_form_is_the_same() -> None:
    q, k = torch.randn(1, 1, 8), torch.randn(1, 32, 8)
    sign = torch.where(q > 0, 1.0, -1.0)
    want = (q.abs() * (sign * k.unflatten(1, (2, 16)).transpose(1, 2)).amax(1)).sum(-1)
    torch.testing.assert_close(scores(q, k, 16)[0], want)


def test_empty_slots_do_not_widen_the_range() -> None:
    k = torch.randn(1, 4, 8).abs() + 1
    valid = torch.tensor([[True, True, False, False]])
    found = Quest(page=4).summarise(k, valid)
    assert torch.equal(found["low"][0], k[0, :2].amin(0)) and torch.equal(found["high"][0], k[0, :2].amax(0))
    assert not any(x.any() for x in Quest(page=4).summarise(k, ~valid & valid).values())


def test_bounds_hold_for_what_is_left_of_a_page() -> None:
    """Tokens that go after their page was sealed may leave its bounds wide, never too narrow."""
    pages = run("streaming(sinks=2, recent=30) + quest(budget=16, page=4)", draw(120), 60).lane.pages
    assert pages is not None
    k, there = pages.decoded()[0].unflatten(1, (-1, 4)), (pages.position >= 0).unflatten(1, (-1, 4))[..., None]
    assert (there.any(2) & ~there.all(2)).any()
    low, high = pages.summary["low"], pages.summary["high"]
    assert ((k >= low[:, :, None]) & (k <= high[:, :, None]) | ~there).all()


@pytest.mark.parametrize("heads, group", [(2, 2), (3, 1), (1, 4)])
@pytest.mark.parametrize(("reduce", "budget"), [("max", 40), ("mean", 40), ("each", 40), ("each", 32)])
def test_reads_are_those_of_the_loop(heads: int, group: int, reduce: str, budget: int) -> None:
    tokens, page = draw(101, heads, group), 8
    found = run(Stack(selection=Quest(budget=budget, page=page, reduce=reduce)), tokens, 100)  # type: ignore[arg-type]
    sealed = len(found.lane.pages)  # type: ignore[arg-type]
    seen = torch.zeros(1, heads, 101, dtype=torch.bool)
    seen[..., sealed:] = True
    for h in range(heads):
        bound: list[float] = []
        heads_bound: list[list[float]] = []
        for p in range(sealed // page):
            low, high = tokens.k[0, h, p * page : p * page + page].aminmax(dim=0)
            rows = [tokens.q[0, h * group + g, 100] for g in range(group)]
            each = torch.stack([torch.maximum(q * low, q * high).sum() for q in rows])
            bound.append(float(each.max() if reduce == "max" else each.mean()))
            heads_bound.append(each.tolist())
        count = (budget - (101 - sealed)) // page
        best = sorted(range(len(bound)), key=lambda p: -bound[p])[:count]
        if reduce == "each":
            by_head = [sorted(range(len(bound)), key=lambda p: -heads_bound[p][g]) for g in range(group)]
            turns = [by_head[g][turn] for turn in range(len(bound)) for g in range(group)]
            best = list(dict.fromkeys(turns))[:count]
        for p in best:
            seen[0, h, p * page : p * page + page] = True
    torch.testing.assert_close(found.out[:, -1:], plain(tokens, 100, seen), atol=1e-5, rtol=1e-4)
    assert int(seen[0, 0].sum()) <= budget


@pytest.mark.parametrize("reduce", ["max", "mean", "each"])
@pytest.mark.parametrize("even", [False, True])
def test_dead_pages_have_no_turn_and_rows_may_read_different_numbers(reduce: Any, even: bool) -> None:
    random = torch.Generator().manual_seed(0)
    q, low = torch.randn(3, 3, 8, generator=random), torch.randn(3, 20, 8, generator=random)
    high, alive = low + torch.rand(3, 20, 8, generator=random), torch.rand(3, 20, generator=random) < 0.6
    counts = torch.tensor([6, 6, 6] if even else [6, 2, 4])
    at = Where(0, 1, lambda: counts, 6, lambda: q, 1.0, 0, even=even)
    found = Quest(reduce=reduce).select(q, {"low": low, "high": high}, alive, at)
    assert found is not None and found.shape == (3, 6)
    for row, count in enumerate(counts.tolist()):
        units = alive[row].nonzero()[:, 0].tolist()
        bound = [[float(torch.maximum(x * low[row, u], x * high[row, u]).sum()) for u in units] for x in q[row]]
        ranked = [[units[i] for i in sorted(range(len(units)), key=lambda i: -head[i])] for head in bound]
        turns = list(dict.fromkeys(unit for turn in zip(*ranked, strict=True) for unit in turn))
        one = [(max if reduce == "max" else sum)(each) for each in zip(*bound, strict=True)]
        best = turns if reduce == "each" else [units[i] for i in sorted(range(len(units)), key=lambda i: -one[i])]
        assert sorted(u for u in found[row].tolist() if u >= 0) == sorted(best[:count])


@pytest.mark.parametrize(
    "text",
    [
        "quest(budget=56, page=4)",  # the shorter row holds no more, the longer one does
        "quest(budget=0.5, page=4)",
        "snapkv(budget=40, window=6) + quest(budget=0.7, page=4)",  # more than the longer row holds, less than the shorter one
    ],
)
def test_a_row_reads_what_it_reads_alone(text: str) -> None:
    together, valid = Bare(text, rows=2, tokens=80), torch.ones(2, 60, dtype=torch.bool)
    valid[1, :13] = False
    alone = [Bare(text, rows=2, tokens=80) for _ in range(2)]
    for row, one in enumerate(alone):
        one.q, one.k, one.v = (x[row : row + 1, :, 13 * row :] for x in (one.q, one.k, one.v))
        one.feed(60 - 13 * row)
    together.feed(60, valid)
    for _ in range(18):
        torch.testing.assert_close(together.feed(1), torch.cat([one.feed(1) for one in alone]))


@pytest.mark.parametrize("padding", [0, 9])
def test_a_unit_is_read_though_the_budget_has_no_room_for_one(padding: int) -> None:
    bare, valid = Bare("quest(budget=1, page=4)", rows=2), torch.ones(2, 60, dtype=torch.bool)
    valid[1, :padding] = False
    bare.feed(60, valid)
    bare.feed(1)
    lane = bare.cache.parts[0].lane
    assert torch.equal((lane.reach() >= 0).sum(1), 4 + (lane.tail.position[:, lane.tail.span] >= 0).sum(1))


def test_pages_grow_as_if_built_at_once() -> None:
    tokens = draw(150)
    grown, whole = run("quest(budget=64)", tokens, 20).lane, run("quest(budget=64)", tokens, 150).lane
    for name, x in grown.pages.summary.items():  # type: ignore[union-attr]
        assert torch.equal(x, whole.pages.summary[name][:, : x.shape[1]])  # type: ignore[union-attr]


def test_dense_layers_read_everything() -> None:
    tokens = draw(101)
    policy = "quest(budget=32, dense_layers=1)"
    first, second = (run(policy, tokens, 100, layer=i, layers=2) for i in range(2))
    assert first.lane.units is None and second.lane.units is not None
    torch.testing.assert_close(first.out[:, -1:], plain(tokens, 100))


def mass(policy: str, tokens: Tokens, query: int) -> float:
    """The share of the last query's attention that falls on what was read, mean over KV heads and their group."""
    found = run(policy, tokens, query)
    lane = found.lane
    pages, units = lane.pages.position, lane.units  # type: ignore[union-attr]
    size = lane.stack.selection.unit
    total = []
    for h in range(2):
        chosen = units[h][units[h] >= 0]  # type: ignore[index]
        read = pages[h].unflatten(0, (-1, size))[chosen].flatten().tolist()
        read += lane.tail.position[h, lane.tail.span].tolist()
        probs = (tokens.q[0, 2 * h : 2 * h + 2, query] @ tokens.k[0, h, : query + 1].T * tokens.scale).softmax(1)
        total.append(float(probs[:, read].sum(1).mean()))
    return sum(total) / len(total)


def test_the_oracle_receives_most_attention_and_more_with_budget() -> None:
    tokens = draw(301, dim=32)
    tokens.q *= 3
    others = ["quest(budget={}, page=4)", "landmarks(budget={}, chunk=4, local=0)", "retrieval(budget={}, chunk=4)"]
    for budget in (48, 96):
        ceiling = mass(f"oracle_topk(budget={budget})", tokens, 300)
        for policy in others:
            assert mass(policy.format(budget), tokens, 300) <= ceiling + 1e-6
    found = [mass(f"oracle_topk(budget={b})", tokens, 300) for b in (32, 64, 128, 256)]
    assert found == sorted(found) and found[0] < found[-1]
