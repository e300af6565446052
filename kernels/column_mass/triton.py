"""Two Triton kernels: the log-sum-exp of each query, and then, per block of tokens, the sum over the queries after it (or the
most that one of them pays)."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from kvengine.kernels.gpu import FUSED, cdiv, next_power_of_2
from kvengine.kernels.gpu.stream import LOG2E
from kvengine.kernels.span_attention import Band
from kvengine.kernels.span_attention.triton import compute_type

QUERIES, TOKENS = 64, 64
"""Of a tile: queries of one head, and tokens."""


@triton.jit
def scored(
    x, key, t, place, asked, begin, band_sinks, band_local, scale, softcap,
    BAND: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Scores [query, token] of queries in slots `asked` (negative: none) and tokens in slots t (`place` negative: none)."""
    scores = tl.dot(x, tl.trans(key), input_precision="ieee") * scale
    if SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0))
    distance = asked[:, None] - t[None, :]
    seen = (place >= 0)[None, :] & (distance >= 0)
    if BAND:
        seen = seen & ((t < begin + band_sinks)[None, :] | (distance < band_local))
    return tl.where(seen, scores, -float("inf"))


@triton.jit(do_not_specialize=["queries", "tokens", "position_row"])
def lse_kernel(
    q, k, position, at, real, first, sink_logits, lse, k_row, k_token, position_row,
    group, queries, tokens, band_sinks, band_local, scale, softcap,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BAND: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """One program per some queries of one head; +inf for a query that sees nothing, as its weights are 0."""
    part = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    head = tl.program_id(1).to(tl.int64)  # only the first axis holds more than 65535 programs
    row = head // group
    n, d = part * QUERIES + tl.arange(0, QUERIES), tl.arange(0, BLOCK_D)
    asked = tl.load(at + n, mask=n < queries, other=-1)
    asked = tl.where(tl.load(real + row * queries + n, mask=n < queries, other=0) != 0, asked, -1)
    line = head * queries + n
    inside = (asked >= 0)[:, None] & (d < DIM)[None, :]
    x = tl.load(q + line[:, None] * DIM + d[None, :], mask=inside, other=0.0).to(COMPUTE)
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if SINKS:
        top = tl.zeros([QUERIES], tl.float32) + tl.load(sink_logits + head).to(tl.float32)
        total = tl.where(top == -float("inf"), 0.0, 1.0)
    begin, far, near = 0, 0, 0
    end = tl.max(asked, 0) + 1
    if BAND:  # tokens from `far` to `near` are seen by none
        begin = tl.load(first + row).to(tl.int32)
        near = tl.maximum(tl.min(tl.where(asked >= 0, asked, tokens), 0) - band_local + 1, 0) // TOKENS * TOKENS
        far = tl.minimum((tl.maximum(begin + band_sinks, 0) + TOKENS - 1) // TOKENS * TOKENS, near)
    for step in range(0, end - (near - far), TOKENS):
        t = tl.where(step < far, step, step + near - far) + tl.arange(0, TOKENS)
        place = tl.load(position + row * position_row + t, mask=t < tokens, other=-1)
        token = row * k_row + t.to(tl.int64) * k_token
        key = tl.load(k + token[:, None] + d[None, :], mask=(place >= 0)[:, None] & (d < DIM)[None, :], other=0.0)
        scores = scored(
            x, key.to(COMPUTE), t, place, asked, begin, band_sinks, band_local, scale, softcap, BAND, SOFTCAP
        )
        high = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(high == float("-inf"), 0.0, high)
        total = total * tl.exp2((top - shift) * LOG2E) + tl.sum(tl.exp2((scores - shift[:, None]) * LOG2E), 1)
        top = high
    found = tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), float("inf"))
    tl.store(lse + line, found, mask=n < queries)


@triton.jit(do_not_specialize=["queries", "tokens", "position_row"])
def mass_kernel(
    q, k, position, at, real, first, later, lse, out, k_row, k_token, position_row,
    group, queries, tokens, band_sinks, band_local, scale, softcap,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BAND: tl.constexpr,
    SOFTCAP: tl.constexpr, MOST: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """One program per block of tokens and query head: every query from the first on whose slot is not before them."""
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = head // group
    t, d = part * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCK_D)
    place = tl.load(position + row * position_row + t, mask=t < tokens, other=-1)
    token = row * k_row + t.to(tl.int64) * k_token
    key = tl.load(k + token[:, None] + d[None, :], mask=(place >= 0)[:, None] & (d < DIM)[None, :], other=0.0).to(
        COMPUTE
    )
    begin, end = 0, queries
    if BAND:
        begin = tl.load(first + row).to(tl.int32)
        if part * TOKENS >= begin + band_sinks:  # queries that lie further behind see none of these
            end = tl.load(later + (tl.cdiv(tokens, TOKENS) + part))
    mass = tl.zeros([TOKENS], tl.float32)
    for start in range(tl.load(later + part), end, QUERIES):
        n = start + tl.arange(0, QUERIES)
        asked = tl.load(at + n, mask=n < end, other=-1)
        asked = tl.where(tl.load(real + row * queries + n, mask=n < end, other=0) != 0, asked, -1)
        line = head * queries + n
        inside = (asked >= 0)[:, None] & (d < DIM)[None, :]
        x = tl.load(q + line[:, None] * DIM + d[None, :], mask=inside, other=0.0).to(COMPUTE)
        scores = scored(x, key, t, place, asked, begin, band_sinks, band_local, scale, softcap, BAND, SOFTCAP)
        total = tl.load(lse + line, mask=n < end, other=float("inf"))
        paid = tl.exp2((scores - total[:, None]) * LOG2E)
        if MOST:
            mass = tl.maximum(mass, tl.max(paid, 0))
        else:
            mass += tl.sum(paid, 0)
    tl.store(out + head * tokens + t, mass, mask=t < tokens)


def column_mass(
    q: Tensor, k: Tensor, position: Tensor, at: Tensor, real: Tensor, scale: float, band: Band | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `kvengine.kernels.column_mass`."""
    return received(q, k, position, at, real, scale, band, softcap, sinks)


def received(
    q: Tensor, k: Tensor, position: Tensor, at: Tensor, real: Tensor, scale: float, band: Band | None,
    softcap: float | None, sinks: Tensor | None, most: bool = False,
) -> Float[Tensor, "row group token"]:  # fmt: skip
    """What each token receives from all queries of a head; or the `most` that one of these pays."""
    q, k = q.contiguous(), k if k.stride(-1) == 1 else k.contiguous()
    position = position if position.stride(-1) == 1 else position.contiguous()
    at, real = at.to(torch.int32).contiguous(), real.contiguous().view(torch.uint8)
    (rows, group, queries, dim), tokens = q.shape, k.shape[1]
    lse = torch.empty(rows, group, queries, device=q.device, dtype=torch.float32)
    out = torch.empty(rows, group, tokens, device=q.device, dtype=torch.float32)
    wide, exact = max(next_power_of_2(dim), 16), k.dtype == torch.float32
    few, some = (16 if exact else QUERIES), (32 if exact or wide > 128 else TOKENS)
    starts = torch.arange(0, tokens, some, device=q.device, dtype=torch.int32)
    later = torch.searchsorted(at, starts, out_int32=True)
    if band is not None:
        later = torch.cat([later, torch.searchsorted(at, starts + (some - 1 + band.local), out_int32=True)])
    numbers = (
        group, queries, tokens, 0 if band is None else band.sinks, 0 if band is None else band.local, scale, softcap or 1.0,
    )  # fmt: skip
    shape = dict(
        QUERIES=few, TOKENS=some, DIM=dim, BLOCK_D=wide, BAND=band is not None, SOFTCAP=softcap is not None,
        COMPUTE=compute_type(k.dtype), num_warps=8 if wide > 128 else 4, num_stages=2,
    )  # fmt: skip
    strides = k.stride(0), k.stride(1), position.stride(0)
    first = at if band is None else band.first
    lse_kernel[(cdiv(queries, few), rows * group)](
        q, k, position, at, real, first, lse if sinks is None else sinks.contiguous(), lse, *strides, *numbers,
        SINKS=sinks is not None, **shape, **FUSED,
    )  # fmt: skip
    mass_kernel[(cdiv(tokens, some), rows * group)](
        q, k, position, at, real, first, later, lse, out, *strides, *numbers, MOST=most, **shape, **FUSED
    )
    return out
