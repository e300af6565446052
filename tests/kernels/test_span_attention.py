"""Attention of a prompt to spans of its tokens."""

from __future__ import annotations

import math

import pytest
import support_kernels as oracle
import torch
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.causal_attention.native import fits
from kvengine.kernels.span_attention import Band, band_spans, block_spans, causal_spans, pairs, span_attention

ROWS, GROUP, DIM = 3, 2, 16
HERE = torch.zeros(1, 1, 1, DIM)
BACKENDS = [name for name in oracle.backends() if name != "native" or fits(HERE, HERE, HERE)]
WIDE = [name for name in BACKENDS if name != "native"]  # the C version is for float32


def drawn(queries: int, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Rows with 0, 3 and 6 tokens of padding in front, which holds NaN."""
    rng = torch.Generator().manual_seed(queries)
    q, k, v = (torch.randn(*s, DIM, generator=rng).to(dtype) for s in ((ROWS, GROUP, queries), *[(ROWS, tokens)] * 2))
    first = torch.tensor([0, 3, 6]).clamp(max=tokens - 1)
    position = torch.arange(tokens, dtype=torch.int32).repeat(ROWS, 1)
    position = position.masked_fill(position < first[:, None], -1)
    k[position < 0], v[position < 0] = math.nan, math.nan
    return q, k, v, position, first


def allowed(position: Tensor, queries: int, spans: Tensor, block: int, band: Band | None) -> Tensor:
    """Which tokens each query sees, one pair at a time; by query head if `spans` are."""
    rows, tokens = position.shape
    lines, there = max(rows, len(spans)), (position >= 0).tolist()
    seen = [[[False] * tokens for _ in range(queries)] for _ in range(lines)]
    first, of = [0] * rows if band is None else band.first.tolist(), spans.tolist()
    for line in range(lines):
        r = line // (lines // rows)
        for i in range(queries):
            at = tokens - queries + i
            for start, end in of[line % len(of)][i // block]:
                for j in range(start, min(end, at + 1)):
                    inside = band is None or j < first[r] + band.sinks or at - j < band.local
                    seen[line][i][j] |= inside and there[r][j]
    return torch.tensor(seen)


CASES = {
    "whole": (40, 40, 16),
    "several tiles": (200, 333, 64),
    "later chunk": (21, 60, 8),
    "one query": (1, 33, 128),
    "odd block": (30, 45, 12),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", CASES.values(), ids=CASES)
@pytest.mark.parametrize("kind", ["causal", "band", "sparse"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_a_loop(backend: str, kind: str, shape: tuple[int, int, int]) -> None:
    queries, tokens, block = shape
    if backend == "native" and block % 8:
        pytest.skip("the C version takes eight queries at a time")
    q, k, v, position, first = drawn(queries, tokens)
    band = Band(first, 2, 5) if kind == "band" else None
    if kind == "sparse":  # per row, blocks of tokens drawn at random, and one empty span
        rng = torch.Generator().manual_seed(3)
        start = torch.randperm(tokens // 7, generator=rng)[:3].sort().values * 7
        spans = torch.stack([start, start + 7], 1).repeat(ROWS, -(-queries // block), 1, 1)
        spans[1, :, 1, 1] = 0
    else:
        spans = (
            causal_spans(queries, tokens, q.device, block) if band is None else band_spans(queries, tokens, band, block)
        )

    def call(q: Tensor, k: Tensor, v: Tensor, position: Tensor, spans: Tensor, first: Tensor) -> Tensor:
        mine = None if band is None else band._replace(first=first)
        return span_attention(q, k, v, position, spans, scale=0.3, band=mine, block=block, backend=backend)

    got = oracle.on(backend, call)(q, k, v, position, spans, first)
    want = oracle.attend(q, k, v, allowed(position, queries, spans, block, band), 0.3)
    assert oracle.error(got, want.out) <= 1e-5
    if kind == "band" and queries > 1:  # the spans leave nothing out that the band lets through
        whole = torch.tensor([0, tokens]).expand(1, -(-queries // block), 1, 2)
        assert torch.equal(
            allowed(position, queries, whole, block, band), allowed(position, queries, spans, block, band)
        )
        other = oracle.attend(q, k, v, allowed(position, queries, spans, block, Band(first, 2, 6)), 0.3)
        assert oracle.error(got, other.out) > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(200, 333, 64), (21, 60, 8)], ids=["several tiles", "later chunk"])
def test_every_query_head_may_have_its_own_spans(shape: tuple[int, int, int], backend: str) -> None:
    queries, tokens, block = shape
    q, k, v, position, first = drawn(queries, tokens)
    keep = torch.rand(ROWS * GROUP, -(-queries // block), -(-tokens // block)) < 0.5
    keep[0], keep[1] = False, True
    spans, sinks = block_spans(keep, block, tokens), torch.randn(ROWS, GROUP)
    band = Band(first, 2, 30) if queries > tokens // 2 else None

    def call(q: Tensor, k: Tensor, v: Tensor, position: Tensor, spans: Tensor, first: Tensor, sinks: Tensor) -> Tensor:
        mine = None if band is None else band._replace(first=first)
        more = {"scale": 0.3, "band": mine, "sinks": sinks, "block": block, "backend": backend}
        return span_attention(q, k, v, position, spans, **more)

    got = oracle.on(backend, call)(q, k, v, position, spans, first, sinks)
    sees = allowed(position, queries, spans, block, band)
    for h in range(GROUP):
        mine = oracle.attend(q[:, h : h + 1], k, v, sees[h::GROUP], 0.3, None, sinks[:, h : h + 1])
        assert oracle.error(got[:, h : h + 1], mine.out) <= 1e-5
    blocks = torch.arange(tokens) // block  # what was kept is what spans say
    wanted = keep.repeat_interleave(block, 1)[:, :queries].gather(2, blocks.expand(len(keep), queries, -1))
    every = torch.tensor([0, tokens]).expand(1, -(-queries // block), 1, 2)
    causal = allowed(position, queries, every, block, band).repeat_interleave(GROUP, 0)
    assert torch.equal(sees, wanted & causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", [*WIDE, None])
def test_in_sixteen_bits(backend: str, dtype: torch.dtype) -> None:
    q, k, v, position, first = drawn(24, 40, dtype)
    spans = causal_spans(24, 40, q.device, 8)
    run = span_attention if backend is None else oracle.on(backend, span_attention)
    got = run(q, k, v, position, spans, scale=0.3, block=8, backend=backend)
    assert got.dtype == dtype
    want = oracle.attend(q, k, v, allowed(position, 24, spans, 8, None), 0.3)
    assert oracle.error(got, want.out) <= 1e-2
    by_head = spans.repeat(ROWS * GROUP, 1, 1, 1)
    same = run(q, k, v, position, by_head, scale=0.3, block=8, backend=backend)
    assert oracle.error(same, want.out) <= 1e-2


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("backend", WIDE)
def test_heads_that_leave_no_room_for_tokens_are_taken_some_at_a_time(backend: str, joined: bool) -> None:
    """Values have fewer channels than keys."""
    rng = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(*shape, generator=rng) for shape in ((1, 65, 3, 260), (1, 9, 260), (1, 9, 20)))
    position, sinks = torch.arange(9, dtype=torch.int32)[None], torch.randn(1, 65, generator=rng) if joined else None
    spans = causal_spans(3, 9, q.device, 8)
    got = oracle.on(backend, span_attention)(q, k, v, position, spans, scale=0.1, sinks=sinks, block=8, backend=backend)
    want = oracle.attend(q, k, v, allowed(position, 3, spans, 8, None), 0.1, None, sinks)
    assert oracle.error(got, want.out) <= 1e-5


@pytest.mark.sampled(4)
@pytest.mark.parametrize("softcap", [None, 0.5, 2.0])
@pytest.mark.parametrize("sinks", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_softcap_and_sinks(backend: str, sinks: bool, softcap: float | None) -> None:
    q, k, v, position, first = drawn(90, 133)
    spans, logits = causal_spans(90, 133, q.device, 8), torch.randn(ROWS, GROUP) * 4 if sinks else None
    if logits is not None:
        logits[0, 1] = -math.inf
    scale = 1.0 if backend == "triton" else 3.0  # its interpreter warns where a power overflows, which is meant to
    more = {"scale": scale, "softcap": softcap, "block": 8, "backend": backend}
    got = oracle.on(backend, span_attention)(q, k, v, position, spans, sinks=logits, **more)
    sees = allowed(position, 90, spans, 8, None)
    want = oracle.attend(q, k, v, sees, scale, softcap, logits)
    assert oracle.error(got, want.out) <= 1e-5
    if softcap is not None:
        assert oracle.error(got, oracle.attend(q, k, v, sees, scale, None, logits).out) > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_capped_in_sixteen_bits(dtype: torch.dtype) -> None:
    q, k, v, position, first = drawn(24, 40, dtype)
    spans, logits = causal_spans(24, 40, q.device, 8), torch.randn(ROWS, GROUP)
    got = span_attention(q, k, v, position, spans, scale=0.3, softcap=1.5, sinks=logits, block=8)
    assert got.dtype == dtype
    want = oracle.attend(q, k, v, allowed(position, 24, spans, 8, None), 0.3, 1.5, logits)
    assert oracle.error(got, want.out) <= 1e-2


def test_refusals_say_why() -> None:
    q, k, v, position, first = drawn(9, 20)
    with pytest.raises(KernelError, match=r"\[1, 3 or 6, 3, span, 2\]"):
        span_attention(q, k, v, position, causal_spans(9, 20, q.device, 8), scale=1.0, block=4)
    with pytest.raises(KernelError, match="at most as many queries"):
        span_attention(q, k[:, :5], v[:, :5], position[:, :5], causal_spans(9, 5, q.device, 4), scale=1.0, block=4)


@pytest.mark.skipif("native" not in BACKENDS, reason="no C compiler, or vectors of less than 256 bits")
@pytest.mark.parametrize(("sinks", "local"), [(0, 1), (4, 70), (64, 64), (200, 130)])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_wide_bands_over_many_tiles(group: int, sinks: int, local: int) -> None:
    """The C version leaves tiles out that a band hides, and hides parts of others."""
    rng = torch.Generator().manual_seed(group)
    q = torch.randn(2, group, 300, 32, generator=rng)
    k, v = (torch.randn(2, 517, 32, generator=rng) for _ in range(2))
    first = torch.tensor([0, 90])
    position = torch.arange(517, dtype=torch.int32).repeat(2, 1)
    position[1, :90], position[1, 300:303] = -1, -1
    k[position < 0], v[position < 0] = math.nan, math.nan
    band = Band(first, sinks, local)
    spans = band_spans(300, 517, band)
    about = dict(scale=0.2, band=band)
    got = span_attention(q, k, v, position, spans, backend="native", **about)
    want = span_attention(q.double(), k.double(), v.double(), position, spans, backend="reference", **about)
    assert oracle.error(got, want) <= 1e-5


@pytest.mark.parametrize(
    "tokens, sinks, local",
    [(116, 0, 38), (300, 65, 5), (300, 0, 107)],
    ids=["its last", "its first", "all but its first"],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_band_that_takes_or_leaves_one_token_of_64(backend: str, tokens: int, sinks: int, local: int) -> None:
    """In a span of all tokens, of which the band hides many."""
    q, k, v = (torch.randn(*s, DIM) for s in ((1, 2, 16), (1, tokens), (1, tokens)))
    position, spans = torch.arange(tokens, dtype=torch.int32)[None], torch.tensor([0, tokens]).view(1, 1, 1, 2)
    band = Band(torch.zeros(1, dtype=torch.int64), sinks, local)

    def call(q: Tensor, k: Tensor, v: Tensor, position: Tensor, spans: Tensor, first: Tensor) -> Tensor:
        mine = band._replace(first=first)
        return span_attention(q, k, v, position, spans, scale=0.3, band=mine, block=16, backend=backend)

    got = oracle.on(backend, call)(q, k, v, position, spans, band.first)
    want = oracle.attend(q, k, v, allowed(position, 16, spans, 16, band), 0.3)
    assert oracle.error(got, want.out) <= 1e-5


@pytest.mark.parametrize(
    ("dtype", "band", "scale"),
    [
        (torch.float32, None, 0.2),
        (torch.float32, (40, 60), 0.2),
        (torch.bfloat16, None, -0.2),
        (torch.bfloat16, (4, 150), 0.2),
        (torch.bfloat16, (100, 70), 0.2),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", WIDE)
def test_blocks_without_padding_that_all_see(
    backend: str, dtype: torch.dtype, band: tuple[int, int] | None, scale: float
) -> None:
    """Padding in front, at the end, and in the middle; spans that begin and end anywhere."""
    rng = torch.Generator().manual_seed(5)
    q = torch.randn(3, 3, 70, 24, generator=rng).to(dtype)
    k, v = (torch.randn(3, 300, 24, generator=rng).to(dtype) for _ in range(2))
    position = torch.arange(300, dtype=torch.int32).repeat(3, 1)
    position[0, :75], position[1, 240:], position[2, 130:133] = -1, -1, -1
    first = torch.tensor([75, 0, 0])
    k[position < 0], v[position < 0] = math.nan, math.nan
    inside = None if band is None else Band(first, *band)
    spans = causal_spans(70, 300, q.device, 64) if inside is None else band_spans(70, 300, inside, 64)
    for some in (spans, torch.tensor([[3, 199], [210, 300]]).expand(1, 2, 2, 2)):

        def call(q: Tensor, k: Tensor, v: Tensor, position: Tensor, spans: Tensor, first: Tensor) -> Tensor:
            mine = None if band is None else Band(first, *band)
            return span_attention(q, k, v, position, spans, scale=scale, band=mine, block=64, backend=backend)

        got = oracle.on(backend, call)(q, k, v, position, some, first)
        want = oracle.attend(q, k, v, allowed(position, 70, some, 64, inside), scale)
        assert oracle.error(got, want.out) <= (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_may_lie_by_channels(backend: str) -> None:
    """And positions by tokens."""
    q, k, v, position, _ = drawn(8, 13)
    want = oracle.attend(q, k, v, allowed(position, 8, spans := causal_spans(8, 13, q.device, 8), 8, None), 0.3)
    k, v, position = (x.T.contiguous().T if x.dim() == 2 else x.mT.contiguous().mT for x in (k, v, position))
    which = None if backend == "native" else backend  # C wants channels side by side
    got = oracle.on(backend, span_attention)(q, k, v, position, spans, scale=0.3, block=8, backend=which)
    assert oracle.error(got, want.out) <= 1e-5


@pytest.mark.parametrize("queries, tokens, skip, block", [(7, 7, 0, 3), (5, 11, 2, 4), (9, 9, 3, 8), (1, 6, 0, 2)])
def test_pairs_are_those_that_causal_spans_hold(queries: int, tokens: int, skip: int, block: int) -> None:
    rng = torch.Generator().manual_seed(queries)
    edges = torch.randint(0, tokens + 1, (2, -(-queries // block), 4), generator=rng).sort(-1).values
    spans = edges.unflatten(2, (2, 2))
    want = 0
    for line in spans:
        for i in range(skip, queries):
            want += sum(a <= t < b for t in range(tokens - queries + i + 1) for a, b in line[i // block].tolist())
    assert pairs(spans, queries, tokens, skip, block) == want / 2
