"""What lies further apart than 32 bits count, in little memory: pages of it are only had where they are touched."""

from __future__ import annotations

import pytest
import support_kernels as oracle
import torch

from kvengine.kernels.attention import attention
from kvengine.kernels.gpu import FUSED

pytestmark = pytest.mark.skipif("triton" not in oracle.backends(), reason="Triton does not run here")


def test_triton_packs_codes_whose_bits_32_bits_do_not_count() -> None:
    from kvengine.kernels.quantise.triton import pack_kernel

    device = oracle.device_of("triton")
    codes = torch.arange(1024, dtype=torch.uint8, device=device) % 16
    packed = torch.zeros(512, dtype=torch.uint8, device=device)
    pack_kernel[(1,)](codes, packed, 1 << 29, BITS=4, BLOCK=1024, **FUSED)  # the first program of many
    assert torch.equal(packed, codes[::2] | codes[1::2] << 4)


def test_triton_reads_masks_of_many_queries_of_many_tokens() -> None:
    rows, queries, tokens, apart = 1, 3, 20, 3 << 29
    device, rng = oracle.device_of("triton"), torch.Generator().manual_seed(0)
    seen = torch.rand(rows, queries, tokens, generator=rng) < 0.5
    held = torch.empty(0, dtype=torch.bool, device=device)
    memory = torch.UntypedStorage(2 * apart + tokens, device=device)
    held.set_(memory, 0, seen.shape, (queries * apart, apart, 1))  # type: ignore[call-overload]
    held.copy_(seen)
    q, k, v = (torch.randn(rows, *s, 16, generator=rng) for s in ((2, queries), (tokens,), (tokens,)))
    got = attention(q.to(device), k.to(device), v.to(device), held, 0.3, backend="triton")
    oracle.close(got, oracle.attend(q, k, v, seen, 0.3), 1e-5)
