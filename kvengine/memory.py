"""Memory that a cache holds for long, and memory that a prompt leaves behind.

On a CPU a large block is a mapping of its own and asks for huge pages: attention waits for fewer address translations, and
a block that is freed is the system's again whatever lies beside it. So is a large pinned block: torch's allocator would
give it the next power of two of bytes, and keep it when it goes.

Small blocks, and what a prompt's pass needs for a while (keys and values of all tokens, however few stay), come from the C
library's heap. There the smallest block that stays keeps the room before it in the process, so `trim` hands it back.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Bytes of a huge page, on x86 and on ARM with pages of 4 KB. Smaller blocks would only be slower to grow.
HUGE = 1 << 21
PINNED = 1 | 2  # to cudaHostRegister: for all devices of the process (portable), and in reach of their kernels (mapped)
LOOSE = 1 << 26  # bytes of prompts' keys and values after which the heap is trimmed, which takes milliseconds


class Block(mmap.mmap):
    """A mapping; `pinned`: the address from which a GPU may read it, 0 if none may."""

    pinned = 0

    def pin(self, start: int, size: int, reader: torch.device) -> bool:
        """Let a GPU read it; whether CUDA could."""
        self.reader = reader
        if int(torch.cuda.cudart().cudaHostRegister(start, size, PINNED)) == 0:
            self.pinned = start
        else:
            with contextlib.suppress(RuntimeError):  # the next kernel is told of the failure: let it be this one
                torch.zeros(1, device=reader)
        return bool(self.pinned)

    def __del__(self) -> None:
        if self.pinned:
            with contextlib.suppress(RuntimeError, AttributeError, TypeError):  # at exit, CUDA may be gone before
                torch.cuda.synchronize(self.reader)  # something may be on its way from here
                torch.cuda.cudart().cudaHostUnregister(self.pinned)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device, reader: torch.device | None = None) -> Tensor:
    """As `torch.empty`; in pinned memory, if a GPU is named that reads it."""
    pin = reader is not None
    size = math.prod(shape) * dtype.itemsize
    if size < HUGE or device.type != "cpu" or sys.platform != "linux":
        return torch.empty(tuple(shape), dtype=dtype, device=device, pin_memory=pin)
    try:
        block = Block(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no memory, or no more mappings: the heap may have some left, and else says so as torch does
        return torch.empty(tuple(shape), dtype=dtype, device=device, pin_memory=pin)
    address = torch.frombuffer(block, dtype=torch.uint8, count=1).data_ptr()
    start = -address % HUGE
    with contextlib.suppress(OSError):  # a system that has none
        block.madvise(mmap.MADV_HUGEPAGE, start, size // HUGE * HUGE)  # the rest of one more would be wasted
    if reader is not None and not block.pin(address + start, size, reader):
        return torch.empty(tuple(shape), dtype=dtype, device=device, pin_memory=True)
    made = torch.frombuffer(block, dtype=torch.uint8, count=size, offset=start).view(dtype).view(*shape)
    return made.detach()  # no view of bytes to autograd: what is written into one may have no gradients


def trim() -> None:
    """Have the heap give the system whatever it does not use, at its end or not (glibc; elsewhere nothing is done)."""
    if (found := _malloc_trim()) is not None:
        found(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        found: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, TypeError, AttributeError):  # TypeError: Windows wants a name
        return None
    return found
