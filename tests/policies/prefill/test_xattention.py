"""Blocks by antidiagonal sums, against the formula written out pair by pair."""

from __future__ import annotations

import math

import pytest
import torch
from support_layer import Tokens, draw, padded, plain, run
from support_prefill import capped
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.kernels.span_attention import span_attention
from kvengine.policies.prefill import _blocks
from kvengine.policies.prefill.xattention import XAttention


def mass(q: Tensor, k: Tensor, scale: float, block: int, s: int, softcap: float | None = None) -> Tensor:
    """m(b, c) of one head's queries [query, dim], those of the last of the tokens [token, dim]; tile by tile."""
    tokens, start = len(k), len(k) - len(q)
    tiles = -(-tokens // block) * block // s
    score = torch.full((tiles, tiles), -math.inf, dtype=torch.float64)
    for t in range(tiles):
        for u in range(t + 1):
            pairs = [(s * t + r, s * u + (s - 1 - r + u % 2) % s) for r in range(s)]
            inside = [(i, j) for i, j in pairs if start <= i < tokens and j < tokens]
            score[t, u] = sum(float(q[i - start].double() @ k[j].double()) for i, j in inside) * scale / s
    p = capped(score, softcap).masked_fill(score == -math.inf, -math.inf).softmax(1)
    p[: start // s], p[-(-tokens // s) :] = 0, 0
    return p.unflatten(0, (-1, block // s)).sum(1).unflatten(1, (-1, block // s)).sum(2)[start // block :]


def chosen(m: Tensor, threshold: float, first: int) -> Tensor:
    """The blocks that each block reads: the first, its own, and then the heaviest until the share is reached."""
    keep = torch.zeros_like(m, dtype=torch.bool)
    for i, row in enumerate(m):
        own = first + i
        taken = {0, own}
        for c in sorted(range(own + 1), key=lambda c: -float(row[c])):
            if sum(float(row[x]) for x in taken) >= threshold * float(row.sum()):
                break
            taken.add(c)
        keep[i, list(taken)] = True
    return keep


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("queries", "tokens"), [(40, 40), (61, 61), (16, 80), (9, 61), (1, 33)])
@pytest.mark.parametrize(("stride", "block"), [(4, 16), (8, 8), (1, 8)])
@pytest.mark.parametrize("room", [1, 1 << 22], ids=["a block at a time", "all"])
def test_the_choice_is_the_papers(
    stride: int, block: int, queries: int, tokens: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_blocks, "NEAR", room)
    torch.manual_seed(queries)
    q, k = torch.randn(2, 3, queries, 16), torch.randn(2, tokens, 16)
    method, first = XAttention(0.7, stride, block), (tokens - queries) // block
    found, choice = method.mass(q, k, 0.5), method.choose(q, k, 0.5)
    assert choice.block == block and choice.columns is None
    for r in range(2):
        for h in range(3):
            want = mass(q[r, h], k[r], 0.5, block, stride)
            torch.testing.assert_close(found[r, h].double(), want, rtol=1e-4, atol=1e-5)
            for spans, keep in zip(choice.spans[3 * r + h], chosen(want, 0.7, first), strict=True):
                read = {t // block for a, b in spans.tolist() for t in range(a, b)}
                assert read == set(keep.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_at_stride_one_the_estimate_is_the_attention(softcap: float | None) -> None:
    q, k = torch.randn(1, 1, 24, 16), torch.randn(1, 24, 16)
    scores = capped(q[0, 0] @ k[0].T, softcap).masked_fill(~torch.ones(24, 24, dtype=torch.bool).tril(), -math.inf)
    want = scores.softmax(1).unflatten(0, (3, 8)).sum(1).unflatten(1, (3, 8)).sum(2)
    torch.testing.assert_close(XAttention(stride=1, block=8).mass(q, k, 1.0, softcap)[0, 0], want)


def test_capped_logits_choose_by_the_attention_that_they_make() -> None:
    """A cap makes attention flatter, and more blocks are needed to hold a share of it."""
    torch.manual_seed(0)
    q, k = 3 * torch.randn(1, 2, 61, 16), torch.randn(1, 61, 16)
    found = XAttention(0.7, 4, 16).mass(q, k, 0.5, 1.0)
    for h in range(2):
        torch.testing.assert_close(found[0, h].double(), mass(q[0, h], k[0], 0.5, 16, 4, 1.0), rtol=1e-4, atol=1e-5)
    read = [sum(b - a for a, b in XAttention(0.7, 4, 16).choose(q, k, 0.5, cap).spans.flatten(0, 2).tolist())
            for cap in (1.0, None)]  # fmt: skip
    assert read[0] > read[1]


@pytest.mark.parametrize("line", ["vertical", "slanted"])
@pytest.mark.parametrize("offset", range(8))
def test_no_line_slips_through(line: str, offset: int) -> None:
    """Queries that look at one token, or at the one at a fixed distance before each, read the block where that is."""
    n, names = 512, torch.eye(512)
    if line == "vertical":
        q, k, aim = names[:1].expand(n, n), torch.zeros(n, n), torch.full((n,), 100 + offset)
        k[100 + offset] = 90 * names[0]
    else:
        k, aim = 90 * names, torch.arange(n) - 200 - offset
        q = names[aim.clamp(min=0)]
    choice = XAttention(threshold=0.5, stride=8, block=64).choose(q[None, None], k[None], 1.0)
    spans = [choice.spans[0, i // 64].tolist() for i in range(256, n)]
    met = [any(a <= int(aim[256 + i]) < b for a, b in parts) for i, parts in enumerate(spans)]
    assert sum(met) >= 0.8 * len(met)  # a line may cut a corner of a block
    assert max(sum(max(0, b - a) for a, b in parts) for parts in spans) <= 192  # and not much else is read


def attended(tokens: Tokens, end: int, method: XAttention) -> Tensor:
    """The prompt's outputs, with blocks by the oracle; [seq, token, q_head, dim]."""
    q, k, v = (x[0] for x in tokens.part(0, end))
    group = len(q) // len(k)
    outs = []
    for h in range(len(q)):
        keep = chosen(
            mass(q[h], k[h // group], q.shape[-1] ** -0.5, method.block, method.stride, tokens.softcap),
            method.threshold,
            0,
        )
        sees = keep.repeat_interleave(method.block, 0).repeat_interleave(method.block, 1)[:end, :end].tril()
        scores = capped((q[h] @ k[h // group].T) * q.shape[-1] ** -0.5, tokens.softcap)
        outs.append(scores.masked_fill(~sees, -math.inf).softmax(1) @ v[h // group])
    return torch.stack(outs, 1)[None]


TEXT = "xattention(threshold=0.6, stride=4, block=8, last=0)"


@pytest.mark.parametrize("softcap", [None, 0.3])
def test_the_prompt_reads_its_blocks_and_decoding_everything(softcap: float | None) -> None:
    tokens, method = draw(62), XAttention(0.6, 4, 8)
    tokens.softcap = softcap
    out = run(TEXT, tokens, 61).out
    torch.testing.assert_close(out[:, :61], attended(tokens, 61, method))
    assert (out[:, :61] - run("full", tokens, 61).out[:, :61]).abs().max() > 1e-2
    torch.testing.assert_close(out[:, 61:], plain(tokens, 61))


@pytest.mark.parametrize("chunks", [(), (32,), (56,), (24, 40, 56)])
@pytest.mark.parametrize("last", [1, 9, 100])
def test_the_last_queries_read_everything(last: int, chunks: tuple[int, ...]) -> None:
    tokens = draw(61)
    first, want = run(TEXT, tokens, 60).out, run("full", tokens, 60).out
    out = run(TEXT.replace("last=0", f"last={last}"), tokens, 60, chunks=chunks).out
    some = max(0, 60 - last)
    torch.testing.assert_close(out[:, :some], first[:, :some])
    torch.testing.assert_close(out[:, some:], want[:, some:])
    longer, valid = padded(tokens, 13)
    late = run(TEXT.replace("last=0", f"last={last}"), longer, 73, valid=valid).out[:, 13:]
    torch.testing.assert_close(late, out)


def test_chunks_that_end_with_blocks_do_not_matter() -> None:
    tokens = draw(61)
    want = run(TEXT, tokens, 60).out
    torch.testing.assert_close(run(TEXT, tokens, 60, chunks=(8, 32, 40)).out, want)
    cut = run(TEXT, tokens, 60, chunks=(11, 30)).out  # each part of a divided block chooses
    assert cut.isfinite().all() and (cut - want).abs().max() > 1e-3


def test_padding_changes_nothing() -> None:
    tokens = draw(60)
    longer, valid = padded(tokens, 13)
    want = run(TEXT, tokens, 60).out
    torch.testing.assert_close(run(TEXT, longer, 73, valid=valid).out[:, 13:], want)


def test_a_greater_threshold_reads_more_and_one_everything() -> None:
    q, k = torch.randn(1, 2, 200, 16), torch.randn(1, 200, 16)
    read = []
    for threshold in (0.0, 0.3, 0.6, 0.9, 1.0):
        spans = XAttention(threshold, 4, 16).choose(q, k, 1.0).spans
        read.append(float((spans[..., 1] - spans[..., 0]).clamp(min=0).sum()) / len(spans))
    assert read == sorted(read) and len(set(read)) == 5
    position = torch.arange(200, dtype=torch.int32)[None]
    whole = span_attention(q, k, k, position, spans, scale=1.0, block=16)
    want = torch.nn.functional.scaled_dot_product_attention(
        q, *[k[:, None].expand(-1, 2, -1, -1)] * 2, is_causal=True, scale=1.0
    )
    torch.testing.assert_close(whole, want)


@pytest.mark.parametrize(
    "options",
    [{"block": 20}, {"stride": 3}, {"stride": 0}, {"threshold": 1.5}, {"block": 0}, {"stride": 256}, {"last": -1}],
)
def test_refusals(options: dict[str, float]) -> None:
    with pytest.raises(PolicyError, match="XAttention"):
        XAttention(**options)
