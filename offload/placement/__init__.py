"""Placement: where sealed pages live.

A pool asks its placement for shelves: each keeps some of the fields of all pieces, a piece being a page or, where parts
of pages can be read alone, a unit of the selection.

    reserve    room for so many pieces
    write      put pieces at these ids
    read       bring these pieces to the compute device
    forget     what these ids held is not wanted any more
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from kvengine import memory
from kvengine.errors import PolicyError, unknown
from kvengine.offload.placement._ahead import Ahead

Fields = dict[str, Tensor]
Held = dict[str, dict[str, int]]
"""Bytes by tier and field."""


@dataclass(frozen=True)
class Site:
    """Whose pages they are.

    Attributes:
        layer, lane: numbers; shelves read one after the other in this order.
        rows: sequences x KV heads.
        prompt: tokens of the longest prompt.
        piece: tokens of a piece.
        share: of the cache's byte caps, the part that is this lane's.
        ahead: what the lanes of a cache share.
    """

    layer: int = 0
    lane: int = 0
    rows: int = 1
    prompt: int = 0
    piece: int = 1
    share: float = 1.0
    ahead: Ahead = field(default_factory=Ahead)


@runtime_checkable
class Shelf(Protocol):
    """Some fields of all pieces."""

    served: Counter[str]
    """Pieces read, by the tier that had them; "ahead" had been fetched before they were asked for."""
    piece_bytes: int

    @property
    def faults(self) -> int:
        """Times that a tier failed."""

    def reserve(self, pieces: int) -> None: ...

    def write(self, at: Int[Tensor, "piece"], fields: Mapping[str, Tensor]) -> None: ...

    def read(self, at: Int[Tensor, "piece"], without: tuple[str, ...] = ()) -> Fields: ...

    def start(self, at: Int[Tensor, "piece"], without: tuple[str, ...] = ()) -> Callable[[], Fields]:
        """Begin to read, as far as that goes on while others work; the result gives what `read` does."""

    def forget(self, at: np.ndarray) -> None: ...

    def resident(self, pieces: int = 0) -> Fields | None:
        """All pieces, if that is where they are: within reach of the compute device, which is about to read so many."""

    def nbytes(self) -> Held: ...


@dataclass(frozen=True)
class Placement:
    """Everything stays on the compute device."""

    fine: ClassVar[bool] = False  # parts of pages are read alone, where the representation allows it

    @property
    def steady(self) -> bool:
        """Whether the host need not know which pages a query reads: such a step can be recorded."""
        return False

    def open(self, like: Mapping[str, Tensor], site: Site) -> list[Shelf]:
        """Shelves for pieces shaped and typed as `like[name][0]`, read back to the device of `like`."""
        return [Flat(like, None, "device")]

    def check(self, fields: tuple[str, ...]) -> None:
        """Refuse fields that cannot be placed as asked."""


def check_names(policy: object, fields: object) -> None:
    """Refuse what is not a tuple of names."""
    if not isinstance(fields, tuple) or not all(isinstance(f, str) for f in fields):
        raise PolicyError(f"{type(policy).__name__}: fields={fields!r} must be a tuple of field names, such as ('v',)")


def check_known(policy: object, wanted: tuple[str, ...], fields: tuple[str, ...]) -> None:
    """Refuse names that the representation does not have."""
    for name in wanted:
        if name not in fields:
            raise PolicyError(
                f"{type(policy).__name__}: {unknown('page field', name, fields)}: what a page holds depends on the "
                "representation. Name fields that it has, or leave fields=(...) out to move all"
            )


def divide(like: Mapping[str, Tensor], wanted: tuple[str, ...]) -> tuple[Fields, list[Shelf]]:
    """The fields to move (no name: all of them), and a shelf on the compute device for those that stay, if any do."""
    moved = {name: x for name, x in like.items() if not wanted or name in wanted}
    stay = {name: x for name, x in like.items() if name not in moved}
    return moved, [Flat(stay, None, "device")] if stay else []


class TensorStore:
    """Slots of one field in one tensor, on the compute device or in (pinned) host memory."""

    def __init__(self, like: Tensor, device: torch.device | None) -> None:
        self.home = like.device
        device = device or like.device
        self.reader = like.device if device.type == "cpu" and like.device.type == "cuda" else None
        self.data = memory.empty((0, *like.shape[1:]), like.dtype, device, self.reader)

    def reserve(self, slots: int) -> None:
        if slots <= len(self.data):
            return
        old = self.data  # slots are read only once they are written, so nothing is put into the new ones
        self.data = memory.empty((slots, *old.shape[1:]), old.dtype, old.device, self.reader)
        self.data[: len(old)] = old

    def __deepcopy__(self, memo: dict[int, Any]) -> TensorStore:
        """Left to itself, the copy of pinned memory is not."""
        twin = memo[id(self)] = object.__new__(TensorStore)
        twin.home, twin.reader = self.home, self.reader
        twin.data = memory.empty(tuple(self.data.shape), self.data.dtype, self.data.device, self.reader)
        twin.data.copy_(self.data)
        return twin

    def write(self, at: Int[Tensor, "slot"] | slice, x: Tensor) -> None:
        self.data[at if isinstance(at, slice) else at.to(self.data.device)] = x.to(self.data.device)

    def read(self, at: Int[Tensor, "slot"]) -> Tensor:
        return self.data[at.to(self.data.device)].to(self.home, non_blocking=True)


class Flat:
    """A shelf of one tier: pieces at their ids, in one tensor for each field."""

    recalls: ClassVar[bool] = False  # what was read last is kept nearer, in the place of other pieces
    once: ClassVar[bool] = False  # the host knows what a read wants, and brings a piece that it names twice once

    def __init__(self, like: Mapping[str, Tensor], device: torch.device | None, tier: str) -> None:
        self.tier, self.served, self.faults = tier, Counter[str](), 0
        self.stores = {name: TensorStore(x, device) for name, x in like.items()}
        self.piece_bytes = sum(x[:1].nbytes for x in like.values())

    def reserve(self, pieces: int) -> None:
        for store in self.stores.values():
            store.reserve(pieces)

    def write(self, at: Int[Tensor, "piece"] | slice, fields: Mapping[str, Tensor]) -> None:
        for name, store in self.stores.items():
            store.write(at, fields[name])

    def read(self, at: Int[Tensor, "piece"], without: tuple[str, ...] = ()) -> Fields:
        return {name: store.read(at) for name, store in self.stores.items() if name not in without}

    def start(self, at: Int[Tensor, "piece"], without: tuple[str, ...] = ()) -> Callable[[], Fields]:
        return partial(self.read, at, without)

    def forget(self, at: np.ndarray) -> None: ...

    def resident(self, pieces: int = 0) -> Fields | None:
        return {name: store.data for name, store in self.stores.items()}

    def nbytes(self) -> Held:
        return {self.tier: {name: store.data.nbytes for name, store in self.stores.items()}}


INTERFACE = Placement
