"""Plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvengine.kernels.put_token import Limit


def put_token(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor | None, now: Tensor, slot: int | None,
    origin: int | None, ring: int, counts: Tensor | None, score: Tensor | None, limit: Limit | None,
) -> None:  # fmt: skip
    """See `kvengine.kernels.put_token`."""
    k, v = k.to(keys.dtype), v.to(values.dtype)  # autocast comes and goes
    if slot is not None:
        keys[:, slot], values[:, slot] = k[:, 0], v[:, 0]
        if position is not None:
            position[:, slot] = now
        if score is not None:
            score[:, slot] = 0
    elif origin is None and position is not None:
        at = torch.arange(len(k), device=k.device), (position < 0).to(torch.int8).argmax(1)
        keys[at], values[at] = k[:, 0], v[:, 0]  # scatter_ makes floats of all halves, on a CPU
        position[at] = now.to(position.dtype).expand(len(k))
        if score is not None:
            # torch would make a tensor of a number and copy it from the host, which no recording allows
            score[at] = score.new_zeros(len(k))
    elif origin is not None and position is not None:
        there = now - origin
        there = there % ring if ring else there
        keys.index_copy_(1, there, k)
        values.index_copy_(1, there, v)
        position.index_copy_(1, there, now.to(position.dtype).expand(len(k), 1))
        if score is not None:
            score.index_fill_(1, there, 0.0)
    if counts is not None:
        counts.add_(1)
        if limit is not None:
            limit.units.copy_(((limit.reads - counts) // limit.unit).clamp(min=1))
