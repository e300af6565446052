"""How a prompt is read, against the dumb attention and against itself in other pieces."""

from __future__ import annotations

import math
from typing import Any

import pytest
import support_kernels as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import every
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.causal_attention import FAR, causal_attention, follows, native, quicker
from kvengine.kernels.cpu import library

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
HERE = torch.zeros(1, 1, 1, 32)
NATIVE = pytest.mark.skipif(not native.fits(HERE, HERE, HERE), reason="no C compiler, or vectors of less than 256 bits")
BACKENDS = ["reference", pytest.param("native", marks=NATIVE)]
SHAPES = [  # sequences, KV heads, group, queries, tokens, dim, dim_v
    (1, 2, 4, 200, 200, 64, 64),
    (1, 2, 2, 61, 61, 16, 16),
    (2, 3, 1, 65, 130, 16, 32),
    (1, 1, 7, 1, 77, 32, 96),
    (2, 1, 8, 33, 33, 128, 128),
    (1, 4, 2, 9, 300, 48, 64),
]


def case(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as a model brings them; behind and before what is used lies what nobody may read."""
    sequences, heads, group, queries, tokens, dim, dim_v = shape
    rng = torch.Generator().manual_seed(sum(shape))
    draw = lambda *size: torch.randn(*size, generator=rng).to(dtype)  # noqa: E731
    q, v = (
        draw(sequences, queries, heads * group, dim).transpose(1, 2),
        draw(sequences, tokens, heads, dim_v).transpose(1, 2),
    )
    slots = draw(sequences, heads, tokens + 5, dim)
    slots[:, :, :2], slots[:, :, -3:] = math.nan, math.nan
    return q, slots[:, :, 2:-3], v


def expected(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    (sequences, _, queries, _), (heads, tokens) = q.shape, k.shape[1:3]
    grouped = q.unflatten(1, (heads, -1)).flatten(0, 1)
    sees = torch.arange(tokens) <= torch.arange(tokens - queries, tokens)[:, None]
    out = oracle.attend(grouped, k.flatten(0, 1), v.flatten(0, 1), sees.expand(sequences * heads, -1, -1), scale).out
    return out.unflatten(0, (sequences, heads)).flatten(1, 2).transpose(1, 2)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_each_token_sees_those_up_to_itself(backend: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v = case(shape, dtype)
    if backend == "native" and not native.fits(q, k, v):
        assert dtype == torch.bfloat16
        return
    got = causal_attention(q, k, v, scale=0.3, backend=backend)
    assert got.dtype == dtype
    assert oracle.error(got, expected(q, k, v, 0.3)) <= BOUND[dtype]
    blind = torch.full_like(v, 7.0)
    blind[:, :, 0] = v[:, :, 0]
    assert (
        shape[3] < shape[4] or oracle.error(causal_attention(q, k, blind, scale=0.3)[:, 0], got[:, 0].double()) < 1e-2
    )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("dtype", [*BOUND, torch.float64], ids=str)
@pytest.mark.parametrize("queries", every(2, [640, 1, 7, 511]))
@pytest.mark.parametrize("backend", BACKENDS)
def test_places_without_a_token_are_not_read(backend: str, queries: int, dtype: torch.dtype) -> None:
    """Padding before a row and within it, evicted tokens, a row of nothing: memory there holds NaN."""
    q, k, v = case((3, 2, 3, queries, 700, 32, 32), dtype)
    if backend == "native" and not native.fits(q, k, v):
        return
    position = torch.arange(700).repeat(3, 1)
    position[0, :99], position[0, 640:650], position[1, 1::2], position[2] = -1, -1, -1, -1
    sees = (position >= 0)[:, None] & (torch.arange(700) <= torch.arange(700 - queries, 700)[:, None])
    grouped, flat = q.unflatten(1, (2, -1)).flatten(0, 1), [x.flatten(0, 1) for x in (k, v)]
    want = oracle.attend(grouped, *flat, sees.repeat_interleave(2, 0), 0.3).out.unflatten(0, (3, 2)).flatten(1, 2)
    k, v = (x.masked_fill((position < 0)[:, None, :, None], math.nan) for x in (k, v))
    got = causal_attention(q, k, v, scale=0.3, position=position, backend=backend)
    assert oracle.error(got, want.transpose(1, 2)) <= BOUND.get(dtype, 1e-12)
    assert not got[2].any()


@NATIVE
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 2), st.integers(1, 3), st.integers(1, 9), st.integers(1, 150), st.integers(0, 150),
    st.sampled_from([16, 32, 80, 256, 512]), st.sampled_from([16, 32, 48, 256, 512]), st.floats(1e-3, 30), st.integers(0, 5),
)  # fmt: skip
def test_any_shape_and_scale(
    sequences: int, heads: int, group: int, queries: int, before: int, dim: int, dim_v: int, scale: float, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(sequences, heads * group, queries, dim, generator=rng)
    k, v = (torch.randn(sequences, heads, before + queries, d, generator=rng) for d in (dim, dim_v))
    for dtype, bound in ((torch.float32, 0.0), (torch.bfloat16, 5e-3)):
        given = q.to(dtype), k.to(dtype), v.to(dtype)
        if not native.fits(*given):
            continue
        got = causal_attention(*given, scale=scale, backend="native")
        want = causal_attention(*(x.double() for x in given), scale=scale)
        # logits are as large, in float32
        assert oracle.error(got, want) <= bound + 1e-5 * max(1.0, scale * math.sqrt(dim))


@NATIVE
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("cuts", [(0, 1, 300), (0, 63, 64, 65, 300), (0, 130, 299, 300)])
def test_the_pieces_a_prompt_comes_in_do_not_change_a_bit(
    cuts: tuple[int, ...], threads: int, dtype: torch.dtype
) -> None:
    q, k, v = case((2, 2, 3, 300, 300, 64, 64), dtype)
    if not native.fits(q, k, v):
        return
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        want = causal_attention(q, k, v, scale=0.125, backend="native")
        parts = [
            causal_attention(q[:, :, a:b], k[:, :, :b], v[:, :, :b], scale=0.125, backend="native")
            for a, b in zip(cuts, cuts[1:], strict=False)
        ]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.cat(parts, 1), want)
    alone = causal_attention(q[1:], k[1:], v[1:], scale=0.125, backend="native")
    assert torch.equal(alone, want[1:])


@NATIVE
def test_large_logits_and_keys_that_do_not_count() -> None:
    """Scores far apart, the best one last or first: no overflow, and weights that vanish are zero."""
    for best in (0, 99):
        q, k, v = torch.ones(1, 1, 100, 32), torch.zeros(1, 1, 100, 32), torch.randn(1, 1, 100, 32)
        k[:, :, best] = 100.0
        got = causal_attention(q, k, v, scale=1.0, backend="native")
        assert torch.equal(got[0, 99, 0], v[0, 0, best])
        assert bool(got.isfinite().all())


def test_what_it_does_not_know() -> None:
    q, k, v = torch.zeros(1, 2, 2, 8), torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, 3, 4)
    assert not follows(q, k, v) and not follows(q.double(), k.double(), k.double())
    assert not follows(q.requires_grad_(), k, k)
    with torch.no_grad():
        assert follows(q, k, k)
    assert not quicker(q, k, v)  # 8 and 4 channels


@NATIVE
def test_only_what_fits_goes_to_c() -> None:
    q, k, v = case((1, 2, 2, 5, 9, 32, 32))
    assert quicker(q, k, v)
    for other in (
        (q.double(), k.double(), v.double()), (q.half(), k.half(), v.half()),
        (q[..., :24], k[..., :24], v), (q, k, v[..., :20]), (q, k, v.repeat_interleave(2, -1)[..., ::2]),
        (q.clone().requires_grad_(), k, v),
    ):  # fmt: skip
        assert not quicker(*other)
        got = causal_attention(*other, scale=0.2)
        assert oracle.error(got, expected(*(x.detach() for x in other), 0.2)) < 1e-2


PAIRED = torch.zeros(1, 1, 1, 32, dtype=torch.bfloat16)


@pytest.mark.skipif(not native.fits(PAIRED, PAIRED, PAIRED), reason="vectors of less than 256 bits, or a matrix unit")
@pytest.mark.parametrize(
    "shape", [(2, 2, 4, 200, 333, 64, 32), (1, 1, 1, 700, 700, 128, 128), (1, 3, 2, 9, 90, 32, 96)]
)
def test_in_bfloat16_hardly_more_is_lost_than_by_the_library(shape: tuple[int, ...]) -> None:
    q, k, v = case(shape, torch.bfloat16)
    want = expected(q, k, v, 0.3)
    ours, theirs = (causal_attention(q, k, v, scale=0.3, backend=name) for name in ("native", "reference"))
    assert oracle.error(ours, want) <= 1.25 * oracle.error(theirs, want)
    apart = k.new_zeros(*k.shape[:3], k.shape[3] + 1)[..., 1:].copy_(k)  # an odd step from token to token
    assert not native.fits(q, apart, v)
    assert oracle.error(causal_attention(q, apart, v, scale=0.3), want) < 1e-2


@NATIVE
@pytest.mark.parametrize("pairs", [0, 1])
def test_long_texts_are_the_librarys_where_it_is_faster(pairs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.needed(), "kv_causal_halves", lambda: pairs)
    q, k = torch.zeros(1, 1, 1, 128), torch.zeros(1, 1, 1, 128).expand(1, 1, FAR // 1024, 128)
    more = torch.zeros(1, 1, 1, 128).expand(1, 1, FAR // 1024 + 1, 128)
    assert quicker(q, k, k) and quicker(q, more, more) == bool(pairs)


@pytest.mark.parametrize("change", [dict(queries=10), dict(heads=3), dict(values=8)])
def test_shapes_that_do_not_fit_are_refused(change: dict[str, Any]) -> None:
    q = torch.zeros(1, 4, change.get("queries", 5), 32)
    k, v = (
        torch.zeros(1, change.get("heads", 2), 9, 32),
        torch.zeros(1, change.get("heads", 2), change.get("values", 9), 32),
    )
    with pytest.raises(KernelError, match="keys and values of the same tokens"):
        causal_attention(q, k, v, scale=1.0)
    with pytest.raises(KernelError, match=r"with positions \[1, 8\]"):
        causal_attention(q[:, :2], k[:, :1], k[:, :1], scale=1.0, position=torch.zeros(1, 8))
    with pytest.raises(KernelError, match="no Triton version|cannot run here|the inputs are not"):
        causal_attention(
            q[:, :, :2], k[:, :1].expand(-1, 2, -1, -1), k[:, :1].expand(-1, 2, -1, -1), scale=1.0, backend="triton"
        )
