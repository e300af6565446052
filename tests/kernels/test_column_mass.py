"""The attention that each token receives, against one query after the other in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import support_kernels as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.column_mass import column_mass, fits, reference
from kvengine.kernels.span_attention import Band

ROWS, DIM = 3, 16
HERE = torch.zeros(1, 1, 1, DIM)
NATIVE = pytest.mark.skipif(not fits(HERE, HERE[0]), reason="no C compiler, or vectors of less than 256 bits")
BACKENDS = [name for name in oracle.backends() if name != "native" or fits(HERE, HERE[0])]
CASES = {  # query heads of a group, queries, tokens, each how many-th of the last is asked
    "whole": (2, 40, 40, 1),
    "several tiles": (1, 150, 203, 1),
    "later chunk": (3, 21, 60, 1),
    "probes": (2, 23, 90, 3),
    "one query": (4, 1, 33, 1),
    "one token": (2, 1, 1, 1),
}


def drawn(
    group: int, queries: int, tokens: int, each: int = 1, dtype: torch.dtype = torch.float32, dim: int = DIM
) -> tuple[Tensor, ...]:
    """Rows with 0, 3 and 6 tokens of padding in front, and one lost later, which hold NaN; so do queries that are none."""
    rng = torch.Generator().manual_seed(queries + tokens)
    q, k = (torch.randn(*s, dim, generator=rng).to(dtype) for s in ((ROWS, group, queries), (ROWS, tokens)))
    first = torch.tensor([0, 3, 6]).clamp(max=tokens - 1)
    position = torch.arange(tokens, dtype=torch.int32).repeat(ROWS, 1)
    position = position.masked_fill(position < first[:, None], -1)
    position[1, tokens // 2] = -1
    at = torch.arange(tokens - 1 - (queries - 1) * each, tokens, each)
    real = at >= first[:, None]
    real[2, queries // 3] &= queries == 1
    k[position < 0] = math.nan
    q.transpose(1, 2)[~real] = math.nan
    return q, k, position, at, real, first


def allowed(position: Tensor, at: Tensor, real: Tensor, band: Band | None = None) -> Tensor:
    """Which tokens each query sees, one pair at a time."""
    seen = torch.zeros(*real.shape, position.shape[1], dtype=torch.bool)
    first, there, ends = [0] * len(real) if band is None else band.first.tolist(), (position >= 0).tolist(), at.tolist()
    for r, i in real.nonzero().tolist():
        tokens = range(ends[i] + 1)
        inside = [band is None or t < first[r] + band.sinks or ends[i] - t < band.local for t in tokens]
        seen[r, i, : ends[i] + 1] = torch.tensor([inside[t] and there[r][t] for t in tokens], dtype=torch.bool)
    return seen


def expected(q: Tensor, k: Tensor, visible: Tensor, *how: Any) -> Tensor:
    found = oracle.attend(q, k, torch.zeros(*k.shape[:2], 1), visible, *how).probs
    assert found is not None
    return found.sum(2)


@pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
@pytest.mark.parametrize("banded", [False, True], ids=["causal", "band"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_a_loop(backend: str, banded: bool, shape: tuple[int, ...]) -> None:
    q, k, position, at, real, first = drawn(*shape)
    band = Band(first, 2, 5) if banded else None

    def call(q: Tensor, k: Tensor, position: Tensor, at: Tensor, real: Tensor, first: Tensor) -> Tensor:
        mine = None if band is None else band._replace(first=first)
        return column_mass(q, k, position, at, real, scale=0.3, band=mine, backend=backend)

    got = oracle.on(backend, call)(q, k, position, at, real, first)
    assert got.dtype == torch.float32
    assert oracle.error(got, expected(q, k, allowed(position, at, real, band), 0.3)) <= 1e-5
    if at[0] > 0:  # the control
        other = allowed(position, at - 1, real) if band is None else allowed(position, at, real, Band(first, 2, 6))
        assert oracle.error(got, expected(q, k, other, 0.3)) > 1e-3


@pytest.mark.parametrize("local", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_without_padding_that_all_see(backend: str, dtype: torch.dtype, local: int | None) -> None:
    """Padding, and queries that do not count, in front, at the end and in the middle."""
    rng = torch.Generator().manual_seed(7)
    q, k = (torch.randn(*s, 48, generator=rng).to(dtype) for s in ((3, 2, 200), (3, 300)))
    position, at = torch.arange(300, dtype=torch.int32).repeat(3, 1), torch.arange(100, 300)
    position[0, :75], position[1, 240:], position[2, 130:133] = -1, -1, -1
    real = position[:, 100:] >= 0
    real[0, :40], real[2, 150] = False, False
    k[position < 0] = math.nan
    q.transpose(1, 2)[~real] = math.nan
    band = None if local is None else Band(torch.tensor([75, 0, 0]), 40, local)

    def call(q: Tensor, k: Tensor, position: Tensor, at: Tensor, real: Tensor, first: Tensor) -> Tensor:
        mine = None if band is None else band._replace(first=first)
        return column_mass(q, k, position, at, real, scale=-0.2, band=mine, backend=backend)

    got = oracle.on(backend, call)(q, k, position, at, real, torch.tensor([75, 0, 0]))
    assert oracle.error(got, expected(q, k, allowed(position, at, real, band), -0.2)) <= 1e-5


@pytest.mark.parametrize("tokens, sinks, local", [(116, 0, 38), (300, 65, 5)], ids=["its last", "its first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_band_that_takes_one_token_of_64(
    backend: str, dtype: torch.dtype, tokens: int, sinks: int, local: int
) -> None:
    q, k = (torch.randn(*s, 32).to(dtype) for s in ((1, 2, 16), (1, tokens)))
    position, at = torch.arange(tokens, dtype=torch.int32)[None], torch.arange(tokens - 16, tokens)
    real, band = torch.ones(1, 16, dtype=torch.bool), Band(torch.zeros(1, dtype=torch.int64), sinks, local)

    def call(q: Tensor, k: Tensor, position: Tensor, at: Tensor, real: Tensor, first: Tensor) -> Tensor:
        mine = band._replace(first=first)
        return column_mass(q, k, position, at, real, scale=0.2, band=mine, backend=backend)

    got = oracle.on(backend, call)(q, k, position, at, real, band.first)
    assert oracle.error(got, expected(q, k, allowed(position, at, real, band), 0.2)) <= 1e-5


@pytest.mark.parametrize("dim", [16, 32, 96])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_in_sixteen_bits(backend: str, dtype: torch.dtype, dim: int) -> None:
    """What is multiplied has few bits; what comes out is not rounded to so few. From 32 channels on C has a matrix unit."""
    q, k, position, at, real, _ = drawn(2, 24, 150, 2, dtype, dim)
    for keys in (k, torch.cat([k, k[..., :1]], 2)[..., :dim]):  # an odd stride
        got = oracle.on(backend, column_mass)(q, keys, position, at, real, scale=0.2, backend=backend)
        assert oracle.error(got, expected(q, k, allowed(position, at, real), 0.2)) <= 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_may_lie_by_channels(backend: str) -> None:
    """And positions by tokens."""
    q, k, position, at, real, _ = drawn(2, 8, 13)
    want = expected(q, k, allowed(position, at, real), 0.3)
    k, position = k.mT.contiguous().mT, position.T.contiguous().T
    which = None if backend == "native" else backend  # C wants channels side by side
    got = oracle.on(backend, column_mass)(q, k, position, at, real, scale=0.3, backend=which)
    assert oracle.error(got, want) <= 1e-5


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_softcap_and_sinks(backend: str, softcap: float | None) -> None:
    q, k, position, at, real, _ = drawn(2, 13, 80)
    sinks = torch.randn(ROWS, 2)
    sinks[0, 1] = 30.0  # takes nearly all
    sinks[1, 0] = -math.inf  # takes nothing
    more = dict(scale=0.3, softcap=softcap, backend=backend)
    got = oracle.on(backend, column_mass)(q, k, position, at, real, sinks=sinks, **more)
    assert oracle.error(got, expected(q, k, allowed(position, at, real), 0.3, softcap, sinks)) <= 1e-5


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_seen_gives_nothing(backend: str, sinks: bool) -> None:
    """A row without tokens, one without queries that count, and queries before the row's first token (dead_tokens)."""
    q, k, position, at, real, _ = drawn(2, 30, 30)
    position[0] = -1
    real[1] = False
    real[2], position[2, :20] = True, -1
    k[position < 0], q[1] = math.nan, math.nan
    q[2] = 1.0
    more = dict(scale=0.3, backend=backend, sinks=torch.zeros(ROWS, 2) if sinks else None)
    got = oracle.on(backend, column_mass)(q, k, position, at, real, **more).cpu()
    assert not got[:2].any() and not got[2, :, :20].any() and bool((got[2, :, 20:] > 0).all())
    if not sinks:
        torch.testing.assert_close(got[2].sum(1), torch.full((2,), 10.0))
    for few, some in ((0, 30), (0, 0)):
        nothing = q[:, :, :few], k[:, :some], position[:, :some], at[:few], real[:, :few]
        found = oracle.on(backend, column_mass)(*nothing, scale=0.3, backend=backend).cpu()
        assert found.shape == (ROWS, 2, some) and not found.any()


@NATIVE
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 9), st.integers(1, 150), st.integers(0, 150), st.sampled_from([16, 48, 128, 256, 512]),
    st.sampled_from([torch.float32, torch.bfloat16]), st.floats(1e-3, 10), st.booleans(), st.booleans(), st.booleans(),
    st.integers(0, 9),
)  # fmt: skip
def test_any_shape_in_c(
    rows: int, group: int, queries: int, before: int, dim: int, dtype: torch.dtype, scale: float, band: bool, cap: bool,
    sink: bool, seed: int,
) -> None:  # fmt: skip
    rng = torch.Generator().manual_seed(seed)
    tokens = queries + before
    q = torch.randn(rows, queries, group, dim, generator=rng).to(dtype).transpose(1, 2)
    k = torch.randn(rows, tokens + 3, dim, generator=rng).to(dtype)[:, 1 : tokens + 1]
    position = torch.arange(tokens).masked_fill(torch.rand(rows, tokens, generator=rng) < 0.1, -1)
    at = torch.randperm(tokens, generator=rng)[:queries].sort().values
    real = torch.rand(rows, queries, generator=rng) < 0.9
    first = torch.randint(tokens, (rows,), generator=rng)
    sinks = torch.randn(rows, group, generator=rng) if sink else None
    about = dict(scale=scale, band=Band(first, seed * 9, 1 + seed * 20) if band else None, softcap=3.0 if cap else None)
    got = column_mass(q, k, position, at, real, sinks=sinks, backend="native", **about)  # type: ignore[arg-type]
    want = column_mass(q, k, position, at, real, sinks=sinks, backend="reference", **about)  # type: ignore[arg-type]
    assert oracle.error(got, want.double()) <= 2e-5 * max(
        1.0, scale * math.sqrt(dim)
    )  # logits are as large, in float32


@NATIVE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries", [5, 300])
def test_threads_do_not_change_a_bit(queries: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    q, k = (torch.randn(*s, 64, generator=rng).to(dtype) for s in ((2, 3, queries), (2, 300)))
    given = (
        q,
        k,
        torch.arange(300).repeat(2, 1),
        torch.arange(300 - queries, 300),
        torch.ones(2, queries, dtype=torch.bool),
    )
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found += [column_mass(*given, scale=0.125, backend="native") for _ in range(2)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found)


@NATIVE
def test_large_logits() -> None:
    """Scores far apart, the best token first or last: no overflow, and weights that vanish are zero."""
    for best in (0, 99):
        q, k = torch.ones(1, 1, 1, 32), torch.zeros(1, 100, 32)
        k[:, best] = 100.0
        given = torch.arange(100)[None], torch.tensor([99]), torch.ones(1, 1, dtype=torch.bool)
        got = column_mass(q, k, *given, scale=1.0, backend="native")
        assert torch.equal(got[0, 0], torch.arange(100).eq(best).float())


def test_more_queries_than_are_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, position, at, real, first = drawn(2, 40, 40)
    want = column_mass(q, k, position, at, real, scale=0.3, backend="reference")
    monkeypatch.setattr(reference, "BLOCK", 40 * 2 * 7)
    assert len(reference.blocks(q, 40)) == 6
    got = column_mass(q, k, position, at, real, scale=0.3, backend="reference")
    torch.testing.assert_close(got, want)


@NATIVE
def test_only_what_fits_goes_to_c() -> None:
    q, k, position, at, real, _ = drawn(2, 20, 20)
    q, k, real = q.nan_to_num(), k.nan_to_num(), torch.ones_like(real)
    assert fits(q, k) and fits(q.bfloat16(), k.half())
    for other in (
        (q.double(), k.double()), (q[..., :8], k[..., :8]), (q, k.repeat_interleave(2, -1)[..., ::2]),
        (torch.zeros(ROWS, 2, 20, 1040), torch.zeros(ROWS, 20, 1040)),
    ):  # fmt: skip
        assert not fits(*other)
        with pytest.raises(KernelError, match="native"):
            column_mass(*other, position, at, real, scale=0.2, backend="native")
        got = column_mass(*other, position, at, real, scale=0.2)
        assert oracle.error(got, expected(*other, allowed(position, at, real), 0.2)) < 1e-5
    assert column_mass(q.clone().requires_grad_(), k, position, at, real, scale=0.2).requires_grad


@NATIVE
def test_what_torch_does_in_less_time_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr("kvengine.kernels.column_mass.pick", lambda *given: asked.append(given[3]) or reference)
    q, k, position, at, real, _ = drawn(2, 2, 9)
    for n, dtype in ((1, torch.float32), (2, torch.float32), (1, torch.bfloat16)):
        column_mass(q[:, :, :n].to(dtype), k.to(dtype), position, at[:n], real[:, :n], scale=1.0)
    assert asked == [False, True, True]


@pytest.mark.parametrize("change", [dict(k=1), dict(position=1), dict(at=1), dict(real=1), dict(sinks=1)])
def test_shapes_that_do_not_fit_are_refused(change: dict[str, int]) -> None:
    q, k, position, at, real, _ = drawn(2, 9, 20)
    given = dict(q=q, k=k, position=position, at=at, real=real, sinks=torch.zeros(ROWS, 2))
    name, by = next(iter(change.items()))
    given[name] = given[name][by:]
    with pytest.raises((KernelError, TypeCheckError)) as refusal:  # the latter where signatures are checked
        column_mass(**given, scale=1.0)
    assert refusal.type is TypeCheckError or str(list(given[name].shape)) in str(refusal.value)
