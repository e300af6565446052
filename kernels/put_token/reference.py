"""Plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvengine.kernels.put_token import Limit


def put_token(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor, counts: Tensor, now: Tensor,
    origin: int | None, ring: int, score: Tensor | None, limit: Limit | None,
) -> None:  # fmt: skip
    """See `kvengine.kernels.put_token`."""
    k, v, place = k.to(keys.dtype), v.to(values.dtype), now.to(position.dtype)  # autocast comes and goes
    if origin is None:
        at = torch.arange(len(k), device=k.device), (position < 0).to(torch.int8).argmax(1)
        keys[at], values[at] = k[:, 0], v[:, 0]
        position[at] = place.expand(len(k))
        if score is not None:
            # torch would make a tensor of a number and copy it from the host, which no recording allows
            score[at] = score.new_zeros(len(k))
    else:
        slot = now - origin
        slot = slot % ring if ring else slot
        keys.index_copy_(1, slot, k)
        values.index_copy_(1, slot, v)
        position.index_copy_(1, slot, place.expand(len(k), 1))
        if score is not None:
            score.index_fill_(1, slot, 0.0)
    counts.add_(1)
    if limit is not None:
        limit.units.copy_(((limit.reads - counts) // limit.unit).clamp(min=1))
