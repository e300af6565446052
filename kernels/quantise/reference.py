"""Plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvengine.kernels import quantise as op


def pack(codes: Tensor, bits: int) -> Tensor:
    """See `kvengine.kernels.quantise.pack`."""
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.uint8)
    fields: Tensor = codes.unflatten(-1, (-1, 8 // bits)) << shifts
    return fields.sum(-1, dtype=torch.uint8)  # the fields do not overlap, so the sum is their union


def quantise(
    x: Tensor, bits: int, group: int, over: str, alive: Tensor | None, scale_dtype: torch.dtype
) -> op.Quantised:
    """See `kvengine.kernels.quantise.quantise`."""
    axis = -2 if over == "tokens" else -1
    groups = x.to(torch.float32).unflatten(axis, (-1, group))
    low, high = _range(groups, axis, alive)
    top = 2**bits - 1
    scale, zero = kept((high - low) / top, scale_dtype), kept(low, scale_dtype)
    step = torch.where(scale > 0, scale.to(torch.float32), 1)
    codes = ((groups - zero.to(torch.float32)) / step).nan_to_num(0).round_().clamp_(0, top)
    codes = codes.to(torch.uint8).flatten(axis - 1, axis)
    return op.Quantised(pack(codes, bits), scale.squeeze(axis), zero.squeeze(axis))


def kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """In the dtype; what is beyond its numbers is its last."""
    end = torch.finfo(dtype).max
    return x.clamp(-end, end).to(dtype)


def _range(groups: Tensor, axis: int, alive: Tensor | None) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of each group's living members; 0 and 0 for a group without any, NaN if one is not finite."""
    if alive is None:
        low, high, seen = groups.amin(axis, keepdim=True), groups.amax(axis, keepdim=True), groups
    else:
        there = (alive.unflatten(-1, groups.shape[-3:-1]) if axis == -2 else alive[..., None])[..., None]
        low = groups.masked_fill(~there, torch.inf).amin(axis, keepdim=True)
        high = groups.masked_fill(~there, -torch.inf).amax(axis, keepdim=True)
        low, high, seen = torch.where(low > high, 0, low), torch.where(low > high, 0, high), groups.where(there, 0)
    return low + (seen * 0).sum(axis, keepdim=True), high
