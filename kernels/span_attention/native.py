"""The C version on the CPU (`kv_causal` in `kvengine/kernels/cpu/causal.c`)."""

from __future__ import annotations

import torch
from torch import Tensor

from kvengine.kernels.causal_attention import native
from kvengine.kernels.cpu import call
from kvengine.kernels.span_attention import Band


def span_attention(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, spans: Tensor, scale: float, band: Band | None,
    softcap: float | None, sinks: Tensor | None, block: int,
) -> Tensor:  # fmt: skip
    """See `kvengine.kernels.span_attention`."""
    spans = spans.to(torch.int64).contiguous()
    first = None if band is None else band.first.to(torch.int64).contiguous()
    logits = None if sinks is None else sinks.float().contiguous()
    rows, share = len(q), len(spans) // len(q) if len(spans) > len(q) else 1
    if share > 1:  # each query head reads for itself
        q = q.flatten(0, 1)[:, None]
    out = native.attention(
        q, k[:, None], v[:, None], scale, position, share, spans=spans.data_ptr(), queries_per=block,
        spans_per=spans.shape[2], spans_sequence=spans.stride(0) if len(spans) > 1 else 0,
        first=None if first is None else first.data_ptr(), sinks=0 if band is None else band.sinks,
        local=0 if band is None else band.local, logits=call.address(logits), softcap=softcap or 0.0,
    )  # fmt: skip
    return out.transpose(1, 2).reshape(rows, -1, *out.shape[1:2], out.shape[3])
