"""Plain torch. It fetches what is there too, as it would have to wait to know what is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvengine.kernels.fetch_pages.reference import fetch as fetch_all

if TYPE_CHECKING:
    from kvengine.kernels.fetch_kept import Kept


def fetch(
    kept: Kept, fields: Mapping[str, Tensor], at: Tensor, device: torch.device, remember: bool
) -> dict[str, Tensor]:
    """See `kvengine.kernels.fetch_kept`."""
    rows, slots = kept.ids.shape
    asked = at.view(rows, -1)
    same = asked[:, :, None] == kept.ids[:, None]
    there = same.any(2)
    slot = (torch.arange(rows, device=at.device)[:, None] * slots + same.view(torch.uint8).argmax(2)).flatten()
    kept.counts[:, 0] += torch.stack([there.sum(1), (~there).sum(1)], 1)
    found = {}
    for name, field in fields.items():
        x = fetch_all(field, at, device)
        old = there.flatten().view(-1, *[1] * (x.dim() - 1))
        found[name] = torch.where(old, kept.data[name][slot], x)
    if remember:
        some = min(asked.shape[1], slots)
        for name, x in found.items():
            kept.data[name].unflatten(0, (rows, slots))[:, :some] = x.unflatten(0, (rows, -1))[:, :some]
        kept.ids[:, :some] = asked[:, :some]
    return found
