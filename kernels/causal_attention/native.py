"""The C version on the CPU (`kv_causal` in `kvengine/kernels/cpu/causal.c`)."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.cpu import library
from kvengine.kernels.cpu.call import DTYPES, LANES
from kvengine.kernels.dispatch import DENSE_DIM

EIGHT = 8
"""Queries that it takes together."""
PAIRED = 2 * LANES
"""Channels of a register of bfloat16."""


class Causal(ctypes.Structure):
    """One call; mirrors causal.c."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in (
            "sequences", "share", "heads", "group", "queries", "tokens", "dim", "dim_v", "threads", "dtype",
        )),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out")),
        *((f"{name}_{axis}", ctypes.c_int64) for name in ("q", "k", "v", "out") for axis in ("sequence", "head", "token")),
        *((name, ctypes.c_void_p) for name in ("spans", "position", "first")),
        *((name, ctypes.c_int64) for name in (
            "queries_per", "spans_per", "spans_sequence", "position_sequence", "sinks", "local",
        )),
        ("logits", ctypes.c_void_p),
        ("softcap", ctypes.c_float),
    ]  # fmt: skip


def fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the C version knows these tensors, and this machine's vectors are wide enough for it."""
    dim, dim_v = q.shape[-1], v.shape[-1]
    return (
        q.is_cpu  # asked first: elsewhere nothing is compiled to find out
        and q.dtype == k.dtype == v.dtype
        and q.dtype in (torch.float32, torch.bfloat16)
        and dim % LANES == dim_v % LANES == 0
        and 0 < max(dim, dim_v) <= DENSE_DIM
        and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        and library.load().library is not None
        and bool(library.needed().kv_causal_wide())
        and (q.dtype == torch.float32 or _bfloat16_fits(q, k, v))
    )


def _bfloat16_fits(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether numbers lie in pairs, and the processor has no matrix unit, which the library uses."""
    even = all(step % 2 == 0 for step in k.stride()[:-1])
    return even and q.shape[-1] % PAIRED == v.shape[-1] % PAIRED == 0 and bool(library.needed().kv_causal_bfloat16())


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, position: Tensor | None = None, share: int = 1, **more: Any
) -> Float[Tensor, "seq query q_head dim_v"]:
    """See `kvengine.kernels.causal_attention`. `share`: sequences of `q`, one after the other, that read one of `k` and `v`.
    `more`: the members of `Causal` that say which tokens are seen."""
    sequences, q_heads, queries, dim = q.shape
    heads, tokens, dim_v = k.shape[1], k.shape[2], v.shape[3]
    out = q.new_empty(sequences, queries, q_heads, dim_v)
    strides = {
        f"{name}_{axis}": x.stride(i)
        for name, x in (("q", q), ("k", k), ("v", v), ("out", out.transpose(1, 2)))
        for i, axis in enumerate(("sequence", "head", "token"))
    }
    if position is not None:
        position = position.to(torch.int32)
        position = position if position.stride(1) == 1 else position.contiguous()
        strides |= {"position": position.data_ptr(), "position_sequence": position.stride(0)}
    call = Causal(
        sequences=sequences, share=share, heads=heads, group=q_heads // heads, queries=queries, tokens=tokens, dim=dim,
        dim_v=dim_v, threads=torch.get_num_threads(), dtype=DTYPES[q.dtype], scale=scale, q=q.data_ptr(),
        k=k.data_ptr(), v=v.data_ptr(), out=out.data_ptr(), **strides, **more,
    )  # fmt: skip
    if library.needed().kv_causal(ctypes.byref(call)):
        raise KernelError("the native causal kernel could not allocate its buffers")
    return out
