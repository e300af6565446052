"""Where chosen units lie, and which tokens they hold: what is asked before they are fetched from elsewhere."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.dispatch import pick


def unit_places(
    units: Int[Tensor, "row chosen"],
    table: Int[Tensor, "row pages"],
    position: Int[Tensor, "row slot"],
    *,
    page: int,
    unit: int,
    backend: str | None = None,
) -> tuple[Int[Tensor, "piece"], Int[Tensor, "row place"]]:
    """Each unit's number among the units of all pages (int64, rows one after the other), and its tokens' positions.

    `units`: of each row's pages by `table`, `page // unit` to a page; -1 for none, of which the positions are -1, and the
    number is one that exists. `position` (int32): -1 where a slot holds no token. Raises KernelError on shapes that do not
    fit.
    """
    if position.shape != (len(units), table.shape[1] * page) or len(table) != len(units) or page % unit:
        raise KernelError(
            f"for units {list(units.shape)} of {unit} in pages of {page}: table {list(table.shape)} and position "
            f"{list(position.shape)} do not fit together"
        )
    return pick("unit_places", (units,), backend, False).unit_places(units, table, position, page // unit, unit)  # type: ignore[no-any-return]


__all__ = ["unit_places"]
