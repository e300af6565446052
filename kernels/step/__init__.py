"""One decoded token over contiguous slots: written behind them, and its query answered, in one call.

What `attention` does for any number of queries takes many small operations around the kernel; for a single token over
a few thousand others these are most of the time.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.dispatch import DENSE_DIM, native_refusal, pick
from kvengine.kernels.step.native import DTYPES, Ends, Merged, Paid, Placed, Rule, Sealed, Slots


def step(
    q: Float[Tensor, "seq q_head 1 dim"],
    k: Float[Tensor, "seq head 1 dim"],
    v: Float[Tensor, "seq head 1 dim_v"],
    keys: Float[Tensor, "row slot dim"],
    values: Float[Tensor, "row slot dim_v"],
    position: Int[Tensor, "row slot"] | None,
    *,
    start: int,
    end: int,
    at: int,
    holes: bool,
    scale: float,
    fill: bool = False,
    rule: Rule | None = None,
    score: Float[Tensor, "row slot"] | None = None,
    backend: str | None = None,
) -> Float[Tensor, "seq 1 q_head dim_v"]:
    """Put a token of position `at` into slot `end` of every row, and attend from it to the slots from `start` on.

    `keys`, `values`, `position` (int32; None: nobody keeps them) are written to; a row is a KV head of a sequence,
    `row = seq * heads + head`. `holes`: slots whose position is -1 hold no token; what is in them is ignored. `fill`:
    it goes into a free slot before `end`, which every row has. `rule`: what stays after it. `score` (float32, contiguous)
    is written to: 0 for the new token, then, if the rule is `Paid` or `Merged`, all that it makes of them. Returns the
    queries' dtype, computed in float32. Raises KernelError on shapes that do not fit.
    """
    rows, slots = keys.shape[:2] if position is None else position.shape
    if (holes or fill or rule is not None) and position is None:
        raise KernelError(
            "holes=True, fill=True and rules need the positions that tell which slots hold a token; got position=None"
        )
    paid = rule.paid if isinstance(rule, Merged) else rule if isinstance(rule, Paid) else None
    if paid is not None and (rows % paid.together or (paid.together > 1 and paid.reduce != "mean")):
        raise KernelError(f"{rows} rows cannot judge {paid.together} together by their {paid.reduce}")
    if paid is not None and paid.adds and score is None:
        raise KernelError("a verdict that adds to scores needs them; got score=None")
    if keys.shape[:2] != (rows, slots) or values.shape[:2] != (rows, slots) or k.shape[0] * k.shape[1] != rows:
        raise KernelError(
            f"step needs keys, values and position of {k.shape[0] * k.shape[1]} rows and the same slots; got "
            f"{list(keys.shape)}, {list(values.shape)} and {None if position is None else list(position.shape)}"
        )
    if not 0 <= start <= end < slots:
        raise KernelError(f"slots from start={start} to end={end} must lie within the {slots} there are")
    if fill and not bool((position[:, start:end] < 0).any(1).all()):  # type: ignore[index]
        raise KernelError(f"fill=True needs a free slot in every row between start={start} and end={end}")
    run = pick("step", (q, k, v, keys), backend, fits(q, k, v, keys, values, position, score))
    return run.step(q, k, v, keys, values, position, start, end, at, holes, scale, fill, rule, score)  # type: ignore[no-any-return]


def ready(keys: Tensor, values: Tensor, position: Tensor | None) -> Slots | None:
    """These slots made ready for the C version, to be used for as long as they are the same; None if it cannot serve them."""
    known = keys.dtype in DTYPES and keys.dtype == values.dtype and max(keys.shape[2], values.shape[2]) <= DENSE_DIM
    lie = keys.is_contiguous() and values.is_contiguous() and (position is None or position.is_contiguous())
    return None if native_refusal((keys, values), known and lie) else Slots(keys, values, position)


def fits(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor | None, score: Tensor | None
) -> bool:
    """Whether the C version knows these tensors."""
    noted = [(position, torch.int32), (score, torch.float32)]
    return (
        q.dtype in DTYPES
        and q.dtype == k.dtype == v.dtype == keys.dtype == values.dtype
        and q.shape[2] == 1
        and max(keys.shape[2], values.shape[2]) <= DENSE_DIM
        and (q.is_contiguous() and k.is_contiguous() and v.is_contiguous())
        and (keys.is_contiguous() and values.is_contiguous())
        and all(x is None or (x.dtype == dtype and x.is_contiguous()) for x, dtype in noted)
    )


__all__ = ["Ends", "Merged", "Paid", "Placed", "Rule", "Sealed", "Slots", "ready", "step"]
