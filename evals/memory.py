"""Peak memory of a block of code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PROCESS = Path("/proc/self")


@dataclass
class Peak:
    """Bytes at the highest point, set when the block ends; None where the platform does not tell."""

    bytes: int | None = None


@contextlib.contextmanager
def peak(device: Any) -> Iterator[Peak]:
    """On a GPU what torch allocated; on a CPU the resident memory of the whole process (Linux; elsewhere None)."""
    result = Peak()
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield result
        result.bytes = torch.cuda.max_memory_allocated(device)
    else:
        reset = _reset_resident_peak()
        yield result
        result.bytes = _resident_peak() if reset else None


def _reset_resident_peak() -> bool:
    try:
        (PROCESS / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident_peak() -> int | None:
    for line in (PROCESS / "status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return None
