"""The token that goes for a decoded one: merged into the one most like it, or chosen by its place; against lists and doubles."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import pytest
import support_kernels as oracle
import torch
from torch import Tensor

from kvengine.kernels.step import Ends, Merged, Paid, Placed, Sealed, ready, step
from kvengine.kernels.verdict import verdict

BACKENDS = [name for name in oracle.backends() if name != "triton"]
ALONE = [name for name in oracle.backends() if name != "native"]
SHAPES = [  # sequences, heads, group, dim, dim_v, slots
    (1, 2, 3, 64, 64, 40),
    (2, 3, 1, 24, 40, 11),
    (2, 2, 4, 128, 16, 601),
    (3, 2, 5, 8, 8, 33),
    (2, 2, 2, 37, 29, 50),
    (1, 3, 4, 512, 512, 70),
]
BETA = 0.6


def case(shape: tuple[int, ...], dtype: torch.dtype, fill: bool) -> tuple[dict[str, Any], slice]:
    """The new token of every head, and slots in no order, of which some hold what nobody may read; and those in use."""
    seq, heads, group, dim, dim_v, slots = shape
    rng, rows, start, end = torch.Generator().manual_seed(slots), seq * heads, slots // 5, slots - 1
    draw = lambda *size: torch.randn(*size, generator=rng).to(dtype)  # noqa: E731
    position = torch.stack([torch.randperm(slots, generator=rng) for _ in range(rows)]).int()
    position[torch.rand(position.shape, generator=rng) < 0.2] = -1
    position[range(rows), [start + r % (end - start) for r in range(rows)]] = -1
    keys, values, score = draw(rows, slots, dim), draw(rows, slots, dim_v), torch.rand(rows, slots, generator=rng)
    keys[position < 0], values[position < 0] = math.nan, math.nan
    about = dict(
        q=draw(seq, heads * group, 1, dim), k=draw(seq, heads, 1, dim), v=draw(seq, heads, 1, dim_v), keys=keys,
        values=values, position=position, score=score, start=start, end=end, at=slots, holes=True, scale=0.2, fill=fill,
    )  # fmt: skip
    return about, slice(start, end + (not fill))


def after_token(about: dict[str, Any], used: slice) -> dict[str, Tensor]:
    """Copies of what is there when the new token has been written."""
    out = {name: about[name].clone() for name in ("keys", "values", "position")}
    for r, free in enumerate(about["position"][:, used] < 0):
        spot = used.start + int(free.nonzero()[0]) if about["fill"] else about["end"]
        for name, x in (("keys", about["k"]), ("values", about["v"])):
            out[name][r, spot] = x.flatten(0, 2)[r]
        out["position"][r, spot] = about["at"]
    return out


def same(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.nan_to_num(7), want.nan_to_num(7))


def merging(
    shape: tuple[int, ...], dtype: torch.dtype, fill: bool, shrinks: bool, spares: bool
) -> tuple[dict[str, Any], slice, Merged]:
    """Rows differ in budget, thresholds and in what goes last; one keeps all, and in one nothing may take others in.

    In the first, what goes is like two others to the bit: the earlier of them takes it in.
    """
    about, used = case(shape, dtype, fill)
    alike = slice(used.start + 2, used.start + 5)
    about["position"][0, alike] = shape[-1] // 2 + torch.arange(3, dtype=torch.int32)
    about["score"][0, alike] = torch.tensor([-9.0, 1.0, 1.0])
    about["keys"][0, alike], about["values"][0, alike] = torch.ones(shape[3]), torch.randn(3, shape[4]).to(dtype)
    row = torch.arange(shape[0] * shape[1])
    budget = (after_token(about, used)["position"][:, used] >= 0).sum(1) - (row != 3).long()
    first, recent = torch.where(row == 4, shape[-1] + 5, shape[-1] // 3 + row), 2 + row
    threshold = torch.tensor([math.nan, -1.0, 2.0, 0.25, math.nan, 0.0])[: len(row)].clone()
    return about, used, Merged(Paid(budget, recent, "mean", True, 1, first), threshold, BETA, shrinks, spares)


def check_merged(
    want: dict[str, Tensor], got: dict[str, Tensor], used: slice, now: int, rule: Merged, tau: Tensor
) -> None:
    """`want`: what was there before the verdict. `rule`: with the thresholds of before, which are `tau` now."""
    taus, merges, spares = rule.threshold.tolist(), 0, rule.spares
    (budget, recent, *_, first), shrinks = rule.paid, rule.shrinks
    assert first is not None
    for r in range(len(taus)):
        there = [s for s in range(used.start, used.stop) if want["position"][r, s] >= 0]
        at = {s: int(want["position"][r, s]) for s in there}
        rank = {s: 2 * (at[s] < first[r]) + (at[s] > now - recent[r]) for s in there}
        worst = sorted(there, key=lambda s: (rank[s], 0.0 if rank[s] else float(got["score"][r, s]), at[s]))
        gone = worst[: len(there) - int(budget[r])]
        targets = [s for s in sorted(there, key=at.__getitem__) if s not in gone and (not spares or at[s] >= first[r])]
        assert len(gone) == (r != 3) and bool(targets) == (r != 4 or not spares)
        if gone and targets:
            vectors = want["keys"][r].double()
            likes = torch.cosine_similarity(vectors[gone], vectors[targets], dim=1)
            like, mate = float(likes.max()), targets[int(likes.argmax())]
            taus[r] = like if math.isnan(taus[r]) else BETA * like + (1 - BETA) * taus[r]
            if like >= taus[r]:
                merges += 1
                own, weight, part = (1, like, 1) if shrinks else (math.e, math.exp(like), math.exp(like))
                for name in ("keys", "values"):
                    x = want[name][r]
                    made = ((own * x[mate].double() + weight * x[gone[0]].double()) / (own + part)).to(x.dtype)
                    assert torch.equal(x[mate], made) == (r == 0 and name == "keys")
                    torch.testing.assert_close(got[name][r, mate], made)
                    x[mate] = got[name][r, mate]
        want["position"][r, gone] = -1
    assert merges >= 2
    assert all(same(got[name], x) for name, x in want.items())
    torch.testing.assert_close(tau, torch.tensor(taus), equal_nan=True)


MERGING = [
    pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str),
    pytest.mark.parametrize("shape", SHAPES),
    pytest.mark.parametrize("shrinks, spares", [(False, True), (True, False)]),
]


def each(test: Any) -> Any:
    return functools.reduce(lambda test, mark: mark(test), MERGING, test)


@pytest.mark.sampled(4)
@each
@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_goes_is_merged_into_the_most_alike(
    backend: str, fill: bool, shrinks: bool, spares: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    about, used, rule = merging(shape, dtype, fill, shrinks, spares)
    want, tau = after_token(about, used), rule.threshold.clone()
    step(rule=rule._replace(threshold=tau), backend=backend, **about)
    check_merged(want, about, used, about["at"], rule, tau)


@each
@pytest.mark.parametrize("backend", ALONE)
def test_a_verdict_alone_merges_as_well(
    backend: str, shrinks: bool, spares: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Where the token was written and answered before."""
    about, used, rule = merging(shape, dtype, True, shrinks, spares)
    want, device = after_token(about, used), oracle.device_of(backend)
    there = {name: x.to(device, copy=True) for name, x in (want | {"score": about["score"]}).items()}
    part = {name: x[:, used] for name, x in there.items()}
    moved, now = (
        rule._replace(paid=Paid(*(oracle._moved(x, device) for x in rule.paid))),
        torch.tensor([about["at"]], device=device),
    )
    tau = rule.threshold.to(device, copy=True)
    mass = torch.rand(len(tau), shape[2], used.stop - used.start, device=device)
    mass.masked_fill_(part["position"][:, None] < 0, 0)
    verdict(moved._replace(threshold=tau), now=now, mass=mass, backend=backend, **part)
    check_merged(want, {name: x.cpu() for name, x in there.items()}, used, about["at"], rule, tau.cpu())


@pytest.mark.parametrize("backend", BACKENDS)
def test_of_several_that_go_the_first_slot_is_merged_and_keys_may_be_zero(backend: str) -> None:
    """Two go, the later slot before the earlier or after it; what goes is zero, or the most alike is."""
    about, used = case((1, 4, 1, 16, 8, 12), torch.float32, True)
    one, two, nought = used.start + 1, used.start + 6, used.start + 4
    keys, position, score = about["keys"], about["position"], about["score"]
    position[:, used] = torch.arange(used.stop - used.start, dtype=torch.int32).flip(0)
    position[:, used.stop - 1] = -1  # for the new token
    keys[:, used], about["values"][:, used] = torch.randn(4, 9, 16), torch.randn(4, 9, 8)
    score[:, one], score[:, two] = torch.tensor([-5.0, -9.0, -9.0, -9.0]), torch.tensor([-9.0, -5.0, -5.0, -5.0])
    keys[2, one] = 0
    keys[3, used], about["k"][0, 3] = -keys[3, used].abs(), -about["k"][0, 3].abs()
    keys[3, one], keys[3, nought] = 1, 0
    want, rest = after_token(about, used), [s for s in range(used.start, used.stop) if s not in (one, two)]
    held, tau = torch.full((4,), used.stop - used.start - 2), torch.full((4,), -1.0)
    paid = Paid(held, torch.zeros_like(held), "mean", True, 1, torch.zeros_like(held))
    step(rule=Merged(paid, tau, 0.0, False, True), backend=backend, **about)
    for r in range(4):
        likes = torch.cosine_similarity(want["keys"][r, rest].double(), want["keys"][r, one].double(), dim=1)
        mate = max(rest, key=lambda s: (float(likes[rest.index(s)]), -int(want["position"][r, s])))
        assert (mate == nought) == (r == 3)
        weight = likes[rest.index(mate)].exp()
        for name in ("keys", "values"):
            x = want[name][r].double()
            made = (math.e * x[mate] + weight * x[one]) / (math.e + weight)
            torch.testing.assert_close(about[name][r, mate], made.float())
    want["position"][:, [one, two]] = -1
    assert torch.equal(about["position"], want["position"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ALONE)
def test_values_that_are_a_part_of_their_keys_are_merged_once(backend: str, dtype: torch.dtype) -> None:
    device, rng = oracle.device_of(backend), torch.Generator().manual_seed(0)
    keys = torch.randn(2, 30, 24, generator=rng).to(dtype).to(device)
    want, position = keys.clone(), torch.arange(30, dtype=torch.int32, device=device).repeat(2, 1)
    few, one = torch.tensor([29, 29], device=device), torch.ones(2, dtype=torch.int64, device=device)
    rule = Merged(Paid(few, one, adds=True), torch.full((2,), -1.0, device=device), 0.0)
    score = torch.rand(2, 30, generator=rng).to(device)
    verdict(
        rule, position, few[:1], mass=torch.zeros(2, 1, 30, device=device), score=score, keys=keys, values=keys[..., :16],
        backend=backend,
    )  # fmt: skip
    for r in range(2):
        lost = int((position[r] < 0).nonzero())
        likes = torch.cosine_similarity(want[r].double(), want[r, lost].double(), dim=1)
        likes[lost] = -2
        mate = int(likes.argmax())
        weight = likes[mate].exp()
        made = (math.e * want[r, mate].double() + weight * want[r, lost].double()) / (math.e + weight)
        torch.testing.assert_close(keys[r, mate], made.to(dtype))
        want[r, mate] = keys[r, mate]
    assert torch.equal(keys, want)


@pytest.mark.skipif("native" not in BACKENDS, reason="no C compiler")
def test_of_scores_that_are_no_numbers_none_goes() -> None:
    """Of a row that holds too many the new token goes, whose score is one, and is merged; not what is in a free slot."""
    about, used = case((1, 2, 1, 16, 8, 12), torch.float32, False)
    about["position"][:, used] = torch.arange(used.stop - used.start, dtype=torch.int32)
    about["position"][:, used.start + 1] = -1
    about["keys"][:], about["values"][:] = torch.randn(2, 12, 16), torch.randn(2, 12, 8)
    about["keys"][:, used.start + 1] = math.nan
    about["score"][:] = math.nan
    want, tau = after_token(about, used), torch.full((2,), -1.0)
    paid = Paid(torch.tensor([3, 4]), torch.zeros(2, dtype=torch.int64), "mean", True)
    step(rule=Merged(paid, tau, 1.0), backend="native", **about)
    new = used.stop - 1
    likes = torch.cosine_similarity(
        want["keys"][:, used.start : new].double(), want["keys"][:, new : new + 1].double(), dim=2
    )
    torch.testing.assert_close(tau, likes.nan_to_num(-2).amax(1).float())
    want["position"][:, new] = -1
    assert torch.equal(about["position"], want["position"])


@pytest.mark.skipif("native" not in BACKENDS, reason="no C compiler")
def test_a_rule_ends_with_its_token() -> None:
    """Slots are described to C once, and take tokens under one rule after the other."""
    about, _ = case((1, 2, 3, 16, 16, 60), torch.float32, False)
    about["position"][:], about["score"] = torch.arange(60, dtype=torch.int32), torch.rand(2, 60)
    first = [about[name].nan_to_num(1) for name in ("keys", "values", "position", "score")]
    token, rows = (about["q"], about["k"], about["v"]), torch.arange(2)
    mine = [x.clone() for x in first]
    slots = ready(*mine[:3])
    ends, tau, alive = Ends(rows + 2, rows + 9), torch.full((2,), -1.0), torch.ones(2, 4, dtype=torch.bool)
    sealed = torch.arange(60, 84, dtype=torch.int32).view(2, 12)
    paid = Paid(torch.tensor([20, 19]), torch.tensor([2, 3]), first=torch.tensor([1, 2]))
    bare = paid._replace(first=None)
    rules = [None, ends, paid, bare, Merged(bare, tau, 0.5), Placed(rows + 20, rows + 4), Sealed(ends, sealed, alive)]
    states = [tau, sealed, alive]
    begun = [x.clone() for x in states]
    for one, other in itertools.permutations(rules, 2):
        for x, y in zip(mine + states, first + begun, strict=True):
            x.copy_(y)
        assert slots is not None and slots.step(*token, 1, 31, 80, True, 0.2, rule=one, score=mine[3]) is not None
        twins, between = [x.clone() for x in mine], [x.clone() for x in states]
        got = slots.step(*token, 1, 32, 90, True, 0.2, rule=other, score=mine[3])
        after = [x.clone() for x in states]
        for x, y in zip(states, between, strict=True):
            x.copy_(y)
        alone = ready(*twins[:3])
        assert alone is not None and got is not None
        want = alone.step(*token, 1, 32, 90, True, 0.2, rule=other, score=twins[3])
        for x, y in zip([got, *mine, *after], [want, *twins, *states], strict=True):
            assert y is not None and torch.equal(x, y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_only_one_left_may_be_the_opposite(backend: str) -> None:
    """Whose cosine is -1, or a little less as it is rounded."""
    rng, rows = torch.Generator().manual_seed(11), 40
    k, v = torch.randn(1, rows, 1, 16, generator=rng), torch.randn(1, rows, 1, 8, generator=rng)
    keys, values = torch.zeros(rows, 3, 16), torch.randn(rows, 3, 8, generator=rng)
    keys[:, 0] = -k[0, :, 0] * (1 + torch.rand(rows, 1, generator=rng))
    position, tau = torch.tensor([[0, -1, -1]], dtype=torch.int32).repeat(rows, 1), torch.full((rows,), math.nan)
    paid = Paid(torch.ones(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.int64))
    want = (math.e * v[0, :, 0].double() + math.exp(-1) * values[:, 0].double()) / (math.e + math.exp(-1))
    about: dict[str, Any] = dict(start=0, end=1, at=1, holes=True, scale=0.2, rule=Merged(paid, tau, 0.5))
    step(torch.randn(1, rows, 1, 16, generator=rng), k, v, keys, values, position, backend=backend, **about)
    assert position.tolist() == [[-1, 1, -1]] * rows
    torch.testing.assert_close(tau, torch.full((rows,), -1.0))
    torch.testing.assert_close(values[:, 1], want.float())


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_stays_anyway_ends_at_first_and_at_recent(backend: str) -> None:
    """The worst token is the newest that is not recent, or the oldest that is; the one at `first`, or just before it."""
    about, _ = case((1, 4, 1, 16, 16, 12), torch.float32, True)
    position, score, start, end = about["position"], about["score"], about["start"], about["end"]
    position[:, start:end] = torch.arange(end - start, dtype=torch.int32)
    position[:, end - 1] = -1  # for the new token, at 12
    about["q"], about["keys"], about["values"] = about["q"] * 0, torch.zeros(4, 12, 16), torch.zeros(4, 12, 16)
    worst, goes = [7, 7, 3, 2], [7, 5, 3, 5]
    score[:] = 9.0
    score[:, start + 5] = 1.0
    score[range(4), [start + p for p in worst]] = 0.0
    first, recent = torch.tensor([0, 0, 3, 3]), torch.tensor([5, 6, 1, 1])
    paid = Paid(torch.full((4,), end - start - 1), recent, "mean", True, 1, first)
    step(rule=Merged(paid, torch.full((4,), 2.0), 0.0, False, True), backend=backend, **about)
    want = torch.arange(end - start, dtype=torch.int32).repeat(4, 1)
    want[:, -1] = about["at"]
    want[range(4), goes] = -1
    assert torch.equal(position[:, start:end], want)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_goes_is_chosen_by_its_place(backend: str, fill: bool, shape: tuple[int, ...]) -> None:
    """The first, the last, or one between them, in rows that hold more than their budget by one, by three, or not at all."""
    about, used = case(shape, torch.float32, fill)
    want, row = after_token(about, used), torch.arange(shape[0] * shape[1])
    budget = (want["position"][:, used] >= 0).sum(1) - torch.tensor([1, 1, 3, 0, 1, -2])[row]
    place = torch.tensor([0, 4, 1 << 20, 2, 1, 0])[row].minimum(budget)
    score = about["score"].clone()
    step(rule=Placed(budget, place), backend=backend, **about)
    for r in row.tolist():
        order = sorted(int(p) for p in want["position"][r, used] if p >= 0)
        if len(order) > budget[r]:
            want["position"][r][want["position"][r] == order[int(place[r])]] = -1
    assert all(same(about[name], x) for name, x in want.items())
    assert torch.equal(about["score"] != score, want["position"] == about["at"]) or not fill
