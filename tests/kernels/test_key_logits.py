"""Logits of paged keys: every layout, random tables, on every backend that runs here."""

from __future__ import annotations

import math

import pytest
import support_kernels as oracle
import torch
from support_pools import LAYOUTS, PAGE, ROWS, pool, rows

from kvengine.errors import KernelError
from kvengine.kernels.dispatch import torch_only
from kvengine.kernels.key_logits import key_logits, scan
from kvengine.kernels.paged_attention import paged_attention
from kvengine.kernels.slots import resolve

BACKENDS = oracle.backends()


@pytest.mark.parametrize("dim, dim_v, group", [(64, 64, 3), (72, 40, 1), (32, 32, 5)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_the_oracle(backend: str, layout: str, dim: int, dim_v: int, group: int) -> None:
    codec, fields, k, _ = pool(layout, dim, dim_v)
    given, q = rows(1), torch.randn(ROWS, group, dim, generator=torch.Generator().manual_seed(1))
    where, position = resolve(given["table"], given["position"], None, PAGE, PAGE)
    live = torch.zeros(len(k) * PAGE, dtype=torch.bool).index_fill_(0, where[position >= 0], True)
    for x in fields.values():  # what no row names may hold anything
        if x.is_floating_point() and x.shape[1] == PAGE:
            x.flatten(0, 1)[~live] = math.nan
    got = oracle.on(backend, key_logits)(
        q, fields, given["table"], given["position"], page=PAGE, scale=0.2, codec=codec, dim_v=dim_v, backend=backend
    )
    want = torch.einsum("rgd,rtd->rgt", q.double(), k.flatten(0, 1)[where]) * 0.2
    assert torch.equal(got.cpu() == -math.inf, (position < 0)[:, None].expand_as(got))
    bound = 1e-5 if backend != "triton" or codec != "dense" else oracle.TRITON.get(layout, 1e-5)
    there = (position >= 0)[:, None].expand_as(got)
    assert oracle.error(got.cpu()[there], want[there]) <= bound


@pytest.mark.parametrize("dim", [8, 256])
@pytest.mark.parametrize("backend", BACKENDS)
def test_narrow_and_wide_heads(backend: str, dim: int) -> None:
    codec, fields, k, _ = pool("bfloat16", dim, dim)
    given, q = rows(1), torch.randn(ROWS, 2, dim).bfloat16()
    got = oracle.on(backend, key_logits)(
        q, fields, given["table"], given["position"], page=PAGE, scale=1.0, codec=codec, backend=backend
    )
    where, position = resolve(given["table"], given["position"], None, PAGE, PAGE)
    want, there = q.double() @ k.flatten(0, 1)[where].mT, (position >= 0)[:, None].expand_as(got)
    assert oracle.error(got.cpu()[there], want[there]) <= 1e-5  # products of bfloat16 are exact, sums are floats


@pytest.mark.skipif("native" not in BACKENDS, reason="C does both")
@pytest.mark.parametrize("dim, dim_v, group", [(64, 64, 3), (72, 40, 1), (64, 64, 9)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_scan_gives_attention_and_logits(layout: str, dim: int, dim_v: int, group: int) -> None:
    codec, fields, _, _ = pool(layout, dim, dim_v)
    given, q = rows(1), torch.randn(ROWS, group, dim, generator=torch.Generator().manual_seed(1))
    q = q.bfloat16() if layout == "bfloat16" else q
    where, more = (q, fields, given["table"], given["position"]), {"page": PAGE, "scale": 0.2, "codec": codec}
    found, want = scan(*where, dim_v=dim_v, **more), paged_attention(*where, dim_v=dim_v, **more)
    assert found is not None and found[0].probs is None
    assert torch.equal(found[0].out, want.out) and torch.equal(found[0].lse, want.lse)
    alone = key_logits(*where, dim_v=dim_v, **more)
    assert alone is not None
    torch.testing.assert_close(found[1], alone, rtol=1e-5, atol=1e-5)
    with torch_only():
        assert scan(*where, dim_v=dim_v, **more) is None and key_logits(*where, dim_v=dim_v, **more) is None


def test_shapes_that_do_not_fit() -> None:
    codec, fields, _, _ = pool("float32", 32, 32)
    given, q = rows(1), torch.zeros(ROWS + 1, 2, 32)
    with pytest.raises(KernelError, match=f"q needs {ROWS} rows"):
        key_logits(q, fields, given["table"], given["position"], page=PAGE, scale=1.0, codec=codec)
    with pytest.raises(KernelError, match="'nearly'. Known: dense"):
        key_logits(q[1:], fields, given["table"], given["position"], page=PAGE, scale=1.0, codec="nearly")
