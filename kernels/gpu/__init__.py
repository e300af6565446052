"""What the Triton kernels share: what a chip has, dividing rows of unequal length among programs, and reading stored tokens."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

log = logging.getLogger(__name__)

FUSED = {"enable_fp_fusion": True}
"""Of every launch: products are added in one instruction, as was Triton's default up to 3.8; 3.9 warns that it asks for a
choice, and 3.10 would choose otherwise."""
LEAST = (8, 0)
"""The compute capability from which on Triton supports chips, and multiplies bfloat16 by their tensor cores."""
CHAINED = (9, 0)
"""That from which on a kernel may come in before the one before it has ended (`kvengine.kernels.gpu.chain`)."""
ROOM = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""By compute capability times ten: bytes of shared memory that a block may have."""

compiling_for: ContextVar[int] = ContextVar("compiling_for", default=90)
"""Compute capability times ten, while launches compile for a chip that is not here."""


class Note(NamedTuple):
    """A launch."""

    kernel: Any
    grid: tuple[int, ...]
    given: tuple[Any, ...]
    named: dict[str, Any]
    ready: Any
    """How it is launched without Triton (`kvengine.kernels.gpu.again`); None if that is not known."""


class Notes(list[Note]):
    """What is launched."""

    def __init__(self) -> None:
        super().__init__()
        self.own: list[Tensor] = []
        """What was taken as `scratch` meanwhile."""


noting: ContextVar[Notes | None] = ContextVar("noting", default=None)
"""Where to note what is launched."""


def scratch(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for a launch to write and those behind it to read: as it is not asked for where they are made again, all of it is
    written first."""
    found = torch.empty(shape, dtype=dtype, device=device)
    if (notes := noting.get()) is not None:
        notes.own.append(found)
    return found


@contextmanager
def noted() -> Iterator[Notes]:
    """What is launched inside."""
    notes = Notes()
    token = noting.set(notes)
    try:
        yield notes
    finally:
        noting.reset(token)


class Chip(NamedTuple):
    """What decides how kernels are launched on a GPU."""

    processors: int
    room: int
    """Bytes of shared memory that a block may have."""
    chained: bool
    """Whether a kernel may come in before the one before it has ended."""
    refusal: str | None
    """Why kernels are not launched; None if they are."""


@functools.cache
def chip(device: torch.device) -> Chip:
    """Of a CUDA device. The first look at one that the kernels are not for is logged, as plain torch computes there."""
    has = torch.cuda.get_device_properties(device)
    refusal = None
    if torch.version.hip:
        refusal = f"it is written for NVIDIA's GPUs, and {has.name} is AMD's"
    elif (has.major, has.minor) < LEAST:
        refusal = f"it needs compute capability {LEAST[0]}.{LEAST[1]}, and {has.name} has {has.major}.{has.minor}"
    if refusal:
        log.warning("no Triton kernel runs on %s: %s. Plain torch computes there, which takes longer", device, refusal)
        return Chip(has.multi_processor_count, 0, False, refusal)
    room: int = has.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return Chip(has.multi_processor_count, room, (has.major, has.minor) >= CHAINED, None)


def room(device: torch.device) -> int:
    """Bytes of shared memory that a block may have there; of the chip that is compiled for, where tensors are on no GPU."""
    return chip(device).room if device.type == "cuda" else ROOM[compiling_for.get()]


def crowds(device: torch.device, taken: int) -> bool:
    """Whether so many bytes of queries leave too little of that for tokens: more than three fifths."""
    return crowded(room(device), taken)


def crowded(room: int, taken: int) -> bool:
    """The same of so much room."""
    return 5 * taken > 3 * room


def cdiv(x: int, y: int) -> int:
    """How many of size `y` hold `x`. Triton's own takes forty times as long on the host, and a launch asks several times."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The least power of two that is `n` or more; 0 for 0. As `cdiv`, not Triton's own."""
    return 1 << (n - 1).bit_length() if n else 0


def lined(x: Tensor) -> Tensor:
    """Each row's numbers side by side, as kernels read them; rows may lie apart, and what the engine keeps is not copied."""
    return x if x.stride(-1) == 1 else x.contiguous()


def near(x: Tensor) -> Tensor:
    """As `lined`, of tokens no further apart than 32 bits count within a block of 128, as some kernels do."""
    return lined(x) if x.stride(1) < 1 << 24 else x.contiguous()
