"""Plain torch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def plan(table: Tensor, position: Tensor, into: Tensor, page: int) -> tuple[Tensor, Tensor, Tensor]:
    """Source and target slot in the pool of every slot of every row (target -1: stays behind), and new positions."""
    slot = torch.arange(position.shape[1], device=table.device).expand_as(position)
    held = table.long().gather(1, slot // page)
    alive = (position >= 0) & (held >= 0)
    rank = alive.cumsum(1) - 1
    room = into.shape[1] * page
    alive &= rank < room
    rank = torch.where(alive, rank, 0)
    target = into.long().gather(1, (rank // page).clamp_max(max(into.shape[1] - 1, 0))) * page + rank % page
    moved = position.new_full((position.shape[0], room + 1), -1)
    moved.scatter_(1, torch.where(alive, rank, room), position)  # the extra column takes what stays behind
    return torch.where(alive, held * page + slot % page, 0), torch.where(alive, target, -1), moved[:, :room]


def compact(fields: Mapping[str, Tensor], table: Tensor, position: Tensor, into: Tensor, page: int) -> Tensor:
    """See `kvengine.kernels.compact`."""
    source, target, moved = plan(table, position, into, page)
    moving = target >= 0
    for field in fields.values():
        slots = field.view(-1, *field.shape[2:])
        slots[target[moving]] = slots[source[moving]]
    return moved
