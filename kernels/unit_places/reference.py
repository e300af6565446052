"""Plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def unit_places(units: Tensor, table: Tensor, position: Tensor, per: int, unit: int) -> tuple[Tensor, Tensor]:
    """See `kvengine.kernels.unit_places`. `per`: units of a page."""
    at = units.clamp(min=0)
    piece = table.gather(1, at // per).clamp(min=0).long() * per + at % per
    slots = (at[..., None] * unit + torch.arange(unit, device=at.device)).flatten(1)
    none = (units < 0)[..., None].expand(-1, -1, unit).flatten(1)
    return piece.flatten(), position.gather(1, slots).masked_fill(none, -1)
