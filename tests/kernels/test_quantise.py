"""Packing, and the group-wise quantiser."""

from __future__ import annotations

import math

import pytest
import support_kernels as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvengine.errors import KernelError
from kvengine.kernels import codecs
from kvengine.kernels.quantise import WIDTHS, dequantise, pack, quantise, unpack

BACKENDS = [b for b in oracle.backends() if b != "native"]


@given(st.sampled_from(WIDTHS), st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("backend", BACKENDS)
def test_packing_is_little_endian_and_reversible(backend: str, bits: int, size: int, rows: int, seed: int) -> None:
    codes = torch.randint(0, 2**bits, (rows, size * 8), generator=torch.Generator().manual_seed(seed)).byte()
    packed = oracle.on(backend, pack)(codes, bits, backend=backend).cpu()
    assert torch.equal(unpack(packed, bits), codes)
    for row, got in zip(codes.tolist(), packed.tolist(), strict=True):
        number = sum(code << (bits * i) for i, code in enumerate(row))
        assert list(number.to_bytes(len(row) * bits // 8, "little")) == got


@pytest.mark.parametrize("over", ["tokens", "channels"])
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_error_is_half_a_step(backend: str, scale_dtype: torch.dtype, bits: int, over: str) -> None:
    x = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(1)) * 3 + 1
    x[0, :8, 3] = 2.5  # constant groups have scale 0
    got = oracle.on(backend, quantise)(x, bits, 8, over, scale_dtype=scale_dtype, backend=backend)
    back = dequantise(got, bits).cpu()
    axis = 1 if over == "tokens" else 2
    groups = x.unflatten(axis, (-1, 8))
    step = ((groups.amax(axis + 1) - groups.amin(axis + 1)) / (2**bits - 1)).repeat_interleave(8, axis)
    slack = x.abs().max() * torch.finfo(scale_dtype).eps * 4
    assert ((x - back).abs() <= step / 2 + slack).all()
    assert torch.allclose(got.scale.cpu().float().repeat_interleave(8, axis), step, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("over", ["tokens", "channels"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dead_tokens_do_not_widen_a_group(backend: str, over: str) -> None:
    x = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(1))
    alive = torch.ones(2, 16, dtype=torch.bool)
    alive[0, 3:5] = alive[1, 8:] = False
    run = oracle.on(backend, quantise)
    clean = run(x, 4, 8, over, alive=alive, backend=backend)
    x[~alive] = math.nan
    poisoned = run(x, 4, 8, over, alive=alive, backend=backend)
    assert torch.equal(dequantise(poisoned, 4).cpu()[alive], dequantise(clean, 4).cpu()[alive])
    assert poisoned.scale.isfinite().all() and poisoned.zero.isfinite().all()


def test_more_bits_err_less() -> None:
    x = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(2))
    errors = [float((dequantise(quantise(x, b, 32, "tokens"), b) - x).pow(2).mean()) for b in WIDTHS]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-4 < errors[0]


def test_zipcache_pages_keep_salient_tokens_better() -> None:
    rng = torch.Generator().manual_seed(4)
    k, v = (
        torch.randn(3, 32, 64, generator=rng),
        torch.randn(3, 32, 48, generator=rng) * torch.rand(48, generator=rng) * 9,
    )
    salient = torch.rand(3, 32, generator=rng).argsort(1) < 12
    fields = codecs.encode_zipcache(k, v, (4, 2), salient)
    for x, back in zip((k, v), codecs.decode("zipcache", fields, 64, 48), strict=True):
        high, low = ((x - back)[some].pow(2).mean() for some in (salient, ~salient))
        assert high < low / 4
    assert fields["k_high"].shape == (3, 12, 32) and fields["v_low"].shape == (3, 20, 12)


def test_refusals_say_why() -> None:
    x = torch.randn(1, 16, 8)
    with pytest.raises(KernelError, match="must divide the 16 tokens"):
        quantise(x, 4, 5, "tokens")
    with pytest.raises(KernelError, match="bits=3"):
        quantise(x, 3, 8, "tokens")
    with pytest.raises(KernelError, match="'tokens' or 'channels'"):
        quantise(x, 4, 8, "keys")  # type: ignore[arg-type]
    uneven = torch.ones(2, 16, dtype=torch.bool)
    uneven[0, 3] = False
    with pytest.raises(KernelError, match="as many salient tokens"):
        codecs.encode_zipcache(x.expand(2, -1, -1), x.expand(2, -1, -1), (4, 2), uneven)
    with pytest.raises(KernelError, match="check dim_v"):
        codecs.width(torch.zeros(1, 1, 24, dtype=torch.uint8), 64)
