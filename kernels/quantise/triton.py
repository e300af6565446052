"""The Triton kernels: one read of the values, one write of codes, scales and zeros."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels import quantise as op
from kvengine.kernels.gpu import FUSED, cdiv, next_power_of_2
from kvengine.kernels.gpu.again import launched_again
from kvengine.kernels.quantise import reference

WHOLE = tl.constexpr(12582912.0)
"""Where neighbouring float32 are whole numbers: adding it rounds, and halves to even ones, as torch does."""


@triton.jit
def packed(code, TOKENS: tl.constexpr, CHANNELS: tl.constexpr, BITS: tl.constexpr):
    """Codes [TOKENS, CHANNELS] as bytes, the first of each in the lowest bits."""
    per: tl.constexpr = 8 // BITS
    fields = tl.reshape(code, (TOKENS, CHANNELS // per, per)) << (tl.arange(0, per) * BITS)[None, None, :]
    return tl.sum(fields, 2).to(tl.uint8)


@launched_again
@triton.jit
def pack_kernel(codes, out, size, BITS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    code = tl.load(codes + at, mask=at < size, other=0).to(tl.int32)
    byte = tl.program_id(0).to(tl.int64) * (BLOCK * BITS // 8) + tl.arange(0, BLOCK * BITS // 8)
    tl.store(
        out + byte,
        tl.reshape(packed(code[None, :], 1, BLOCK, BITS), (BLOCK * BITS // 8,)),
        mask=byte < size // (8 // BITS),  # `size * BITS` may need more than 32 bits
    )


@launched_again
@triton.jit(do_not_specialize=["tokens"])
def quantise_kernel(
    x, alive, code_out, scale_out, zero_out, tokens, token_step, channel_step,
    DIM: tl.constexpr, BITS: tl.constexpr, BY_CHANNEL: tl.constexpr, ALIVE: tl.constexpr, TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """A tile [TOKENS, CHANNELS]: a group of tokens and many channels if BY_CHANNEL, else many tokens and a group of
    channels."""
    i, j = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t, c = tl.arange(0, TOKENS), tl.arange(0, CHANNELS)
    token, channel = i * token_step + t, j * channel_step + c
    ok_t, ok_c = (t < token_step) & (token < tokens), (c < channel_step) & (channel < DIM)
    ok = ok_t[:, None] & ok_c[None, :]
    seen = ok
    if ALIVE:
        seen = ok & (tl.load(alive + token, mask=ok_t, other=0) != 0)[:, None]
    value = tl.load(x + token[:, None] * DIM + channel[None, :], mask=seen, other=0.0).to(tl.float32)
    axis: tl.constexpr = 0 if BY_CHANNEL else 1
    low = tl.min(tl.where(seen, value, float("inf")), axis)
    high = tl.max(tl.where(seen, value, -float("inf")), axis)
    none = low > high
    low, high = tl.where(none, 0.0, low), tl.where(none, 0.0, high)
    odd = tl.sum(value * 0.0, axis)  # NaN if one is not finite, which neither minimum need tell
    scale, zero = tl.div_rn(high - low, tl.full(high.shape, 2**BITS - 1, tl.float32)), low  # as CPUs divide
    if scale_out.dtype.element_ty == tl.float16:  # what is beyond its numbers is its last
        scale, zero = tl.minimum(scale, 65504.0), tl.minimum(tl.maximum(zero, -65504.0), 65504.0)
    scale, zero = (scale + odd).to(scale_out.dtype.element_ty), (zero + odd).to(scale_out.dtype.element_ty)
    step = tl.where(scale.to(tl.float32) > 0, scale.to(tl.float32), 1.0)
    base = zero.to(tl.float32)
    if BY_CHANNEL:
        scaled = tl.div_rn(value - base[None, :], tl.broadcast_to(step[None, :], value.shape))
        at, ok_group = i * DIM + channel, ok_c
    else:
        scaled = tl.div_rn(value - base[:, None], tl.broadcast_to(step[:, None], value.shape))
        at, ok_group = token * (DIM // channel_step) + j, ok_t
    tl.store(scale_out + at, scale, mask=ok_group)
    tl.store(zero_out + at, zero, mask=ok_group)
    within = tl.minimum(tl.maximum(scaled, 0.0), 2**BITS - 1)
    code = (within + WHOLE - WHOLE).to(tl.int32)
    b = tl.arange(0, CHANNELS * BITS // 8)
    byte = j * channel_step * BITS // 8 + b
    ok_b = (b < channel_step * BITS // 8) & (byte < DIM * BITS // 8)
    tl.store(
        code_out + token[:, None] * (DIM * BITS // 8) + byte[None, :], packed(code, TOKENS, CHANNELS, BITS),
        mask=ok_t[:, None] & ok_b[None, :],
    )  # fmt: skip


@launched_again
@triton.jit(do_not_specialize=["tokens"])
def turned_kernel(
    y, levels, code_out, scale_out, tokens,
    DIM: tl.constexpr, BITS: tl.constexpr, FORM: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """TurboQuant's codes and scales of vectors that are turned: what they are next to is found by comparing with all
    middles between levels, which are few."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = tl.arange(0, CHANNELS)
    there, ok = t < tokens, (t < tokens)[:, None] & (c < DIM)[None, :]
    x = tl.load(y + t[:, None] * DIM + c[None, :], mask=ok, other=0.0)
    square = tl.sum(x * x, 1)
    size = tl.sqrt(square / DIM)
    z = x / tl.maximum(size, 1.1754943508222875e-38)[:, None]
    code = tl.zeros([TOKENS, CHANNELS], tl.int32)
    level = tl.load(levels)
    near = tl.zeros([TOKENS, CHANNELS], tl.float32) + level
    for i in tl.static_range(1, 1 << BITS):
        above = tl.load(levels + i)
        further = z > (above + level) / 2
        code += further.to(tl.int32)
        near = tl.where(further, above, near)
        level = above
    near = tl.where((c < DIM)[None, :], near, 0.0)
    scale = size + square * 0.0
    if FORM != 2:
        along = tl.sum(x * near, 1)  # positive, as a number and its level have one sign; 0 for zeros
        if FORM == 1:
            scale = along / tl.sum(near * near, 1)
        else:
            scale = square / tl.where(along == 0, 1.0, along)
        scale = tl.where(size == 0, 0.0, scale)
    tl.store(scale_out + t, scale, mask=there)
    if BITS == 3:
        b, u = tl.arange(0, CHANNELS // 4), tl.arange(0, CHANNELS // 8)
        at = code_out + t[:, None] * (3 * DIM // 8)
        tl.store(at + b[None, :], packed(code & 3, TOKENS, CHANNELS, 2), mask=there[:, None] & (b < DIM // 4)[None, :])
        upper = packed(code >> 2, TOKENS, CHANNELS, 1)
        tl.store(at + DIM // 4 + u[None, :], upper, mask=there[:, None] & (u < DIM // 8)[None, :])
    else:
        b = tl.arange(0, CHANNELS * BITS // 8)
        at = code_out + t[:, None] * (DIM * BITS // 8) + b[None, :]
        tl.store(at, packed(code, TOKENS, CHANNELS, BITS), mask=there[:, None] & (b < DIM * BITS // 8)[None, :])


def turned_codes(y: Tensor, bits: int, form: int, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [n, dim * bits / 8] and scales [n] of turned vectors (`kvengine.kernels.turboquant`)."""
    tokens, dim = y.shape
    code = torch.empty(tokens, dim * bits // 8, dtype=torch.uint8, device=y.device)
    scale = torch.empty(tokens, dtype=torch.float32, device=y.device)
    channels = max(8, next_power_of_2(dim))
    block = max(1, 2048 // channels)
    if y.numel():
        turned_kernel[(cdiv(tokens, block),)](
            y.contiguous(), levels, code, scale, tokens, DIM=dim, BITS=bits, FORM=form, TOKENS=block, CHANNELS=channels, **FUSED
        )  # fmt: skip
    return code, scale


def pack(codes: Tensor, bits: int) -> Tensor:
    """See `kvengine.kernels.quantise.pack`."""
    codes = codes.contiguous()
    out = torch.empty(*codes.shape[:-1], codes.shape[-1] * bits // 8, dtype=torch.uint8, device=codes.device)
    block = 1024
    if codes.numel():
        pack_kernel[(cdiv(codes.numel(), block),)](codes, out, codes.numel(), BITS=bits, BLOCK=block, **FUSED)
    return out


def quantise(
    x: Tensor, bits: int, group: int, over: str, alive: Tensor | None, scale_dtype: torch.dtype
) -> op.Quantised:
    """See `kvengine.kernels.quantise.quantise`."""
    token, dim = x.shape[-2:]
    by_channel = over == "tokens"
    if not x.numel() or (not by_channel and group * bits % 8):  # a group that ends inside a byte
        return reference.quantise(x, bits, group, over, alive, scale_dtype)
    x = x.contiguous()
    tokens = x.numel() // dim
    code = torch.empty(*x.shape[:-1], dim * bits // 8, dtype=torch.uint8, device=x.device)
    shape = (token // group, dim) if by_channel else (token, dim // group)
    scale, zero = torch.empty(2, *x.shape[:-2], *shape, dtype=scale_dtype, device=x.device)
    steps = (group, 64) if by_channel else (32, group)
    sides = next_power_of_2(steps[0]), max(8, next_power_of_2(steps[1]))
    quantise_kernel[(cdiv(tokens, steps[0]), cdiv(dim, steps[1]))](
        x, x if alive is None else alive.contiguous(), code, scale, zero, tokens, *steps, DIM=dim, BITS=bits,
        BY_CHANNEL=by_channel, ALIVE=alive is not None, TOKENS=sides[0], CHANNELS=sides[1], **FUSED,
    )  # fmt: skip
    return op.Quantised(code, scale, zero)
