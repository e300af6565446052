"""Elastic Cache against a loop: anchors, buckets, their means, and what goes while decoding."""

import pytest
import torch
from support import one, patched
from support_retention import Case, best, held, output, positions, probabilities
from torch import Tensor

import kvengine
from kvengine.errors import UnsupportedPolicy
from kvengine.stack import Stack
from kvengine.stats import measure

Held = dict[int, tuple[Tensor, Tensor]]


def scores(case: Case, b: int) -> dict[int, float]:
    """Attention received from the prompt's queries, the mean over all heads of a sequence."""
    pad = case.pads[b]
    total = dict.fromkeys(range(pad, case.length), 0.0)
    for row in range(b * case.heads, (b + 1) * case.heads):
        for i in range(pad, case.length):
            paid = probabilities(case, row, i, list(range(pad, i + 1))).mean(0)
            for j, p in enumerate(paid.tolist()):
                total[pad + j] += p / case.heads
    return total


def after_prompt(case: Case, row: int, budget: int, sinks: int, recent: int) -> Held:
    _, k, v, pad = case.row(row)
    score = scores(case, row // case.heads)
    protected = lambda p: p < pad + sinks or p >= case.length - recent  # noqa: E731
    kept = best(score, budget, protected)
    anchors = [p for p in kept if not protected(p)]
    buckets: dict[int, list[int]] = {p: [p] for p in kept}
    for p in score:
        if p not in buckets and anchors:
            buckets[min(anchors, key=lambda a: (abs(a - p), a))].append(p)
    return {p: (k[members].mean(0), v[members].mean(0)) for p, members in buckets.items()}


def same(found: Held, want: Held) -> None:
    assert sorted(found) == sorted(want)
    for p in want:
        torch.testing.assert_close(found[p], want[p])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("heads, group, pads, chunks", [(2, 2, (0, 5), 3), (3, 1, (0,), 1), (1, 4, (4, 0), 2)])
@pytest.mark.parametrize("offset, sinks, recent", [(-4, 1, 1), (0, 3, 4), (3, 1, 4), (-9, 3, 1)])
def test_anchors_buckets_and_the_place_that_goes(
    heads: int, group: int, pads: tuple[int, ...], chunks: int, offset: int, sinks: int, recent: int
) -> None:
    case = Case(heads, group, pads=pads)
    layer = case.prompt(f"elastic(budget=12, sinks={sinks}, recent={recent}, offset={offset})", chunks)
    want = [after_prompt(case, row, 12, sinks, recent) for row in range(case.rows)]
    for row in range(case.rows):
        same(held(layer, row), want[row])
    place = min(max(12 + offset if offset <= 0 else offset, sinks), 12 - recent)
    for t, out in case.decode(layer):
        for row, mine in enumerate(want):
            q, k, v, _ = case.row(row)
            mine[t] = (k[t], v[t])
            keys, values = (torch.stack([mine[p][i] for p in sorted(mine)]) for i in (0, 1))
            answer = (q[:, t] @ keys.T * case.call.scale).softmax(-1) @ values
            torch.testing.assert_close(output(case, out, row), answer)
            del mine[sorted(mine)[place]]
            same(held(layer, row), mine)
    assert measure([layer]).held.tolist() == [[[12] * heads] * len(pads)]


def test_one_anchor_takes_in_everything() -> None:
    case = Case(heads=1, group=2)
    found = held(case.prompt("elastic(budget=3, sinks=1, recent=1)"), 0)
    (anchor,) = set(found) - {0, 36}
    torch.testing.assert_close(found[anchor], (case.k[0, 0, 1:36].mean(0), case.v[0, 0, 1:36].mean(0)))
    assert torch.equal(found[0][0], case.k[0, 0, 0]) and torch.equal(found[36][0], case.k[0, 0, 36])


def test_all_heads_keep_the_same_tokens() -> None:
    case = Case(heads=4, group=1)
    layer = case.prompt("elastic(budget=12)")
    assert len({tuple(positions(layer, row)) for row in range(4)}) == 1


def test_while_it_fits_nothing_goes_and_nothing_is_merged() -> None:
    case = Case(length=9, steps=20, pads=(0, 3))
    layer = case.prompt("elastic(budget=16)")
    for t, _ in case.decode(layer):
        if t < 16:
            assert positions(layer, 0) == list(range(t + 1))
            assert all(torch.equal(k, case.k[0, 0, p]) for p, (k, _) in held(layer, 0).items())
        assert len(positions(layer, 0)) == min(16, t + 1)
        assert len(positions(layer, 2)) == min(16, t + 1 - 3)


def test_a_later_prompt_leaves_what_was_generated_before_it_too() -> None:
    """The place that goes counts from the end of all that was left, of which tokens generated between prompts are part."""
    case = Case(length=20, steps=40, pads=(0, 6))
    layer = case.prompt("elastic(budget=40, offset=-4)")
    for t in range(20, 32):
        case.feed(layer, t, t + 1)
    case.feed(layer, 32, 49)
    before = [positions(layer, row) for row in range(case.rows)]
    case.feed(layer, 49, 50)
    for row, left in enumerate(before):
        assert len(left) == 40
        assert positions(layer, row) == [*left[:36], *left[37:], 49]


@pytest.mark.parametrize("budget, recent", [(2, 2), (2, 5), (0.1, 30)])
def test_more_recent_than_fit_are_the_newest(budget: int | float, recent: int) -> None:
    """Sinks make way for them, and rows of other lengths have other budgets."""
    case = Case(pads=(0, 14))
    layer = case.prompt(f"elastic(budget={budget}, recent={recent})")
    for t, _ in case.decode(layer):
        for row in range(case.rows):
            count = 2 if budget == 2 else (37 - case.row(row)[3]) // 10
            assert positions(layer, row) == list(range(t + 1 - count, t + 1))


def test_room_for_no_anchor_merges_nothing() -> None:
    case = Case(heads=1, group=1)
    found = held(case.prompt("elastic(budget=2)"), 0)
    assert sorted(found) == [0, 36] and torch.equal(found[0][1], case.v[0, 0, 0])


def test_it_goes_with_pages_of_any_kind() -> None:
    """What it drops while decoding is not merged, so sealed pages need not change."""
    for other in ("kivi(bits=8, group=8, residual=8)", "quest(budget=8, page=4)"):
        case = Case(length=61)
        layer = case.prompt(f"elastic(budget=30, offset=-5) + {other}")
        want = after_prompt(case, 0, 30, 1, 1)
        assert positions(layer, 0) == sorted(want)
        for _ in case.decode(layer):
            assert len(positions(layer, 0)) == 30
    with pytest.raises(UnsupportedPolicy):
        Stack.parse("d2o + kivi")  # which merges at every step


def test_a_later_prompt_merges_what_codes_hold_too() -> None:
    """As without codes, but for what 8 bits lose: a token that goes is taken in by the one beside it that stays."""
    case = Case(length=40, steps=30)
    plain, coded = (case.prompt(f"elastic(budget=30){more}") for more in ("", " + kivi(bits=8, group=8, residual=8)"))
    for layer in (plain, coded):
        case.feed(layer, 40, 70)
    assert coded.parts[0].lane.pages is not None
    for row in range(case.rows):
        want, found = held(plain, row), held(coded, row)
        assert sorted(found) == sorted(want)
        for p in want:
            torch.testing.assert_close(found[p], want[p], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("other", ["turboquant(residual=8)", "kivi(group=8, residual=8) + duo(sinks=2, recent=10)"])
def test_a_later_turn_of_a_model_in_half_precision_is_held_as_the_first(other: str, dtype: torch.dtype) -> None:
    """There codes are decoded, in more than the model has, and merged anew with what came."""
    model, ids = patched(f"elastic(budget=24) + {other}").to(dtype), one()["input_ids"]
    cache, found = kvengine.EngineCache(model), []
    with torch.no_grad():
        for turn in range(3):
            model(ids, cache=cache)
            found.append({x.dtype for e in cache.engines for p in e.parts for x in p.lane.tail.held()[:2]})
            assert cache.engines[0].parts[0].lane.pages is not None
            assert model(ids[:, turn : turn + 1], cache=cache).logits.isfinite().all()
    assert found == [{dtype}] * 3
