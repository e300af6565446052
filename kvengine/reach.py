"""What a lane's last query has read, told when somebody asks: statistics do, decoding does not."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from kvengine.pages import Pages
from kvengine.tail import Tail


class Reach(NamedTuple):
    """Units of pages and a whole tail, as they were when the query asked. Tokens may have moved from the tail to pages since.

    Attributes:
        units: [row, chosen], -1 for none; None: all.
        pages: positions of all slots of the pages then; later pages come behind them.
        tail: positions of the tail's slots then.
        unit: slots of a unit.
    """

    units: Int[Tensor, "row chosen"] | None
    pages: Int[Tensor, "row slot"] | None
    tail: Int[Tensor, "row token"]
    unit: int

    def positions(self) -> Int[Tensor, "row token"]:
        """Of what was read, -1 for none."""
        if self.pages is None:
            return self.tail
        if self.units is None:
            return torch.cat([self.pages, self.tail], 1)
        units, pages = self.units, self.pages.unflatten(1, (-1, self.unit))
        gone = (units < 0) | (units >= pages.shape[1])  # it read pages that have been rolled back since
        at = units.masked_fill(gone, 0)[:, :, None].expand(-1, -1, pages.shape[2])
        return torch.cat([pages.gather(1, at).masked_fill(gone[:, :, None], -1).flatten(1), self.tail], 1)

    def told(self, rows: Int[Tensor, "chosen"] | None = None) -> Reach:
        """The same, or that of some rows, with nothing kept but the positions."""
        found = self.positions()
        return Reach(None, None, found if rows is None else found[rows], 1)


def reached(
    units: Int[Tensor, "row chosen"] | None, pages: Pages | None, tail: Tail, position: Tensor | None = None
) -> Reach:
    """What a query reads of these now. `position`: of all of the tail's slots, if they are at hand."""
    near = (tail.position if position is None else position)[:, tail.span]
    near = near.clone() if tail.placed else near  # else they are made at each time, and nobody writes there
    if pages is None:
        return Reach(units, None, near, 1)
    return Reach(units, pages.position, near, pages.selection.unit)
