"""Plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvengine.kernels.attention import attention
from kvengine.kernels.slots import resolve
from kvengine.kernels.state import State


def lowrank_attention(
    q: Tensor,
    u: Tensor,
    v: Tensor,
    basis: Tensor,
    inv_freq: Tensor,
    table: Tensor,
    position: Tensor,
    page: int,
    scale: float,
    units: Tensor | None,
    unit: int,
    rope_scaling: float,
    want_probs: bool,
) -> State:
    """See `kvengine.kernels.lowrank_attention`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    where, at = resolve(table, position, units, unit, page)
    sequence = torch.arange(len(q), device=q.device) // (len(q) // len(u))
    coordinates = u[sequence[:, None], at.clamp(min=0).long()].to(wide).masked_fill((at < 0)[..., None], 0)
    keys = rotate(coordinates @ basis.to(wide), at, inv_freq, rope_scaling)
    visible = (at >= 0)[:, None].expand(-1, q.shape[2], -1)
    return attention(q, keys, v.flatten(0, 1)[where], visible, scale, want_probs=want_probs)


def rotate(keys: Tensor, position: Tensor, inv_freq: Tensor, scaling: float) -> Tensor:
    """Rotary embedding of `keys` [row, token, dim] at `position` [row, token]."""
    half = inv_freq.shape[0]
    angle = position[..., None].to(inv_freq.dtype) * inv_freq
    cos, sin = angle.cos().to(keys.dtype) * scaling, angle.sin().to(keys.dtype) * scaling
    first, second, rest = keys.split((half, half, keys.shape[-1] - 2 * half), -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)
