"""Plain torch: an indexed copy on the host, then one to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def fetch(field: Tensor, at: Tensor, device: torch.device) -> Tensor:
    """See `kvengine.kernels.fetch_pages`. Waits for the ids if they are on a GPU."""
    found = field.index_select(0, at.to("cpu", torch.long))
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)
