"""TurboQuant's turn inside of a kernel, against the matrix."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import pytest
import support_kernels as oracle
import torch

from kvengine.kernels import turboquant
from kvengine.kernels.gpu import FUSED

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from kvengine.kernels.gpu.hadamard import turned, turned_tiles  # noqa: E402 - which need Triton
from kvengine.kernels.paged_attention.words import tiles as loaded  # noqa: E402

pytestmark = pytest.mark.skipif("triton" not in oracle.backends(), reason="Triton does not run here")


@triton.jit
def turning_kernel(x, sign, lines, whole, DIM: tl.constexpr, TILES: tl.constexpr):
    c = TILES * tl.arange(0, DIM // TILES)
    at = tl.arange(0, 8)[:, None] * DIM + c[None, :]
    y, power = turned_tiles(loaded(x + at, None, None, TILES), loaded(sign + c[None, :], None, None, TILES), TILES)
    for i in tl.static_range(TILES):
        tl.store(lines + at + i, y[i].to(tl.float32) * power[:, None])
    d = tl.arange(0, DIM)
    tl.store(whole + d, turned(tl.load(x + d).to(tl.float32), tl.load(sign + d)))


@pytest.mark.parametrize("dtype, size", [(torch.float16, 1.0), (torch.float32, 1e4), (torch.float32, 1e-8)])
@pytest.mark.parametrize("dim, tiles", [(64, 4), (128, 4), (256, 4), (128, 8), (256, 8)])
def test_triton_turns_as_the_matrix_does(dim: int, tiles: int, dtype: torch.dtype, size: float) -> None:
    device = oracle.device_of("triton")
    x = torch.randn(8, dim, generator=torch.Generator().manual_seed(dim)) * size
    x[3] = 0
    x[5, 0] = 6e4 if dtype == torch.float16 else 1e6 * size  # beyond all others
    x = x.bfloat16().to(device, dtype)  # of 16 bits, as queries are
    lines, whole = torch.full((8, dim), 7.0, device=device), torch.full((dim,), 7.0, device=device)
    turning_kernel[(1,)](x, turboquant.rotation(dim, x.device), lines, whole, DIM=dim, TILES=tiles, **FUSED)
    want = turboquant.turned(x)
    assert ((whole - want[0]).abs() <= 2e-6 * want[0].abs().max()).all()
    assert ((lines - want).abs() <= 1e-3 * want.abs().amax(1, keepdim=True)).all()  # in float16
