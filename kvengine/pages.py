"""Sealed history: a table of pages per row.

    table      [row, column]           page in the pool, -1 for none
    position   [row, column * page]    as in the tail: -1 for no token
    score      [row, column * page]
    alive      [row, column * page / unit]   whether a unit holds a token
    summary    {name: [row, column * page / unit, ...]}   what the selection remembers of a unit

What is small and belongs to a row is addressed by row; only the pages themselves go through the table. A column that
a row does not use costs that row a few bytes, not a page.

Copied shallowly to remember a state, like the tail: sealing writes only new columns, everything else replaces tensors.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.policies.representation import Representation
from kvengine.policies.selection import Selection
from kvengine.pool import Pool, User


class Pages(User):
    def __init__(self, pool: Pool, rows: int, page: int, representation: Representation, selection: Selection, device: torch.device):
        self.pool, self.page = pool, page
        self.representation, self.selection = representation, selection
        self.columns = 0
        new = dict(device=device)
        self._table = torch.empty(rows, 0, dtype=torch.int32, **new)  # type: ignore[call-overload]
        self._position = torch.empty(rows, 0, dtype=torch.int32, **new)  # type: ignore[call-overload]
        self._score = torch.empty(rows, 0, dtype=torch.float32, **new)  # type: ignore[call-overload]
        self._alive = torch.empty(rows, 0, dtype=torch.bool, **new)  # type: ignore[call-overload]
        self._summary: dict[str, Tensor] = {}
        self.clean = True  # every slot holds a token
        pool.users.add(self)

    def __copy__(self) -> Pages:
        twin = object.__new__(Pages)
        twin.__dict__.update(self.__dict__, _summary=dict(self._summary))
        self.pool.users.add(twin)
        return twin

    def __len__(self) -> int:
        """Slots of a row."""
        return self.columns * self.page

    @property
    def units(self) -> int:
        return len(self) // self.selection.unit

    @property
    def table(self) -> Int[Tensor, "row column"]:
        return self._table[:, : self.columns]

    @property
    def position(self) -> Int[Tensor, "row token"]:
        return self._position[:, : len(self)]

    @property
    def score(self) -> Float[Tensor, "row token"]:
        return self._score[:, : len(self)]

    @property
    def alive(self) -> Bool[Tensor, "row unit"]:
        return self._alive[:, : self.units]

    @property
    def summary(self) -> dict[str, Tensor]:
        return {name: x[:, : self.units] for name, x in self._summary.items()}

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
    ) -> None:
        """Add whole pages. `full`: every slot holds a token; else pages without any are not stored."""
        m = k.shape[1] // self.page
        pages = [x.unflatten(1, (m, self.page)) for x in (k, v, position, score)]
        if full:
            used = torch.ones(k.shape[0], m, dtype=torch.bool, device=k.device)
        else:
            used = (pages[2] >= 0).any(2)
        self.reserve(m)
        at = slice(self.columns, self.columns + m)
        kept = [x.flatten(0, 1) if full else x[used] for x in pages]
        dead = None if full else kept[2] < 0
        if dead is not None:
            kept[:2] = [x.masked_fill(dead[..., None], 0) for x in kept[:2]]
        if len(kept[0]):
            ids = self.pool.put(self.representation.encode(kept[0], kept[1], kept[3]))
            if full:
                self._table[:, at] = ids.view(k.shape[0], m).to(torch.int32)
            else:
                self._table[:, at].masked_scatter_(used, ids.to(torch.int32))
        slots = slice(at.start * self.page, at.stop * self.page)
        self._position[:, slots], self._score[:, slots] = position.to(torch.int32), score
        self.summarise(k, position >= 0, at)
        self.columns += m
        self.clean &= full

    def summarise(self, k: Tensor, valid: Tensor, at: slice) -> None:
        per = self.page // self.selection.unit
        units = slice(at.start * per, at.stop * per)
        by_unit = k.unflatten(1, (-1, self.selection.unit)).flatten(0, 1)
        there = valid.unflatten(1, (-1, self.selection.unit))
        self._alive[:, units] = there.any(2)
        for name, x in self.selection.summarise(by_unit, there.flatten(0, 1)).items():
            x = x.unflatten(0, (k.shape[0], -1))
            if name not in self._summary:
                room = self._alive.shape[1]
                self._summary[name] = torch.zeros(x.shape[0], room, *x.shape[2:], dtype=x.dtype, device=x.device)
            self._summary[name][:, units] = x

    def reserve(self, more: int) -> None:
        """Room for `more` columns, an eighth more than asked if there is none."""
        need = self.columns + more
        if need <= self._table.shape[1]:
            return
        columns = need + (need // 8 if self.columns else 1)
        self._table = wider(self._table, columns, -1)
        self._position = wider(self._position, columns * self.page, -1)
        self._score = wider(self._score, columns * self.page, 0)
        per = self.page // self.selection.unit
        self._alive = wider(self._alive, columns * per, False)
        self._summary = {name: wider(x, columns * per, 0) for name, x in self._summary.items()}

    def judge(self, score: Float[Tensor, "row token"], keep: Bool[Tensor, "row token"] | None) -> None:
        """Set scores, and drop what is not kept."""
        self._score = wider(score, self._score.shape[1], 0)
        if keep is not None:
            position = self.position.masked_fill(~keep, -1)
            alive = (position >= 0).unflatten(1, (-1, self.selection.unit)).any(2)
            self._position = wider(position, self._position.shape[1], -1)
            self._alive = wider(alive, self._alive.shape[1], False)
            self.clean = False

    def release(self) -> int:
        """Give back pages without a token, and columns that no row uses; how many slots of a row went."""
        empty = ~(self.position >= 0).unflatten(1, (-1, self.page)).any(2)
        table = self.table.masked_fill(empty, -1)
        used = (table >= 0).any(0).nonzero()[:, 0]
        self._table = wider(table, self._table.shape[1], -1)
        gone = self.columns - len(used)
        if gone:
            self.columns = len(used)
            per = self.page // self.selection.unit
            pick = lambda x, n: x.unflatten(1, (-1, n))[:, used].flatten(1, 2)  # noqa: E731
            self._table = self._table[:, used]
            self._position, self._score = pick(self._position, self.page), pick(self._score, self.page)
            self._alive = pick(self._alive, per)
            self._summary = {name: pick(x, per) for name, x in self._summary.items()}
        return gone * self.page

    def decoded(self, columns: slice | None = None) -> tuple[Float[Tensor, "row token dim"], Float[Tensor, "row token dim_v"]]:
        """Keys and values of all slots; zeros where a row has no page."""
        table = self.table if columns is None else self.table[:, columns]
        fields = self.pool.read(table.clamp(min=0).flatten().long())
        k, v = self.representation.decode(fields)
        shape = (len(table), -1)
        return k.flatten(0, 1).unflatten(0, shape), v.flatten(0, 1).unflatten(0, shape)

    def chosen(
        self, units: Int[Tensor, "row chosen"]
    ) -> tuple[Float[Tensor, "row token dim"], Float[Tensor, "row token dim_v"], Int[Tensor, "row token"]]:
        """Keys, values and positions of the chosen units; position -1 where there is nothing."""
        unit, per = self.selection.unit, self.page // self.selection.unit
        at = units.clamp(min=0)
        page = self.table.gather(1, at // per).clamp(min=0).long()
        k, v = self.representation.decode(self.pool.read(page.flatten()))
        part = (at % per).flatten()
        every = torch.arange(len(part), device=part.device)
        pick = lambda x: x.unflatten(1, (per, unit))[every, part].unflatten(0, units.shape).flatten(1, 2)  # noqa: E731
        slots = (at[..., None] * unit + torch.arange(unit, device=at.device)).flatten(1)
        position = self.position.gather(1, slots)
        gone = (units < 0)[..., None].expand(-1, -1, unit).flatten(1)
        return pick(k), pick(v), position.masked_fill(gone, -1)

    def rows(self, index: Int[Tensor, "chosen"]) -> None:
        """Become the given rows; pages are shared, not copied."""
        self._table, self._position, self._score = self._table[index], self._position[index], self._score[index]
        self._alive = self._alive[index]
        self._summary = {name: x[index] for name, x in self._summary.items()}

    def tensors(self) -> dict[str, Tensor]:
        """What is addressed by row."""
        named = {f"summary.{name}": x for name, x in self._summary.items()}
        return {"table": self._table, "position": self._position, "score": self._score, "alive": self._alive, **named}


def wider(x: Tensor, size: int, empty: float) -> Tensor:
    """`x` in front of `empty` up to `size` along axis 1."""
    if x.shape[1] == size:
        return x
    out = torch.full((x.shape[0], size, *x.shape[2:]), empty, dtype=x.dtype, device=x.device)
    out[:, : x.shape[1]] = x
    return out
