"""Plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvengine.kernels.attention.reference import attention


def step(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor | None, start: int, end: int,
    at: int, holes: bool, scale: float, fill: bool, ends: tuple[Tensor, Tensor] | None,
) -> Tensor:  # fmt: skip
    """See `kvengine.kernels.step`."""
    used, to = slice(start, end + (not fill)), torch.full((len(keys),), end)
    if fill and position is not None:
        to = start + (position[:, used] < 0).to(torch.int8).argmax(1)
    row = torch.arange(len(keys))
    keys[row, to], values[row, to] = k.flatten(0, 2), v.flatten(0, 2)
    if position is not None:
        position[row, to] = at
    grouped = q.unflatten(1, (k.shape[1], -1)).flatten(0, 1)
    visible = (position[:, None, used] >= 0) if holes and position is not None else None
    out = attention(grouped, keys[:, used], values[:, used], visible, scale, None, None, False).out.to(q.dtype)
    if ends is not None and position is not None:
        held, (first, recent) = position[:, used], ends
        held.masked_fill_((held >= first[:, None]) & (held <= at - recent[:, None]), -1)
    return out.unflatten(0, k.shape[:2]).flatten(1, 2).transpose(1, 2)
