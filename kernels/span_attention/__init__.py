"""Attention of a prompt's queries to spans of its tokens: what lies outside the spans is skipped, not masked.

Each block of queries names the spans of tokens that it reads; inside them causality holds, and if given a band. Serves
A-shape heads, streaming heads, block-sparse patterns and, with one span per block, plain causal attention in chunks.
Work and memory follow the spans: nothing of size queries times tokens is made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
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
    spans: Int[Tensor, "rows block span 2"],
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
    of the tokens that it reads; spans of a block must not overlap, an empty one has end <= start; one row of spans
    serves all rows. `band`: also hides what is outside of it, token by token. `sinks`: a logit per query head that
    joins the softmax with a zero value. Raises KernelError on shapes that do not fit.
    """
    rows, _, queries, _ = q.shape
    blocks = -(-queries // block)
    if k.shape[0] != rows or v.shape[:2] != k.shape[:2] or position.shape != k.shape[:2] or queries > k.shape[1]:
        raise KernelError(
            f"span_attention takes q [row, group, query, dim], k and v [row, token, *], position [row, token] with at "
            f"most as many queries as tokens; got {[list(x.shape) for x in (q, k, v, position)]}"
        )
    if spans.dim() != 4 or spans.shape[0] not in (1, rows) or spans.shape[1] != blocks or spans.shape[3] != 2:
        raise KernelError(f"spans must be [1 or {rows}, {blocks}, span, 2]; got {list(spans.shape)}")
    native = block % EIGHT == 0 and fits(q, k, v)
    if backend is None and not native and block % EIGHT == 0 and pays(q, k, v, softcap, sinks):
        more = {"scale": scale, "band": band, "softcap": softcap, "sinks": sinks, "block": block}
        out = span_attention(q.float(), k.float(), v.float(), position, spans, **more)  # type: ignore[arg-type]
        return out.to(q.dtype)
    inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
    run = pick("span_attention", inputs, backend, native, max(q.shape[-1], v.shape[-1]))
    return run.span_attention(q, k, v, position, spans, scale, band, softcap, sinks, block)  # type: ignore[no-any-return]


def pays(q: Tensor, k: Tensor, v: Tensor, softcap: float | None, sinks: Tensor | None) -> bool:
    """Whether a CPU's 16-bit numbers are widened for the C version: the library caps no scores and knows no sinks."""
    half = all(x.dtype in (torch.bfloat16, torch.float16) for x in (q, k, v))
    return half and (softcap is not None or sinks is not None) and fits(*(x[:0].float() for x in (q, k, v)))


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


def _starts(queries: int, tokens: int, device: torch.device, block: int) -> Int[Tensor, "block"]:
    return tokens - queries + torch.arange(0, queries, block, device=device)
