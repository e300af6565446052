"""A shelf of several tiers: what is used stays high, what is not moves down, and is brought up when it is read.

    slot[tier, piece]   where a piece is on a tier, -1 if it is not there
    used[tier, piece]   when that copy was last read

New pieces go to the highest tier. Where there is no room, those longest unused go one tier down, unless they are there
already: a sealed piece never changes, so a copy below stays good and going down again costs nothing. A piece that is
read from below comes up again, never in place of one that the same read wants: reading more than a tier holds leaves
the tier as it is, instead of pushing out each piece just before its turn.

Tiers below memory are written on another thread (`_packed`). One that cannot be written costs its room, not the pages:
they stay above, beyond that tier's cap, and `faults` counts it; what is read from below then is not brought up. A tier that
cannot be read is skipped where the piece is elsewhere too. Only where there is no other copy, or no tier has room, does a
StoreError reach the caller.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from kvengine.errors import StoreError
from kvengine.offload.placement import Fields, Held, Site
from kvengine.offload.placement._levels import Full, Layout, Level, Unwritable
from kvengine.offload.placement._packed import Packed
from kvengine.offload.placement._staged import Staged

log = logging.getLogger(__name__)
READ = 1 << 24
"""Bytes of pieces that are read from a tier together."""


def oldest(used: np.ndarray, count: int) -> np.ndarray:
    """Those longest unused, of equals the first: of when each was last used.

    >>> oldest(np.array([3, 1, 2, 5]), 2)
    array([1, 2])
    """
    return np.argsort(used, kind="stable")[:count]


class Tiered:
    """Pieces on several tiers, the highest first.

    Args:
        like: one tensor per field, which says shape, dtype and compute device.
        levels: the tiers.
        site: whose pages.
    """

    def __init__(self, like: Mapping[str, Tensor], levels: list[Level], site: Site) -> None:
        self.levels, self.layout = levels, Layout.of(like)
        self.piece_bytes = self.layout.size
        self.like = {name: x.new_empty(0, *x.shape[1:]) for name, x in like.items()}  # not a view: it would keep x
        self.slot = np.full((len(levels), 0), -1, dtype=np.int64)
        self.used = np.zeros((len(levels), 0), dtype=np.int64)
        self.clock, self.refused, self.served = 0, 0, Counter[str]()
        self.last = np.zeros(0, dtype=np.int64)  # what the last read wanted
        self.staged: Staged | None = None
        self.site, self.at = site, (site.layer, site.lane)
        self.joined()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tiered:
        """A shelf of its own with the same pieces, for a copied cache."""
        self.settle()
        twin = object.__new__(Tiered)
        memo[id(self)] = twin
        own = {name: x for name, x in vars(self).items() if name not in ("site", "staged")}
        twin.__dict__.update(copy.deepcopy(own, memo), staged=None)
        twin.site = replace(self.site, ahead=copy.deepcopy(self.site.ahead, memo))
        twin.joined()
        return twin

    def joined(self) -> None:
        """Take part in what the lanes of the cache share: fetching ahead, and writing behind."""
        self.site.ahead.join(self.at, self)
        for level in self.levels:
            if isinstance(level, Packed):
                level.behind(partial(self.site.ahead.run, what=level.name), self.site.share)

    def reserve(self, pieces: int) -> None:
        more = pieces - self.slot.shape[1]
        if more > 0:
            self.slot = np.pad(self.slot, ((0, 0), (0, more)), constant_values=-1)
            self.used = np.pad(self.used, ((0, 0), (0, more)))

    def resident(self, pieces: int = 0) -> Fields | None:
        return None

    def nbytes(self) -> Held:
        held: Held = {}
        for level in self.levels:
            held.setdefault(level.name, {}).update(level.nbytes())
        if self.staged is not None:
            held.setdefault("host", {})["ahead"] = self.staged.raw.nbytes
        if behind := sum(level.waiting_bytes for level in self.levels if isinstance(level, Packed)):
            held.setdefault("host", {})["behind"] = behind
        return held

    def flush(self) -> None:
        """Wait until what goes down is there, or a tier fails."""
        for level in self.levels:
            if isinstance(level, Packed):
                level.flush()

    @property
    def faults(self) -> int:
        """Times that a tier failed or refused."""
        return self.refused + sum(level.failures for level in self.levels if isinstance(level, Packed))

    # Moving down

    def write(self, at: Int[Tensor, "piece"], fields: Mapping[str, Tensor]) -> None:
        ids = at.cpu().numpy()
        self.forget(ids)
        self.clock += 1
        self.place(0, ids, {name: fields[name] for name in self.like})

    def forget(self, at: np.ndarray) -> None:
        self.settle()
        self.staged = None
        for t in range(len(self.levels)):
            self.drop(t, at[self.slot[t, at] >= 0])

    def drop(self, t: int, ids: np.ndarray) -> None:
        if len(ids):
            self.levels[t].release(self.slot[t, ids])
            self.slot[t, ids] = -1

    def place(self, t: int, ids: np.ndarray, fields: Mapping[str, Tensor], beyond: bool = True) -> None:
        """Put pieces on a tier that are not there yet, and those it has no room for, the first ones, below.

        `beyond`: where the one below refuses, the tier has more than it may. Else Full is raised, as where none has room.
        """
        level, new, refused = self.levels[t], self.slot[t, ids] < 0, False
        if not new.all():
            at = torch.from_numpy(np.flatnonzero(new))
            ids, fields = ids[new], {name: x[at.to(x.device)] for name, x in fields.items()}
        if (below := len(ids) - level.capacity) > 0 and t + 1 < len(self.levels):
            try:
                self.place(t + 1, ids[:below], {name: x[:below] for name, x in fields.items()}, beyond)
                ids, fields = ids[below:], {name: x[below:] for name, x in fields.items()}
            except Unwritable as error:
                self.fault(error, beyond)
                refused = True
        if not len(ids):
            return
        try:
            self.make_room(t, len(ids), beyond)
        except Full:
            if not (refused and beyond):  # else they are more than this tier may have, and stay all the same
                raise
        slots = level.slots.take(len(ids))
        try:
            level.write(slots, fields)
        except StoreError:
            level.slots.release(slots)
            raise
        self.slot[t, ids], self.used[t, ids] = slots, self.clock

    def make_room(self, t: int, count: int, beyond: bool) -> None:
        """Room for `count` pieces, by sending others down; where none goes down, by giving up those that are above too."""
        try:
            self.send_down(t, count, beyond)
        except Full:
            there = np.flatnonzero((self.slot[t] >= 0) & (self.slot[:t] >= 0).any(0))
            if not len(there):  # what could not go down would be read for that once more
                raise
            self.drop(t, there[oldest(self.used[t, there], self.short(t, count))])
            self.send_down(t, count, beyond)

    def short(self, t: int, count: int) -> int:
        """How many pieces must go before there is room for `count`."""
        return max(0, count + self.levels[t].slots.used - self.levels[t].capacity)

    def send_down(self, t: int, count: int, beyond: bool) -> None:
        """Raises Full if not enough go down; those that do not are where they were."""
        level, refused = self.levels[t], False
        if (short := self.short(t, count)) and t + 1 < len(self.levels):
            there = np.flatnonzero(self.slot[t] >= 0)
            gone = there[oldest(self.used[t, there], short)]
            new = gone[self.slot[t + 1, gone] < 0]
            try:
                if len(new):
                    self.place(t + 1, new, level.read(self.slot[t, new], ()), beyond)
            except Full:
                raise
            except StoreError as error:  # not written there, or not read here
                self.fault(error, beyond)
                refused = True
            # Not all that were below still are: they were given up for others, as they are here too.
            self.drop(t, gone[(self.slot[t + 1 :, gone] >= 0).any(0)])
        if self.short(t, count) and not (refused and beyond):
            raise Full(
                f"{count} more pages do not fit: every tier down to {level.name!r} is full (here it has room for "
                f"{level.capacity} pages of {self.layout.size} bytes); raise a cap, or add a tier below"
            )

    def fault(self, error: StoreError, matters: bool = True) -> None:
        """Count it and say so. Bringing up is tried at every read: what hinders that is said where it first happened.

        The error itself knows the frames that it passed, and with the record of it this shelf would be kept.
        """
        if matters:
            self.refused += 1
            log.warning("%s: %s", type(error).__name__, str(error))

    # Moving up

    def start(self, at: Int[Tensor, "piece"], without: tuple[str, ...] = ()) -> Callable[[], Fields]:
        return partial(self.read, at, without)

    def read(self, at: Int[Tensor, "piece"], without: tuple[str, ...] = ()) -> Fields:
        """Raises StoreError if a piece's only copy cannot be read."""
        ids, place, inverse = np.unique(at.cpu().numpy(), return_index=True, return_inverse=True)
        if len(ids) < len(at):
            place = np.arange(len(ids))
        self.settle()
        self.clock += 1
        self.last = ids
        if (following := self.site.ahead.after(self.at)) is not None and following is not self:
            following.fetch_ahead()
        out = {name: x.new_zeros(len(ids), *x.shape[1:]) for name, x in self.like.items()}
        source = self.collect(ids, place, out)
        self.promote(ids, place, source, out)
        if following is self:
            self.fetch_ahead()
        out = {name: x for name, x in out.items() if name not in without}
        if len(ids) == len(at):  # each once, and where it was wanted
            return out
        where = torch.from_numpy(inverse.reshape(-1)).to(at.device)
        return {name: x[where] for name, x in out.items()}

    def collect(self, ids: np.ndarray, place: np.ndarray, out: Fields) -> np.ndarray:
        """Fill `out`, at their `place`, from the highest tiers that have the pieces; which tier each came from, -1 for never
        written."""
        source = np.full(len(ids), -1)
        missing = np.any(self.slot[:, ids] >= 0, axis=0)
        failed: StoreError | None = None
        for t, level in enumerate(self.levels):
            if isinstance(level, Packed):
                self.unload(ids, place, missing, source, out)
            here = np.flatnonzero(missing & (self.slot[t, ids] >= 0))
            if not len(here):
                continue
            try:
                for some in self.portions(here):
                    self.enter(place[some], level.read(self.slot[t, ids[some]], ()), out)
                    self.used[t, ids[some]] = self.clock
                    self.served[level.name] += len(some)
                    missing[some], source[some] = False, t
            except StoreError as error:
                self.fault(error)
                failed = error
        try:
            if failed is not None and missing.any():
                raise failed
        finally:
            failed = None  # no circle: an error knows the frames that it passed, and so this shelf
        return source

    def portions(self, here: np.ndarray) -> list[np.ndarray]:
        """Some at a time: read at once, all would be there as bytes and as fields beside what they are put into."""
        each = max(1, READ // self.layout.size)
        return np.split(here, range(each, len(here), each))

    @staticmethod
    def enter(at: np.ndarray, found: Fields, out: Fields) -> None:
        for name, x in found.items():
            out[name][torch.from_numpy(at).to(out[name].device)] = x.to(out[name].device)

    def unload(self, ids: np.ndarray, place: np.ndarray, missing: np.ndarray, source: np.ndarray, out: Fields) -> None:
        """Take what was fetched ahead."""
        if self.staged is None:
            return
        staged, self.staged = self.staged, None
        here = np.flatnonzero(missing & np.isin(ids, staged.at))
        for some in self.portions(here) if len(here) else ():
            rows = torch.from_numpy(np.searchsorted(staged.at, ids[some]))
            self.enter(place[some], self.layout.unpack(staged.raw[rows]), out)
            self.served["ahead"] += len(some)
            missing[some], source[some] = False, self.lowest(ids[some])

    def lowest(self, ids: np.ndarray) -> np.ndarray:
        """The highest tier below memory that has each piece."""
        first = self.below[0]
        return first + (self.slot[first:, ids] >= 0).argmax(0)

    def promote(self, ids: np.ndarray, place: np.ndarray, source: np.ndarray, found: Fields) -> None:
        """Bring what came from below to the highest tiers that have room beside what else was read."""
        for t, level in enumerate(self.levels[:-1]):
            if isinstance(level, Packed):
                return
            room = level.capacity - int((self.slot[t, ids] >= 0).sum())
            up = np.flatnonzero(source > t)[: max(0, room)]
            if not len(up):
                continue
            rows = torch.from_numpy(place[up])
            try:
                self.place(t, ids[up], {name: x[rows.to(x.device)] for name, x in found.items()}, beyond=False)
            except Full:  # what would have to go down has nowhere to go: they are read where they are
                return
            source[up] = t

    def fetch_ahead(self) -> None:
        """Begin to fetch what the last read wanted, as far as it is below memory; does not wait."""
        below = self.below
        if self.staged is not None or not len(self.last) or not below:
            return
        there = self.slot[:, self.last] >= 0
        ids = self.last[~there[: below[0]].any(0) & there.any(0)]
        if not len(ids):
            return
        staged = Staged(ids, torch.empty(len(ids), self.layout.size, dtype=torch.uint8))
        source = self.lowest(ids)
        loads = [
            (level, self.slot[t, ids[source == t]], np.flatnonzero(source == t))
            for t, level in enumerate(self.levels)
            if isinstance(level, Packed)
        ]
        try:
            staged.future = self.site.ahead.run(lambda: staged.fill(loads))
        except RuntimeError:  # no thread can be started: they are fetched when they are read
            self.refused += 1
            return
        self.staged = staged  # not before: of a load that never began nothing may be used

    @property
    def below(self) -> list[int]:
        """The tiers below memory."""
        return [t for t, level in enumerate(self.levels) if isinstance(level, Packed)]

    def settle(self) -> None:
        """Wait for what is under way; a load that failed is forgotten, and tried again when it is wanted."""
        staged = self.staged
        if staged is None or staged.future is None:
            return
        for level in self.levels:
            if isinstance(level, Packed):
                level.check_process()
        staged.future.result()
        staged.future = None
        if staged.problem:
            self.fault(StoreError(staged.problem))
            self.staged = None
