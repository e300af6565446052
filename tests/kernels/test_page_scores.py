"""Quest's bounds and the choice of units."""

from __future__ import annotations

import copy
import math
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import support_kernels as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.page_scores import (
    head_scores,
    log_shares,
    page_bounds,
    page_scores,
    remembered,
    top_units,
    units_by_share,
)
from kvengine.kernels.page_scores.remembered import Remembered

BACKENDS = oracle.backends()


def bounds(dim: int, units: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(dim + units)
    low = torch.randn(3, units + 4, dim, generator=rng).to(dtype)[:, 2 : units + 2]  # a view, as of preallocated rows
    alive = (torch.rand(3, units, generator=rng) < 0.7).T.contiguous().T  # of a layout of its own
    alive[1] = False
    high = (low.float() + torch.rand(3, units, dim, generator=rng)).to(dtype)
    high[~alive] = math.nan
    return low, high, alive


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 8, 1), (3, 72, 67), (4, 128, 301), (9, 64, 33), (4, 512, 50)], ids=str)
@pytest.mark.parametrize("alike", [False, True], ids=["query in float32", "query in the dtype"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_match_a_loop(
    backend: str, alike: bool, shape: tuple[int, int, int], dtype: torch.dtype, reduce: str
) -> None:
    group, dim, units = shape
    low, high, alive = bounds(dim, units, dtype)
    q = torch.randn(3, group, dim, generator=torch.Generator().manual_seed(0))
    q = q.to(dtype) if alike else q
    got = oracle.on(backend, page_scores)(q, low, high, alive, reduce=reduce, backend=backend).cpu()
    heads = oracle.on(backend, head_scores)(q, low, high, alive, backend=backend).cpu()
    for r in range(3):
        for u in range(units):
            if not alive[r, u]:
                assert got[r, u] == -math.inf and (heads[r, :, u] == -math.inf).all()
                continue
            each = torch.maximum(q[r].double() * low[r, u].double(), q[r].double() * high[r, u].double()).sum(-1)
            want = each.max() if reduce == "max" else each.mean()
            assert abs(got[r, u] - want) <= 1e-5 * dim and (heads[r, :, u] - each).abs().max() <= 1e-5 * dim


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_and_who_is_alive_may_be_views(backend: str) -> None:
    low, high, alive = bounds(24, 33, torch.float32)
    many, pairs = torch.randn(3, 3, 2, 48, generator=torch.Generator().manual_seed(4)), torch.stack([alive, ~alive], 2)
    for q in (many[:, :, 1, :24], many[:, :, 1, ::2], many[..., :24].transpose(0, 1)[1]):
        got = oracle.on(backend, page_scores)(q, low, high, pairs[..., 0], backend=backend)
        want = page_scores(q.clone(), low, high, alive, backend="reference")
        torch.testing.assert_close(got.cpu(), want, atol=1e-4, rtol=0)
    few = torch.stack([want, -want], 2)[..., 0]
    assert torch.equal(
        oracle.on(backend, top_units)(few, 7, backend=backend).cpu(), top_units(want, 7, backend="reference")
    )
    share = oracle.on(backend, log_shares)(many[:, :, 1, :24], low, pairs[..., 0], 0.3, backend=backend)
    other = log_shares(many[:, :, 1, :24].clone(), low, alive, 0.3, backend="reference")
    torch.testing.assert_close(share.cpu()[[0, 2]], other[[0, 2]], atol=1e-4, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_an_earlier_call_read_is_not_in_the_way(backend: str) -> None:
    """Where heads end within a register, too."""
    run, alive = oracle.on(backend, page_scores), torch.ones(1, 9, dtype=torch.bool)
    for dim in (72, 40, 8):
        bad, x, q = torch.full((1, 9, 80), math.nan), torch.randn(1, 9, dim), torch.randn(1, 3, dim)
        assert run(torch.ones(1, 3, 80), bad, bad, alive, backend=backend).shape == (1, 9)
        want = (q.double() @ x.double().mT).amax(1)
        torch.testing.assert_close(run(q, x, x, alive, backend=backend).cpu().double(), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim, units", [(8, 5), (72, 70), (128, 1100), (8, 4200)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_log_shares_are_a_softmax_of_each_head(backend: str, dim: int, units: int, dtype: torch.dtype) -> None:
    mean, _, alive = bounds(dim, units, dtype)
    mean = mean.clone()
    mean[~alive] = math.nan
    q = torch.randn(3, 5, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    got = oracle.on(backend, log_shares)(q, mean, alive, 0.3, backend=backend).cpu()
    for r in (0, 2):  # row 1 is dead
        logits = q[r].double() @ mean[r, alive[r]].double().T * 0.3
        assert torch.allclose(got[r][:, alive[r]].double(), logits - logits.logsumexp(-1, keepdim=True), atol=1e-4)
    assert (got.masked_select(~alive[:, None].expand_as(got)) == -math.inf).all()


def test_bounds_bound_every_living_key() -> None:
    rng = torch.Generator().manual_seed(3)
    k, alive = torch.randn(2, 48, 16, generator=rng), torch.rand(2, 48, generator=rng) < 0.4
    alive[0, 8:16] = False
    k[~alive] = math.nan
    low, high = page_bounds(k, alive, 8)
    assert not low[0, 1].any() and not high[0, 1].any()
    q = torch.randn(2, 5, 16, generator=rng)
    scores = page_scores(q, low, high, alive.unflatten(1, (-1, 8)).any(-1))
    exact = (q @ k.mT).amax(1).masked_fill(~alive, -math.inf).unflatten(1, (-1, 8)).amax(-1)
    assert (scores >= exact - 1e-5).all()
    one = page_scores(q, *page_bounds(k, alive, 1), alive)  # a unit of one token: the bound is the score
    assert torch.allclose(one[alive], (q @ k.mT).amax(1)[alive], atol=1e-5)


@given(
    st.lists(st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1.5, math.inf]), min_size=1, max_size=40), st.integers(0, 50)
)
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("backend", BACKENDS)
def test_top_units_are_the_best_with_ties_to_the_lower_id(backend: str, row: list[float], count: int) -> None:
    got = oracle.on(backend, top_units)(torch.tensor([row, row[::-1]]), count, backend=backend)
    for scores, ids in zip((row, row[::-1]), got.tolist(), strict=True):
        order = sorted(range(len(scores)), key=lambda u: (-scores[u], u))[:count]
        want = sorted(u for u in order if scores[u] > -math.inf)
        assert ids == want + [-1] * (min(count, len(scores)) - len(want))


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton does not run here")
@pytest.mark.parametrize("count", [1, 3, 7])
def test_triton_chooses_among_more_units_than_a_program_holds(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    from kvengine.kernels.page_scores import triton

    monkeypatch.setattr(triton, "MOST", 16)
    rng = torch.Generator().manual_seed(count)
    for units in (17, 200, 600):
        scores = torch.randint(-3, 12, (3, units), generator=rng).float()  # many are equal
        scores[torch.rand(3, units, generator=rng) < 0.2] = -math.inf
        scores[1, :100], scores[2, 5:] = -math.inf, -math.inf
        got = oracle.on("triton", top_units)(scores, count, backend="triton").cpu()
        assert torch.equal(got, top_units(scores, count, backend="reference"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_may_have_counts_of_their_own(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "triton":
        monkeypatch.setattr("kvengine.kernels.page_scores.triton.MOST", 16)
    rng, counts = torch.Generator().manual_seed(2), torch.tensor([0, 1, 4, 5, 9])
    for units in (3, 16, 90):
        scores = torch.randint(-3, 12, (5, units), generator=rng).float()  # many are equal
        scores[torch.rand(5, units, generator=rng) < 0.2] = -math.inf
        got = oracle.on(backend, top_units)(scores, 5, counts=counts, backend=backend).tolist()
        for row, n, ids in zip(scores, counts.tolist(), got, strict=True):
            want = [u for u in top_units(row[None], min(n, 5), backend="reference")[0].tolist() if u >= 0]
            assert ids == want + [-1] * (min(5, units) - len(want))


@pytest.mark.parametrize("most", [16, 16384])
@pytest.mark.parametrize("backend", BACKENDS)
def test_who_is_not_alive_is_not_chosen(backend: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "triton":
        monkeypatch.setattr("kvengine.kernels.page_scores.triton.MOST", most)
    rng = torch.Generator().manual_seed(most)
    for units in (1, 3, 16, 30, 91):
        wide = torch.randint(-3, 12, (4, units + 9), generator=rng).float()
        alive = (torch.rand(units, 4, generator=rng) < 0.6).T  # of a layout of its own
        alive[3] = False
        wide[1, ::2] = math.inf
        apart, narrow = wide.clone()[:, 3 : units + 3], wide[:, :units].clone()
        apart[~alive] = narrow[~alive] = math.nan
        for scores in (apart, narrow, wide[:1, :units].expand(4, units)):
            got = oracle.on(backend, top_units)(scores, 5, alive=alive, backend=backend).cpu()
            assert torch.equal(got, top_units(scores.masked_fill(~alive, -math.inf), 5, backend="reference"))


def wanted(
    q: Tensor, mean: Tensor, coherence: Tensor | None, live: list[int], count: int, outliers: float, first: bool, reduce: str,
    softcap: float | None,
) -> list[int]:  # fmt: skip
    """Of one row, unit by unit."""
    forced: list[int] = []
    if coherence is not None:
        forced = sorted(live, key=lambda u: (float(coherence[u]), -u))[: int(count * outliers)]
    free = [u for u in live if u not in forced]
    share: dict[int, list[float]] = {u: [] for u in free}
    for head in q.double() if free else []:
        logits = mean[free].double() @ head * 0.3
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        for u, x in zip(free, logits.softmax(0).tolist(), strict=True):
            share[u].append(x)
    if first and live and count:
        forced, free = [live[0]], live[1:]
    by = max if reduce == "max" else sum
    best = sorted(free, key=lambda u: (-by(share[u]), u))  # type: ignore[operator]
    return sorted([*forced, *best[: max(0, count - len(forced))]])


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("forced", ["none", "outliers", "many outliers", "first"])
@pytest.mark.parametrize("even", [False, True], ids=["counts", "even"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_units_by_share_match_a_loop(
    backend: str, even: bool, forced: str, reduce: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [(8, 1, 4, None), (8, 12, 1, None), (16, 70, 9, 0.5), (72, 33, 40, None), (8, 150, 7, None)]
    if backend == "triton":  # the last one has more units than a program holds
        monkeypatch.setattr("kvengine.kernels.page_scores.triton.MOST", 128)
    for dim, units, most, softcap in cases:
        mean, _, alive = bounds(dim, units, torch.float32)
        mean = mean.clone()
        mean[~alive] = math.nan
        rng = torch.Generator().manual_seed(units)
        coherence = (
            (torch.rand(3, units, generator=rng) * 8).round().div(8)
        )  # many are equal, or differ in the last bit
        coherence = (coherence * (1 + torch.randint(0, 2, coherence.shape, generator=rng) / 1024)).half()
        coherence[~alive] = -1.0
        coherence = coherence.T.contiguous().T
        q, counts = torch.randn(3, 3, dim, generator=rng), torch.tensor([most, 2, most // 2])
        limits = [most] * 3 if even else counts.tolist()
        far = coherence if "outliers" in forced else None
        share = {"outliers": 0.1875, "many outliers": 0.9}.get(forced, 0.0)
        got = oracle.on(backend, units_by_share)(
            q, mean, alive, most, 0.3, counts=None if even else counts, coherence=far, outliers=share,
            first=forced == "first", reduce=reduce, softcap=softcap, backend=backend,
        ).tolist()  # fmt: skip
        for r, count in enumerate(limits):
            live = alive[r].nonzero().flatten().tolist()
            own = None if far is None else far[r]
            want = wanted(q[r], mean[r], own, live, count, share, forced == "first", reduce, softcap)
            assert got[r] == want + [-1] * (min(most, units) - len(want)), (units, r)


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_units_are_told_apart_however_little_they_get(backend: str, reduce: str) -> None:
    """One gets nearly all, and the others less than float32's least number."""
    rng, alive = torch.Generator().manual_seed(0), torch.ones(2, 40, dtype=torch.bool)
    mean, q = torch.randn(2, 40, 16, generator=rng), torch.randn(2, 3, 16, generator=rng)
    mean[:, 7] = 8 * q.sum(1)
    q *= 10
    run = oracle.on(backend, units_by_share)
    got = run(
        q, mean, alive, 9, 0.3, counts=None, coherence=None, outliers=0.0, first=False, reduce=reduce, backend=backend
    )
    for r in range(2):
        each = (q[r].double() @ mean[r].double().T * 0.3).softmax(1)
        assert each[:, [u for u in range(40) if u != 7]].max() < 1e-45
        assert got[r].tolist() == wanted(q[r], mean[r], None, list(range(40)), 9, 0.0, False, reduce, None)


def test_refusals_say_why() -> None:
    low, high, alive = bounds(8, 4, torch.float32)
    q = torch.randn(3, 2, 8)
    with pytest.raises(KernelError, match="mean must be"):
        log_shares(q, low[:, :3], alive, 1.0)
    with pytest.raises(KernelError, match="mean must be"):
        units_by_share(q, low, alive, 2, 1.0, coherence=low[:, :2, 0])
    with pytest.raises(KernelError, match="not both"):
        units_by_share(q, low, alive, 2, 1.0, coherence=low[:, :, 0], first=True)
    with pytest.raises(KernelError, match="low and high must be"):
        page_scores(q, low[:, :3], high[:, :3], alive)
    with pytest.raises(KernelError, match="'max' or 'mean'"):
        page_scores(q, low, high, alive, reduce="sum")  # type: ignore[arg-type]
    with pytest.raises(KernelError, match="must divide"):
        page_bounds(low, alive, 3)
    with pytest.raises(KernelError, match="at least 0"):
        top_units(torch.zeros(1, 3), -1)


NUMBERS = [(0, "units", 0), (1, "candidates", 0), (1, "count", 1), (1, "most", 1)]


class Chooser:
    """Choices as on a GPU: two launches, made again for a query of the same kind over what lies where it lay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.remembered, self.notes, self.works = Remembered(), 2, True
        self.chosen = self.made = 0
        self.now: tuple[Any, ...] = ()
        names = ("units", "each"), ("ids", "candidates", "count", "most", "outliers")
        notes = [SimpleNamespace(kernel=SimpleNamespace(arg_names=x), given=[0.0, 0, 0, 0, 0.2]) for x in names]
        monkeypatch.setattr(remembered, "noted", lambda: nullcontext(notes[: self.notes]))
        launches = SimpleNamespace(remembered=self.remember)
        monkeypatch.setitem(sys.modules, "kvengine.kernels.gpu.launches", launches)

    def kind(self) -> list[Any]:
        q, of, units, count, kind = self.now
        among = (units - 1).bit_length() if units <= 16 else 16 * -(-units // 16)
        chosen = (count - 1).bit_length(), int(count * 0.2).bit_length()
        return [q.dtype, q.shape, q.stride(), kind, [id(x) for x in of], among, chosen]

    def answer(self) -> Tensor:
        q, _, units, count, more = self.now
        return (q.float().sum((1, 2), keepdim=True)[:, 0].long() + torch.arange(count)) * 3 + sum(more) + units

    def remember(self, notes: Any, given: Any, held: Any, numbers: Any) -> Any:
        q, of, *_ = self.now
        assert given[0] is q and held is of and len(notes) == 2 and numbers == NUMBERS
        self.made, kind = self.made + 1, self.kind()

        def again(given: Any, numbers: Any) -> bool:
            assert self.kind() == kind and given[0] is self.now[0] and numbers == self.now[2:4]
            assert given[1].dtype == torch.int64 and given[1].shape == self.answer().shape
            if self.works:
                given[1].copy_(self.answer())
            return self.works

        return SimpleNamespace(again=again)

    def choose(self) -> Tensor:
        self.chosen += 1
        return self.answer()

    def __call__(self, *now: Any) -> int:
        """Chooses, and says how often the general way was gone for it."""
        self.now, before = now, self.chosen
        assert torch.equal(self.remembered.top(*now, self.choose), self.answer())  # type: ignore[arg-type]
        return self.chosen - before


def test_launches_that_choose_are_made_again_for_what_is_no_different(monkeypatch: pytest.MonkeyPatch) -> None:
    ask, of = Chooser(monkeypatch), (torch.ones(2, 6, 4), torch.ones(2, 6, dtype=torch.bool))
    q, (low, alive) = torch.randn(2, 3, 4), of
    base = (q, of, 6, 3, (0,))
    kinds = [
        (q[:, :2], of, 6, 3, (0,)), (q.mT.contiguous().mT, of, 6, 3, (0,)), (q.half(), of, 6, 3, (0,)), (q, of, 6, 2, (0,)),
        (q, of, 6, 3, (1,)),
    ]  # fmt: skip
    elsewhere = [
        (q, (low.clone(), alive), 6, 3, (0,)), (q, (low, alive.clone()), 6, 3, (0,)), (q, (low,), 6, 3, (0,)),
        (q, (low, *of), 6, 3, (0,)),
    ]  # fmt: skip
    assert [ask(*base), ask(*base), ask(torch.randn(2, 3, 4), *base[1:])] == [1, 0, 0]
    for other in kinds:
        assert [ask(*other), ask(*other), ask(*base), ask(*base)] == [1, 0, 0, 0]
    for other in elsewhere:
        assert [ask(*other), ask(*other), ask(*base), ask(*base)] == [1, 0, 1, 0]


def test_launches_that_choose_are_made_again_for_more_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where these take as many blocks: up to a power of two, and then to a multiple of sixteen."""
    ask, of, q = Chooser(monkeypatch), (torch.ones(2, 99, 4),), torch.randn(2, 3, 4)
    general = [units for units in range(1, 66) if ask(q, of, units, 1, ())]
    assert general == [1, 2, 3, 5, 9, 17, 33, 49, 65]


def test_launches_that_choose_are_made_again_for_fewer_that_are_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down to half a power of two, and as long as a fifth takes as many parts; to and fro, and never more than there are."""
    ask, of, q = Chooser(monkeypatch), (torch.ones(2, 99, 4),), torch.randn(2, 3, 4)
    general = [count for count in range(64, 8, -1) if ask(q, of, 70, count, ())]
    assert general == [64, 39, 32, 19, 16, 9] and not any(ask(q, of, 70, count, ()) for count in range(9, 65))
    assert ask(q, of, 65, 64, ()) == 0 and not ask.remembered.known[0].holds((), 65, 66)


def test_launches_that_choose_are_let_go_and_not_kept_at_any_price(monkeypatch: pytest.MonkeyPatch) -> None:
    ask, of = Chooser(monkeypatch), (torch.ones(2, 99, 4), torch.ones(2, 99, dtype=torch.bool))
    q = torch.randn(2, 3, 4)
    kinds = [(q, of, 9, 3, (kind,)) for kind in range(39)]
    assert [ask(*kind) for kind in kinds] == [
        1
    ] * 39 and ask.made == remembered.MOST  # none came again: no more are noted
    last, made = kinds[remembered.MOST - 1], ask.made
    assert ask(*last) == 0 and [ask(*kind) for kind in kinds[10:]] == [1] * 29 and ask.made == made + remembered.MOST
    last = kinds[10 + remembered.MOST - 1]
    assert ask(*last) == 0 and [ask(*kind) for kind in kinds[20:22] for _ in range(2)] == [1, 0, 1, 0]
    ask.works, made = False, ask.made  # as where the query lies askew
    assert [ask(*kinds[21]) for _ in range(2)] == [1, 1]
    ask.works = True
    assert ask(*kinds[21]) == 0 and ask.made == made
    for forget in (ask.remembered.forget, lambda: setattr(ask, "remembered", copy.deepcopy(ask.remembered))):
        forget()
        assert not ask.remembered.known and [ask(*kinds[21]) for _ in range(2)] == [1, 0]
    ask.notes = 1  # another way of choosing
    assert [ask(*kind) for kind in kinds[:3] for _ in range(2)] == [1] * 6
