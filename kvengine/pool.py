"""Pages of named fields, shared by the rows of a lane and addressed through their tables."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from kvengine import page_answers
from kvengine.offload.placement import Flat, Placement, Shelf, Site


class Pool:
    """Fields of fixed-size pages, on the shelves of a placement.

    A page is in use while some table names it; what no table names any more is found when room runs short. That keeps
    forks, beams and rolled-back drafts free of reference counts.

    Args:
        placement: where pages live.
        site: whose they are.
        per: pieces of a page. With more than one, every field has the tokens as its second axis.
    """

    def __init__(self, placement: Placement, site: Site | None = None, per: int = 1) -> None:
        self.placement, self.site, self.per = placement, site or Site(), per
        self.shelves: list[Shelf] = []
        self.forms: page_answers.Forms = {}  # of a page's fields
        self.users: WeakSet[User] = WeakSet()
        self.stamps = np.zeros(1, dtype=np.int64)  # of each page; a new one whenever it is written
        self.pages = self.written = 0
        self.free: list[int] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Pool:
        """Pages of a copied cache. Left to itself, a copied WeakSet goes on naming the users of the first pool."""
        twin = memo[id(self)] = object.__new__(Pool)
        vars(twin).update({name: copy.deepcopy(x, memo) for name, x in vars(self).items() if name != "users"})
        twin.users = WeakSet(copy.deepcopy(list(self.users), memo))
        return twin

    def put(self, fields: dict[str, Tensor]) -> Int[Tensor, "page"]:
        """Store pages (the first axis of every field); their ids.

        Pages that follow one another, as free ones mostly do, are copied as they lie on a `Flat` shelf, and their ids are counted
        on the device: a list of them would have the host wait until it has come there.
        """
        some = next(iter(fields.values()))
        count = len(some)
        self.forms = self.forms or {name: (x.dtype, x.shape[1:]) for name, x in fields.items()}
        if self.per > 1:
            fields = {name: x.unflatten(1, (self.per, -1)).flatten(0, 1) for name, x in fields.items()}
        taken = self.fresh(count, fields)
        first, behind = taken[0], taken[0] + count
        in_order = taken == list(range(first, behind))
        at = torch.arange(first, behind, device=some.device) if in_order else torch.tensor(taken, device=some.device)
        for shelf in self.shelves:
            if in_order and isinstance(shelf, Flat):
                shelf.write(slice(first * self.per, behind * self.per), fields)
            else:
                shelf.write(self.pieces(at), fields)
        return at

    def pieces(self, at: Int[Tensor, "page"]) -> Int[Tensor, "piece"]:
        """The pieces of these pages."""
        if self.per == 1:
            return at
        return (at[:, None] * self.per + torch.arange(self.per, device=at.device)).flatten()

    def fresh(self, count: int, like: dict[str, Tensor] | None = None) -> list[int]:
        """Free pages that somebody is about to write. `like`: the fields, where these may be the first."""
        taken = self.take(count, like or {})
        self.stamps[taken] = np.arange(self.written, self.written + count)
        self.written += count
        return taken

    def take(self, count: int, like: dict[str, Tensor]) -> list[int]:
        if not self.shelves:
            self.placement.check(tuple(like))
            self.shelves = page_answers.shelves(self.placement, self.placement.open(like, self.site))
        if not self.spares(count):
            self.grow(max(self.pages + count - len(self.free), self.pages + self.pages // 8))
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def ensure(self, count: int) -> None:
        """So many pages that are free, so that sealing them moves nothing."""
        if not self.spares(count):
            self.grow(self.pages + count - len(self.free))

    def spares(self, count: int) -> bool:
        """Whether so many pages are free, those included that no table names any more."""
        if count > len(self.free):
            self.collect()
        return count <= len(self.free)

    def grow(self, pages: int) -> None:
        for shelf in self.shelves:
            shelf.reserve(pages * self.per)
        self.stamps = np.pad(self.stamps, (0, pages - len(self.stamps)))
        self.free += range(self.pages, pages)
        self.pages = pages

    def collect(self) -> None:
        """Find the pages that no table names."""
        used = {page for user in self.users for page in user.pages_in_use()}
        self.free = [page for page in range(self.pages) if page not in used]
        pieces = np.asarray(self.free, dtype=np.int64)[:, None] * self.per + np.arange(self.per)
        for shelf in self.shelves:
            shelf.forget(pieces.reshape(-1))

    def read(self, at: Int[Tensor, "page"], without: tuple[str, ...] = ()) -> dict[str, Tensor]:
        return self.joined(self.start(self.pieces(at), without)())

    def joined(self, fields: dict[str, Tensor]) -> dict[str, Tensor]:
        """Pages of pieces."""
        if self.per == 1:
            return fields
        return {name: x.unflatten(0, (-1, self.per)).flatten(1, 2) for name, x in fields.items()}

    def start(self, at: Int[Tensor, "piece"], without: tuple[str, ...] = ()) -> Callable[[], dict[str, Tensor]]:
        """Begin to read pieces, as far as shelves can do that while others work; calling the result gives them.

        Piece `i` of page `p` has the id `p * per + i`.
        """
        begun = [shelf.start(at, without) for shelf in self.shelves]
        return lambda: {name: x for finish in begun for name, x in finish().items()}

    def resident(self, table: Tensor, units: Tensor | None = None) -> dict[str, Tensor] | None:
        """All fields, if all are within reach of the compute device; about to be read are these units, each from one piece, or
        all pages of the table."""
        pieces = table.numel() * self.per if units is None else units.numel()
        found: dict[str, Tensor] = {}
        for shelf in self.shelves:
            fields = shelf.resident(pieces)
            if fields is None:
                return None
            found |= fields
        return self.joined(found)

    def nbytes(self) -> dict[str, dict[str, int]]:
        """Bytes held, by tier and field."""
        held: dict[str, dict[str, int]] = {}
        for shelf in self.shelves:
            for tier, fields in shelf.nbytes().items():
                held.setdefault(tier, {}).update(fields)
        return held

    @property
    def on_device(self) -> bool:
        """Whether all pages lie on the compute device, and stay."""
        return all(type(x) is Flat and x.tier == "device" for x in self.shelves)

    @property
    def recalls(self) -> bool:
        """Whether a read leaves its pieces nearer, in the place of those of the read before."""
        return any(getattr(shelf, "recalls", True) for shelf in self.shelves)

    @property
    def once(self) -> bool:
        """Whether the host knows which pieces a read wants, so that it may ask for each once."""
        return any(getattr(shelf, "once", True) for shelf in self.shelves)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, wherever it is."""
        return self.per * sum(shelf.piece_bytes for shelf in self.shelves)

    def served(self) -> Counter[str]:
        """Pieces read, by the tier that had them; those of fields that never leave the device are not counted."""
        return sum((shelf.served for shelf in self.shelves), Counter())

    @property
    def faults(self) -> int:
        return sum(shelf.faults for shelf in self.shelves)


@runtime_checkable
class User(Protocol):
    """Something with a table into a pool."""

    def pages_in_use(self) -> list[int]: ...
