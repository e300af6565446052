"""What a rule leaves, against a loop over tokens."""

from __future__ import annotations

import math
from typing import Any

import pytest
import support_kernels as oracle
import torch
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.step import Ends, Merged, Paid, Placed, Sealed
from kvengine.kernels.verdict import verdict

BACKENDS = [x for x in oracle.backends() if x != "native"]
ROWS, NOW = 4, 200


def held(n: int) -> Tensor:
    """Positions in any order, some slots empty; the newest token is there."""
    rng = torch.Generator().manual_seed(n)
    order = torch.stack([torch.randperm(NOW, generator=rng)[:n] for _ in range(ROWS)]).int()
    order[torch.rand(ROWS, n, generator=rng) < 0.3] = -1
    order[:, n // 2] = NOW
    return torch.nn.functional.pad(order, (2, 5), value=77)[:, 2 : n + 2]  # a part of longer rows


def sent(backend: str, x: Any) -> Any:
    return oracle._moved(x, oracle.device_of(backend))


def ruled(backend: str, rule: Any) -> Any:
    return type(rule)(*(ruled(backend, x) if isinstance(x, Ends | Paid) else sent(backend, x) for x in rule))


def judged(
    backend: str, rule: Any, position: Tensor, now: int = NOW, **given: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    at, more = sent(backend, position.clone()), sent(backend, {name: x.clone() for name, x in given.items()})
    verdict(rule, at, sent(backend, torch.tensor([now])), backend=backend, **more)
    return at.cpu(), more


@pytest.mark.parametrize("n", [1, 17, 150])
@pytest.mark.parametrize("backend", BACKENDS)
def test_verdict_by_ends_is_as_the_loop(backend: str, n: int) -> None:
    first, recent = torch.tensor([0, 3, 90, 500]), torch.tensor([5, 60, 1, 20])
    position = held(n)
    position[1, :4] = torch.tensor([2, 3, 140, 141], dtype=torch.int32)[:n]  # of each end what stays and what goes
    got, _ = judged(backend, ruled(backend, Ends(first, recent)), position)
    for row in range(ROWS):
        low, high = int(first[row]), NOW - int(recent[row])
        assert got[row].tolist() == [p if p < low or p > high else -1 for p in position[row].tolist()]
    assert n == 1 or (got != position).any()


@pytest.mark.parametrize("units, unit", [(10, 3), (3, 16), (70, 16), (2, 1500)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_verdict_over_sealed_tokens_is_as_the_loop(backend: str, units: int, unit: int) -> None:
    rng = torch.Generator().manual_seed(units)
    sealed = torch.randint(-1, NOW, (ROWS, units * unit + 4), generator=rng, dtype=torch.int32)[:, : units * unit]
    sealed[:, -unit:] = torch.where(torch.arange(unit) % 2 == 0, 40, -1).int()  # a unit that dies
    ends = Ends(torch.full((ROWS,), 4), torch.tensor([50, 60, 70, 120]))
    alive = torch.ones(ROWS, units + 2, dtype=torch.bool)
    rule, position = ruled(backend, Sealed(ends, sealed.clone(), alive.clone()[:, :units])), held(17)
    got, _ = judged(backend, rule, position)
    assert torch.equal(got, judged(backend, ruled(backend, ends), position)[0])
    for row in range(ROWS):
        high = NOW - int(ends.recent[row])
        left = [p if p < 4 or p > high else -1 for p in sealed[row].tolist()]
        assert rule.position[row].tolist() == left
        assert rule.alive[row].tolist() == [max(left[i * unit : (i + 1) * unit]) >= 0 for i in range(units)]
    assert not rule.alive[:, -1].any()


@pytest.mark.parametrize("n", [1, 30, 150])
@pytest.mark.parametrize(
    "reduce, together, adds, first",
    [("mean", 1, True, False), ("mean", 2, False, False), ("max", 1, True, True), ("sum", 1, False, True)],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_verdict_by_attention_is_as_the_loop(
    backend: str, reduce: str, together: int, adds: bool, first: bool, n: int
) -> None:
    position, rng = held(n), torch.Generator().manual_seed(n + adds)
    mass = torch.rand(ROWS, 3, n, generator=rng).masked_fill(position[:, None] < 0, 0)
    score = torch.rand(ROWS, n + 1, generator=rng)[:, :n]
    budget, recent = torch.tensor([n, max(1, n // 2), 5, 1]), torch.tensor([1, n // 4 + 1, 3, 1])
    early = torch.tensor([4, 100, 0, 30]) if first else None
    rule = Paid(budget, recent, reduce, adds, together, early)  # type: ignore[arg-type]
    given = {"mass": mass, "score": score} if adds else {"mass": mass}
    got, more = judged(backend, ruled(backend, rule), position, **given)
    for row in range(ROWS):
        rows = [row // together * together + i for i in range(together)]
        each = torch.cat([mass[r] for r in rows]).double()
        paid = each.max(0).values if reduce == "max" else each.sum(0) if reduce == "sum" else each.mean(0)
        paid = paid + score[row].double() if adds else paid
        if adds:
            torch.testing.assert_close(more["score"][row].cpu().double(), paid, rtol=1e-6, atol=1e-6)
        held_here = [i for i, p in enumerate(position[row].tolist()) if p >= 0]

        def worth(i: int, row: int = row, paid: Tensor = paid) -> tuple[float, int]:
            p = int(position[row, i])
            rank = (p > NOW - int(recent[row])) + (2 * (p < int(early[row])) if early is not None else 0)
            return (rank * 1e30 if rank else float(paid[i]), p)

        stays = sorted(held_here, key=worth, reverse=True)[: int(budget[row])]
        assert [i for i, p in enumerate(got[row].tolist()) if p >= 0] == sorted(stays)
        assert all(int(got[row, i]) == int(position[row, i]) for i in stays)


@pytest.mark.parametrize("n", [1, 30, 150])
@pytest.mark.parametrize("backend", BACKENDS)
def test_verdict_by_place_is_as_the_loop(backend: str, n: int) -> None:
    position = held(n)
    counts = (position >= 0).sum(1)
    rule = Placed(counts - torch.tensor([1, 1, 0, 1]), (counts * torch.tensor([0.0, 0.5, 0.5, 0.99])).long())
    got, _ = judged(backend, ruled(backend, rule), position)
    for row in range(ROWS):
        there = sorted(p for p in position[row].tolist() if p >= 0)
        gone = there[int(rule.place[row])] if len(there) > int(rule.budget[row]) else math.inf
        assert got[row].tolist() == [-1 if p == gone else p for p in position[row].tolist()]


@pytest.mark.parametrize("backend", BACKENDS)
def test_verdict_over_more_than_a_program_holds(backend: str) -> None:
    position = torch.arange(9000, dtype=torch.int32).repeat(1, 1)
    mass = torch.rand(1, 2, 9000, generator=torch.Generator().manual_seed(0))
    got, _ = judged(backend, ruled(backend, Paid(torch.tensor([8999]), torch.tensor([1]))), position, 8999, mass=mass)
    assert (got < 0).sum() == 1 and int(mass.mean(1)[0, :].argmin()) == int((got[0] < 0).nonzero())


def test_refusals_say_why() -> None:
    position, one = held(9), torch.ones(ROWS, dtype=torch.int64)
    with pytest.raises(KernelError, match="Paid judges by"):
        verdict(Paid(one, one), position, torch.tensor([NOW]))
    with pytest.raises(KernelError, match="Merged writes keys and values"):
        mass, score = torch.zeros(ROWS, 1, 9), torch.zeros(ROWS, 9)
        rule = Merged(Paid(one, one), torch.zeros(ROWS), 0.5)
        verdict(rule, position, torch.tensor([NOW]), mass=mass, score=score)


@pytest.mark.parametrize("merges", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_of_equals_the_earliest_goes_as_the_loop_says(backend: str, merges: bool) -> None:
    """Whatever slots they lie in; and into the earliest of those left that are as like."""
    places = torch.tensor([[7, 3, -1, 9, 4, 6, 5, 8], [9, 8, 7, 6, 5, 4, -1, -1]], dtype=torch.int32)
    rule: Any = Paid(torch.tensor([6, 5]), torch.tensor([1, 1]))
    about = {"mass": torch.full((2, 1, 8), 0.125)}
    if merges:
        rule = Merged(rule, torch.full((2,), float("nan")), 0.5)
        about |= {"keys": torch.ones(2, 8, 16), "values": torch.eye(8).expand(2, 8, 8).contiguous()}
    got, more = judged(backend, ruled(backend, rule), places, 9, **about)
    assert got.tolist() == [[7, -1, -1, 9, 4, 6, 5, 8], [9, 8, 7, 6, 5, -1, -1, -1]]
    if merges:
        assert (more["values"].cpu() != about["values"]).any(2).nonzero().tolist() == [[0, 4], [1, 4]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_earliest_of_equals_takes_in_what_goes_wherever_it_lies(backend: str) -> None:
    """More keys than a program compares at a time, all alike; in another row what goes is zero, or the most alike is."""
    places = torch.arange(40, dtype=torch.int32).flip(0).repeat(3, 1)  # what goes is in slot 39
    keys, values = torch.ones(3, 40, 512), torch.eye(40).repeat(3, 1, 1)
    keys[1, 39], keys[2, :39], keys[2, 5] = 0, -1, 0
    rule = Merged(Paid(torch.full((3,), 39), torch.ones(3, dtype=torch.int64)), torch.full((3,), math.nan), 0.5)
    about = {"mass": torch.full((3, 1, 40), 0.125), "keys": keys, "values": values}
    got, more = judged(backend, ruled(backend, rule), places, 39, **about)
    assert (got < 0).nonzero().tolist() == [[0, 39], [1, 39], [2, 39]]
    for row, (mate, like) in enumerate([(38, 1.0), (38, 0.0), (5, 0.0)]):
        own, weight = math.e, math.exp(like)
        want = values[row].clone()
        want[mate] = (own * want[mate] + weight * want[39]) / (own + weight)
        torch.testing.assert_close(more["values"][row].cpu(), want)
