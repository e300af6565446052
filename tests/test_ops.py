"""How the engine calls the attention kernels."""

import pytest
import torch

from kvengine import _ops as ops
from kvengine.kernels.attention import reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


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


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_last_tokens_need_no_mask(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(3, *shape, 32).to(dtype) for shape in ((2, 5), (40,), (40,)))
    visible = (torch.arange(40) <= torch.arange(35, 40)[:, None]).expand(3, -1, -1)
    got, want = ops.causal(q, k, v, 0.3), ops.whole(q, k, v, visible, 0.3)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not ops.causal_pays(q[:, :, :1], k, v)  # a single query is a decoded token
