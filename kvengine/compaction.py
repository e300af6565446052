"""Pages that a retention has left few tokens in: what is left of several moves into one.

Codes are not written again, but those of a token that stand for it alone may lie anywhere. Each row's emptiest pages, as many as
fit into one, go into a fresh one; until no two do, so that fewer than half of all slots are holes. A token's bytes are read and
written once for each time, and it is moved again only when its page has emptied by half since.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from kvengine.kernels.compact import compact
from kvengine.offload.placement import Flat
from kvengine.pages import Pages


def can_merge(pages: Pages) -> bool:
    """Whether tokens can move among these pages: each is coded by itself, and all are on the compute device."""
    shelves = pages.pool.shelves
    return (
        pages.representation.by_slot
        and pages.pool.per == 1
        and all(type(x) is Flat and x.tier == "device" for x in shelves)
    )


def fill_up(pages: Pages) -> None:
    """After `Pages.release`: leave no two pages of a row whose tokens fit into one, where tokens can move."""
    while can_merge(pages) and merge(pages):
        pass


def merge(pages: Pages) -> bool:
    """Once for each row that has two such pages; whether any has. Pages of a remembered state stay as they are."""
    page, per = pages.page, pages.page // pages.selection.unit
    counts = (pages.position >= 0).unflatten(1, (-1, page)).sum(2).masked_fill_(pages.table < 0, page + 1)
    fewest, order = counts.sort(dim=1, stable=True)
    fit = fewest.cumsum(1) <= page
    rows = (fit.sum(1) > 1).nonzero()[:, 0]
    if not len(rows):
        return False
    order, fit = order[rows], fit[rows]
    width = int(fit.sum(1).max())
    order, fit = order[:, :width], fit[:, :width]
    at = rows[:, None], order  # of what moves, a page each
    places = lambda x, n: x[:, : pages.columns * n].unflatten(1, (-1, n))  # noqa: E731
    position = places(pages._position, page)[at].masked_fill(~fit[..., None], -1).flatten(1)
    into = torch.tensor(pages.pool.fresh(len(rows)), device=rows.device)
    fields = pages.pool.resident(into, None, per) or {}
    for x in fields.values():
        x[into] = 0  # what nobody wrote may be no number
    moved = compact(fields, pages._table[at].masked_fill(~fit, -1), position, into[:, None], page=page)
    score = ranked(places(pages._score, page)[at].flatten(1), position >= 0, page) if pages.scored else None
    gone = rows[:, None].expand_as(order)[fit], order[fit]
    places(pages._table, 1)[gone] = -1
    places(pages._position, page)[gone] = -1
    places(pages._alive, per)[gone] = False
    first = rows, order[:, 0]
    places(pages._table, 1)[first] = into[:, None].to(pages._table.dtype)
    places(pages._position, page)[first] = moved
    places(pages._alive, per)[first] = (moved >= 0).unflatten(1, (per, -1)).any(2)
    if score is not None:
        places(pages._score, page)[first] = score
    return True


def ranked(x: Tensor, alive: Bool[Tensor, "row slot"], n: int) -> Tensor:
    """Of each row what is alive, in order, in so many places; 0 in those behind."""
    out = x.new_zeros(len(x), n + 1)
    out.scatter_(1, torch.where(alive, alive.cumsum(1) - 1, n), x)
    return out[:, :n]
