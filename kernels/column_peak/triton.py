"""The Triton kernels: those of `column_mass`, which keep the most instead of the sum."""

from __future__ import annotations

from torch import Tensor

from kvengine.kernels.column_mass.triton import received


def column_peak(
    q: Tensor,
    k: Tensor,
    position: Tensor,
    at: Tensor,
    real: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """See `kvengine.kernels.column_peak`."""
    return received(q, k, position, at, real, scale, None, softcap, sinks, most=True).amax(1)
