"""The C kernels on the CPU (`kvengine/kernels/cpu/scores.c`)."""

from __future__ import annotations

import ctypes
from typing import cast

import torch
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.cpu import call, library

I64, POINTER = ctypes.c_int64, ctypes.c_void_p


class Bounds(ctypes.Structure):
    """Mirrors scores.c."""

    _fields_ = [
        *((name, I64) for name in ("rows", "group", "padded", "dim", "units", "threads", "mean")),
        ("q", POINTER),
        ("high", call.Field),
        ("low", call.Field),
        ("alive", POINTER),
        ("alive_row", I64),
        ("out", POINTER),
    ]


def page_scores(q: Tensor, low: Tensor, high: Tensor, alive: Tensor, reduce: str) -> Tensor:
    """See `kvengine.kernels.page_scores`."""
    out = torch.empty(alive.shape, dtype=torch.float32)
    alive = alive if alive.stride(-1) == 1 else alive.contiguous()
    described = of(q, low, high, alive, reduce)
    parts = call.parts(q, described.dim)
    described.q, described.out = parts.data_ptr(), out.data_ptr()
    library.needed().kv_bounds(ctypes.byref(described))
    return out


def of(q: Tensor, low: Tensor, high: Tensor, alive: Tensor, reduce: str) -> Bounds:
    """The bounds as the C kernels take them, for queries of this shape; units lie side by side in `alive`."""
    rows, group, dim = q.shape
    return Bounds(
        rows=rows, group=group, padded=call.up(group, 4), dim=call.up(dim, call.LANES), units=alive.shape[1],
        threads=call.team(2 * low.numel()), mean=reduce == "mean", high=call.dense(high), low=call.dense(low),
        alive=alive.data_ptr(), alive_row=alive.stride(0),
    )  # fmt: skip


def log_shares(q: Tensor, mean: Tensor, alive: Tensor, scale: float) -> Tensor:
    """See `kvengine.kernels.page_scores.log_shares`: the logits of attention, whose values are a few channels of its keys."""
    values = call.dense(mean[..., : call.LANES])
    seen = alive if alive.stride(-1) == 1 else alive.contiguous()
    state = call.run(
        q[:, :, None], call.dense(mean), values, mean.shape[1], scale, None, None, True, as_="logs",
        visible=seen.data_ptr(), visible_row=seen.stride(0), visible_query=0, visible_column=1,
    )  # fmt: skip
    return cast(Tensor, state.probs)[:, :, 0]


def top_units(scores: Tensor, count: int) -> Tensor:
    """See `kvengine.kernels.page_scores.top_units`."""
    rows, units = scores.shape
    scores = scores.to(torch.float32).contiguous()
    ids = torch.empty(rows, count, dtype=torch.int64)
    at = (I64(n) for n in (rows, units, count, call.team(rows * units * 8)))
    if library.needed().kv_top(POINTER(scores.data_ptr()), *at, POINTER(ids.data_ptr())):
        raise KernelError("the native selection kernel could not allocate its buffers")
    return ids
