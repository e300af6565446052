"""The C kernels on the CPU (`scores.c` and `shares.c` in `kvengine/kernels/cpu`)."""

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
        *((name, I64) for name in ("rows", "group", "padded", "dim", "units", "threads", "mean", "each")),
        ("q", POINTER),
        ("high", call.Field),
        ("low", call.Field),
        ("alive", POINTER),
        ("alive_row", I64),
        ("out", POINTER),
    ]


def page_scores(q: Tensor, low: Tensor, high: Tensor, alive: Tensor, reduce: str) -> Tensor:
    """See `kvengine.kernels.page_scores`."""
    shape = (*q.shape[:2], alive.shape[1]) if reduce == "each" else alive.shape
    out = torch.empty(shape, dtype=torch.float32)
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
        threads=call.team(2 * low.numel()), mean=reduce == "mean", each=reduce == "each",
        high=call.dense(high), low=call.dense(low), alive=alive.data_ptr(), alive_row=alive.stride(0),
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


def top_units(scores: Tensor, count: int, counts: Tensor | None = None, alive: Tensor | None = None) -> Tensor:
    """See `kvengine.kernels.page_scores.top_units`."""
    rows, units = scores.shape
    scores = scores.to(torch.float32)
    scores = scores if scores.stride(1) == 1 else scores.contiguous()
    alive = alive if alive is None or alive.stride(1) == 1 else alive.contiguous()
    counts = None if counts is None else counts.to(torch.int64).contiguous()
    ids = torch.empty(rows, count, dtype=torch.int64)
    at = (I64(n) for n in (rows, units, count, call.team(rows * units * 8), scores.stride(0)))
    who = POINTER(call.address(alive)), I64(0 if alive is None else alive.stride(0)), POINTER(call.address(counts))
    if library.needed().kv_top(POINTER(scores.data_ptr()), *at, *who, POINTER(ids.data_ptr())):
        raise KernelError("the native selection kernel could not allocate its buffers")
    return ids


class Shares(ctypes.Structure):
    """Mirrors shares.c."""

    _fields_ = [
        *((name, I64) for name in ("rows", "group", "padded", "dim", "units", "count", "threads", "added", "first")),
        ("given", POINTER),
        *((name, I64) for name in ("given_dtype", "given_dim", "given_row", "given_head")),
        ("mean", call.Field),
        ("alive", POINTER),
        ("alive_row", I64),
        ("coherence", POINTER),
        *((name, I64) for name in ("coherence_dtype", "coherence_row")),
        ("counts", POINTER),
        *((name, ctypes.c_float) for name in ("scale", "softcap", "outliers")),
        ("ids", POINTER),
    ]


def units_by_share(
    q: Tensor, mean: Tensor, alive: Tensor, most: int, scale: float, counts: Tensor | None, coherence: Tensor | None,
    outliers: float, first: bool, reduce: str, softcap: float | None,
) -> Tensor:  # fmt: skip
    """See `kvengine.kernels.page_scores.units_by_share`."""
    (rows, group, dim), units = q.shape, alive.shape[1]
    q, alive = q if q.stride(2) == 1 else q.contiguous(), alive if alive.stride(1) == 1 else alive.contiguous()
    coherence = coherence if coherence is None or coherence.stride(1) == 1 else coherence.contiguous()
    counts = None if counts is None else counts.to(torch.int64).contiguous()
    ids = torch.empty(rows, min(most, units), dtype=torch.int64)
    asked = Shares(
        rows=rows, group=group, padded=call.up(group, 4), dim=call.up(dim, call.LANES), units=units, count=ids.shape[1],
        threads=call.team(mean.numel()), added=reduce == "mean", first=first, given=q.data_ptr(),
        given_dtype=call.DTYPES[q.dtype], given_dim=dim, given_row=q.stride(0), given_head=q.stride(1), mean=call.dense(mean),
        alive=alive.data_ptr(), alive_row=alive.stride(0), coherence=call.address(coherence),
        counts=call.address(counts), scale=scale, softcap=softcap or 0.0, outliers=outliers, ids=ids.data_ptr(),
    )  # fmt: skip
    if coherence is not None:
        asked.coherence_dtype, asked.coherence_row = call.DTYPES[coherence.dtype], coherence.stride(0)
    if library.needed().kv_shares(ctypes.byref(asked)):
        raise KernelError("the native selection kernel could not allocate its buffers")
    return ids
