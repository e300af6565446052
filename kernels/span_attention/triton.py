"""The Triton kernel: one program per few queries of a KV head, all query heads of the group as rows of one tile."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from kvengine.kernels.dispatch import interpreted
from kvengine.kernels.gpu import FUSED, cdiv, crowds, lined, near, next_power_of_2, room
from kvengine.kernels.gpu.stream import LOG2E
from kvengine.kernels.span_attention import Band

TILE, WIDE_TILE = 128, 64
"""Rows of a tile: query heads of a group times queries. Of 128, as each tile reads its tokens from the second-level cache, which
delivers too few bytes for 64 rows at a time; of wider heads 128 do not fit."""


@triton.jit(do_not_specialize=["line", "count", "least"])
def stretch_kernel(x, out, line, count, least, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first, last = count, 0
    for begin in range(0, count, BLOCK):
        t = begin + tl.arange(0, BLOCK)
        none = tl.load(x + row * line + t, mask=t < count, other=1).to(tl.int32) < least
        first = tl.minimum(first, tl.min(tl.where(none, t, count), 0))
        last = tl.maximum(last, tl.max(tl.where(none, t + 1, 0), 0))
    tl.store(out + 2 * row, tl.where(first == 0, last, 0))
    tl.store(out + 2 * row + 1, tl.where(first == 0, count, first))


def stretches(x: Tensor, least: int) -> Int[Tensor, "row 2"]:
    """[from, to) of each row's numbers, all of which are `least` or more: what follows the last that is less, if the row begins
    with such a one, else what comes before the first. So a row with padding on one side has a stretch of all its tokens."""
    out = torch.empty(len(x), 2, device=x.device, dtype=torch.int32)
    stretch_kernel[(len(x),)](x, out, x.stride(0), x.shape[1], least, BLOCK=2048, num_warps=8, **FUSED)
    return out


@triton.jit(do_not_specialize=["queries", "tokens", "position_row", "spans_row", "count"])
def span_kernel(
    q, k, v, position, clean, spans, first, sink_logits, out, k_row, k_token, v_row, v_token, position_row, spans_row,
    share, group, queries, tokens, block, count, band_sinks, band_local, scale, softcap,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, DIM_V: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, BAND: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Most of a span's blocks hold no padding and are seen whole by all queries here: those come first, and nothing is masked."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)  # only the first axis holds more than 65535 programs
    m = tl.arange(0, HEADS * QUERIES)
    head, query = m // QUERIES, part * QUERIES + m % QUERIES
    there = (head < group) & (query < queries)
    d, e, t = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK)
    line = (row * group + head) * queries + query
    x = tl.load(q + line[:, None] * DIM + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0).to(COMPUTE)
    power = LOG2E if SOFTCAP else scale * LOG2E  # 2 is raised to scores times this
    at = tokens - queries + query
    earliest = tokens - queries + part * QUERIES
    latest = tl.minimum(earliest + QUERIES, tokens) - 1
    acc = tl.zeros([HEADS * QUERIES, BLOCK_V], tl.float32)
    top = tl.full([HEADS * QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([HEADS * QUERIES, 8], tl.float32)
    if SINKS:
        top = tl.load(sink_logits + row * group + head, mask=there, other=-float("inf")).to(tl.float32) * LOG2E
        total = tl.where(there[:, None] & (tl.arange(0, 8) == 0)[None, :], 1.0, total)
    held = row // share
    begin = 0
    if BAND:
        begin = tl.load(first + held).to(tl.int32)
    here = spans + row * spans_row + (part * QUERIES // block) * count * 2
    clean_from, clean_to = tl.load(clean + 2 * held), tl.load(clean + 2 * held + 1)
    keys, values, places = k + held * k_row, v + held * v_row, position + held * position_row
    k_at, v_at = t[:, None] * k_token + d[None, :], t[:, None] * v_token + e[None, :]
    for s in range(0, count):
        start, end = tl.load(here + 2 * s), tl.load(here + 2 * s + 1)
        blocks = tl.maximum(end - start + BLOCK - 1, 0) // BLOCK
        upto = tl.maximum(tl.minimum(tl.minimum(end, earliest + 1), clean_to) - start, 0) // BLOCK
        lead = tl.maximum(clean_from - start + BLOCK - 1, 0) // BLOCK
        if BAND:  # blocks of nothing but the newest tokens; those of nothing but sinks are few
            near = tl.maximum(latest - band_local - start + BLOCK, 0) // BLOCK
            lead = tl.where(near * BLOCK > begin + band_sinks - start, tl.maximum(lead, near), lead)
        lead = tl.minimum(lead, upto)
        for i in range(lead, upto):
            column = (start + i * BLOCK).to(tl.int64)
            key = whole(keys + column * k_token, k_at, d, DIM, BLOCK_D)
            scores = tl.dot(x, tl.trans(key.to(COMPUTE)), input_precision="ieee")
            if SOFTCAP:
                scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 * scale / softcap)) + 1.0))
            value = whole(values + column * v_token, v_at, e, DIM_V, BLOCK_V)
            acc, top, total = weighed(scores, value.to(COMPUTE), acc, top, total, power)
        for i in range(0, blocks - (upto - lead)):
            column = start + tl.where(i < lead, i, i + upto - lead) * BLOCK
            ok = column + t < end
            place = tl.load(places + column + t, mask=ok, other=-1)
            ok = ok & (place >= 0)
            from_k, from_v = keys + column.to(tl.int64) * k_token, values + column.to(tl.int64) * v_token
            key = tl.load(from_k + k_at, mask=ok[:, None] & (d < DIM)[None, :], other=0.0)
            scores = tl.dot(x, tl.trans(key.to(COMPUTE)), input_precision="ieee")
            if SOFTCAP:
                scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 * scale / softcap)) + 1.0))
            distance = at[:, None] - place[None, :]
            seen = ok[None, :] & (distance >= 0)
            if BAND:
                seen = seen & ((place < begin + band_sinks)[None, :] | (distance < band_local))
            scores = tl.where(seen, scores, -float("inf"))
            value = tl.load(from_v + v_at, mask=ok[:, None] & (e < DIM_V)[None, :], other=0.0)
            acc, top, total = weighed(scores, value.to(COMPUTE), acc, top, total, power)
    found = tl.sum(total, 1)
    result = acc / tl.where(found > 0, found, 1.0)[:, None]
    tl.store(out + line[:, None] * DIM_V + e[None, :], result, mask=there[:, None] & (e < DIM_V)[None, :])


@triton.jit
def whole(pointer, at, d, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """A block of vectors, all of which are there."""
    if DIM == BLOCK_D:
        return tl.load(pointer + at)
    else:
        return tl.load(pointer + at, mask=(d < DIM)[None, :], other=0.0)


@triton.jit
def weighed(scores, value, acc, top, total, power):
    """Online softmax in powers of two: take in scores [M, T] (-inf: unseen) and values [T, D]. `total` [M, 8] is summed up at
    the end, as each lane has some of it."""
    high = tl.maximum(top, tl.max(scores, 1) * power)
    shift = tl.where(high == float("-inf"), 0.0, high)
    shrink = tl.exp2(top - shift)
    p = tl.exp2(scores * power - shift[:, None])
    total = total * shrink[:, None] + tl.sum(p.reshape(p.shape[0], p.shape[1] // 8, 8), 1)
    return tl.dot(p.to(value.dtype), value, acc * shrink[:, None], input_precision="ieee"), high, total


def span_attention(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, spans: Tensor, scale: float, band: Band | None,
    softcap: float | None, sinks: Tensor | None, block: int,
) -> Tensor:  # fmt: skip
    """See `kvengine.kernels.span_attention`."""
    q, k, v = q.contiguous(), near(k), near(v)
    position = lined(position)
    spans = spans.to(torch.int32).contiguous()
    if scale < 0:
        q, scale = -q, -scale
    shape, share = q.shape, len(spans) // len(q) if len(spans) > len(q) else 1
    if share > 1:  # each query head reads for itself
        q = q.flatten(0, 1)[:, None]
    (rows, group, queries, dim), dim_v, count = q.shape, v.shape[-1], spans.shape[2]
    heads = next_power_of_2(group)
    wide, wide_v, exact = max(next_power_of_2(dim), 16), max(next_power_of_2(dim_v), 16), k.dtype == torch.float32
    narrow = max(wide, wide_v) <= 128
    tile = 16 if exact else TILE if narrow else WIDE_TILE
    if wide > 256 and room(q.device) < 128 << 10:
        tile = min(tile, 32)
    if heads > tile and crowds(q.device, heads * wide * q.element_size()):
        some = zip(q.split(tile, 1), [None] * group if sinks is None else sinks.split(tile, 1), strict=False)
        return torch.cat([span_attention(x, k, v, position, spans, scale, band, softcap, s, block) for x, s in some], 1)
    each = max(1, min(tile // heads, block & -block))  # a program's queries share their spans
    heads = max(heads, 16 // each)
    out = torch.empty(rows, group, queries, dim_v, device=q.device, dtype=q.dtype)
    span_kernel[(cdiv(queries, each), rows)](
        q, k, v, position, stretches(position, 0), spans, spans if band is None else band.first,
        spans if sinks is None else sinks.contiguous(), out,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), position.stride(0),
        0 if len(spans) == 1 else spans.stride(0), share, group, queries, k.shape[1], block, count,
        0 if band is None else band.sinks, 0 if band is None else band.local, scale, softcap or 1.0,
        QUERIES=each, HEADS=heads, DIM=dim, BLOCK_D=wide, DIM_V=dim_v, BLOCK_V=wide_v,
        BLOCK=16 if wide > 256 else 64 if wide <= 128 and not exact else 32, BAND=band is not None,
        SOFTCAP=softcap is not None, SINKS=sinks is not None,
        COMPUTE=compute_type(k.dtype), num_warps=4 if narrow and exact else 8, num_stages=2, **FUSED,
    )  # fmt: skip
    return out.view(*shape[:3], dim_v)


def compute_type(dtype: torch.dtype) -> tl.dtype:
    if dtype == torch.bfloat16 and interpreted():  # the interpreter multiplies the bits of bfloat16 as integers
        dtype = torch.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
