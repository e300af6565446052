"""The C version on the CPU (`kv_step` in `kvengine/kernels/cpu/step.c`)."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.cpu import library

DTYPES = {torch.float32: 0, torch.bfloat16: 1}


def step(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor | None, start: int, end: int,
    at: int, holes: bool, scale: float,
) -> Tensor:  # fmt: skip
    """See `kvengine.kernels.step`."""
    rows, slots, dim = keys.shape
    seq, heads, dim_v = q.shape[0], q.shape[1], values.shape[2]
    out = q.new_empty(seq, 1, heads, dim_v)
    failed = _function()(
        rows, seq * heads // rows, dim, dim_v, DTYPES[q.dtype], slots, start, end, at, holes, torch.get_num_threads(),
        scale, q.data_ptr(), k.data_ptr(), v.data_ptr(), keys.data_ptr(), values.data_ptr(),
        None if position is None else position.data_ptr(), out.data_ptr(),
    )  # fmt: skip
    if failed:
        raise KernelError("the native step kernel could not allocate its buffers")
    return out


@functools.cache
def _function() -> Any:
    loaded = library.load().library
    if loaded is None:
        raise KernelError(f"the native kernels are not there: {library.load().reason}")
    function = loaded.kv_step
    function.argtypes = [ctypes.c_int64] * 11 + [ctypes.c_float] + [ctypes.c_void_p] * 7
    return function
