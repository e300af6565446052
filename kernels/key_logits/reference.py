"""Plain torch: gather every slot's key, decode it, multiply."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvengine.kernels import codecs
from kvengine.kernels.slots import resolve


def key_logits(
    q: Tensor,
    fields: Mapping[str, Tensor],
    table: Tensor,
    position: Tensor,
    page: int,
    scale: float,
    codec: str,
    dim_v: int,
) -> Tensor:
    """See `kvengine.kernels.key_logits`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    where, position = resolve(table, position, None, page, page)
    if fields[codecs.FIELDS[codec][0]].shape[0] == 0:  # no page exists, so nothing can be named
        return q.new_full((*q.shape[:2], where.shape[1]), -torch.inf, dtype=wide)
    k, _ = codecs.gather(codec, fields, where, page, page, q.shape[-1], dim_v)
    return (q.to(wide) @ k.to(wide).mT).mul_(scale).masked_fill_(position[:, None] < 0, -torch.inf)
