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
    keys: Float[Tensor, "row slot dim"] | None = None,
    values: Float[Tensor, "row slot dim_v"] | None = None,
    backend: str | None = None,
) -> None:
    """Set the `position` (int32) of what goes to -1. The token at `now` was just added.

    `mass`: what each query head paid to each slot (float32, contiguous), which `Paid` judges by; `score` (float32) is what it
    makes of it, written to. `keys` and `values` are written to by `Merged`. Raises KernelError if something is missing.
    """
    paid = rule.paid if isinstance(rule, Merged) else rule if isinstance(rule, Paid) else None
    if paid is not None and (mass is None or mass.shape[0::2] != position.shape or (paid.adds and score is None)):
        raise KernelError(
            f"Paid judges by the attention paid to slots {list(position.shape)}, and adds to scores; got "
            f"{None if mass is None else list(mass.shape)} and {None if score is None else list(score.shape)}"
        )
    if isinstance(rule, Merged) and any(x is None or x.shape[:2] != position.shape for x in (keys, values)):
        raise KernelError(f"Merged writes keys and values of slots {list(position.shape)}")
    pick("verdict", (position,), backend, False).verdict(rule, position, now, mass, score, keys, values)


__all__ = ["verdict"]
