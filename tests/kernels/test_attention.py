"""Attention over contiguous tokens, and merging of parts, on every backend that runs here."""

from __future__ import annotations

import math
import os
import threading
from typing import Any

import pytest
import support_kernels as oracle
import torch
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels import dispatch
from kvengine.kernels.attention import attention
from kvengine.kernels.merge_states import merge_states
from kvengine.kernels.state import State, rescaled

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}
BACKENDS = oracle.backends()


def case(rows: int, group: int, query: int, token: int, dim: int, dim_v: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Queries, and views of larger slots for keys and values; a third of the tokens is visible."""
    rng = torch.Generator().manual_seed(token + dim)
    k, v = (torch.randn(rows, token + 7, d, generator=rng).to(dtype)[:, 3 : token + 3] for d in (dim, dim_v))
    visible = torch.rand(rows, query, token, generator=rng) < 0.3
    return torch.randn(rows, group, query, dim, generator=rng).to(dtype), k, v, visible


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 4, 1, 63, 64, 64),
        (3, 5, 3, 65, 72, 40),
        (1, 1, 1, 1, 8, 8),
        (2, 7, 2, 40, 128, 256),
        (1, 3, 7, 35, 512, 400),
    ],
)
@pytest.mark.parametrize("extra", [{}, {"softcap": 3.0}, {"sinks": True}], ids=["plain", "softcap", "sinks"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_the_oracle(backend: str, dtype: torch.dtype, shape: tuple[int, ...], extra: dict[str, Any]) -> None:
    q, k, v, visible = case(*shape, dtype)
    if "sinks" in extra:
        extra = {"sinks": torch.linspace(-2, 3, shape[0] * shape[1]).reshape(shape[:2])}
        extra["sinks"][0, 0] = -math.inf  # takes nothing
    got = oracle.on(backend, attention)(q, k, v, visible, 0.3, want_probs=True, backend=backend, **extra)
    oracle.close(got, oracle.attend(q, k, v, visible, 0.3, **extra), BOUND[dtype])


@pytest.mark.skipif("native" not in BACKENDS, reason="no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_query_rows_fit_on_small_stacks(dtype: torch.dtype) -> None:
    """All heads of several queries are rows of one, of latents. Threads have 2 MiB where `ulimit -s` is unlimited."""
    q, k, v, visible = case(1, 256, 64, 40, 32, 16, dtype)
    found: list[State] = []
    before = threading.stack_size(2 << 20)
    try:
        thread = threading.Thread(target=lambda: found.append(attention(q, k, v, visible, 0.3, backend="native")))
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    want = attention(q, k, v, visible, 0.3, backend="reference")
    oracle.close(found[0], State(want.out.double(), want.lse.double()), BOUND[dtype])


@pytest.mark.skipif("native" not in BACKENDS, reason="no C compiler")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_that_are_read_in_pieces_lose_no_token(threads: int) -> None:
    """Pieces of unlike lengths, which threads end in any order: of the first alone much is seen."""
    rng = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(3, *shape, generator=rng) for shape in ((2, 1, 256), (2501, 256), (2501, 256)))
    k[:, -1] = q[:, 0, 0]  # what the last piece ends with counts
    sinks, visible = torch.randn(3, 2, generator=rng), torch.ones(3, 1, 2501, dtype=torch.bool)
    visible[..., 800:2500] = False
    torch.set_num_threads(threads)
    got = attention(q, k, v, visible, 0.1, sinks=sinks, want_probs=True, backend="native")
    oracle.close(got, oracle.attend(q, k, v, visible, 0.1, sinks=sinks), 1e-5)


VIEWS = {
    "one of several": lambda q: q[:, :, 1:2],
    "every other": lambda q: q[:, :, ::2],
    "the first": lambda q: q[:, :, :3],
    "of one head": lambda q: q[:, 1:2, 1:],
    "heads last": lambda q: q.transpose(1, 2).contiguous().transpose(1, 2),
    "rows last": lambda q: q.transpose(0, 1).contiguous().transpose(0, 1),
    "channels apart": lambda q: q[..., ::2],
}
"""Of queries [2, 3, 4, 48], as a model's projections and their parts lie."""


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_and_masks_may_lie_in_any_order(backend: str, view: str) -> None:
    rng = torch.Generator().manual_seed(9)
    q = VIEWS[view](torch.randn(2, 3, 4, 48, generator=rng))
    k, v = torch.randn(2, 37, q.shape[3], generator=rng), torch.randn(2, 37, 24, generator=rng)
    visible = (torch.rand(2, 37, q.shape[2], generator=rng) < 0.6).mT
    got = oracle.on(backend, attention)(q, k, v, visible, 0.2, want_probs=True, backend=backend)
    oracle.close(got, oracle.attend(q, k, v, visible, 0.2), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries, dim_v", [(1, 64), (3, 64), (3, 40), (70, 64)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_mask_means_all(backend: str, queries: int, dim_v: int, dtype: torch.dtype) -> None:
    q, k, v, visible = case(*((1, 2) if queries > 64 else (2, 4)), queries, 70, 64, dim_v, dtype)
    got = oracle.on(backend, attention)(q, k, v, None, 0.2, backend=backend)
    oracle.close(got, oracle.attend(q, k, v, torch.ones_like(visible), 0.2), BOUND[dtype])
    assert got.probs is None


@pytest.mark.parametrize("queries", [65, 150])
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_queries(backend: str, queries: int) -> None:
    """More than are read together."""
    q, k, v, visible = case(2, 1, queries, 40, 32, 24, torch.float32)
    visible[0, queries // 2] = False  # a query that sees nothing
    got = oracle.on(backend, attention)(q, k, v, visible, 0.2, want_probs=True, backend=backend)
    oracle.close(got, oracle.attend(q, k, v, visible, 0.2), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_unseen_tokens_may_hold_anything(backend: str) -> None:
    q, k, v, visible = case(3, 2, 2, 50, 32, 32, torch.float32)
    visible[:, :, 10:20] = False
    visible[1] = False  # a row that sees nothing
    want = oracle.attend(q, k, v, visible, 0.3)
    k[:, 10:20], v[:, 10:20] = math.nan, math.inf
    got = oracle.on(backend, attention)(q, k, v, visible, 0.3, want_probs=True, backend=backend)
    oracle.close(got, want, 1e-5)
    assert not got.out[1].any() and (got.lse[1] == -math.inf).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shift", [-300.0, 300.0])
def test_large_scores_neither_overflow_nor_vanish(backend: str, shift: float) -> None:
    q, k, v, visible = case(1, 2, 1, 70, 16, 16, torch.float32)
    q[..., 0], k[..., 0] = 1.0, shift
    got = oracle.on(backend, attention)(q, k, v, visible, 1.0, backend=backend)
    oracle.close(got, oracle.attend(q, k, v, visible, 1.0), 1e-4)  # float32 scores near 300 carry 3e-5 of error


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton does not run here")
def test_triton_joins_more_shares_than_it_takes_in_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a long row on a GPU. Each outweighs those before it, or behind; the last the first by more than float32 can say."""
    from kvengine.kernels.gpu import stream

    monkeypatch.setattr(stream, "programs", lambda device, each: 64)
    for name, size in (("FEW", 1), ("SOME", 2), ("SHARES", 4)):
        monkeypatch.setattr(stream, name, size)
    q, k, v, _ = case(2, 2, 1, 330, 16, 16, torch.float32)
    q[:, 0], q[:, 1], k[..., 0] = 0.0, 0.0, torch.arange(330) / 2
    q[0, :, :, 0], q[1, :, :, 0] = 1.0, -1.0
    run, everyone = oracle.on("triton", attention), torch.ones(2, 1, 330, dtype=torch.bool)
    oracle.close(run(q, k, v, None, 0.7, backend="triton"), oracle.attend(q, k, v, everyone, 0.7), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_at_all(backend: str) -> None:
    q, k, v, visible = case(2, 2, 1, 0, 16, 16, torch.float32)
    got = oracle.on(backend, attention)(q, k, v, visible, 1.0, backend=backend)
    assert not got.out.any() and (got.lse == -math.inf).all()


@pytest.mark.parametrize("queries", [1, 3, 70])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_and_no_mask(backend: str, queries: int) -> None:
    """Torch's own kernel, which several queries may go to, ends the process there."""
    q, none = torch.randn(2, 3, queries, 16), torch.zeros(2, 0, 16)
    got = oracle.on(backend, attention)(q, none, none, None, 0.2, backend=backend)
    assert not got.out.any() and got.out.shape == q.shape and bool((got.lse == -math.inf).all())


@pytest.mark.parametrize(
    "at", [(20,), (20, 21), (9, 20, 21), (9, 20, 21, 30, 44)], ids=lambda at: f"{len(at) + 1} parts"
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_merged_parts_equal_the_whole(backend: str, at: tuple[int, ...]) -> None:
    """Triton's program takes up to four at a time."""
    q, k, v, visible = case(3, 2, 2, 60, 32, 32, torch.float32)
    visible[0, 0] = False
    visible[1, :, 20:] = False
    whole = oracle.attend(q, k, v, visible, 0.3)
    cuts = list(zip((0, *at), (*at, 60), strict=True))
    parts = [
        attention(q, k[:, a:b], v[:, a:b], visible[:, :, a:b], 0.3, want_probs=True, backend="reference")
        for a, b in cuts
    ]
    poisoned = [p._replace(out=torch.where(p.lse[..., None] == -math.inf, math.nan, p.out)) for p in parts]
    got = oracle.on(backend, merge_states)([State(*p) for p in poisoned], backend=backend)
    oracle.close(got, whole, 1e-5)
    shares = torch.cat([rescaled(p, State(got.out.cpu(), got.lse.cpu())) for p in parts], -1)
    assert oracle.error(shares, whole.probs) <= 1e-5


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_of_the_merged_parts_may_outweigh_all_others(backend: str, parts: int) -> None:
    outs, lses = torch.randn(parts, 1, 2, 1, 32), 300 * torch.eye(parts)
    for at in range(parts):
        states = [State(out, lse.repeat(1, 2, 1)) for out, lse in zip(outs, lses[at], strict=True)]
        got = oracle.on(backend, merge_states)(states, backend=backend)
        assert torch.equal(got.out.cpu(), outs[at]) and bool((got.lse == 300).all())


def test_gradients_fall_back_to_torch() -> None:
    q, k, v, _ = case(1, 2, 1, 9, 8, 8, torch.float32)
    attention(q.requires_grad_(), k, v, None, 1.0).out.sum().backward()
    assert q.grad is not None and q.grad.abs().sum() > 0


def test_refusals_say_why() -> None:
    q, k, v, visible = case(2, 2, 1, 9, 8, 8, torch.float32)
    with pytest.raises(KernelError, match="visible must be"):
        attention(q, k, v, visible[:, :, 1:], 1.0)
    with pytest.raises(KernelError, match=r"got \[2, 2, 1, 8\]"):
        attention(q, k[..., 1:], v, None, 1.0)
    with pytest.raises(KernelError, match="Did you mean 'native'"):
        attention(q, k, v, None, 1.0, backend="natve")
    with pytest.raises(KernelError, match="float64|dtypes"):
        attention(q.double(), k.double(), v.double(), None, 1.0, backend="native")
    if os.environ.get("TRITON_INTERPRET") != "1":
        with pytest.raises(KernelError, match="not on a CUDA device"):
            attention(q, k, v, None, 1.0, backend="triton")
    with pytest.raises(TypeError, match="want_probs"):
        rescaled(attention(q, k, v, None, 1.0), attention(q, k, v, None, 1.0))


def test_every_backend_reports_itself() -> None:
    assert set(dispatch.info()) == set(dispatch.BACKENDS)


@pytest.mark.parametrize("backend", oracle.backends())
def test_columns_behind_a_rows_length_are_not_read(backend: str) -> None:
    rng = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(3, n, 16, generator=rng) for n in (2, 37, 37))
    lengths = torch.tensor([0, 20, 37], dtype=torch.int32)
    for row, n in enumerate(lengths.tolist()):
        k[row, n:] = v[row, n:] = float("nan")
    got = oracle.on(backend, attention)(
        q[:, :, None], k, v, None, 0.3, want_probs=True, lengths=lengths, backend=backend
    )
    assert not got.probs[0].any() and not got.probs[1, :, :, 20:].any()
    assert not got.out[0].any() and bool((got.lse[0] == -torch.inf).all())
    for row in (1, 2):
        n = int(lengths[row])
        want = (torch.softmax(q[row].double() @ k[row, :n].double().T * 0.3, -1) @ v[row, :n].double())[:, None]
        torch.testing.assert_close(got.out[row].cpu().double(), want, rtol=1e-5, atol=1e-5)
    with pytest.raises(KernelError, match="lengths must be int32"):
        attention(q[:, :, None], k, v, None, 0.3, lengths=lengths.long())


@pytest.mark.skipif("native" not in BACKENDS, reason="no C compiler")
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("dim, dim_v", [(16, 16), (32, 48), (48, 32), (96, 64), (128, 128), (160, 256)])
@pytest.mark.parametrize("group", [1, 4, 5])
def test_vectors_read_as_they_lie_or_widened(group: int, dim: int, dim_v: int, dtype: torch.dtype) -> None:
    """Whether a width and a group let stored vectors be used in place or not, nothing is rounded on the way."""
    for token in (1, 31, 70):
        q, k, v, _ = case(2, group, 1, token, dim, dim_v, dtype)
        got = attention(q, k, v, None, 0.2, backend="native")
        oracle.close(got, oracle.attend(q, k, v, torch.ones(2, 1, token, dtype=torch.bool), 0.2), 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "group, query, dim, dim_v", [(16, 1, 576, 512), (5, 3, 288, 256), (4, 1, 80, 64), (4, 1, 72, 64)]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_that_are_the_keys_first_channels(
    backend: str, group: int, query: int, dim: int, dim_v: int, dtype: torch.dtype
) -> None:
    """Each token's vector is read once where widths allow."""
    q, k, _, visible = case(2, group, query, 45, dim, dim_v, dtype)
    k[~visible.any(1)] = torch.nan  # seen by nobody
    if backend == "triton":
        q, k, visible = (x.to(oracle.device_of(backend)) for x in (q, k, visible))
    got = attention(q, k, k[..., :dim_v], visible, dim**-0.5, want_probs=True, backend=backend)
    want = oracle.attend(q.cpu(), k.cpu(), k[..., :dim_v].cpu(), visible.cpu(), dim**-0.5)
    oracle.close(got, want, BOUND[dtype])


@pytest.mark.sampled(6)
@pytest.mark.skipif("native" not in BACKENDS, reason="no C compiler")
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize(
    "dim, dim_v", [(32, 64), (64, 96), pytest.param(128, 128, marks=pytest.mark.slow), (576, 512), (72, 600)]
)
@pytest.mark.parametrize("group, query", [(8, 1), (3, 7), (16, 5)])
def test_many_rows_of_queries(group: int, query: int, dim: int, dim_v: int, dtype: torch.dtype) -> None:
    """As many as a verified draft, or heads over latents, have; scores grow, so that every batch has a new maximum."""
    for token in (1, 15, 33, 64, 150):
        q, k, v, visible = case(2, group, query, token, dim, dim_v, dtype)
        k = (k.float() * torch.linspace(0.1, 2, token)[:, None]).to(dtype)
        for seen in (visible, None):
            got = attention(q, k, v, seen, dim**-0.5, want_probs=True, backend="native")
            every = torch.ones_like(visible) if seen is None else seen
            oracle.close(got, oracle.attend(q, k, v, every, dim**-0.5), 2e-5)


def test_states_that_cannot_be_merged_are_refused() -> None:
    with pytest.raises(KernelError, match="at least one state"):
        merge_states([])
    one, other = (State(torch.zeros(2, 1, 3, dim), torch.zeros(2, 1, 3)) for dim in (8, 4))
    with pytest.raises(KernelError, match=r"must share a shape .*\(2, 1, 3, 4\), \(2, 1, 3, 8\)"):
        merge_states([one, other])


def test_rows_and_channels_that_do_not_fit_are_refused() -> None:
    q, k = torch.zeros(2, 1, 1, 8), torch.zeros(2, 5, 8)
    for wrong in ((q[:1], k, k), (q, k, k[:, :4]), (q[..., :4], k, k)):
        with pytest.raises(KernelError, match="attention takes q"):
            attention(*wrong, None, 1.0)
    with pytest.raises(KernelError, match="position must be"):
        attention(q, k, k, None, 1.0, position=torch.zeros(2, 4, dtype=torch.int32))
    with pytest.raises(KernelError, match="lengths must be int32"):
        attention(q, k, k, None, 1.0, lengths=torch.tensor([5, 5]))
