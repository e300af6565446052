"""What a rule leaves of a row's tokens after a decoded token, where that is judged on the device alone.

The rules are those of `kvengine.kernels.step`, whose C version answers and judges in one call.
"""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.dispatch import pick
from kvengine.kernels.step import Merged, Paid, Rule


def verdict(
    rule: Rule,
    position: Int[Tensor, "row slot"],
    now: Int[Tensor, "1"],
    *,
    mass: Float[Tensor, "row group slot"] | None = None,
    score: Float[Tensor, "row slot"] | None = None,
    backend: str | None = None,
) -> None:
    """Set the `position` (int32) of what goes to -1. The token at `now` was just added.

    `mass`: what each query head paid to each slot (float32, contiguous), which `Paid` judges by; `score` (float32) is what it
    makes of it, written to. Raises KernelError for `Merged`, which changes keys and values, and if something is missing.
    """
    if isinstance(rule, Merged):
        raise KernelError("a verdict that merges writes keys and values too; it is one of `step`")
    if isinstance(rule, Paid) and (mass is None or mass.shape[0::2] != position.shape or (rule.adds and score is None)):
        raise KernelError(
            f"Paid judges by the attention paid to slots {list(position.shape)}, and adds to scores; got "
            f"{None if mass is None else list(mass.shape)} and {None if score is None else list(score.shape)}"
        )
    pick("verdict", (position,), backend, False).verdict(rule, position, now, mass, score)


__all__ = ["verdict"]
