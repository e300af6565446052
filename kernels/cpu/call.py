"""Describe tensors to the C attention kernel, and call it. The structures mirror fields.h and attention.h."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

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
        ("k", Field),
        ("v", Field),
        ("visible", POINTER),
        *((name, I64) for name in ("visible_row", "visible_query", "visible_column")),
        *((name, POINTER) for name in ("table", "position", "units", "query_position")),
        *((name, I64) for name in ("table_row", "position_row", "page", "unit", "chosen", "window")),
        ("softcap", ctypes.c_float),
        ("halves", ctypes.c_float),
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
    x = x.to(torch.int32)
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def up(n: int, multiple: int) -> int:
    """`n` rounded up."""
    return -(-n // multiple) * multiple


def floats(q: Tensor, dim: int, scale: float = 1.0, split: bool = False) -> Tensor:
    """Queries [row, head, dim] as the kernels take them (`kv_queries`): one call for what would be many small ones."""
    q = q if q.stride(-1) == 1 else q.contiguous()
    rows, heads, wide = q.shape
    padded = up(heads, 4)
    out = torch.empty(rows, padded, 2 if split else 1, dim)
    library.needed().kv_queries(
        POINTER(q.data_ptr()), *map(I64, (DTYPES[q.dtype], rows, heads, q.stride(0), q.stride(1), wide, padded, dim, split)),
        ctypes.c_float(scale), POINTER(out.data_ptr()),
    )  # fmt: skip
    return out


def run(
    q: Tensor, k: Field, v: Field, columns: int, scale: float, softcap: float | None, sinks: Tensor | None,
    want_probs: bool, *, logs: bool = False, **more: Any,
) -> State:  # fmt: skip
    """Attend. `more`: the members of `Attention` that say which columns are seen; tensors must outlive the call. `logs`:
    probabilities as logarithms."""
    rows, group, queries, _ = q.shape
    heads, dim, dim_v = group * queries, up(k.dim, LANES), up(v.dim, LANES)
    scaled = floats(q.flatten(1, 2), dim, scale)
    out = torch.empty(rows, heads, dim_v)
    lse = torch.empty(rows, group, queries)
    scores = torch.full((rows, heads, columns), -torch.inf) if want_probs else None
    logits = None if sinks is None else sinks.float()[..., None].expand(rows, group, queries).contiguous()
    threads = team(rows * columns * (k.dim + v.dim))
    call = Attention(
        rows=rows, heads=heads, padded=up(heads, 4), queries=queries, dim=dim, dim_v=dim_v, columns=columns,
        splits=_splits(rows, columns, threads), threads=threads, q=scaled.data_ptr(), k=k, v=v,
        softcap=softcap or 0.0, halves=scale if q.dtype == torch.bfloat16 else 0.0, sinks=address(logits),
        scores=address(scores), out=out.data_ptr(), lse=lse.data_ptr(), **more,
    )  # fmt: skip
    if library.needed().kv_attention(ctypes.byref(call)):
        raise KernelError("the native attention kernel could not allocate its buffers")
    probs = None if scores is None else _shares(scores.view(rows, group, queries, columns), lse)
    if probs is not None and not logs:
        probs.exp_()
    return State(out.view(rows, group, queries, dim_v)[..., : v.dim], lse, probs)


def team(values: int) -> int:
    """Threads for reading so many values: torch's setting, but one for each 32 768 at most, as waking one costs."""
    return max(1, min(torch.get_num_threads(), values // 32768))


def address(x: Tensor | None) -> int | None:
    """Where the tensor's first element is; None for none."""
    return None if x is None else x.data_ptr()


def _shares(scores: Tensor, lse: Tensor) -> Tensor:
    return scores.sub_(torch.where(lse == -torch.inf, 0, lse)[..., None])


def _splits(rows: int, columns: int, threads: int) -> int:
    """Pieces per row: about four tasks a thread, but no piece under 512 columns."""
    return max(1, min(-(-4 * threads // max(rows, 1)), columns // 512))
