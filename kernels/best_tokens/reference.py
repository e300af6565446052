"""Plain torch: sort, and see who comes before the `count`-th."""

from __future__ import annotations

import torch
from torch import Tensor


def best_tokens(score: Tensor, count: Tensor) -> Tensor:
    """See `kvengine.kernels.best_tokens`."""
    order = score.flip(1).argsort(dim=1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return (rank.flip(1) < count[:, None]) & (score > float("-inf"))
