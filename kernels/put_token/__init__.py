"""One decoded token of every row, written into slots of which only the device knows the number.

Around the attention of a recorded step stands what a step counts: each of these would be a launch of its own on a GPU, and
such a launch takes as long as reading a megabyte.
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
    position: Int[Tensor, "row slot"],
    counts: Int[Tensor, "row"],
    now: Int[Tensor, "1"],
    *,
    origin: int | None,
    ring: int = 0,
    score: Float[Tensor, "row slot"] | None = None,
    limit: Limit | None = None,
    backend: str | None = None,
) -> None:
    """Write a token of position `now` into slot `now - origin`, modulo `ring` if that is not 0, and count it.

    `origin=None`: into the first slot of each row whose position is -1; every row must have one. `keys`, `values`,
    `position`, `counts` (int32, contiguous), `score` (0 for the new token) and `limit.units`, by what is counted then, are
    written to. Raises KernelError on shapes that do not fit.
    """
    rows, slots = position.shape
    if k.shape[:2] != (rows, 1) or v.shape[:2] != (rows, 1) or keys.shape[:2] != (rows, slots):
        raise KernelError(
            f"put_token takes k and v [row, 1, *] for slots [row, slot] = {[rows, slots]}; got {list(k.shape)}, "
            f"{list(v.shape)} and {list(keys.shape)}"
        )
    if values.shape[:2] != (rows, slots) or counts.shape != (rows,) or not 0 <= ring <= slots:
        raise KernelError(
            f"for {rows} rows of {slots} slots: values {list(values.shape)}, counts {list(counts.shape)} and ring={ring} "
            "do not fit together"
        )
    run = pick("put_token", (k, v, keys, values), backend, False)
    run.put_token(k, v, keys, values, position, counts, now, origin, ring, score, limit)


__all__ = ["Limit", "put_token"]
