"""Describe tensors to the C attention kernel, and call it. The structures mirror fields.h and attention.h."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels import turboquant
from kvengine.kernels.codecs import width
from kvengine.kernels.cpu import library
from kvengine.kernels.state import State

LANES = 16
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
DENSE, PER_CHANNEL, PER_TOKEN, MIXED, LOWRANK, TURNED = range(6)

I64, POINTER = ctypes.c_int64, ctypes.c_void_p

Noted = Literal["probs", "logs", "logits"]


class Field(ctypes.Structure):
    """One side (keys or values) of the stored tokens."""

    _fields_ = [(name, I64) for name in (
        "layout", "dim", "dtype", "row_stride", "token_stride", "bits", "low_bits", "group", "page", "salient",
        "per_token",
    )] + [(name, POINTER) for name in (
        "data", "low", "scale", "zero", "channel", "mask",
    )] + [("factor", ctypes.c_double)]  # fmt: skip


class Attention(ctypes.Structure):
    """One call."""

    _fields_ = [
        *((name, I64) for name in (
            "rows", "heads", "padded", "queries", "dim", "dim_v", "columns", "splits", "threads",
        )),
        ("q", POINTER),
        ("given", POINTER),
        *((name, I64) for name in ("given_dtype", "given_dim", "given_row", "given_head")),
        ("k", Field),
        ("v", Field),
        ("visible", POINTER),
        *((name, I64) for name in ("visible_row", "visible_query", "visible_column")),
        *((name, POINTER) for name in ("table", "position", "units", "query_position")),
        *((name, I64) for name in ("table_row", "position_row", "page", "unit", "chosen", "window")),
        *((name, ctypes.c_float) for name in ("softcap", "scale", "halves")),
        *((name, POINTER) for name in ("sinks", "scores", "out", "lse")),
    ]  # fmt: skip


def dense(x: Tensor) -> Field:
    """A field of contiguous vectors, [row, token, dim] by strides."""
    return Field(layout=DENSE, dim=x.shape[-1], dtype=DTYPES[x.dtype], row_stride=x.stride(0),
                 token_stride=x.stride(1), data=x.data_ptr())  # fmt: skip


def paged(codec: str, fields: Mapping[str, Tensor], side: str, dim: int, page: int) -> Field:
    """The field of one side of a pool."""
    if codec == "dense":
        x = fields[side]
        return Field(layout=DENSE, dim=dim, dtype=DTYPES[x.dtype], token_stride=x.stride(1), data=x.data_ptr())
    if codec == "turboquant":
        code, scale = fields[f"{side}_code"], fields[f"{side}_scale"]
        bits = turboquant.width(code, dim)
        return Field(
            layout=TURNED, dim=dim, dtype=DTYPES[scale.dtype], page=page, bits=bits, data=code.data_ptr(),
            scale=scale.data_ptr(), zero=turboquant.levels(bits).data_ptr(), channel=turboquant.rotation(dim).data_ptr(),
        )  # fmt: skip
    scale, zero = fields[f"{side}_scale"], fields[f"{side}_zero"]
    field = Field(dim=dim, dtype=DTYPES[scale.dtype], page=page, scale=scale.data_ptr(), zero=zero.data_ptr())
    if codec in ("kivi", "quantspec"):
        code = fields[f"{side}_code"]
        field.layout, field.bits, field.data = (
            (PER_CHANNEL if side == "k" else PER_TOKEN),
            width(code, dim),
            code.data_ptr(),
        )
        field.group = page // scale.shape[1] if side == "k" else dim // scale.shape[2]
        field.low = fields[f"{side}_low"].data_ptr() if codec == "quantspec" else None
        return field
    high, low = fields[f"{side}_high"], fields[f"{side}_low"]
    field.layout, field.per_token, field.salient = MIXED, side == "v", high.shape[1]
    field.bits, field.low_bits = width(high, dim), width(low, dim)
    field.data, field.low, field.mask = high.data_ptr(), low.data_ptr(), fields["mask"].data_ptr()
    if side == "v":
        field.channel = fields["v_channel"].data_ptr()
    return field


def int32(x: Tensor) -> Tensor:
    """As int32 with contiguous rows; what the engine keeps already is, and is not copied."""
    x = x if x.dtype is torch.int32 else x.to(torch.int32)
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def up(n: int, multiple: int) -> int:
    """`n` rounded up."""
    return -(-n // multiple) * multiple


def parts(q: Tensor, dim: int) -> Tensor:
    """Queries [row, head, dim] in parts, as `kv_queries` splits them."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    rows, heads, wide = q.shape
    padded = up(heads, 4)
    out = torch.empty(rows, padded, 2, dim, dtype=torch.float32)
    library.needed().kv_queries(
        POINTER(q.data_ptr()), *map(I64, (DTYPES[q.dtype], rows, heads, q.stride(0), q.stride(1), wide, padded, dim, 1)),
        ctypes.c_float(1), POINTER(out.data_ptr()),
    )  # fmt: skip
    return out


def run(
    q: Tensor, k: Field, v: Field, columns: int, scale: float, softcap: float | None, sinks: Tensor | None,
    want_probs: bool, *, as_: Noted = "probs", **more: Any,
) -> State:  # fmt: skip
    """Attend. `more`: the members of `Attention` that say which columns are seen; tensors must outlive the call. `as_`: what the
    state's `probs` are, if they are wanted: probabilities, their logarithms, or the logits before a softmax."""
    rows, group, queries, wide = q.shape
    if q.stride(3) != 1 or (queries > 1 < group and q.stride(1) != queries * q.stride(2)):
        q = q.contiguous()
    heads, dim, dim_v = group * queries, up(k.dim, LANES), up(v.dim, LANES)
    out = torch.empty(rows, group, queries, dim_v, dtype=torch.float32)
    lse = torch.empty(rows, group, queries, dtype=torch.float32)
    scores = torch.full((rows, heads, columns), -torch.inf, dtype=torch.float32) if want_probs else None
    logits = None if sinks is None else sinks.float()[..., None].expand(rows, group, queries).contiguous()
    threads = team(rows * columns * (k.dim + v.dim))
    call = Attention(
        rows=rows, heads=heads, padded=up(heads, 4), queries=queries, dim=dim, dim_v=dim_v, columns=columns,
        splits=_splits(rows, columns, threads), threads=threads, given=q.data_ptr(), given_dtype=DTYPES[q.dtype],
        given_dim=wide, given_row=q.stride(0), given_head=q.stride(2 if queries > 1 else 1), k=k, v=v, scale=scale,
        softcap=softcap or 0.0, halves=scale if q.dtype == torch.bfloat16 else 0.0, sinks=address(logits),
        scores=address(scores), out=out.data_ptr(), lse=lse.data_ptr(), **more,
    )  # fmt: skip
    if library.needed().kv_attention(ctypes.byref(call)):
        raise KernelError("the native attention kernel could not allocate its buffers")
    probs = None if scores is None else scores.view(rows, group, queries, columns)
    if probs is not None and as_ != "logits":
        probs.sub_(torch.where(lse == -torch.inf, 0, lse)[..., None])
    if probs is not None and as_ == "probs":
        probs.exp_()
    return State(out if dim_v == v.dim else out[..., : v.dim], lse, probs)


def team(values: int) -> int:
    """Threads for reading so many values: torch's setting, but no more than `most`."""
    return min(torch.get_num_threads(), most(values))


def most(values: int) -> int:
    """Threads that reading so many values may use: one for each 32 768, as waking one costs."""
    return max(1, values // 32768)


def address(x: Tensor | None) -> int | None:
    """Where the tensor's first element is; None for none."""
    return None if x is None else x.data_ptr()


def _splits(rows: int, columns: int, threads: int) -> int:
    """Pieces per row: about four tasks a thread, but no piece under 512 columns."""
    return max(1, min(-(-4 * threads // max(rows, 1)), columns // 512))
