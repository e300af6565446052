"""Parts that wait to be joined in one launch: with each other, with finished ones and with sinks, against the whole."""

from __future__ import annotations

import math
import os

import pytest
import support_kernels as oracle
import torch
from torch import Tensor

from kvengine.kernels import codecs, turboquant
from kvengine.kernels.attention import attention
from kvengine.kernels.merge_states import merge_states, ongoing, received
from kvengine.kernels.paged_attention import paged_attention
from kvengine.kernels.state import Into, State
from kvengine.saliency import running

BACKENDS = oracle.backends()
ROWS, GROUP = 3, 5
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def case(tokens: int, dtype: torch.dtype, queries: int = 1, dim: int = 24) -> tuple[Tensor, ...]:
    rng = torch.Generator().manual_seed(tokens)
    position = torch.where(torch.rand(ROWS, tokens, generator=rng) < 0.6, torch.arange(tokens), -1).int()
    position[1, : tokens // 3] = -1
    q = torch.randn(ROWS, GROUP, queries, dim, generator=rng).to(dtype)
    k, v = (torch.randn(ROWS, tokens, dim, generator=rng).to(dtype) for _ in range(2))
    for x in (k, v):  # a slot without a token may hold anything
        x[position < 0] = math.nan
    return q, k, v, position


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("cuts", [(60,), (25, 60), (1, 40, 60), (7, 20, 41, 60)], ids=len)
@pytest.mark.parametrize("backend", BACKENDS)
def test_waiting_parts_equal_the_whole(backend: str, cuts: tuple[int, ...], dtype: torch.dtype, sinks: bool) -> None:
    q, k, v, position = case(60, dtype)
    logits = torch.linspace(-2, 3, ROWS * GROUP).view(ROWS, GROUP) if sinks else None
    want = oracle.attend(q, k, v, (position >= 0)[:, None], 0.3, sinks=logits)
    read = oracle.on(backend, attention)
    parts = [
        read(
            q, k[:, a:b], v[:, a:b], None, 0.3, position=position[:, a:b], want_probs=True, wait=i != 1, backend=backend
        )
        for i, (a, b) in enumerate(zip((0, *cuts), cuts, strict=False))
    ]
    merge = oracle.on(backend, merge_states)
    got = merge(parts, sinks=logits, dtype=dtype, backend=None if backend == "native" else backend)
    assert got.out.dtype == dtype and got.probs is None
    oracle.close(got, want, BOUND[dtype])
    paid = received(parts, got)
    assert want.probs is not None and oracle.error(paid, want.probs.sum(2)) <= BOUND[dtype]


@pytest.mark.parametrize("backend", BACKENDS)
def test_waiting_parts_of_several_queries_are_received(backend: str) -> None:
    q, k, v, position = case(300, torch.float32, queries=3)
    seen = (position >= 0)[:, None].repeat(1, 3, 1)
    seen[0, 1], seen[2] = False, False  # who sees nothing pays nothing
    want, read = oracle.attend(q, k, v, seen, 0.3), oracle.on(backend, attention)
    ends = (0, 270), (270, 300)
    parts = [
        read(q, k[:, a:b], v[:, a:b], seen[..., a:b], 0.3, want_probs=True, wait=True, backend=backend) for a, b in ends
    ]
    got = merge_states(parts)
    oracle.close(got, want, 1e-5)
    assert want.probs is not None and oracle.error(received(parts, got), want.probs.sum(2)) <= 1e-5


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mean_goes_on(backend: str, by_row: bool, sinks: bool) -> None:
    """In one launch what `running` says; a row that sees nothing, and slots between others that hold the mean, included."""
    q, k, v, position = case(300, torch.float32)
    position[2] = -1
    held = torch.rand(ROWS, 310, generator=torch.Generator().manual_seed(1))
    mean, at = held[:, 4:304], torch.tensor([300])
    judged = torch.tensor([[7], [250], [0]]) if by_row else 120
    logits = torch.linspace(-2, 3, ROWS * GROUP).view(ROWS, GROUP) if sinks else None
    paid = oracle.attend(q, k, v, (position >= 0)[:, None], 0.3, sinks=logits).probs
    assert paid is not None
    want = held.double()
    want[:, 4:304] = running(want[:, 4:304], paid.sum((1, 2)), position, at, judged)
    device = oracle.device_of(backend)
    q, k, v, position, held, at = (x.to(device) for x in (q, k, v, position, held, at))
    mean, judged = held[:, 4:304], judged.to(device) if isinstance(judged, Tensor) else judged
    part = attention(q, k, v, None, 0.3, position=position, want_probs=True, wait=True, backend=backend)
    whole = merge_states([part], sinks=None if logits is None else logits.to(device))
    assert (part.waiting is not None) == (backend == "triton")
    ongoing(part, whole, mean, position, at, judged)
    torch.testing.assert_close(held.double().cpu(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "kind", ["dense", "kivi", "turned-4", "turned-4-last", "turned-4-both", "turned-3", "turned-3-last-both"]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_waiting_pages_and_tail_equal_the_whole(backend: str, kind: str) -> None:
    """Their programs, blocks and lengths differ; what is turned is turned back, and nothing else."""
    codec = "turboquant" if "turned" in kind else kind
    q, k, v, position = case(4 * 32 + 20, torch.bfloat16, dim=64)
    k, v = (x.nan_to_num() for x in (k, v))
    sealed, at = 4 * 32, (ROWS * 4, 32, 64)
    fields = {"k": k[:, :sealed].reshape(at), "v": v[:, :sealed].reshape(at)}
    if codec == "kivi":
        fields = codecs.encode_kivi(fields["k"].float(), fields["v"].float(), 4, 32, scale_dtype=torch.float16)
    if codec == "turboquant":
        for name in "kv":
            x = fields.pop(name).float()
            bits = int(kind[7])
            fields[f"{name}_code"], fields[f"{name}_scale"] = turboquant.encode(x, bits, "unbiased", torch.float16)
    table = torch.arange(ROWS * 4, dtype=torch.int32).view(ROWS, 4)
    lengths = torch.tensor([20, 3, 0], dtype=torch.int32)
    far = oracle.on(backend, paged_attention)(
        q, fields, table, position[:, :sealed].contiguous(), page=32, scale=0.3, codec=codec, wait=True, backend=backend
    )
    tail = k[:, sealed:], v[:, sealed:]
    near = oracle.on(backend, attention)(q, *tail, None, 0.3, lengths=lengths, wait=True, backend=backend)
    parts = [near, far] if "last" in kind else [far, near]
    if "both" in kind:  # a second lot of the same pages
        parts.insert(0, far)
    got = merge_states(parts)
    late = torch.arange(20) < lengths[:, None]
    one = paged_attention(
        q, fields, table, position[:, :sealed].contiguous(), page=32, scale=0.3, codec=codec, backend="reference"
    )
    two = oracle.attend(q, *tail, late[:, None], 0.3)
    pages = State(one.out.cpu().double(), one.lse.cpu().double())
    want = merge_states([pages, *([pages] if "both" in kind else []), two], backend="reference")
    oracle.close(got, want, 1e-2)


@pytest.mark.parametrize("cuts", [(60,), (25, 60), (1, 40, 60)], ids=len)
@pytest.mark.parametrize("backend", BACKENDS)
def test_waiting_rows_are_written_among_others(backend: str, cuts: tuple[int, ...]) -> None:
    q, k, v, position = case(60, torch.bfloat16)
    read, spans = oracle.on(backend, attention), list(zip((0, *cuts), cuts, strict=False))
    parts = [
        read(q, k[:, a:b], v[:, a:b], None, 0.3, position=position[:, a:b], wait=True, backend=backend)
        for a, b in spans
    ]
    want = merge_states(parts, dtype=torch.bfloat16)
    rows = torch.tensor([4, 0, 3], device=q.device if backend != "triton" else oracle.device_of(backend))
    out = torch.full((6, *want.out.shape[1:]), 7.0, dtype=torch.bfloat16, device=rows.device)
    got = merge_states(parts, dtype=torch.bfloat16, into=Into(out, rows))
    assert got.out is out and torch.equal(got.lse, want.lse)
    assert torch.equal(out[rows], want.out) and bool((out[[1, 2, 5]] == 7.0).all())


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="only Triton's programs wait")
def test_triton_lets_several_wait() -> None:
    q, k, v, _ = case(20, torch.float32)
    for wait in (False, True):
        part = attention(q, k, v, None, 0.3, wait=wait, backend="triton")
        assert (part.waiting is not None) == wait and bool(part.out.numel()) != wait
    assert attention(q, k, v, None, 0.3, wait=True, backend="reference").waiting is None
