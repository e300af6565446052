"""Units chosen by shares of attention in one call of C: against a loop over them in double precision."""

from __future__ import annotations

import math
from typing import Any

import pytest
import support_kernels as oracle
import torch
from torch import Tensor

from kvengine.kernels.page_scores import units_by_share

BACKENDS = [name for name in oracle.backends() if name != "triton"]
SCALE = 0.125
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def whole(*shape: int, seed: int) -> Tensor:
    """Small whole numbers: their products are exact in every dtype, so that what is equal is equal in all of them."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).float()


def wanted(
    q: Tensor, mean: Tensor, alive: Tensor, count: int, reduce: str, softcap: float | None, coherence: Tensor | None,
    outliers: float, first: bool,
) -> list[int]:  # fmt: skip
    """Of one row. Units that want the same to a billionth are as good."""
    live, forced = alive.nonzero()[:, 0].tolist(), list[int]()
    if coherence is not None:
        forced = sorted(live, key=lambda u: (float(coherence[u]), -u))[: int(count * outliers)]
    free = [u for u in live if u not in forced]
    logits = q.double() @ mean[free].double().T * SCALE
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    share = logits.log_softmax(1) if free else logits
    want = dict(zip(free, (share.amax(0) if reduce == "max" else share.logsumexp(0)).tolist(), strict=True))
    if first and live:
        want[live[0]] = math.inf
    best = sorted(free, key=lambda u: (-round(want[u], 9), u))[: count - len(forced)]
    return sorted([*forced, *best])


@pytest.mark.parametrize("forced", ["none", "outliers", "first"])
@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_units_of_any_number_dtype_and_layout(backend: str, dtype: torch.dtype, reduce: Any, forced: str) -> None:
    """One block of units and several, widths that fill registers or do not, one query head to more than four."""
    cases = [
        (1, 64, 1, None),
        (4, 64, 600, 3.0),
        (5, 40, 700, None),
        (1, 72, 513, None),
        (4, 96, 560, None),
        (9, 16, 31, 1.5),
    ]
    for group, dim, units, softcap in cases:
        rows = 3
        mean = whole(rows, units + 3, dim, seed=units).to(dtype)[:, 2 : units + 2]  # a view, as of preallocated rows
        alive = (torch.rand(units, rows, generator=torch.Generator().manual_seed(1)) < 0.8).T  # of a layout of its own
        alive[1] = False
        mean[~alive] = math.nan
        far = (whole(rows, units, seed=2) / 4).half() if forced == "outliers" else None  # many are equal
        q, counts = whole(rows, 2 * group, dim, seed=3).to(dtype)[:, ::2], torch.tensor([units // 7 + 2, 4, 0])
        for given in (None, counts):
            got = units_by_share(
                q, mean, alive, units // 7 + 2, SCALE, counts=given, coherence=far, outliers=0.3 if far is not None else 0.0,
                first=forced == "first", reduce=reduce, softcap=softcap, backend=backend,
            ).tolist()  # fmt: skip
            for r, ids in enumerate(got):
                most = int((counts if given is not None else counts[:1].expand(3))[r])
                own = None if far is None else far[r]
                want = wanted(q[r], mean[r], alive[r], most, reduce, softcap, own, 0.3, forced == "first")
                assert ids == want + [-1] * (min(units // 7 + 2, units) - len(want)), (group, units, r)


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.skipif("native" not in BACKENDS, reason="no C compiler")
def test_what_is_no_number_hides_no_other_unit(reduce: Any) -> None:
    """It is read itself, where attention shows it."""
    q, mean, alive = whole(2, 4, 64, seed=0), whole(2, 600, 64, seed=1), torch.ones(2, 600, dtype=torch.bool)
    plain = units_by_share(q, mean, alive, 40, SCALE, reduce=reduce, backend="native")
    for bad in (math.nan, math.inf):
        worse = mean.clone()
        worse[0, 577, 3] = bad
        got = units_by_share(q, worse, alive, 41, SCALE, reduce=reduce, backend="native").tolist()
        assert set(got[0]) == {*plain[0].tolist(), 577} and got[1][:40] != plain[0].tolist()
    worse = q.clone()
    worse[0, 1, 5] = math.nan
    assert units_by_share(worse, mean, alive, 3, SCALE, reduce=reduce, backend="native")[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_shapes(backend: str) -> None:
    for rows, units, most in ((0, 5, 2), (2, 0, 2), (2, 5, 0)):
        q, mean, alive = torch.ones(rows, 2, 16), torch.ones(rows, units, 16), torch.ones(rows, units, dtype=torch.bool)
        assert units_by_share(q, mean, alive, most, SCALE, backend=backend).shape == (rows, min(most, units))
