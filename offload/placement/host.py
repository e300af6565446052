"""Host: sealed pages live in host memory (pinned where there is CUDA); what a query reads is fetched. Where the model
runs on a CPU, that is its own memory, and pages are read where they lie.

What was fetched may stay on the device for the next step, the resident set of ShadowKV (arXiv:2410.21465): then only
what it lacks is fetched. `keep="previous"` keeps what the last step read, as its code does, and the device finds it by itself;
`keep="lru"` gives up what was unused for longest, and only as much as must go, of which the host keeps track: it waits for the
device at every read. `cache.stats()` counts hits and misses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.kernels import fetch_kept, fetch_pages
from kvengine.kernels.streams import side_stream
from kvengine.offload.placement import Fields, Flat, Held, Placement, Shelf, Site, check_known, check_names, divide
from kvengine.offload.placement._levels import UNLIMITED, Level, Memory
from kvengine.offload.placement._tiered import Tiered
from kvengine.policies._budget import check_choice, tokens


@dataclass(frozen=True)
class Host(Placement):
    """Sealed pages in host memory.

    Args:
        fields: names of the page fields to move; empty moves all. ShadowKV moves the values only: `fields=("v",)`.
            Those of other representations have other names, which an error tells.
        resident: tokens per KV head and sequence that stay on the device once they were fetched (or a fraction of the
            prompt); 0 fetches all that is read, each time. Where a head reads more than 2048 units of the selection, or
            pages, nothing is looked for among them, and all are fetched.
        keep: what stays: what the previous step read, which the device finds by itself; or ("lru") what was used last, of which
            the host keeps track, so that it waits for the device, and steps cannot be recorded.
    """

    fine: ClassVar[bool] = True
    fields: tuple[str, ...] = ()
    resident: int | float = 0
    keep: Literal["previous", "lru"] = "previous"

    def __post_init__(self) -> None:
        check_names(self, self.fields)
        fraction = isinstance(self.resident, float) and 0 <= self.resident <= 1
        if isinstance(self.resident, bool) or not (fraction or (isinstance(self.resident, int) and self.resident >= 0)):
            raise PolicyError(f"Host: resident={self.resident!r} must be tokens (int) or a fraction of the prompt")
        check_choice(self, keep=(self.keep, ("previous", "lru")))

    def open(self, like: Mapping[str, Tensor], site: Site) -> list[Shelf]:
        moved, here = divide(like, self.fields)
        cpu = torch.device("cpu")
        if not self.resident:
            return [*here, Fetched(moved)]
        slots = max(1, tokens(self.resident, site.prompt) // site.piece)
        if self.keep == "previous":
            return [*here, Recalled(moved, site.rows, slots)]
        room = site.rows * slots
        levels: list[Level] = [Memory("device", moved, None, room), Memory("host", moved, cpu, UNLIMITED)]
        return [*here, Tiered(moved, levels, site)]

    def check(self, fields: tuple[str, ...]) -> None:
        check_known(self, self.fields, fields)

    @property
    def steady(self) -> bool:
        return not self.resident or self.keep == "previous"


class Fetched(Flat):
    """Pieces in host memory, which the compute device fetches by itself while it works on what it has."""

    fetched: Counter[str]

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        super().__init__(like, torch.device("cpu"), "host")
        self.home = next(iter(like.values())).device

    def reserve(self, pieces: int) -> None:
        if self.home.type == "cuda" and pieces > min(len(store.data) for store in self.stores.values()):
            torch.cuda.synchronize(self.home)  # a fetch may still read what is given up for larger memory
        super().reserve(pieces)

    def start(self, at: Int[Tensor, "piece"], without: tuple[str, ...] = ()) -> Callable[[], Fields]:
        """Begin to read; the host waits for nothing. Calling the result makes what is queued from then on wait."""
        self.fetched[self.tier] += len(at)
        fields = {name: store.data for name, store in self.stores.items() if name not in without}
        return fetch_pages.start(fields, at, self.home, stream=beside(self.home)).wait

    def read(self, at: Int[Tensor, "piece"], without: tuple[str, ...] = ()) -> Fields:
        return self.start(at, without)()

    def resident(self, pieces: int = 0) -> Fields | None:
        """Where the model runs on the host, its kernels read pages in place."""
        if self.home.type != "cpu":
            return None
        self.fetched[self.tier] += pieces
        return {name: store.data for name, store in self.stores.items()}

    @property
    def served(self) -> Counter[str]:
        return self.fetched + self.counted()

    @served.setter
    def served(self, fetched: Counter[str]) -> None:
        self.fetched = fetched

    def counted(self) -> Counter[str]:
        """What the device has counted by itself."""
        return Counter()


class Recalled(Fetched):
    """As that, with what the last step read still on the device: `slots` pieces of each row."""

    recalls: ClassVar[bool] = True

    def __init__(self, like: Mapping[str, Tensor], rows: int, slots: int) -> None:
        super().__init__(like)
        self.like = {name: x.new_empty(0, *x.shape[1:]) for name, x in like.items()}  # not a view: it would keep x
        self.rows, self.slots = rows, slots
        self.kept: fetch_kept.Kept | None = None

    def reserve(self, pieces: int) -> None:
        super().reserve(pieces)
        if self.kept is None and self.resident() is None:  # not while a step is recorded, which would do it every time
            self.kept = fetch_kept.empty(self.like, self.rows, self.slots)

    def write(self, at: Int[Tensor, "piece"] | slice, fields: Mapping[str, Tensor]) -> None:
        super().write(at, fields)
        if self.kept is not None:
            fetch_kept.forget(self.kept, at)

    def start(self, at: Int[Tensor, "piece"], without: tuple[str, ...] = ()) -> Callable[[], Fields]:
        """As of pieces that are all fetched; so they are where they are too many to be looked for."""
        if self.kept is None or not fetch_kept.fits(self.kept, len(at)):
            return super().start(at, without)
        fields = {name: store.data for name, store in self.stores.items() if name not in without}
        stream, all_of_them = beside(self.home), len(fields) == len(self.stores)
        return fetch_kept.start(self.kept, fields, at, self.home, remember=all_of_them, stream=stream).wait

    def counted(self) -> Counter[str]:
        if self.kept is None:
            return Counter()
        hits, misses = self.kept.counts.sum((0, 1)).tolist()
        return Counter({"device": hits, "host": misses})

    def nbytes(self) -> Held:
        if self.kept is None:
            return super().nbytes()
        return super().nbytes() | {
            "device": {n: x.nbytes for n, x in self.kept.data.items()} | {"kept": self.kept.nbytes}
        }


def beside(device: torch.device) -> torch.cuda.Stream | None:
    """A device's stream for fetches: one of a thread, as they share the bus. None where there are no streams."""
    return side_stream(device, "fetches") if device.type == "cuda" else None
