"""Two Triton kernels: the log-sum-exp of each query, and then, per block of tokens, the sum over the queries after it (or the
most that one of them pays)."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from kvengine.kernels.gpu import FUSED, cdiv, lined, near, next_power_of_2, room
from kvengine.kernels.gpu.stream import LOG2E
from kvengine.kernels.span_attention import Band
from kvengine.kernels.span_attention.triton import compute_type, stretches, whole

QUERIES, TOKENS = 64, 64
"""Of a tile: queries of one head, and tokens."""


@triton.jit
def scored(x, key, scale, softcap, SOFTCAP: tl.constexpr):
    """Of all pairs; capped ones are scaled before, others by the power that 2 is raised to."""
    scores = tl.dot(x, tl.trans(key), input_precision="ieee")
    if SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 * scale / softcap)) + 1.0))
    return scores


@triton.jit
def seen(scores, asked, t, place, begin, band_sinks, band_local, BAND: tl.constexpr):
    """-inf where a query in slot `asked` (negative: none) does not see slot t (`place` negative: no token)."""
    distance = asked[:, None] - t[None, :]
    sees = (place >= 0)[None, :] & (distance >= 0)
    if BAND:
        sees = sees & ((t < begin + band_sinks)[None, :] | (distance < band_local))
    return tl.where(sees, scores, -float("inf"))


@triton.jit(do_not_specialize=["queries", "tokens", "position_row"])
def lse_kernel(
    q, k, position, clean, at, real, first, sink_logits, lse, k_row, k_token, position_row,
    group, queries, tokens, band_sinks, band_local, scale, softcap,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BAND: tl.constexpr,
    SOFTCAP: tl.constexpr, SINKS: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """One program per some queries of one head; in powers of two, and +inf for a query that sees nothing, as its weights are 0.
    Blocks of tokens that hold no padding and that all see come first: nothing is masked there."""
    part = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    head = tl.program_id(1).to(tl.int64)  # only the first axis holds more than 65535 programs
    row = head // group
    n, d, t = part * QUERIES + tl.arange(0, QUERIES), tl.arange(0, BLOCK_D), tl.arange(0, TOKENS)
    asked = tl.load(at + n, mask=n < queries, other=-1)
    asked = tl.where(tl.load(real + row * queries + n, mask=n < queries, other=0) != 0, asked, -1)
    line = head * queries + n
    inside = (asked >= 0)[:, None] & (d < DIM)[None, :]
    x = tl.load(q + line[:, None] * DIM + d[None, :], mask=inside, other=0.0).to(COMPUTE)
    power = LOG2E if SOFTCAP else scale * LOG2E
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES, 8], tl.float32)
    if SINKS:
        top = tl.zeros([QUERIES], tl.float32) + tl.load(sink_logits + head).to(tl.float32) * LOG2E
        total = tl.where((top > -float("inf"))[:, None] & (tl.arange(0, 8) == 0)[None, :], 1.0, total)
    begin, far, near = 0, 0, 0
    end, earliest = tl.max(asked, 0) + 1, tl.min(tl.where(asked >= 0, asked, tokens), 0)
    low = (tl.load(clean + 2 * row) + TOKENS - 1) // TOKENS * TOKENS  # from here to `high` nothing is masked
    high = tl.minimum(earliest + 1, tl.load(clean + 2 * row + 1)) // TOKENS * TOKENS
    if BAND:  # tokens from `far` to `near` are seen by none
        begin = tl.load(first + row).to(tl.int32)
        near = tl.maximum(earliest - band_local + 1, 0) // TOKENS * TOKENS
        far = tl.minimum((tl.maximum(begin + band_sinks, 0) + TOKENS - 1) // TOKENS * TOKENS, near)
        low = tl.maximum(low, tl.maximum(end - band_local + TOKENS - 1, 0) // TOKENS * TOKENS)
    high = tl.maximum(low, high)
    keys, k_at = k + row * k_row, t[:, None] * k_token + d[None, :]
    for step in range(low, high, TOKENS):
        key = whole(keys + (step + tl.zeros([], tl.int64)) * k_token, k_at, d, DIM, BLOCK_D)
        scores = scored(x, key.to(COMPUTE), scale, softcap, SOFTCAP)
        top, total = summed(scores, top, total, power)
    for step in range(0, tl.maximum(end - (near - far) - (high - low), 0), TOKENS):
        start = tl.where(step < far, step, step + near - far)
        start = tl.where(start < low, start, start + high - low)
        place = tl.load(position + row * position_row + start + t, mask=start + t < tokens, other=-1)
        held = (place >= 0)[:, None] & (d < DIM)[None, :]
        key = tl.load(keys + start.to(tl.int64) * k_token + k_at, mask=held, other=0.0)
        scores = scored(x, key.to(COMPUTE), scale, softcap, SOFTCAP)
        scores = seen(scores, asked, start + t, place, begin, band_sinks, band_local, BAND)
        top, total = summed(scores, top, total, power)
    found = tl.sum(total, 1)
    result = tl.where((found > 0) & (asked >= 0), top + tl.log2(tl.where(found > 0, found, 1.0)), float("inf"))
    tl.store(lse + line, result, mask=n < queries)


@triton.jit
def summed(scores, top, total, power):
    """The online softmax's sum. Of `total` [M, 8] each lane has some."""
    now = tl.maximum(top, tl.max(scores, 1) * power)
    shift = tl.where(now == float("-inf"), 0.0, now)
    p = tl.exp2(scores * power - shift[:, None])
    p = tl.sum(p.reshape(p.shape[0], p.shape[1] // 8, 8), 1)
    return now, total * tl.exp2(top - shift)[:, None] + p


@triton.jit(do_not_specialize=["queries", "tokens", "position_row", "parts"])
def mass_kernel(
    q, k, position, clean, counted, at, real, first, later, lse, out, k_row, k_token, position_row,
    group, queries, tokens, band_sinks, band_local, scale, softcap, parts,
    QUERIES: tl.constexpr, TOKENS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BAND: tl.constexpr,
    SOFTCAP: tl.constexpr, MOST: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """One program per block of tokens and query head: every query from the first on whose slot is not before them. Queries that
    all count and see all of them come first: nothing is masked there."""
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = head // group
    t, d, m = part * TOKENS + tl.arange(0, TOKENS), tl.arange(0, BLOCK_D), tl.arange(0, QUERIES)
    place = tl.load(position + row * position_row + t, mask=t < tokens, other=-1)
    token = row * k_row + t.to(tl.int64) * k_token
    key = tl.load(k + token[:, None] + d[None, :], mask=(place >= 0)[:, None] & (d < DIM)[None, :], other=0.0).to(
        COMPUTE
    )
    power = LOG2E if SOFTCAP else scale * LOG2E
    begin, start, end = 0, tl.load(later + part), queries
    low = tl.maximum(tl.load(later + parts + part), tl.load(counted + 2 * row))
    high = tl.load(counted + 2 * row + 1)
    if BAND:
        begin = tl.load(first + row).to(tl.int32)
        high = tl.minimum(high, tl.load(later + 2 * parts + part))
        if part * TOKENS >= begin + band_sinks:  # queries that lie further behind see none of these
            end = tl.load(later + 3 * parts + part)
    if (part * TOKENS < tl.load(clean + 2 * row)) | ((part + 1) * TOKENS > tl.load(clean + 2 * row + 1)):
        high = 0
    low = tl.minimum(low, end)
    high = low + tl.maximum(tl.minimum(high, end) - low, 0) // QUERIES * QUERIES
    before = (low - start + QUERIES - 1) // QUERIES
    mass = tl.zeros([QUERIES // 16, 8, TOKENS], tl.float32)
    asked_for, x_at = q + head * queries * DIM, m[:, None] * DIM + d[None, :]
    for i in range(low, high, QUERIES):
        x = whole(asked_for + (i + tl.zeros([], tl.int64)) * DIM, x_at, d, DIM, BLOCK_D).to(COMPUTE)
        scores = scored(x, key, scale, softcap, SOFTCAP)
        total = tl.load(lse + head * queries + i + m)
        mass = paid(tl.exp2(scores * power - total[:, None]), mass, MOST)
    for i in range(0, before + (tl.maximum(end - high, 0) + QUERIES - 1) // QUERIES):
        n = tl.where(i < before, start + i * QUERIES, high + (i - before) * QUERIES) + m
        some = n < tl.where(i < before, low, end)
        asked = tl.load(at + n, mask=some, other=-1)
        asked = tl.where(tl.load(real + row * queries + n, mask=some, other=0) != 0, asked, -1)
        line = head * queries + n
        inside = (asked >= 0)[:, None] & (d < DIM)[None, :]
        x = tl.load(q + line[:, None] * DIM + d[None, :], mask=inside, other=0.0).to(COMPUTE)
        scores = scored(x, key, scale, softcap, SOFTCAP)
        scores = seen(scores, asked, t, place, begin, band_sinks, band_local, BAND)
        total = tl.load(lse + line, mask=some, other=float("inf"))
        mass = paid(tl.exp2(scores * power - total[:, None]), mass, MOST)
    if MOST:
        mass = tl.max(tl.max(mass, 0), 0)
    else:
        mass = tl.sum(tl.sum(mass, 0), 0)
    tl.store(out + head * tokens + t, mass, mask=t < tokens)


@triton.jit
def paid(weights, mass, MOST: tl.constexpr):
    """Weights [query, token] taken in, as far as a lane has both: two of a product's 16 rows."""
    two = weights.reshape(weights.shape[0] // 16, 2, 8, weights.shape[1])
    if MOST:
        return tl.maximum(mass, tl.max(two, 1))
    else:
        return mass + tl.sum(two, 1)


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
    q, k = q.contiguous(), near(k)
    position = lined(position)
    at, real = at.to(torch.int32).contiguous(), real.to(torch.int32).contiguous()
    if scale < 0:
        q, scale = -q, -scale
    (rows, group, queries, dim), tokens = q.shape, k.shape[1]
    lse = torch.empty(rows, group, queries, device=q.device, dtype=torch.float32)
    out = torch.empty(rows, group, tokens, device=q.device, dtype=torch.float32)
    wide, exact = max(next_power_of_2(dim), 16), k.dtype == torch.float32
    few, some = (16 if exact else QUERIES), (32 if exact or wide > 128 else TOKENS)
    if wide > 256 and room(q.device) < 128 << 10:
        few = min(few, 32)
    starts, parts = torch.arange(0, tokens, some, device=q.device, dtype=torch.int32), cdiv(tokens, some)
    slots = [starts, starts + (some - 1)]  # of the first query that sees some of a block, and all of it
    slots += (
        [] if band is None else [starts + band.local, starts + (some - 1 + band.local)]
    )  # that sees not all, and none
    later = torch.searchsorted(at, torch.cat(slots), out_int32=True)
    clean, counted = stretches(position, 0), stretches(real, 1)
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
        q, k, position, clean, at, real, first, lse if sinks is None else sinks.contiguous(), lse, *strides, *numbers,
        SINKS=sinks is not None, **shape, **FUSED,
    )  # fmt: skip
    mass_kernel[(parts, rows * group)](
        q,
        k,
        position,
        clean,
        counted,
        at,
        real,
        first,
        later,
        lse,
        out,
        *strides,
        *numbers,
        parts,
        MOST=most,
        **shape,
        **FUSED,
    )
    return out
