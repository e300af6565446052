"""Memory that a cache holds for long, and memory that a prompt leaves behind.

On a CPU, a block of some size gets pages of its own from the system, and a large one asks for huge pages: attention waits
for fewer address translations, and a block that is freed is the system's again whatever lies beside it.

What a prompt's pass needs for a while is the model's: keys and values of all tokens, however few stay, come from the C
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

OWN = 1 << 16  # bytes: the least that gets pages of its own
HUGE = 1 << 21  # bytes of a huge page, on x86 and on ARM with pages of 4 KB
LOOSE = (
    1 << 26
)  # bytes of keys and values that came with prompts, after which the heap is trimmed: it takes milliseconds


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin: bool = False) -> Tensor:
    """As `torch.empty`; `pin`: in pinned memory."""
    size = math.prod(shape) * dtype.itemsize
    if size < OWN or pin or device.type != "cpu" or sys.platform != "linux":
        return torch.empty(tuple(shape), dtype=dtype, device=device, pin_memory=pin)
    huge = size // HUGE * HUGE  # what is beyond these stays in small pages: the rest of a huge one would be wasted
    try:
        block = mmap.mmap(-1, size + HUGE * bool(huge), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no memory, or no more mappings: the heap may have some left, and else says so as torch does
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    start = 0
    if huge:
        start = -torch.frombuffer(block, dtype=torch.uint8, count=1).data_ptr() % HUGE
        with contextlib.suppress(OSError):  # a system that has none
            block.madvise(mmap.MADV_HUGEPAGE, start, huge)
    return torch.frombuffer(block, dtype=torch.uint8, count=size, offset=start).view(dtype).view(*shape)


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
