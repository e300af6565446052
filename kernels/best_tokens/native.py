"""The C version on the CPU (`kv_best` in `kvengine/kernels/cpu/scores.c`): selects instead of sorting."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.cpu import call, library

I64, POINTER = ctypes.c_int64, ctypes.c_void_p


def best_tokens(score: Tensor, count: Tensor) -> Tensor:
    """See `kvengine.kernels.best_tokens`."""
    rows, tokens = score.shape
    score, count = score.contiguous(), count.to(torch.int64).contiguous()
    keep = torch.empty(rows, tokens, dtype=torch.bool)
    at = (I64(n) for n in (rows, tokens, call.team(rows * tokens * 8)))
    if library.needed().kv_best(POINTER(score.data_ptr()), POINTER(count.data_ptr()), *at, POINTER(keep.data_ptr())):
        raise KernelError("the native selection kernel could not allocate its buffers")
    return keep
