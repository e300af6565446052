"""Pages of named fields, shared by the rows of a lane and addressed through their tables."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet

import torch
from jaxtyping import Int
from torch import Tensor

from kvengine.offload.placement import Placement, Store


class Pool:
    """Fields of fixed-size pages, one store each.

    A page is in use while some table names it; what no table names any more is found when room runs short. That keeps
    forks, beams and rolled-back drafts free of reference counts.
    """

    def __init__(self, placement: Placement) -> None:
        self.placement = placement
        self.stores: dict[str, Store] = {}
        self.users: WeakSet[User] = WeakSet()
        self.pages = 0
        self.free: list[int] = []

    def put(self, fields: dict[str, Tensor]) -> Int[Tensor, "page"]:
        """Store pages (the first axis of every field); their ids."""
        some = next(iter(fields.values()))
        at = torch.tensor(self.take(len(some), fields), dtype=torch.long, device=some.device)
        for name, x in fields.items():
            self.stores[name].write(at, x)
        return at

    def take(self, count: int, like: dict[str, Tensor]) -> list[int]:
        if not self.stores:
            self.placement.check(tuple(like))
        for name, x in like.items():
            if name not in self.stores:
                self.stores[name] = self.placement.open(name, x)
        if count > len(self.free):
            self.collect()
        if count > len(self.free):
            self.grow(max(self.pages + count - len(self.free), self.pages + self.pages // 8))
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def grow(self, pages: int) -> None:
        for store in self.stores.values():
            store.reserve(pages)
        self.free += range(self.pages, pages)
        self.pages = pages

    def collect(self) -> None:
        """Find the pages that no table names."""
        used = {page for user in self.users for page in user.pages_in_use()}
        self.free = [page for page in range(self.pages) if page not in used]

    def read(self, at: Int[Tensor, "page"], without: tuple[str, ...] = ()) -> dict[str, Tensor]:
        return {name: store.read(at) for name, store in self.stores.items() if name not in without}

    def resident(self) -> dict[str, Tensor] | None:
        """All fields on the compute device, if all are there."""
        data = {name: store.resident for name, store in self.stores.items()}
        return None if any(x is None for x in data.values()) else data  # type: ignore[return-value]

    def nbytes(self) -> dict[str, dict[str, int]]:
        """Bytes held, by tier and field."""
        held: dict[str, dict[str, int]] = {}
        for name, store in self.stores.items():
            held.setdefault(store.tier, {})[name] = store.nbytes()
        return held


class User(Protocol):
    """Something with a table into a pool."""

    def pages_in_use(self) -> list[int]: ...
