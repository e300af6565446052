"""The C version on the CPU (`kv_mass` in `kvengine/kernels/cpu/mass.c`)."""

from __future__ import annotations

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.cpu import library
from kvengine.kernels.cpu.call import DTYPES, I64, LANES, POINTER, int32
from kvengine.kernels.dispatch import DENSE_DIM
from kvengine.kernels.span_attention import Band

TASKS = 64
"""Tasks that a call is divided into, about: by its shape and not by the threads, as the order of a sum follows from it."""


class Mass(ctypes.Structure):
    """One call; mirrors mass.c."""

    _fields_ = [
        *((name, I64) for name in (
            "rows", "group", "queries", "tokens", "dim", "parts", "threads", "q_dtype", "k_dtype",
        )),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        *((name, POINTER) for name in ("q", "k")),
        *((name, I64) for name in ("q_row", "q_head", "q_query", "k_row", "k_token")),
        *((name, POINTER) for name in ("position", "at", "real", "first", "logits")),
        *((name, I64) for name in ("position_row", "real_row", "sinks", "local", "most")),
        ("out", POINTER),
    ]  # fmt: skip


def fits(q: Tensor, k: Tensor) -> bool:
    """Whether the C version knows these tensors, and this machine's vectors are wide enough for it."""
    return (
        q.is_cpu  # asked first: elsewhere nothing is compiled to find out
        and q.dtype in DTYPES
        and k.dtype in DTYPES
        and q.shape[-1] % LANES == 0
        and 0 < q.shape[-1] <= DENSE_DIM
        and q.stride(-1) == k.stride(-1) == 1
        and library.load().library is not None
        and bool(library.needed().kv_causal_wide())
    )


def column_mass(
    q: Tensor, k: Tensor, position: Tensor, at: Tensor, real: Tensor, scale: float, band: Band | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `kvengine.kernels.column_mass`."""
    out = received(q, k, position, at, real, scale, band, softcap, sinks)
    return out[0] if len(out) == 1 else out.sum(0)


def received(
    q: Tensor, k: Tensor, position: Tensor, at: Tensor, real: Tensor, scale: float, band: Band | None,
    softcap: float | None, sinks: Tensor | None, most: bool = False,
) -> Float[Tensor, "part row group token"]:  # fmt: skip
    """What each token receives from some of the queries, in parts; or the `most` that one of these pays."""
    (rows, group, queries, dim), tokens = q.shape, k.shape[1]
    parts = max(1, min(TASKS // rows, queries // 64))
    position, at, real = int32(position), at.to(torch.int64).contiguous(), real.contiguous()
    first = None if band is None else band.first.to(torch.int64).contiguous()
    logits = None if sinks is None else sinks.float().contiguous()
    out = torch.empty(parts, rows, group, tokens, dtype=torch.float32)
    call = Mass(
        rows=rows, group=group, queries=queries, tokens=tokens, dim=dim, parts=parts, threads=torch.get_num_threads(),
        q_dtype=DTYPES[q.dtype], k_dtype=DTYPES[k.dtype], scale=scale, softcap=softcap or 0.0, q=q.data_ptr(),
        k=k.data_ptr(), q_row=q.stride(0), q_head=q.stride(1), q_query=q.stride(2), k_row=k.stride(0), k_token=k.stride(1),
        position=position.data_ptr(), position_row=position.stride(0), at=at.data_ptr(), real=real.data_ptr(),
        real_row=real.stride(0), first=None if first is None else first.data_ptr(),
        logits=None if logits is None else logits.data_ptr(), sinks=0 if band is None else band.sinks,
        local=0 if band is None else band.local, most=most, out=out.data_ptr(),
    )  # fmt: skip
    if library.needed().kv_mass(ctypes.byref(call)):
        raise KernelError("the native column-mass kernel could not allocate its buffers")
    return out
