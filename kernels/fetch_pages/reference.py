"""Plain torch: an indexed copy on the host, then one to the device."""

from __future__ import annotations

import torch
from torch import Tensor

from kvengine.errors import KernelError


def fetch(field: Tensor, at: Tensor, device: torch.device) -> Tensor:
    """See `kvengine.kernels.fetch_pages`. Waits for the ids if they are on a GPU."""
    if at.is_cuda and torch.cuda.is_current_stream_capturing():
        raise KernelError(
            "a recorded step cannot wait for the ids of pages that plain torch fetches, as where no Triton kernel runs; "
            "decode without compile_decode, or with how='eager'"
        )
    found = field.index_select(0, at.to("cpu", torch.long))
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)
