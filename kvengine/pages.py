"""Sealed history: a table of pages per row.

    table      [row, column]           page in the pool, -1 for none
    position   [row, column * page]    as in the tail: -1 for no token
    score      [row, column * page]         where somebody asks for it
    alive      [row, column * page / unit]   whether a unit holds a token
    summary    {name: [row, column * page / unit, ...]}   what the selection remembers of a unit

What is small and belongs to a row is addressed by row; only the pages themselves go through the table. Rows fill their
columns from the left, each at its own pace; a column that a row does not use costs that row a few bytes, not a page.

Copied shallowly to remember a state, like the tail; `shared` is set while a remembered state refers to the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine import page_answers, policies
from kvengine.gradients import live, passes
from kvengine.joint import Joint
from kvengine.kernels.page_scores.coarse import Coarse
from kvengine.page_reads import Readable
from kvengine.policies.representation import Representation
from kvengine.policies.selection import Selection
from kvengine.pool import Pool
from kvengine.tokens import Views, wider

CODED = 1 << 22
"""Numbers of keys that are coded together."""


class Pages(Readable):
    def __init__(
        self,
        pool: Pool,
        rows: int,
        page: int,
        representation: Representation,
        selection: Selection,
        device: torch.device,
        joint: Joint | None = None,
        scored: bool = True,
        inner: int | None = None,
    ):
        """`scored`: whether somebody will read the scores of what is held; if not, they are not stored, and read as 0.
        `inner`: dense pages hold no values, which are so many first channels of the keys."""
        self.pool, self.page, self.joint, self.scored = pool, page, joint, scored
        self.representation, self.selection = representation, selection
        self.inner = inner if representation.codec == "dense" else None
        self.columns = 0  # of the longest row
        self.filled = torch.zeros(rows, dtype=torch.long, device=device)
        self.even = True  # every row has filled all columns
        self.shared = False
        new = dict(device=device)
        self._table = torch.empty(rows, 0, dtype=torch.int32, **new)  # type: ignore[call-overload]
        self._position = torch.empty(rows, 0, dtype=torch.int32, **new)  # type: ignore[call-overload]
        self._score = torch.empty(rows, 0, dtype=torch.float32, **new)  # type: ignore[call-overload]
        self._alive = torch.empty(rows, 0, dtype=torch.bool, **new)  # type: ignore[call-overload]
        self._summary: dict[str, Tensor] = {}
        self.clean = True  # every slot holds a token
        self.coarse = False  # read without what the representation calls fine
        self.cut = False  # some tokens came with gradients, which do not pass through what is kept of them
        self.bounds = Coarse()  # what a selection by bounds keeps to read less of them
        self.beside: dict[str, Any] = {}  # what the selection keeps of all pages together
        self.views = Views()  # of what is known by unit
        pool.users.add(self)

    def __copy__(self) -> Pages:
        twin = object.__new__(Pages)
        twin.__dict__.update(self.__dict__, _summary=dict(self._summary), bounds=copy(self.bounds), views=Views())
        self.pool.users.add(twin)
        return twin

    @property
    def score(self) -> Float[Tensor, "row token"]:
        if not self.scored:
            return self._score.new_zeros(1, 1).expand(len(self._score), len(self))
        return self._score[:, : len(self)]

    @property
    def alive(self) -> Bool[Tensor, "row unit"]:
        return self.by_unit()[0]

    @property
    def summary(self) -> dict[str, Tensor]:
        return dict(zip(self._summary, self.by_unit()[1:], strict=True))

    def by_unit(self) -> tuple[Tensor, ...]:
        """Which units are alive, and their summaries."""
        if not policies.ours(self.selection.__class__.__module__):  # it may reshape what it is given
            self.views.forget()
        return self.views.first(self.units, self._alive, *self._summary.values())

    @property
    def stamps(self) -> Int[np.ndarray, "row column"]:
        """A number for each page's contents, -1 where there is no page."""
        table = self.table.cpu().numpy()
        return np.where(table < 0, -1, self.pool.stamps[table])

    def renumbered(self, used: Int[Tensor, "page"]) -> Int[Tensor, "row column"]:
        """The table with page `used[i]` called `i`; `used` are those in use, in order."""
        table = self._table.long()
        place = torch.searchsorted(used, table.clamp(min=0)) if len(used) else table
        return torch.where(table < 0, table, place).to(torch.int32)

    def pages_in_use(self) -> list[int]:
        table = self.table
        return table[table >= 0].tolist()

    def seal(
        self,
        k: Float[Tensor, "row token dim"],
        v: Float[Tensor, "row token dim_v"],
        position: Int[Tensor, "row token"],
        score: Float[Tensor, "row token"],
        full: bool,
        rows: Int[Tensor, "row"] | None = None,
    ) -> None:
        """Add whole pages, behind those that each row has.

        `full`: every slot holds a token. `rows`: which rows these are (None: all).
        """
        self.own()
        for some in self.shares(k, k.shape[1] // self.page):
            at, m = slice(some.start * self.page, some.stop * self.page), len(range(some.start, some.stop))
            held = [x[:, at] for x in (k, v, position, score)]
            if rows is None and self.even:  # nobody need ask which page is whose
                pages = held if m == 1 else [x.unflatten(1, (m, self.page)).flatten(0, 1) for x in held]
                self.put(slice(self.columns, self.columns + m), pages, full)
            else:
                place, (r, j) = self.places(m, rows)
                self.put(place, [x.unflatten(1, (m, self.page))[r, j] for x in held], full)
            self.advance(m, rows, full)

    def seal_chosen(self, held: tuple[Tensor, ...], index: Int[Tensor, "row slot"], counts: Int[Tensor, "row"]) -> None:
        """Add whole pages of the tokens at `index` among those held (k, v, position, score as in `seal`), copied once.

        `counts`: how many pages each row brings, from the left; what stands behind them in `index` is not looked at.
        """
        self.own()
        pages = index.unflatten(1, (-1, self.page))
        for some in self.shares(held[0], pages.shape[1], counts):
            m = len(range(some.start, some.stop))
            mine = (counts - some.start).clamp(0, m)
            brings = None if bool((mine == m).all()) else mine
            at, (r, j) = self.places(m, None, brings)
            chosen = r[:, None], pages[:, some][r, j]
            self.put(at, [x[chosen] for x in held], True)
            self.advance(m if brings is None else brings, None, True)

    def shares(self, k: Float[Tensor, "row token dim"], columns: int, counts: Tensor | None = None) -> Iterator[slice]:
        """Room for so many columns, of which each row fills so many, and those to be coded together, some at a time: floats of
        all of a long prompt would be several times what is kept of it."""
        self.reserve(columns)
        each = max(1, CODED // max(1, len(k) * self.page * k.shape[2]))
        for start in range(0, columns, each):
            if columns > each and self.pool.shelves:  # at once, as they move when they grow
                rest = columns - start
                self.pool.ensure(len(k) * rest if counts is None else int((counts - start).clamp(min=0).sum()))
            yield slice(start, min(start + each, columns))

    def places(self, m: int, rows: Tensor | None, counts: Tensor | None = None) -> tuple[Any, tuple[Tensor, Tensor]]:
        """(row, column) of each new page, or their columns in every row, and (row, page) of each among those given."""
        index = torch.arange(len(self.filled), device=self.filled.device) if rows is None else rows
        if counts is None:
            r = torch.arange(len(index), device=index.device).repeat_interleave(m)
            j = torch.arange(m, device=index.device).repeat(len(index))
        else:
            r, j = (torch.arange(m, device=index.device) < counts[:, None]).nonzero(as_tuple=True)
        if rows is None and counts is None and self.even:
            return slice(self.columns, self.columns + m), (r, j)
        return (index[r], self.filled[index[r]] + j), (r, j)

    def advance(self, by: int | Tensor, rows: Tensor | None, full: bool) -> None:
        """Count so many more pages, of every row or of these."""
        self.filled = self.filled + by if rows is None else self.filled.index_add(0, rows, torch.ones_like(rows) * by)
        if rows is None and isinstance(by, int):
            self.columns += by
        else:
            self.columns, self.even = max(self.columns, int(self.filled.max())), False
        self.clean &= full and self.even

    def put(self, at: Any, flat: list[Tensor], full: bool) -> None:
        """Store pages, and what belongs to them by row, at these (row, column) places, or in these columns of every row.

        `full`: every slot holds a token.
        """
        k, v, position, score = flat
        if not len(k):
            return
        per, there, want = self.page // self.selection.unit, None, score
        if not full:
            dead = position < 0
            k, v = k.masked_fill(dead[..., None], 0), v.masked_fill(dead[..., None], 0)
            want, there = score.masked_fill(dead, float("-inf")), (~dead).unflatten(1, (per, -1))
        with unrounded(k.device.type):
            fields = page_answers.fields(self.representation, k, v, want, self.pool.forms)
        if self.inner is not None:
            del fields["v"]
        ids = self.pool.put(fields)
        self.cut |= live(k, v) and not passes(self)
        lay(ids, self._table, at, 1)
        lay(position, self._position, at, self.page)
        if self.scored:
            lay(score, self._score, at, self.page)
        lay(True if there is None else there.any(2), self._alive, at, per)
        if self.bounds.done:
            self.bounds.changed(per * (at.start if isinstance(at, slice) else int(at[1].min())))
        for name, x in page_answers.summary(self.selection, k, there, per, self._summary).items():
            if self.joint is not None and name in self.selection.spare:
                continue
            if name not in self._summary:
                self._summary[name] = x.new_zeros(*self._alive.shape, *x.shape[1:])
            lay(x.detach(), self._summary[name], at, per)

    def move(self, by: Int[Tensor, "row"]) -> None:
        """Count each row's tokens as that many positions later."""
        at = self._position
        self._position = torch.where(at >= 0, at + by[:, None].to(at.dtype), at)
        self.joint = None if self.joint is None else self.joint.moved(by)

    def spread(
        self, more: int, k: Float[Tensor, "row token dim"], v: Float[Tensor, "row token dim_v"], spare: bool = False
    ) -> None:
        """Have `more` columns that name no page yet, and the pages for them: nothing moves while they are filled.

        `k`, `v` say the shapes, where no page was sealed so far. `spare`: and one for each row, into which others may be merged.
        """
        self.reserve(more + 1)
        if not self.pool.shelves:
            first = [x.new_zeros(1, self.page, x.shape[-1]) for x in (k, v)]
            at = torch.zeros(2, 1, dtype=torch.long, device=k.device)
            nothing = torch.full((1, self.page), -1, device=k.device)
            self.put((at[0], at[1]), [*first, nothing, nothing.float()], True)
            self._table[0, 0] = -1
            self._alive[0, : self.page // self.selection.unit] = False
        self.pool.ensure((more + spare) * len(self.filled))
        self.columns += more
        self.even = self.clean = False
        self.bounds.clear()

    def place(self, rows: Int[Tensor, "some"], page: list[Tensor]) -> None:
        """Seal one page [some, slot, ...] of each of these rows, into columns that are there already."""
        self.put((rows, self.filled[rows]), page, False)
        self.filled = self.filled.index_add(0, rows, torch.ones_like(rows))

    def gather_columns(self) -> None:
        """Undo `spread`: no more columns than are filled."""
        self.columns = int(self.filled.max())
        self.even = bool((self.filled == self.columns).all())

    def clear(self, rows: Bool[Tensor, "row"]) -> None:
        """Forget what these rows hold."""
        self._table = self._table.masked_fill(rows[:, None], -1)
        self._position = self._position.masked_fill(rows[:, None], -1)
        self._alive = self._alive.masked_fill(rows[:, None], False)
        self.filled = self.filled.masked_fill(rows, 0)
        self.clean = False
        self.gather_columns()
        self.bounds.clear()

    def own(self) -> None:
        """Part from tensors that a remembered state refers to."""
        if self.shared:
            self._table, self._position, self._score = self._table.clone(), self._position.clone(), self._score.clone()
            self._alive = self._alive.clone()
            self._summary = {name: x.clone() for name, x in self._summary.items()}
            self.shared = False

    @property
    def roomy(self) -> bool:
        """Whether each row can have one more page, and no tensor is replaced by a longer one."""
        return self.columns < self._table.shape[1] and len(self.filled) <= len(self.pool.free)

    def reserve(self, more: int) -> None:
        """Room for `more` columns, an eighth more than asked if there is none."""
        if (need := self.columns + more) <= self._table.shape[1]:
            return
        self.bounds.remembered.forget()
        self.views.forget()
        columns = spared(need) if self.columns else need + 1
        self._table = wider(self._table, columns, -1)
        self._position = wider(self._position, columns * self.page, -1)
        if self.scored:
            self._score = wider(self._score, columns * self.page, 0)
        per = self.page // self.selection.unit
        self._alive = wider(self._alive, columns * per, False)
        self._summary = {name: wider(x, columns * per, 0) for name, x in self._summary.items()}

    def judge(self, score: Float[Tensor, "row token"], keep: Bool[Tensor, "row token"] | None) -> None:
        """Set scores, and drop what is not kept."""
        if self.scored:
            self._score = wider(score.float(), self._score.shape[1], 0)
        if keep is not None:
            position = self.position.masked_fill(~keep, -1)
            alive = (position >= 0).unflatten(1, (-1, self.selection.unit)).any(2)
            self._position = wider(position, self._position.shape[1], -1)
            self._alive = wider(alive, self._alive.shape[1], False)
            self.clean = False

    def release(self) -> int:
        """Give back pages without a token, and move those of each row together; how many slots of a row went.

        What belongs to rows stays where it is, unless it would have more to spare than `reserve` takes: launches that are noted
        for a GPU name its memory.
        """
        self.own()
        table = self.table
        table.masked_fill_(~(self.position >= 0).unflatten(1, (-1, self.page)).any(2), -1)
        most = int((table >= 0).sum(1).max())
        if gone := self.columns - most:
            order = (table < 0).int().argsort(dim=1, stable=True)[:, :most]
            self.columns = most
            stays = spared(most) >= self._table.shape[1]
            per = self.page // self.selection.unit
            pick = partial(picked, columns=order, gone=gone, stays=stays)
            self._table = pick(self._table, 1, -1)
            self._position = pick(self._position, self.page, -1)
            self._score = pick(self._score, self.page, 0) if self.scored else self._score
            self._alive = pick(self._alive, per, False)
            self._summary = {name: pick(x, per, 0) for name, x in self._summary.items()}
            self.bounds.clear(moved=not stays)
            self.filled, self.even = torch.full_like(self.filled, most), True
        self.pool.spares(len(self.filled))  # of these, so that they are known to be free before more are asked for
        return gone * self.page

    def rows(self, index: Int[Tensor, "chosen"]) -> None:
        """Become the given rows; pages are shared, not copied."""
        self._table, self._position, self._score = self._table[index], self._position[index], self._score[index]
        self._alive, self.filled = self._alive[index], self.filled[index]
        self._summary = {name: x[index] for name, x in self._summary.items()}
        if not self.even:
            self.gather_columns()  # the rows with most pages may be gone
        self.bounds.clear()
        self.views.forget()
        self.joint = None if self.joint is None else self.joint.rows(index)

    def tensors(self) -> dict[str, Tensor]:
        """What is addressed by row."""
        named = {f"summary.{name}": x for name, x in self._summary.items()}
        named |= {f"bounds.{name}": x for name, x in self.bounds.tensors.items()}
        named |= {} if self.joint is None else {f"joint.{name}": x for name, x in self.joint.fields.items()}
        return {"table": self._table, "position": self._position, "score": self._score, "alive": self._alive, **named}


def unrounded(device: str) -> AbstractContextManager[Any]:
    """No autocast: what is kept is not to be rounded on its way into a code."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def lay(x: Tensor | bool, into: Tensor, at: Any, n: int) -> None:
    """Write what belongs to pages, `n` of it to each, to the (row, column) or the columns that these have."""
    if not isinstance(at, slice):
        places = into.unflatten(1, (-1, n))
        places[at] = x if isinstance(x, bool) else x.reshape(-1, n, *into.shape[2:]).to(into.dtype)
    elif isinstance(x, bool):
        into[:, at.start * n : at.stop * n].fill_(x)
    else:
        into[:, at.start * n : at.stop * n] = x.reshape(len(into), -1, *into.shape[2:])


def spared(columns: int) -> int:
    """So many columns with an eighth to spare."""
    return columns + columns // 8


def picked(x: Tensor, n: int, empty: float, *, columns: Int[Tensor, "row some"], gone: int, stays: bool) -> Tensor:
    """These columns of what belongs to columns, `n` of it to each: if it `stays`, at the front of the same memory, and `empty`
    ones behind them for those that are `gone`."""
    found = x.unflatten(1, (-1, n))[torch.arange(len(x), device=x.device)[:, None], columns].flatten(1, 2)
    if not stays:
        return found
    end = found.shape[1]
    x[:, :end] = found
    x[:, end : end + gone * n].fill_(empty)
    return x
