"""Strays: tokens that a retention has left in pages of which most is holes, where codes stand for tokens together.

Codes that tokens share are not written again, as each time more would be lost, and a page of them takes its bytes for as long as
it holds one token. So where tokens take fewer bytes as they are than their page does, they move to the tail as they were read
there, and stay until they are dropped: what a row holds then takes no more than the retention alone would, but for the tail's
room. Rows that differ share a width of the tail, see `emptied`.

    tail      strays | open tokens, the oldest of which are sealed

A row's strays are whatever stands before its open tokens. But for rounding to the tail's dtype nothing is read otherwise than
before, so it does not matter when they move, nor what else is in the batch; hence not where a selection would choose among pages.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvengine import page_answers
from kvengine.tail import Tail
from kvengine.tokens import narrowed, pack, take

if TYPE_CHECKING:
    from kvengine.holding import Holding
    from kvengine.pages import Pages


def can_stray(lane: Holding, pages: Pages) -> bool:
    """Whether tokens leave them so, where the retention drops some: they lie on the compute device, in codes."""
    retention, form = lane.retention, lane.stack.representation
    if retention.merges or retention.ends is not None or form.by_slot or type(lane.tail) is not Tail:
        return False
    return pages.pool.per == 1 and pages.pool.on_device


def strays(lane: Holding, later: int = 0) -> Bool[Tensor, "row slot"] | None:
    """Which slots of the tail hold them, if so many slots came `later` than what is open; None if there are none."""
    tail, n = lane.tail, len(lane.tail) - later
    if not tail.strays:
        return None
    at, open_slots = torch.arange(len(tail), device=lane.first.device), lane.open()
    before = at < (n - open_slots[:, None] if isinstance(open_slots, Tensor) else n - open_slots)
    return before & (tail.position[:, tail.span] >= 0)


def stand_before(
    lane: Holding, mine: Bool[Tensor, "row slot"] | None, more: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
) -> None:
    """Have the tail hold these slots of it, and what is `more`, before the open tokens, which are its last."""
    tail, n, held = lane.tail, max(n for n, _ in lane.lengths), lane.tail.held()
    every = held if more is None else [torch.cat([x, y], 1) for x, y in zip(held, more, strict=True)]
    mine = torch.zeros_like(held[2], dtype=torch.bool) if mine is None else mine
    index = pack(mine if more is None else torch.cat([mine, more[2] >= 0], 1))
    newest = [x[:, x.shape[1] - n :] for x in held]
    if len(lane.lengths) > 1:  # of rows that have fewer, strays may stand here
        closed = torch.arange(n, device=index.device) < n - lane.open()[:, None]  # type: ignore[index]
        newest[2] = newest[2].masked_fill(closed, -1)
    front = [take(x, index, empty) for x, empty in zip(every, (0, 0, -1, 0), strict=True)]
    k, v, position, score = (torch.cat(both, 1) for both in zip(front, newest, strict=True))
    tail.replace(k, v, position, score, False, index.shape[1] + lane.stack.room + lane.stack.page)
    tail.strays = index.shape[1] > 0


def part(lane: Holding) -> int:
    """Have the first slots of the tail be those of strays, for all rows; how many they are."""
    if (mine := strays(lane)) is None:
        return 0
    stand_before(lane, mine)
    return len(lane.tail) - max(n for n, _ in lane.lengths)


def bring_in(lane: Holding) -> None:
    """Move tokens from emptying pages to the tail, if that saves bytes. The host waits for the device to know."""
    pages = lane.pages
    if pages is None or not can_stray(lane, pages):
        return
    mine = strays(lane)
    counts = (pages.position >= 0).unflatten(1, (-1, pages.page)).sum(2).masked_fill_(pages.table < 0, 0)
    here = counts.new_zeros(len(counts), 1) if mine is None else mine.sum(1, keepdim=True)
    known = torch.cat([here, counts], 1).cpu().numpy()
    token = sum(x.shape[-1] * x.element_size() for x in (lane.tail.k, lane.tail.v))
    found = emptied(known[:, 1:], known[:, 0], token, pages.pool.page_bytes)
    if found is None:
        return
    which = torch.from_numpy(found).to(counts.device)
    pages.own()
    more = taken_out(lane.tail, pages, which)
    pages.release()
    lane.beside.forget(lane.tail)
    stand_before(lane, mine, more)


def emptied(
    counts: Int[np.ndarray, "row column"], strays: Int[np.ndarray, "row"], token: int, page: int
) -> Bool[np.ndarray, "row column"] | None:
    """The pages whose tokens are to leave them. `counts`: tokens in each page; `token`, `page`: bytes.

    A row has as many slots as the fullest, so each gives up its emptiest pages until it has some number of strays: the number by
    which most is saved. None if nothing is.

    >>> emptied(np.array([[2, 0, 8, 1], [8, 3, 7, 8]]), np.array([0, 0]), token=1, page=5)
    array([[ True, False, False,  True],
           [False,  True, False, False]])
    """
    order = counts.argsort(1, kind="stable")
    n = np.take_along_axis(counts, order, 1)
    worth = (n > 0) & (n * token < page)
    upto = strays[:, None] + n.cumsum(1)
    each = np.sort(upto[worth])
    saved = page * np.arange(1, len(each) + 1) - token * len(counts) * (each - strays.max()).clip(0)
    if not len(each) or saved.max() <= 0:
        return None
    out = np.zeros(counts.shape, dtype=bool)
    np.put_along_axis(out, order, worth & (upto <= each[saved.argmax()]), 1)
    return out


def taken_out(tail: Tail, pages: Pages, which: Bool[Tensor, "row column"]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, positions and scores of the tokens in these pages, which hold none then, in the tail's dtypes; no positions
    behind those of a row that has fewer."""
    row, column = which.nonzero(as_tuple=True)
    fields = pages.resident(None) or {}
    ids = pages.table[row, column].long()
    k, v = page_answers.decoded(pages.representation, pages.whole({name: x[ids] for name, x in fields.items()}))
    position, score = (x.unflatten(1, (-1, pages.page))[row, column] for x in (pages.position, pages.score))
    page, slot = (position >= 0).nonzero(as_tuple=True)
    row_of, count = row[page], torch.bincount(row[page], minlength=len(which))
    place = torch.arange(len(page), device=row.device) - (count.cumsum(0) - count)[row_of]
    shape = len(which), int(count.max())
    found = []
    for x, like, none in ((k, tail.k, 0), (v, tail.v, 0), (position, position, -1), (score, score, 0)):
        some = x.new_full((*shape, *x.shape[2:]), none, dtype=like.dtype)
        some[row_of, place] = narrowed(x[page, slot], like.dtype)
        found.append(some)
    for x, n, none in ((pages._position, pages.page, -1), (pages._alive, pages.page // pages.selection.unit, False)):
        x.unflatten(1, (-1, n))[row, column] = none
    return tuple(found)  # type: ignore[return-value]
