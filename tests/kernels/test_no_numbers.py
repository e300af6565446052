"""What a query sees and is no number makes its answer none: attention must not pass over a model's overflow."""

from __future__ import annotations

import math

import pytest
import support_kernels as oracle
import torch

from kvengine.kernels.attention import attention
from kvengine.kernels.causal_attention import causal_attention
from kvengine.kernels.codecs import encode_kivi
from kvengine.kernels.merge_states import merge_states
from kvengine.kernels.paged_attention import paged_attention
from kvengine.kernels.state import State


def drawn(queries: int = 1) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, *shape, 32, generator=g) for shape in ((2, queries), (40,), (40,)))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("backend", oracle.backends())
def test_of_a_row(backend: str, side: str, softcap: float | None) -> None:
    """One key of a row, or its query, whose logits then are all none; with pages as without, and of the row alone."""
    q, k, v = drawn()
    (q if side == "q" else k)[0, -1, ..., 3] = math.nan
    found = oracle.on(backend, attention)(q, k, v, None, 0.2, softcap=softcap, backend=backend)
    fields = {"k": k.view(10, 8, 32), "v": v.view(10, 8, 32)}
    table = torch.arange(10, dtype=torch.int32).view(2, 5)
    place = torch.arange(40, dtype=torch.int32).expand(2, -1).contiguous()
    run = oracle.on(backend, paged_attention)
    paged = run(q, fields, table, place, page=8, scale=0.2, softcap=softcap, backend=backend)
    for state in (found, paged):
        bad = state.out.cpu().isnan().flatten(1)
        head = [True, True] if side == "k" else [False, True]
        assert state.out.cpu()[0].isnan().flatten(1).all(1).tolist() == head and not bad[1].any()


@pytest.mark.parametrize("backend", oracle.backends())
def test_of_a_prompt(backend: str) -> None:
    """Queries before the key do not see it."""
    q, k, v = drawn(40)
    k[0, 20, 3] = math.nan
    out = oracle.on(backend, causal_attention)(q, k[:, None], v[:, None], scale=0.2, backend=backend).cpu()
    assert out[0, 20:].isnan().all() and not out[0, :20].isnan().any() and not out[1].isnan().any()


@pytest.mark.parametrize("backend", oracle.backends())
def test_of_codes(backend: str) -> None:
    q, k, v = drawn()
    q[0, 0, 0, 3] = math.nan
    fields = encode_kivi(k.view(10, 8, 32), v.view(10, 8, 32), 4, 8)
    table = torch.arange(10, dtype=torch.int32).view(2, 5)
    place = torch.arange(40, dtype=torch.int32).expand(2, -1).contiguous()
    run = oracle.on(backend, paged_attention)
    out = run(q, fields, table, place, page=8, scale=0.2, codec="kivi", dim_v=32, backend=backend).out.cpu()
    assert out[0, 0].isnan().all() and not out[0, 1].isnan().any() and not out[1].isnan().any()


def test_of_what_is_joined() -> None:
    """A part without a token adds nothing; one whose logits are none does."""
    out, lse = torch.ones(1, 1, 1, 32), torch.zeros(1, 1, 1)
    none = State(torch.full_like(out, math.nan), torch.full_like(lse, math.nan))
    for other in (State(out, lse), State(torch.zeros_like(out), torch.full_like(lse, -math.inf))):
        for parts in ([none, other], [other, none]):
            assert merge_states(parts).out.isnan().all()
