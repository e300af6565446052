"""Dumb attention over one row at a time, in float64: what every kernel is compared with."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import pytest
import torch
from torch import Tensor

from kvengine.kernels import dispatch
from kvengine.kernels.state import State


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, softcap: float | None = None,
    sinks: Tensor | None = None,
) -> State:  # fmt: skip
    """q [row, group, query, dim], k, v [row, token, *], visible [row, query, token]; loops over every query."""
    rows, group, queries, _ = q.shape
    out = torch.zeros(rows, group, queries, v.shape[-1], dtype=torch.float64)
    lse = torch.full((rows, group, queries), -math.inf, dtype=torch.float64)
    probs = torch.zeros(rows, group, queries, k.shape[1], dtype=torch.float64)
    for r in range(rows):
        for g in range(group):
            for n in range(queries):
                seen = visible[r, n].nonzero().flatten()
                logits = (k[r, seen].double() @ q[r, g, n].double()) * scale
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                terms = logits if sinks is None else torch.cat([logits, sinks[r, g].double().reshape(1)])
                if len(terms) == 0:
                    continue
                lse[r, g, n] = torch.logsumexp(terms, 0)
                probs[r, g, n, seen] = torch.exp(logits - lse[r, g, n])
                out[r, g, n] = probs[r, g, n, seen] @ v[r, seen].double()
    return State(out, lse, probs)


def close(got: State, want: State, bound: float) -> None:
    """Relative RMS error of `out` and `probs`, absolute of `lse`; nothing may be NaN."""
    assert error(got.out, want.out) <= bound
    empty = want.lse == -math.inf
    assert torch.equal(got.lse.cpu() == -math.inf, empty)
    assert _worst(got.lse, want.lse, ~empty) <= bound * 10
    if got.probs is not None and want.probs is not None:
        assert error(got.probs, want.probs) <= bound


def error(got: Tensor, want: Tensor) -> float:
    """Root mean square of the difference over that of `want`; infinite if anything is NaN or infinite."""
    got = got.detach().cpu().double()
    assert got.shape == want.shape, (got.shape, want.shape)
    if not bool(got.isfinite().all()):
        return math.inf
    size = float(want.pow(2).mean().sqrt()) if want.numel() else 0.0
    return float((got - want).pow(2).mean().sqrt()) / max(size, 1e-30) if want.numel() else 0.0


def _worst(got: Tensor, want: Tensor, where: Tensor) -> float:
    difference = (got.detach().cpu().double() - want)[where].abs()
    return float(difference.max()) if len(difference) else 0.0


def backends() -> list[str]:
    """Implementations that run in this process: Triton on a GPU, or in its interpreter."""
    status = dispatch.info()
    return [name for name in dispatch.BACKENDS if status[name] in ("available", "interpreted")]


def device_of(backend: str) -> str:
    return "cuda" if backend == "triton" and dispatch.info()["triton"] == "available" else "cpu"


def on(backend: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation with its tensors on the device the backend needs."""
    device = device_of(backend)
    return lambda *args, **kwargs: operation(*_moved(args, device), **_moved(kwargs, device))


def _moved(x: Any, device: str) -> Any:
    if isinstance(x, Tensor):
        return x.to(device) if x.device.type != device else x
    if isinstance(x, State):
        return State(*(_moved(part, device) for part in x))
    if isinstance(x, (list, tuple)):
        return type(x)(_moved(part, device) for part in x)
    return {name: _moved(part, device) for name, part in x.items()} if isinstance(x, dict) else x


NORESERVE = 0x4000 if sys.platform == "linux" else 0
"""Of mappings: no memory is promised before it is touched, so they may be larger than a machine's."""


def sparse(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Zeros, until something is written, in memory that is only had where it is touched; on a GPU anything, in as much as it
    takes. Skips the test where there is not so much."""
    size = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    try:
        if device != "cpu":
            held = torch.empty(0, dtype=dtype, device=device)
            memory = torch.UntypedStorage(size * dtype.itemsize, device=device)
            return held.set_(memory, 0, shape, stride)  # type: ignore[call-overload, no-any-return]
        block = mmap(-1, size * dtype.itemsize, flags=MAP_PRIVATE | MAP_ANONYMOUS | NORESERVE)
    except (OSError, torch.OutOfMemoryError) as error:
        pytest.skip(f"no {size * dtype.itemsize >> 30} GB are to be had: {error}")
    return torch.frombuffer(block, dtype=dtype).as_strided(shape, stride)


def far(backend: str, fields: Mapping[str, Tensor], table: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """For Triton where it takes no memory, on a CPU: the same pages, and their ids, at the end of a pool of which 32 bits count
    no field's numbers but a mask's. As they are for a GPU and for C, of which `test_far_apart.py` asks it."""
    if backend != "triton" or device_of(backend) != "cpu":
        return dict(fields), table
    least = min(x[0].numel() for name, x in fields.items() if name != "mask" and x.numel())
    first = -(-(1 << 32) // least)
    held = {name: sparse((first + len(x), *x.shape[1:]), x.stride(), x.dtype) for name, x in fields.items()}
    for name, x in fields.items():
        held[name][first:] = x
    return held, torch.where(table < 0, table, table + first)


TRITON: dict[str, float] = {"bfloat16": 1e-2, "float16": 1e-3}
"""Triton multiplies weights in the stored dtype, so that tensor cores can."""


def mend_interpreter() -> None:
    """Let Triton 3.6's interpreter loop to a computed bound under NumPy 2.4, which no longer turns an array of one
    element into an integer."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if os.environ.get("TRITON_INTERPRET") == "1":
    mend_interpreter()
    from support_sanitise import watch_interpreter

    watch_interpreter()
elif capability := os.environ.get("TRITON_COMPILED"):
    from support_compiled import run_compiled

    run_compiled(int(capability))
