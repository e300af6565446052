"""Move the living tokens of sparsely filled pages into fewer pages, each byte read and written once."""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Int
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.dispatch import pick


def compact(
    fields: Mapping[str, Tensor],
    table: Int[Tensor, "row pages"],
    position: Int[Tensor, "row slot"],
    into: Int[Tensor, "row fewer"],
    *,
    page: int,
    backend: str | None = None,
) -> Int[Tensor, "row new_slot"]:
    """Copy each row's living slots, in order, to the front of its pages `into` (in place, in the same pools).

    `fields`: those with one entry per slot, [pages, page, ...]; group-wise scales of quantised keys cannot move token
    by token. `into`: free pages, none of them in `table`, enough for every living slot; -1 where a row needs fewer.
    Returns the new positions [row, fewer * page], -1 past the last living token. Untouched slots keep their bytes.
    Raises KernelError for a field that is not addressed by slot. No host sync: the caller knows that `into` suffices.
    """
    for name, field in fields.items():
        if field.dim() < 2 or field.shape[1] != page:
            raise KernelError(f"field {name!r} must be [pages, {page}, ...] to move by slot; got {list(field.shape)}")
    if position.shape != (table.shape[0], table.shape[1] * page) or into.shape[0] != table.shape[0]:
        raise KernelError(
            f"table {list(table.shape)}, position {list(position.shape)} and into {list(into.shape)} do not fit"
        )
    run = pick("compact", (position, *fields.values()), backend, native=False)
    return run.compact(fields, table, position, into, page)  # type: ignore[no-any-return]
