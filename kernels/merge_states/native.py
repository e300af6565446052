"""The C version on the CPU (`kv_merge` in `kvengine/kernels/cpu/states.c`): two parts at a time."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import torch

from kvengine.kernels.cpu import call, library
from kvengine.kernels.state import State


def merge_states(states: Sequence[State]) -> State:
    """See `kvengine.kernels.merge_states`."""
    whole, *others = states
    out, lse = torch.empty_like(whole.out), torch.empty_like(whole.lse)
    sizes = c_int64(lse.numel()), c_int64(out.shape[-1]), c_int64(call.team(2 * out.numel()))
    run = library.needed().kv_merge
    for part in others:
        given = whole.out, whole.lse, part.out, part.lse
        run(*(c_void_p(x.data_ptr()) for x in given), *sizes, c_void_p(out.data_ptr()), c_void_p(lse.data_ptr()))
        whole = State(out, lse)
    return whole


def fits(states: Sequence[State]) -> bool:
    """Whether the C version knows these: contiguous numbers in float32."""
    return all([x.dtype is torch.float32 and x.is_contiguous() for s in states for x in s[:2]])
