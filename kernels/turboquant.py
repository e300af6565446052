"""TurboQuant's codes (arXiv 2504.19874): a vector is turned, and each number of the result is one of 2^bits levels.

    y     =  R x                          R symmetric and orthogonal, the same for every vector: its own inverse
    code  =  the level nearest to y sqrt(dim) / |x|, which is nearly normal: the levels are Lloyd's and Max's for N(0, 1)
    x     ~  scale R level[code]          one scale per token and head

The turn spreads what is large in a few channels over all of them, so that no ranges need to be kept per channel, and
codes of a token depend on that token alone.

Of 3 bits, the lower two lie as codes of two bits, and the upper ones behind these as codes of one bit, for each token.

>>> rotation(4).mul(2).round().int().tolist()
[[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]
"""

from __future__ import annotations

import math
import random
from functools import cache
from typing import Literal

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.dispatch import chosen, pick
from kvengine.kernels.quantise import laid, pack, unpack
from kvengine.kernels.quantise.reference import kept

BITS = (1, 2, 3, 4)
Form = Literal["unbiased", "least", "paper"]
FORMS = ("unbiased", "least", "paper")

UPPER = {
    1: (0.7978846,),
    2: (0.4527800, 1.5104176),
    3: (0.2450942, 0.7560053, 1.3439093, 2.1519457),
    4: (0.1283950, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690173, 2.7325896),
}
"""The positive levels (Max 1960, table I)."""


CPU = torch.device("cpu")


def levels(bits: int, device: torch.device = CPU) -> Float[Tensor, "16"]:
    """What codes stand for, in float32; repeated to 16, so that of a code only its lowest bits count."""
    return _levels(bits, device)


def rotation(dim: int, device: torch.device = CPU) -> Float[Tensor, "dim dim"]:
    """R, in float32: S (H x C) S of size `dim`, where S has random signs on its diagonal, H is Hadamard's matrix and C
    Hartley's (cos + sin) for the odd part of `dim`. All of them are symmetric and their own inverses."""
    return _rotation(dim, device)


@cache  # constants: made once per device, not at every step
@torch.inference_mode(False)  # whoever asks first: later passes may have gradients
def _levels(bits: int, device: torch.device) -> Tensor:
    upper = UPPER[bits]
    return torch.tensor([*(-x for x in reversed(upper)), *upper] * (16 >> bits), dtype=torch.float32, device=device)


@cache
@torch.inference_mode(False)
def _rotation(dim: int, device: torch.device) -> Tensor:
    if device != CPU:
        return rotation(dim).to(device)
    odd = dim // (dim & -dim)
    at = torch.arange(odd, device=CPU)
    angle = torch.outer(at, at).double() % odd * (2 * math.pi / odd)
    whole = (angle.cos() + angle.sin()) / math.sqrt(odd)
    while len(whole) < dim:
        whole = torch.cat([torch.cat([whole, whole], 1), torch.cat([whole, -whole], 1)]) / math.sqrt(2)
    draw = random.Random(dim)  # whose numbers are the same everywhere, unlike those of a matrix decomposition
    sign = torch.tensor([1.0 if draw.random() < 0.5 else -1.0 for _ in range(dim)], dtype=torch.float64, device=CPU)
    return (sign[:, None] * whole * sign).float().contiguous()


def turned(x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
    """R x, in float32. Of what is turned, x again."""
    return x.float() @ rotation(x.shape[-1], x.device)


def width(code: UInt8[Tensor, "*batch byte"], dim: int) -> int:
    """Bits per code, from the packed size. Raises KernelError if it is not one that there is."""
    bits, rest = divmod(code.shape[-1] * 8, dim)
    if rest or bits not in BITS:
        raise KernelError(f"{code.shape[-1]} bytes for {dim} channels is not {BITS} bits per code; check dim_v")
    return bits


def encode(
    x: Float[Tensor, "*batch dim"], bits: int, form: Form, scale_dtype: torch.dtype, *, backend: str | None = None
) -> tuple[UInt8[Tensor, "*batch byte"], Float[Tensor, "*batch 1"]]:
    """Codes and scales. Raises KernelError if `bits` is not 1, 2, 3 or 4, or the codes do not fill whole bytes.

    `form`: scales by which decoded vectors have the right product with any query on average over rotations ("unbiased":
    |x|^2 / <x, R level>), the least squared error ("least"), or the paper's, |x| / sqrt(dim). NaN of what is not finite.
    """
    dim = x.shape[-1]
    if bits not in BITS or dim * (1 if bits == 3 else bits) % 8:
        raise KernelError(f"bits must be one of {BITS} and fill whole bytes; got bits={bits} for {dim} channels")
    y = turned(x)
    if (which := chosen((y,), backend, laid(dim))) != "reference":
        run = pick("quantise", (y,), which)
        code, scale = run.turned_codes(y.reshape(-1, dim), bits, FORMS.index(form), levels(bits, x.device))
        return code.view(*x.shape[:-1], -1), kept(scale.view(*x.shape[:-1], 1), scale_dtype)
    square = y.square().sum(-1, keepdim=True)
    size = (square / dim).sqrt()
    level = levels(bits, x.device)[: 2**bits]
    code = torch.bucketize(y / size.clamp_min(torch.finfo(torch.float32).tiny), (level[1:] + level[:-1]) / 2)
    if form == "paper":
        scale = size + square * 0
    else:
        near = level[code]
        along = (y * near).sum(-1, keepdim=True)  # positive, as a number and its level have one sign
        scale = along / near.square().sum(-1, keepdim=True) if form == "least" else square / along
        scale = torch.where(size == 0, 0, scale)
    return _packed(code.to(torch.uint8), bits), kept(scale, scale_dtype)


def decode(
    code: UInt8[Tensor, "*batch byte"], scale: Float[Tensor, "*batch 1"], dim: int
) -> Float[Tensor, "*batch dim"]:
    """The vectors, in float32."""
    bits = width(code, dim)
    return turned(levels(bits, code.device)[_unpacked(code, bits, dim).int()] * scale.float())


def _packed(code: UInt8[Tensor, "*batch dim"], bits: int) -> UInt8[Tensor, "*batch byte"]:
    return torch.cat([pack(code & 3, 2), pack(code >> 2, 1)], -1) if bits == 3 else pack(code, bits)


def _unpacked(code: UInt8[Tensor, "*batch byte"], bits: int, dim: int) -> UInt8[Tensor, "*batch dim"]:
    if bits != 3:
        return unpack(code, bits)
    return unpack(code[..., : dim // 4], 2) | unpack(code[..., dim // 4 :], 1) << 2
