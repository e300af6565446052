"""Which implementation of an operation runs, and why not another.

Every operation has a plain torch `reference`; some also have `native` (C, for the CPU) and `triton`. `backend=None`
takes the best that can run; naming one that cannot run raises with the reason.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from kvengine.errors import KernelError, unknown
from kvengine.kernels.cpu import library
from kvengine.kernels.gpu import chip

_torch_only: ContextVar[bool] = ContextVar("torch_only", default=False)

BACKENDS = ("reference", "native", "triton")
NATIVE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)
NATIVE_DIM = 256
"""Widest head that the C kernels' buffers hold."""
GPU_DIM = 512
"""Widest head that a GPU's shared memory holds a block of."""
DENSE_DIM = 1024
"""Widest vectors of dense numbers, such as latents, that C attends to."""


def pick(operation: str, inputs: tuple[Tensor, ...], backend: str | None, native: bool = True, wide: int = 0) -> Any:
    """The module `kvengine.kernels.<operation>.<backend>`.

    `inputs`: tensors that decide (device, dtype, gradients). `native`: whether the C version knows these shapes. `wide`:
    channels of a head, if the operation keeps heads whole. Raises KernelError if `backend` is unknown or cannot run here.
    """
    return module(operation, chosen(inputs, backend, native, wide), inputs[0].device)


def module(operation: str, which: str, device: torch.device) -> Any:
    """That of a backend which was `chosen`, for tensors there."""
    found = _module(operation, which)
    return On(found, device) if which == "triton" and elsewhere(device) else found


def chosen(inputs: tuple[Tensor, ...], backend: str | None, native: bool = True, wide: int = 0) -> str:
    """The backend that `pick` takes."""
    if wide > GPU_DIM and backend in (None, "triton"):
        if backend == "triton":
            raise KernelError(
                f"backend='triton' cannot run here: heads of {wide} channels are wider than {GPU_DIM}. Leave backend=None "
                "to take what can."
            )
        return "reference" if inputs[0].is_cuda or native_refusal(inputs, native) else "native"
    return _best(inputs, native) if backend is None else _checked(backend, inputs, native)


def beyond(k: Tensor, v: Tensor) -> int:
    """Channels of dense keys behind those that are the values (latents), if each token's vector can be read once; else 0."""
    dim_v = v.shape[-1]
    rest = k.shape[-1] - dim_v
    if not (16 <= rest <= 128 and 16 <= dim_v <= 512) or rest & (rest - 1) or dim_v & (dim_v - 1):
        return 0
    same = k.dtype == v.dtype and k.is_floating_point() and k.data_ptr() == v.data_ptr() and k.stride() == v.stride()
    return rest if same else 0


def spaced(x: Tensor) -> bool:
    """Whether tokens of all pages follow each other at one distance, as the first channels of longer vectors do."""
    return x.stride(2) == 1 and x.stride(0) == x.shape[1] * x.stride(1)


def elsewhere(device: torch.device) -> bool:
    """Whether it is a GPU, and not the current one: on that one Triton launches, whatever it is given."""
    return device.type == "cuda" and device.index != torch.cuda.current_device()


class On:
    """An implementation whose functions run with another GPU as the current one."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self.module, self.device = module, device

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.module, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.cuda.device(self.device):
                return function(*args, **kwargs)

        return run


@functools.cache
def _module(operation: str, backend: str) -> Any:
    return importlib.import_module(f"kvengine.kernels.{operation}.{backend}")


@contextmanager
def torch_only() -> Iterator[None]:
    """Inside, what runs on a CPU runs as torch operations, for who records these: a recorder sees nothing of C."""
    token = _torch_only.set(True)
    try:
        yield
    finally:
        _torch_only.reset(token)


def info() -> dict[str, str]:
    """For each backend, "available" or the reason why it is not. Compiles the C kernels if that has not happened."""
    cuda = None
    if _has_triton() and torch.cuda.is_available():
        cuda = chip(torch.device("cuda", torch.cuda.current_device())).refusal or "available"
    return {
        "reference": "available",
        "native": library.load().reason or "available",
        "triton": cuda or ("interpreted" if _interpreted() else "no CUDA device, or triton is not installed"),
    }


def interpreted() -> bool:
    """Whether Triton kernels run in its interpreter, on CPU tensors (`TRITON_INTERPRET=1`)."""
    return _interpreted()


def _best(inputs: tuple[Tensor, ...], native: bool) -> str:
    if inputs[0].is_cuda:
        return "reference" if triton_refusal(inputs) else "triton"
    return "reference" if native_refusal(inputs, native) else "native"


def _checked(backend: str, inputs: tuple[Tensor, ...], native: bool) -> str:
    if backend not in BACKENDS:
        raise KernelError(unknown("backend", backend, BACKENDS))
    refusal = None
    if backend != "reference":
        refusal = native_refusal(inputs, native) if backend == "native" else triton_refusal(inputs)
    if refusal:
        raise KernelError(f"backend={backend!r} cannot run here: {refusal}. Leave backend=None to take what can.")
    return backend


def native_refusal(inputs: tuple[Tensor, ...], native: bool) -> str | None:
    """Why the C version cannot run on these; None if it can. `native`: whether it knows the shapes."""
    if _torch_only.get():
        return "torch operations are recorded, and it is none"
    if not all([x.is_cpu for x in inputs]):  # a list: half the time of a generator, and this runs at every token
        return "it reads CPU memory, and an input is on another device"
    if not native or not all([x.dtype in NATIVE_DTYPES for x in inputs]):
        return "it does not know these shapes or dtypes"
    if watched(inputs):
        return "it has no gradient"
    return library.load().reason


def watched(inputs: tuple[Tensor, ...]) -> bool:
    """Whether torch must see what is done to these: operations are recorded, or there is a gradient."""
    return _torch_only.get() or (torch.is_grad_enabled() and any([x.requires_grad for x in inputs]))


def triton_refusal(inputs: tuple[Tensor, ...]) -> str | None:
    """Why the Triton version cannot run on these; None if it can."""
    if not _has_triton():
        return "triton is not installed"
    if inputs[0].is_cuda:
        if refusal := chip(inputs[0].device).refusal:
            return refusal
    elif not _interpreted():
        return "the inputs are not on a CUDA device (and TRITON_INTERPRET is not 1)"
    if torch.float64 in [x.dtype for x in inputs]:
        return "it does not compute in float64"
    return "it has no gradient" if torch.is_grad_enabled() and any([x.requires_grad for x in inputs]) else None


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache  # asked for several times a launch; Triton too knows it of a process
def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
