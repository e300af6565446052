"""The Triton kernel: one program per few queries of a KV head, all query heads of the group as rows of one tile."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels.dispatch import interpreted
from kvengine.kernels.gpu import FUSED, cdiv, crowds, next_power_of_2
from kvengine.kernels.gpu.stream import absorb
from kvengine.kernels.span_attention import Band

TILE = 64
"""Rows of a tile: query heads of a group times queries."""


@triton.jit(do_not_specialize=["queries", "tokens", "position_row", "spans_row", "count"])
def span_kernel(
    q, k, v, position, spans, first, sink_logits, out, k_row, k_token, v_row, v_token, position_row, spans_row,
    share, group, queries, tokens, block, count, band_sinks, band_local, scale, softcap,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, BAND: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)  # only the first axis holds more than 65535 programs
    m = tl.arange(0, HEADS * QUERIES)
    head, query = m // QUERIES, part * QUERIES + m % QUERIES
    there = (head < group) & (query < queries)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    line = (row * group + head) * queries + query
    x = tl.load(q + line[:, None] * DIM + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0).to(COMPUTE)
    at = tokens - queries + query
    acc = tl.zeros([HEADS * QUERIES, BLOCK_V], tl.float32)
    top = tl.full([HEADS * QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([HEADS * QUERIES], tl.float32)
    if SINKS:
        top = tl.load(sink_logits + row * group + head, mask=there, other=-float("inf")).to(tl.float32)
        total = tl.where(there, 1.0, 0.0)
    begin = 0
    if BAND:
        begin = tl.load(first + row // share).to(tl.int32)
    here = spans + row * spans_row + (part * QUERIES // block) * count * 2
    held = row // share
    for s in range(0, count):
        start, end = tl.load(here + 2 * s), tl.load(here + 2 * s + 1)
        for column in range(start, end, BLOCK):
            t = column + tl.arange(0, BLOCK)
            ok = t < end
            place = tl.load(position + held * position_row + t, mask=ok, other=-1)
            ok = ok & (place >= 0)
            token = t.to(tl.int64)[:, None]
            key = tl.load(
                k + held * k_row + token * k_token + d[None, :], mask=ok[:, None] & (d < DIM)[None, :], other=0.0
            )
            scores = tl.dot(x, tl.trans(key.to(COMPUTE)), input_precision="ieee") * scale
            if SOFTCAP:
                scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0))
            distance = at[:, None] - place[None, :]
            seen = ok[None, :] & (distance >= 0)
            if BAND:
                seen = seen & ((place < begin + band_sinks)[None, :] | (distance < band_local))
            scores = tl.where(seen, scores, -float("inf"))
            value = tl.load(
                v + held * v_row + token * v_token + e[None, :], mask=ok[:, None] & (e < DIM_V)[None, :], other=0.0
            )
            acc, top, total = absorb(scores, value.to(COMPUTE), acc, top, total)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + line[:, None] * DIM_V + e[None, :], result, mask=there[:, None] & (e < DIM_V)[None, :])


def span_attention(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, spans: Tensor, scale: float, band: Band | None,
    softcap: float | None, sinks: Tensor | None, block: int,
) -> Tensor:  # fmt: skip
    """See `kvengine.kernels.span_attention`."""
    q, (k, v) = q.contiguous(), (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    position = position if position.stride(-1) == 1 else position.contiguous()
    spans = spans.to(torch.int32).contiguous()
    shape, share = q.shape, len(spans) // len(q) if len(spans) > len(q) else 1
    if share > 1:  # each query head reads for itself
        q = q.flatten(0, 1)[:, None]
    (rows, group, queries, dim), dim_v, count = q.shape, v.shape[-1], spans.shape[2]
    heads = next_power_of_2(group)
    wide, exact = max(next_power_of_2(dim), 16), k.dtype == torch.float32
    tile = 16 if exact else TILE
    if heads > tile and crowds(q.device, heads * wide * q.element_size()):
        some = zip(q.split(tile, 1), [None] * group if sinks is None else sinks.split(tile, 1), strict=False)
        return torch.cat([span_attention(x, k, v, position, spans, scale, band, softcap, s, block) for x, s in some], 1)
    each = max(1, min(tile // heads, block & -block))  # a program's queries share their spans
    heads = max(heads, 16 // each)
    out = torch.empty(rows, group, queries, dim_v, device=q.device, dtype=q.dtype)
    span_kernel[(cdiv(queries, each), rows)](
        q, k, v, position, spans, spans if band is None else band.first, spans if sinks is None else sinks.contiguous(),
        out, k.stride(0), k.stride(1), v.stride(0), v.stride(1), position.stride(0),
        0 if len(spans) == 1 else spans.stride(0), share, group, queries, k.shape[1], block, count,
        0 if band is None else band.sinks, 0 if band is None else band.local, scale, softcap or 1.0,
        QUERIES=each, HEADS=heads, DIM=dim, BLOCK_D=wide, DIM_V=dim_v, BLOCK_V=max(next_power_of_2(dim_v), 16),
        BLOCK=16 if wide > 256 else 64 if wide <= 128 and not exact else 32, BAND=band is not None,
        SOFTCAP=softcap is not None, SINKS=sinks is not None,
        COMPUTE=compute_type(k.dtype), num_warps=8 if wide > 128 else 4, num_stages=2, **FUSED,
    )  # fmt: skip
    return out.view(*shape[:3], dim_v)


def compute_type(dtype: torch.dtype) -> tl.dtype:
    if dtype == torch.bfloat16 and interpreted():  # the interpreter multiplies the bits of bfloat16 as integers
        dtype = torch.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
