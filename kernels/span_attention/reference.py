"""Plain torch, block by block: what a block reads is put together, and the library's fused attention does the rest."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional as F

from kvengine.kernels.attention import reference
from kvengine.kernels.span_attention import Band


def span_attention(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, spans: Tensor, scale: float, band: Band | None,
    softcap: float | None, sinks: Tensor | None, block: int,
) -> Tensor:  # fmt: skip
    """See `kvengine.kernels.span_attention`."""
    queries, tokens = q.shape[2], k.shape[1]
    out = q.new_zeros(*q.shape[:3], v.shape[-1])
    share = max(1, len(spans) // len(q))  # lines of spans for a row: one for each query head, or one for all
    for line, of_line in enumerate(spans.tolist()):
        r, h = divmod(line, share)
        rows = slice(None) if len(spans) == 1 else slice(r, r + 1)
        heads = slice(None) if share == 1 else slice(h, h + 1)
        mine = None if band is None else band._replace(first=band.first[rows])
        logits = None if sinks is None else sinks[rows, heads]
        for b, ranges in enumerate(of_line):
            some = slice(b * block, min((b + 1) * block, queries))
            at = torch.arange(tokens - queries + some.start, tokens - queries + some.stop, device=q.device)
            parts = [slice(start, end) for start, end in ranges if end > start]
            if not parts:
                continue
            keys, values, place = (_joined(x[rows], parts) for x in (k, v, position))
            if bool((place < 0).any()):  # what is no token may hold anything
                keys, values = (x.masked_fill((place < 0)[..., None], 0) for x in (keys, values))
            visible = _visible(at, place, mine)
            out[rows, heads, some] = _attend(q[rows, heads, some], keys, values, visible, scale, softcap, logits)
    return out


def _joined(x: Tensor, parts: list[slice]) -> Tensor:
    return x[:, parts[0]] if len(parts) == 1 else torch.cat([x[:, part] for part in parts], 1)


def _visible(at: Tensor, place: Tensor, band: Band | None) -> Bool[Tensor, "row query token"]:
    """Which of the tokens at these places each query sees."""
    seen = (place >= 0)[:, None] & (place[:, None] <= at[:, None])
    if band is None:
        return seen
    return seen & ((place < band.first[:, None] + band.sinks)[:, None] | (at[:, None] - place[:, None] < band.local))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    if softcap is not None or sinks is not None or q.dtype == torch.float64:
        return reference.attention(q, k, v, visible, scale, softcap, sinks, False).out.to(q.dtype)
    some = visible.any(2, keepdim=True)[:, None]
    mask = visible[:, None] | ~some  # a query that sees nothing would give NaN
    k, v = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).where(some, 0)
