"""Kernels that come in as the one before them ends: programmatic dependent launch, which chips have from Hopper on.

A decode step is a chain of kernels of a few microseconds. Launched one after another, each finds the chip empty, and begins
with what hides behind nothing: blocks are placed, instructions and arguments fetched. Here the next kernel's blocks take what
room there is and wait in `in_turn` until all earlier kernels have ended and what they stored is seen.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvengine.kernels.gpu import CHAINED, FUSED, chip, compiling_for

IN_TURN, APART = FUSED | {"PDL": True, "launch_pdl": True}, FUSED | {"PDL": False}


@triton.jit
def in_turn(PDL: tl.constexpr):
    """Stands before the first access to memory, whatever lies there: so a kernel ends after all that came before it, the next
    one waits for it alone, and nothing is read too early or replaced while an earlier kernel reads it.

    The next kernel is let in at once. It comes in when all of our blocks have, so it takes no room from them; later, when the
    first of them end, less of its way to its own wait would be hidden. Not before the wait: kernels further on would lie in
    the room that earlier ones leave, and the blocks of the longest be placed unevenly."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def chained(device: torch.device) -> dict[str, Any]:
    """Options of a launch there of a kernel that waits `in_turn`. One that does not must not have them."""
    if device.type == "cuda":
        return IN_TURN if chip(device).chained else APART
    # The interpreter compiles for no chip.
    return IN_TURN if divmod(compiling_for.get(0), 10) >= CHAINED else APART
