"""Pages that a retention has left few tokens in: what is left of neighbours moves into one.

Codes are not written again, but those of a token that stand for it alone may lie anywhere. From a row's first page on, as many
neighbours as fit into one go into a fresh one: then no two of them would, and fewer than half of all slots are holes. A token's
bytes are read and written once, and tokens stay in order. What a selection knows of a page is found anew, from the keys as they
are read: it no longer counts tokens that are gone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvengine import page_answers
from kvengine.kernels.compact import compact
from kvengine.pages import Pages, lay
from kvengine.pool import Pool


def can_merge(pages: Pages) -> bool:
    """Whether tokens can move among these pages: each is coded by itself, and all are on the compute device."""
    return pages.representation.by_slot and pages.pool.per == 1 and pages.pool.on_device


def fill_up(pages: Pages, rows: Bool[Tensor, "row"] | None = None) -> None:
    """Leave no two neighbours of a row (of these rows) whose tokens fit into one page, where tokens can move.

    Pages of a remembered state stay as they are. The host waits for the device once, to know what each page holds.
    """
    if not can_merge(pages):
        return
    counts = (pages.position >= 0).unflatten(1, (-1, pages.page)).sum(2)
    counts = counts if rows is None else counts * rows[:, None]
    row, columns = neighbours(counts.cpu().numpy(), pages.page)
    if not len(row):
        return
    pages.own()
    done = 0
    while done < len(row):
        pages.pool.spares(len(row) - done)
        some = slice(done, done + max(1, len(pages.pool.free)))  # what these leave is free for the next
        merge(pages, row[some], columns[some])
        done = some.stop


def neighbours(
    counts: Int[np.ndarray, "row column"], page: int
) -> tuple[Int[np.ndarray, "run"], Int[np.ndarray, "run most"]]:
    """Pages that become one: their row, and their columns, -1 behind those of a shorter run. `counts`: tokens in each page.

    >>> neighbours(np.array([[3, 0, 4, 2, 8], [5, 4, 4, 0, 8]]), 8)
    (array([0, 1]), array([[0, 2],
           [1, 2]]))
    """
    run = np.empty_like(counts)
    held, number = np.full(len(counts), page), np.full(len(counts), -1)
    for i, n in enumerate(counts.T):
        begins = held + n > page
        held, number = np.where(begins, n, held + n), number + begins
        run[:, i] = number
    row, column = counts.nonzero()
    number = row * counts.shape[1] + run[row, column]
    _, first, size = np.unique(number, return_index=True, return_counts=True)
    first, size = first[size > 1], size[size > 1]
    place = np.arange(size.max(initial=0))
    columns = np.append(column, -1)[np.where(place < size[:, None], first[:, None] + place, len(column))]
    return row[first], columns


def merge(pages: Pages, row: Int[np.ndarray, "run"], columns: Int[np.ndarray, "run most"]) -> None:
    """Each run of pages into one, that stands where the first of them did."""
    device, page, per = pages._table.device, pages.page, pages.page // pages.selection.unit
    into = torch.tensor(pages.pool.fresh(len(row)), device=device)
    rows, column = (torch.from_numpy(x).to(device) for x in (row, columns))
    there, at = column >= 0, (rows[:, None], column.clamp(min=0))
    position, table = (of(pages._position, page)[at].masked_fill(~there[..., None], -1).flatten(1), pages._table[at])
    fields = pages.pool.resident(into) or {}
    for x in fields.values():
        x[into] = 0  # what nobody wrote may be no number
    moved = compact(fields, table.masked_fill(~there, -1), position, into[:, None], page=page)
    gone = rows[:, None].expand_as(column)[there], column[there]
    first = rows, column[:, 0]
    if pages.scored:
        score = ranked(of(pages._score, page)[at].flatten(1), position >= 0, page)
        lay(score, pages._score, first, page)
    lay(False, pages._alive, gone, per)
    of(pages._position, page)[gone] = pages._table[gone] = -1
    lay(into, pages._table, first, 1)
    lay(moved, pages._position, first, page)
    alive = (moved >= 0).unflatten(1, (per, -1))
    lay(alive.any(2), pages._alive, first, per)
    pages.bounds.changed(per * int(columns[:, 0].min()))
    if pages._summary:
        k, _ = page_answers.decoded(pages.representation, pages.whole({name: x[into] for name, x in fields.items()}))
        for name, x in page_answers.summary(pages.selection, k, alive, per).items():
            lay(x, pages._summary[name], first, per)


def shed(pages: Pages, fresh: Callable[[], Pool]) -> bool:
    """Part from a pool of which less than half is in use, for a `fresh` one of what is; whether that was done.

    Remembered states and copies keep theirs. What lies elsewhere stays: what is in use there was moved once already.
    """
    old, rows = pages.pool, len(pages.filled)
    if 2 * rows * pages.columns >= old.pages or not old.on_device:
        return False
    numbers = sorted(set(pages.pages_in_use()))
    new = pages.pool = fresh()
    new.users.add(pages)
    if numbers:
        used = torch.tensor(numbers, device=pages._table.device)
        new.put(old.read(used))  # as pages 0, 1, 2 ...
        new.stamps[: len(numbers)] = old.stamps[numbers]  # the contents are what they were
        pages._table = pages.renumbered(used)
    new.written = old.written
    return True


def of(x: Tensor, n: int) -> Tensor:
    """What belongs to columns, `n` of it to each."""
    return x.unflatten(1, (-1, n))


def ranked(x: Tensor, alive: Bool[Tensor, "row slot"], n: int) -> Tensor:
    """Of each row what is alive, in order, in so many places; 0 in those behind."""
    out = x.new_zeros(len(x), n + 1)
    out.scatter_(1, torch.where(alive, alive.cumsum(1) - 1, n), x)
    return out[:, :n]
