"""Attention of a prompt's queries to spans of its tokens: what lies outside the spans is skipped, not masked.

Each block of queries names the spans of tokens that it reads; inside them causality holds, and if given a band. Serves
A-shape heads, streaming heads, block-sparse patterns, each query head's own or the group's, and, with one span per block,
plain causal attention in chunks.
Work and memory follow the spans: nothing of size queries times tokens is made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.causal_attention.native import EIGHT, fits
from kvengine.kernels.dispatch import pick

BLOCK = 128
"""Queries that share their spans, unless said otherwise."""


class Band(NamedTuple):
    """A query reads the first `sinks` tokens of its row, and the `local` newest up to its own."""

    first: Int[Tensor, "row"]
    """Position of each row's first token."""
    sinks: int
    local: int


def span_attention(
    q: Float[Tensor, "row group query dim"],
    k: Float[Tensor, "row token dim"],
    v: Float[Tensor, "row token dim_v"],
    position: Int[Tensor, "row token"],
    spans: Int[Tensor, "lines block span 2"],
    *,
    scale: float,
    band: Band | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, "row group"] | None = None,
    block: int = BLOCK,
    backend: str | None = None,
) -> Float[Tensor, "row group query dim_v"]:
    """Softmax attention of the last `query` of the tokens. In the queries' dtype; 0 where nothing is seen.

    `position`: of each token, which is its index, or -1 for padding. `spans`: for each block of queries, [start, end)
    of the tokens that it reads; spans of a block must not overlap, an empty one has end <= start; one line of spans
    serves all rows, or there is one for each row, or for each query head of each row. `band`: also hides what is outside
    of it, token by token. `sinks`: a logit per query head that joins the softmax with a zero value. Raises KernelError on
    shapes that do not fit.
    """
    rows, _, queries, _ = q.shape
    blocks = -(-queries // block)
    if k.shape[0] != rows or v.shape[:2] != k.shape[:2] or position.shape != k.shape[:2] or queries > k.shape[1]:
        raise KernelError(
            f"span_attention takes q [row, group, query, dim], k and v [row, token, *], position [row, token] with at "
            f"most as many queries as tokens; got {[list(x.shape) for x in (q, k, v, position)]}"
        )
    lines = 1, rows, rows * q.shape[1]
    if spans.dim() != 4 or spans.shape[0] not in lines or spans.shape[1] != blocks or spans.shape[3] != 2:
        raise KernelError(
            f"spans must be [1, {rows} or {lines[2]}, {blocks}, span, 2], as they are for all rows, by row or by query head; "
            f"got {list(spans.shape)}"
        )
    native = block % EIGHT == 0 and fits(q, k, v)
    one_by_one = len(spans) > 1 or softcap is not None or sinks is not None
    if backend is None and not native and block % EIGHT == 0 and one_by_one and widens(q, k, v):
        more = {"scale": scale, "band": band, "softcap": softcap, "sinks": sinks, "block": block}
        out = span_attention(q.float(), k.float(), v.float(), position, spans, **more)  # type: ignore[arg-type]
        return out.to(q.dtype)
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    run = pick("span_attention", inputs, backend, native, max(q.shape[-1], v.shape[-1]))
    return run.span_attention(q, k, v, position, spans, scale, band, softcap, sinks, block)  # type: ignore[no-any-return]


def widens(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a CPU's 16-bit numbers are widened for the C version, where the library would take rows one by one."""
    half = all(x.dtype in (torch.bfloat16, torch.float16) for x in (q, k, v))
    return half and fits(*(x[:0].float() for x in (q, k, v)))


def causal_spans(queries: int, tokens: int, device: torch.device, block: int = BLOCK) -> Int[Tensor, "1 block 1 2"]:
    """Everything up to the block's last query.

    >>> causal_spans(3, 5, torch.device("cpu"), 2).tolist()
    [[[[0, 4]], [[0, 5]]]]
    """
    end = _starts(queries, tokens, device, block).add(block).clamp(max=tokens)
    return torch.stack([torch.zeros_like(end), end], 1)[None, :, None]


def band_spans(queries: int, tokens: int, band: Band, block: int = BLOCK) -> Int[Tensor, "1 block 2 2"]:
    """What a band lets a block read: the sinks of all rows, and from the first query's band to the last query.

    >>> band_spans(2, 9, Band(torch.tensor([0, 1]), 2, 3), 2).tolist()
    [[[[0, 3], [5, 9]]]]
    """
    start = _starts(queries, tokens, band.first.device, block)
    near = (start - band.local + 1).clamp(min=0)
    far = (band.first.max() + band.sinks).minimum(near)
    sink = torch.stack([band.first.min().minimum(far), far], 1)
    return torch.stack([sink, torch.stack([near, (start + block).clamp(max=tokens)], 1)], 1)[None]


def block_spans(keep: Bool[Tensor, "line block columns"], block: int, tokens: int) -> Int[Tensor, "line block span 2"]:
    """The blocks of tokens that each block of queries keeps; neighbours are one span. The last block may be short.

    >>> block_spans(torch.tensor([[[True, True, False, True], [False, False, True, False]]]), 4, 14).tolist()
    [[[[0, 8], [12, 14]], [[8, 12], [0, 0]]]]
    """
    no = keep.new_zeros(*keep.shape[:2], 1)
    edge = torch.cat([no, keep], 2) != torch.cat([keep, no], 2)  # in turns where a span starts and where one ends
    line, row, at = edge.nonzero(as_tuple=True)
    count = edge.sum(2)
    spans = at.new_zeros(*keep.shape[:2], max(2, int(count.max())))
    before = count.flatten().cumsum(0) - count.flatten()
    rank = torch.arange(len(at), device=at.device) - before[line * keep.shape[1] + row]
    spans[line, row, rank] = (at * block).clamp(max=tokens)
    return spans.unflatten(2, (-1, 2))


def pairs(
    spans: Int[Tensor, "line block span 2"], queries: int, tokens: int, skip: int = 0, block: int = BLOCK
) -> float:
    """How many (query, token) pairs causal attention of the last `queries` of these tokens computes, the mean of lines.

    `skip`: the first queries, which are not counted.

    >>> pairs(torch.tensor([[[[0, 1], [3, 4]], [[4, 6], [0, 0]]]]), 4, 6, block=2)
    6.0
    >>> pairs(causal_spans(4, 6, torch.device("cpu")), 4, 6)
    18.0
    """
    start = _starts(queries, tokens, spans.device, block)[:, None]
    first, end = start.clamp(min=tokens - queries + skip), (start + block).clamp(max=tokens)
    asked, a, b = (end - first).clamp(min=0), spans[..., 0], spans[..., 1].maximum(spans[..., 0])
    early = (b.minimum(first) - a.minimum(first)) * asked
    a, b = a.maximum(first).minimum(end), b.maximum(first).minimum(end)
    own = (b - a) * (2 * end - a - b + 1) // 2  # each token is read by the block's queries from its own on
    return float((early + own * (asked > 0)).sum()) / len(spans)


def _starts(queries: int, tokens: int, device: torch.device, block: int) -> Int[Tensor, "block"]:
    return tokens - queries + torch.arange(0, queries, block, device=device)
