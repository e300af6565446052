"""From chosen units to the tokens they hold.

A row's slots are numbered through its pages: slot `s` lies in page `table[row, s // page]`, at place `s % page`. Unit
`u` is slots `u * unit ... (u + 1) * unit - 1`; `unit` divides `page`, so a unit never straddles two pages.

>>> table = torch.tensor([[7, 2]])                      # one row, two pages of four slots
>>> position = torch.tensor([[0, 1, 2, 3, 4, 5, -1, -1]])
>>> where, position = resolve(table, position, torch.tensor([[3, -1]]), 2, 4)
>>> where                                               # unit 3 is the second half of page 2
tensor([[10, 11,  0,  0]])
>>> position                                            # its slots are dead, and no unit is named after it
tensor([[-1, -1, -1, -1]])
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def resolve(
    table: Int[Tensor, "row page"],
    position: Int[Tensor, "row slot"],
    units: Int[Tensor, "row chosen"] | None,
    unit: int,
    page: int,
) -> tuple[Int[Tensor, "row token"], Int[Tensor, "row token"]]:
    """For each token of the chosen units: its index in the pool seen as one run of slots, and its position (-1: none).

    `units` None means every slot of the table. Tokens that are not there have index 0.
    """
    if units is None:
        units, unit = torch.arange(table.shape[1], device=table.device).expand(table.shape), page
    slot = (units.clamp_min(0)[..., None] * unit + torch.arange(unit, device=units.device)).flatten(1)
    held = table.long().gather(1, slot // page)
    there = units.repeat_interleave(unit, 1).ge(0) & held.ge(0)
    where = torch.where(there, held * page + slot % page, 0)
    return where, torch.where(there, position.gather(1, slot), -1)


def visible_to(
    position: Int[Tensor, "row token"],
    query_position: Int[Tensor, "row query"] | None,
    window: int | None,
    queries: int,
) -> Bool[Tensor, "row query token"]:
    """Which tokens each query sees: live ones, not after it, and fewer than `window` positions before it."""
    alive = (position >= 0)[:, None].expand(-1, queries, -1)
    if query_position is None:
        return alive
    distance = query_position[:, :, None] - position[:, None]
    inside = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    return alive & inside
