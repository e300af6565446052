"""The C version on the CPU (`kvengine/kernels/cpu/pages.c`)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvengine.kernels import quantise as op
from kvengine.kernels.cpu import call, library
from kvengine.kernels.cpu.call import DTYPES, I64, POINTER
from kvengine.kernels.quantise import reference

pack = reference.pack


class Groups(ctypes.Structure):
    """Numbers in groups; mirrors pages.c."""

    _fields_ = [
        *((name, I64) for name in (
            "batch", "tokens", "dim", "group", "along", "bits", "dtype", "x_batch", "x_token", "threads",
        )),
        *((name, POINTER) for name in ("x", "alive", "low", "high", "code")),
    ]  # fmt: skip


def quantise(
    x: Tensor, bits: int, group: int, over: str, alive: Tensor | None, scale_dtype: torch.dtype
) -> op.Quantised:
    """See `kvengine.kernels.quantise.quantise`."""
    *batch, tokens, dim = x.shape
    flat = x.reshape(-1, tokens, dim)
    flat = flat if flat.stride(2) == 1 else flat.contiguous()
    along, top = over == "tokens", 2**bits - 1
    low = torch.empty(
        len(flat), tokens // group if along else tokens, dim if along else dim // group, dtype=torch.float32
    )
    high, code = torch.empty_like(low), torch.empty(len(flat), tokens, dim * bits // 8, dtype=torch.uint8)
    seen = None if alive is None else alive.expand(*batch, tokens).contiguous()
    known: dict[str, Any] = dict(
        batch=len(flat), tokens=tokens, dim=dim, group=group, along=along, bits=bits, dtype=DTYPES[x.dtype],
        x_batch=flat.stride(0), x_token=flat.stride(1), threads=call.team(x.numel()), x=flat.data_ptr(),
        alive=call.address(seen), code=code.data_ptr(),
    )  # fmt: skip
    library.needed().kv_ranges(ctypes.byref(Groups(low=low.data_ptr(), high=high.data_ptr(), **known)))
    # Codes go by these as they are kept.
    scale, zero = reference.kept((high - low) / top, scale_dtype), reference.kept(low, scale_dtype)
    step, start = torch.where(scale > 0, scale.float(), 1), zero.float()
    library.needed().kv_codes(ctypes.byref(Groups(low=start.data_ptr(), high=step.data_ptr(), **known)))
    return op.Quantised(*(y.unflatten(0, batch) if batch else y[0] for y in (code, scale, zero)))


def decode(codec: str, fields: Mapping[str, Tensor], side: str, dim: int) -> Tensor:
    """Keys ("k") or values ("v") of whole pages, [P, page, dim] in float32."""
    fields = {name: x.contiguous() for name, x in fields.items() if name.startswith(side) or name == "mask"}
    pages, page = len(fields[f"{side}_scale"]), _slots(codec, fields, side)
    out = torch.empty(pages, page, dim, dtype=torch.float32)
    if out.numel():
        field = call.paged(codec, fields, side, dim, page)
        field.page = page
        library.needed().kv_decode(
            ctypes.byref(field), I64(pages * page), POINTER(out.data_ptr()), I64(call.team(out.numel()))
        )
    return out


class Coding(ctypes.Structure):
    """Turned vectors; mirrors turned.c."""

    _fields_ = [
        *((name, I64) for name in ("vectors", "dim", "bits", "form", "threads")),
        *((name, POINTER) for name in ("x", "levels", "code", "scale")),
    ]  # fmt: skip


def turned_codes(y: Tensor, bits: int, form: int, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [n, dim * bits / 8] and scales [n, 1] of turned vectors (`kvengine.kernels.turboquant`)."""
    n, dim = y.shape
    code, scale = torch.empty(n, dim * bits // 8, dtype=torch.uint8), torch.empty(n, 1, dtype=torch.float32)
    library.needed().kv_turned_codes(ctypes.byref(Coding(
        vectors=n, dim=dim, bits=bits, form=form, threads=call.team(y.numel()), x=y.data_ptr(),
        levels=levels.data_ptr(), code=code.data_ptr(), scale=scale.data_ptr(),
    )))  # fmt: skip
    return code, scale


def _slots(codec: str, fields: Mapping[str, Tensor], side: str) -> int:
    if codec == "zipcache":
        return fields[f"{side}_high"].shape[1] + fields[f"{side}_low"].shape[1]
    return fields[f"{side}_code"].shape[1]
