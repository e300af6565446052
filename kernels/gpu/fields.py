"""Reading stored tokens in a Triton kernel: dense, or codes decoded in registers. Layouts: see codecs.py."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels import turboquant
from kvengine.kernels.codecs import width
from kvengine.kernels.dispatch import spaced
from kvengine.kernels.gpu import next_power_of_2

DENSE = tl.constexpr(0)
PER_CHANNEL = tl.constexpr(1)
PER_TOKEN = tl.constexpr(2)
MIXED_CHANNEL = tl.constexpr(3)
MIXED_TOKEN = tl.constexpr(4)
TURNED = tl.constexpr(5)


@triton.jit
def codes(data, token, d, mask, DIM: tl.constexpr, BITS: tl.constexpr):
    """Codes [token, d] as floats; the token's bytes are contiguous."""
    byte = tl.load(data + token[:, None] * (DIM * BITS // 8) + (d * BITS // 8)[None, :], mask=mask, other=0)
    return ((byte >> ((d * BITS) % 8)[None, :].to(tl.uint8)) & (2**BITS - 1)).to(tl.float32)


@triton.jit
def read(
    data, low, scale, zero, channel, salience, token, ok, row_offset, token_stride,
    LAYOUT: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BITS: tl.constexpr, LOW_BITS: tl.constexpr,
    GROUP: tl.constexpr, PAGE: tl.constexpr, SALIENT: tl.constexpr,
):  # fmt: skip
    """Vectors [token, BLOCK_D] of the tokens (indices into the pool, int64); 0 where not `ok` or past `DIM`."""
    d = tl.arange(0, BLOCK_D)
    mask = ok[:, None] & (d < DIM)[None, :]
    if LAYOUT == DENSE:
        x = tl.load(data + row_offset + token[:, None] * token_stride + d[None, :], mask=mask, other=0.0)
    elif LAYOUT == PER_CHANNEL or LAYOUT == PER_TOKEN:
        code = codes(data, token, d, mask, DIM, BITS)
        if LOW_BITS == 4:  # QuantSpec's lower nibbles
            code += (codes(low, token, d, mask, DIM, 4) - 8.0) * (1.0 / 16)
        if LAYOUT == PER_CHANNEL:
            at = (token // GROUP)[:, None] * DIM + d[None, :]
        else:
            at = token[:, None] * (DIM // GROUP) + (d // GROUP)[None, :]
        s = tl.load(scale + at, mask=mask, other=0.0).to(tl.float32)
        x = code * s + tl.load(zero + at, mask=mask, other=0.0).to(tl.float32)
    elif LAYOUT == TURNED:  # `zero` has the levels
        size: tl.constexpr = DIM * BITS // 8
        if BITS == 3:
            byte = tl.load(data + token[:, None] * size + (d // 4)[None, :], mask=mask, other=0).to(tl.int32)
            above = tl.load(data + token[:, None] * size + (DIM // 4 + d // 8)[None, :], mask=mask, other=0).to(
                tl.int32
            )
            code = ((byte >> (d % 4 * 2)[None, :]) & 3) | (((above >> (d % 8)[None, :]) & 1) << 2)
        else:
            code = codes(data, token, d, mask, DIM, BITS).to(tl.int32)
        s = tl.load(scale + token, mask=ok, other=0.0).to(tl.float32)
        x = tl.load(zero + code, mask=mask, other=0.0) * s[:, None]
    else:
        page, slot = token // PAGE, token % PAGE
        own = tl.load(salience + page * (PAGE // 8) + slot // 8, mask=ok, other=0).to(tl.int32)
        plain = ((own >> (slot % 8).to(tl.int32)) & 1) == 0
        before = tl.zeros_like(slot)  # salient slots of the page before this one
        for i in tl.static_range(PAGE // 8):
            byte = tl.load(salience + page * (PAGE // 8) + i, mask=ok, other=0).to(tl.int32)
            below = tl.minimum(tl.maximum(slot - i * 8, 0), 8).to(tl.int32)
            bits = byte & ((1 << below) - 1)
            bits = bits - ((bits >> 1) & 0x55)
            bits = (bits & 0x33) + ((bits >> 2) & 0x33)
            before += (bits + (bits >> 4)) & 0x0F
        high_at, low_at = page * SALIENT + before, page * (PAGE - SALIENT) + slot - before
        high = codes(data, high_at, d, mask & (~plain)[:, None], DIM, BITS)
        code = tl.where(plain[:, None], codes(low, low_at, d, mask & plain[:, None], DIM, LOW_BITS), high)
        if LAYOUT == MIXED_CHANNEL:
            at = (page * 2 + plain.to(tl.int64))[:, None] * DIM + d[None, :]
            s = tl.load(scale + at, mask=mask, other=0.0).to(tl.float32)
            x = code * s + tl.load(zero + at, mask=mask, other=0.0).to(tl.float32)
        else:
            s = tl.load(scale + token, mask=ok, other=0.0).to(tl.float32)
            z = tl.load(zero + token, mask=ok, other=0.0).to(tl.float32)
            c = tl.load(channel + page[:, None] * DIM + d[None, :], mask=mask, other=0.0).to(tl.float32)
            x = (code * s[:, None] + z[:, None]) * c
    return x


class Side(NamedTuple):
    """Keys or values, as arguments of a kernel."""

    pointers: tuple[Tensor, ...]
    strides: tuple[int, int]
    layout: dict[str, Any]


def dense(x: Tensor, side: str) -> Side:
    """[row, token, dim] by strides."""
    return _side(side, (x,) * 6, (x.stride(0), x.stride(1)), x.shape[-1], DENSE)


def paged(codec: str, fields: Mapping[str, Tensor], side: str, dim: int, page: int) -> Side:
    """One side of a pool."""
    if codec == "dense":
        x = fields[side]
        x = x if spaced(x) else x.contiguous()
        return _side(side, (x,) * 6, (0, x.stride(1)), dim, DENSE, stride=x.stride(1))
    if codec == "turboquant":
        code, scale = fields[f"{side}_code"], fields[f"{side}_scale"]
        levels = turboquant.levels(bits := turboquant.width(code, dim), code.device)
        return _side(side, (code, code, scale, levels, scale, code), (0, 0), dim, TURNED, bits)
    scale, zero = fields[f"{side}_scale"], fields[f"{side}_zero"]
    if codec in ("kivi", "quantspec"):
        code = fields[f"{side}_code"]
        low, low_bits = (code, 8) if codec == "kivi" else (fields[f"{side}_low"], 4)
        group = page // scale.shape[1] if side == "k" else dim // scale.shape[2]
        layout = PER_CHANNEL if side == "k" else PER_TOKEN
        return _side(
            side, (code, low, scale, zero, scale, code), (0, 0), dim, layout, width(code, dim), low_bits, group
        )
    high, low = fields[f"{side}_high"], fields[f"{side}_low"]
    pointers = (high, low, scale, zero, scale if side == "k" else fields["v_channel"], fields["mask"])
    layout, widths = (MIXED_CHANNEL if side == "k" else MIXED_TOKEN), (width(high, dim), width(low, dim))
    return _side(side, pointers, (0, 0), dim, layout, *widths, 1, high.shape[1])


def _side(
    side: str, pointers: tuple[Tensor, ...], strides: tuple[int, int], dim: int, layout: tl.constexpr, bits: int = 8,
    low_bits: int = 8, group: int = 1, salient: int = 1, stride: int = 0,
) -> Side:  # fmt: skip
    return Side(pointers, strides, _layout(side, layout.value, dim, bits, low_bits, group, salient, stride))


@functools.lru_cache
def _layout(
    side: str, layout: int, dim: int, bits: int, low_bits: int, group: int, salient: int, stride: int
) -> dict[str, Any]:
    """Constants of a launch, by name. Asked for twice at every launch, so each is made once, and nobody changes it."""
    named = {
        "LAYOUT": layout, "DIM": dim, "BLOCK_D": max(16, next_power_of_2(dim)), "BITS": bits,
        "LOW_BITS": low_bits, "GROUP": group, "SALIENT": salient, "STRIDE": stride,
    }  # fmt: skip
    return {f"{side.upper()}_{name}": value for name, value in named.items()}
