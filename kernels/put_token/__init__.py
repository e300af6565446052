"""One decoded token of every row, written into its slot.

Around the attention of a step stands what a step counts: each of these would be a launch of its own on a GPU, and such a
launch takes as long as reading a megabyte. In a recorded step only the device knows the slot's number.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.dispatch import pick


class Limit(NamedTuple):
    """How many units of `unit` tokens a row may read beside its tail: `max(1, (reads - count) // unit)`."""

    reads: Int[Tensor, "row"]
    unit: int
    units: Int[Tensor, "row"]
    """int64, written to."""


def put_token(
    k: Float[Tensor, "row 1 dim"],
    v: Float[Tensor, "row 1 dim_v"],
    keys: Float[Tensor, "row slot dim"],
    values: Float[Tensor, "row slot dim_v"],
    position: Int[Tensor, "row slot"] | None,
    now: Int[Tensor, "place"],
    *,
    slot: int | None = None,
    origin: int | None = None,
    ring: int = 0,
    counts: Int[Tensor, "row"] | None = None,
    score: Float[Tensor, "row slot"] | None = None,
    limit: Limit | None = None,
    backend: str | None = None,
) -> None:
    """Write a token of position `now`, one for all rows or one for each, and count it.

    `slot`: where, in every row. `origin`: at `now - origin` of one `now`, modulo `ring` if that is not 0. Neither: into the
    first slot of each row whose position is -1; every row must have one. `keys`, `values`, `position` (int32; None: nobody
    keeps them), `counts` (int32, contiguous), `score` (0 for the new token) and `limit.units`, by what is counted then, are
    written to. Raises KernelError on shapes that do not fit, and if something is missing.
    """
    rows, slots = keys.shape[:2]
    if k.shape[:2] != (rows, 1) or v.shape[:2] != (rows, 1) or now.shape not in ((1,), (rows,)):
        raise KernelError(
            f"put_token takes k and v [row, 1, *] and now [1] or [row] for slots [row, slot] = {[rows, slots]}; got "
            f"{list(k.shape)}, {list(v.shape)} and {list(now.shape)}"
        )
    held = (values.shape[:2], slots if position is None else position.shape[1], rows if counts is None else len(counts))
    if held != ((rows, slots), slots, rows) or not 0 <= ring <= slots or not 0 <= (slot or 0) < max(slots, 1):
        raise KernelError(
            f"for {rows} rows of {slots} slots: values {list(values.shape)}, positions of {held[1]} slots, {held[2]} counts, "
            f"slot={slot} and ring={ring} do not fit together"
        )
    if (
        (position is None and slot is None)
        or (limit is not None and counts is None)
        or (len(now) > 1 and origin is not None)
    ):
        raise KernelError(
            "a free slot, and one that is counted from an origin, are found by positions, a limit by counts, and an origin is "
            f"one for all rows; got slot={slot}, origin={origin}, {len(now)} in now"
        )
    run = pick("put_token", (k, v, keys, values), backend, False)
    run.put_token(k, v, keys, values, position, now, slot, origin, ring, counts, score, limit)


__all__ = ["Limit", "put_token"]
