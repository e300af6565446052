"""Attention of a later chunk, without a mask."""

import pytest
import torch

from kvengine import _ops as ops
from kvengine.kernels.attention import reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("queries", "tokens"), [(1, 1), (5, 5), (7, 40), (64, 65), (33, 300)])
def test_a_later_chunk_is_causal(queries: int, tokens: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(queries)
    q = torch.randn(3, 2, queries, 16, generator=rng).to(dtype)
    slots = [torch.randn(3, tokens + 4, 16, generator=rng).to(dtype) for _ in range(2)]
    k, v = (x[:, 2 : tokens + 2] for x in slots)  # as views of a tail are
    assert ops.follows(q, k, v)
    at = torch.arange(tokens - queries, tokens)
    visible = (torch.arange(tokens) <= at[:, None]).expand(3, -1, -1)
    want = reference.attention(q.double(), k.double(), v.double(), visible, 0.3, None, None, False).out
    got = ops.causal_after(q, k, v, 0.3)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    late = reference.attention(q.double(), k.double(), v.double(), None, 0.3, None, None, False).out
    assert queries == 1 or not torch.allclose(got.double(), late, rtol=1e-2, atol=1e-2)


def test_what_it_does_not_know() -> None:
    q, k, v = torch.zeros(1, 1, 2, 8), torch.zeros(1, 3, 8), torch.zeros(1, 3, 4)
    assert not ops.follows(q, k, v)
    assert not ops.follows(q.double(), k.double(), k.double())
    assert not ops.follows(q.requires_grad_(), k, k)
    with torch.no_grad():
        assert ops.follows(q, k, k)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_all_there_is_is_read_by_a_fused_kernel(dtype: torch.dtype, masked: bool) -> None:
    """The library has none for three axes: it would multiply wide copies of keys and values."""
    q, k, v = (torch.randn(3, *shape, 32).to(dtype) for shape in ((2, 5), (40,), (40,)))
    visible = torch.rand(3, 5, 40) < 0.4 if masked else None
    if visible is not None:
        visible[1, 2] = False
    want = reference.attention(q.double(), k.double(), v.double(), visible, 0.3, None, None, False).out
    with torch.profiler.profile() as profile:
        got = ops.whole(q, k, v, visible, 0.3)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not any("math" in event.key for event in profile.key_averages())
