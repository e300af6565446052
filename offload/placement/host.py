"""Host: sealed pages live in host memory (pinned where there is CUDA); what a query reads is fetched. Where the model
runs on a CPU, that is its own memory, and pages are read where they lie.

What was fetched may stay on the device for the next step, the resident set of ShadowKV (arXiv:2410.21465): then only
what it lacks is fetched. `keep="previous"` keeps what the last step read, as its code does; `keep="lru"` gives up what
was unused for longest, and only as much as must go. `cache.stats()` counts hits and misses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Int
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.kernels import fetch_pages
from kvengine.offload.placement import Fields, Flat, Placement, Shelf, Site, check_known, check_names, divide
from kvengine.offload.placement._levels import UNLIMITED, Level, Memory
from kvengine.offload.placement._rules import RULES
from kvengine.offload.placement._tiered import Tiered


@dataclass(frozen=True)
class Host(Placement):
    """Sealed pages in host memory.

    Args:
        fields: names of the page fields to move; empty moves all. ShadowKV moves the values only: `fields=("v",)`.
            Those of other representations have other names, which an error tells.
        resident: tokens per KV head and sequence that stay on the device once they were fetched (or a fraction of the
            prompt); 0 fetches all that is read, each time.
        keep: what stays when there is no room: what the previous step read, or what was used last.
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
        if self.keep not in RULES:
            raise PolicyError(f"Host: keep={self.keep!r} must be one of {', '.join(map(repr, RULES))}")

    def open(self, like: Mapping[str, Tensor], site: Site) -> list[Shelf]:
        moved, stay = divide(like, self.fields)
        here: list[Shelf] = [Flat(stay, None, "device")] if stay else []
        cpu = torch.device("cpu")
        if not self.resident:
            return [*here, Fetched(moved)]
        tokens = self.resident if isinstance(self.resident, int) else int(self.resident * site.prompt)
        room = site.rows * max(1, tokens // site.piece)
        levels: list[Level] = [Memory("device", moved, None, room), Memory("host", moved, cpu, UNLIMITED)]
        return [*here, Tiered(moved, levels, site, self.keep)]

    def check(self, fields: tuple[str, ...]) -> None:
        check_known(self, self.fields, fields)

    @property
    def steady(self) -> bool:
        return not self.resident


class Fetched(Flat):
    """Pieces in host memory, which the compute device fetches by itself while it works on what it has."""

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        super().__init__(like, torch.device("cpu"), "host")
        self.home = next(iter(like.values())).device

    def reserve(self, pieces: int) -> None:
        if self.home.type == "cuda" and pieces > min(len(store.data) for store in self.stores.values()):
            torch.cuda.synchronize(self.home)  # a fetch may still read what is given up for larger memory
        super().reserve(pieces)

    def start(self, at: Int[Tensor, "piece"], without: tuple[str, ...] = ()) -> Callable[[], Fields]:
        """Begin to read; the host waits for nothing. Calling the result makes what is queued from then on wait."""
        self.served[self.tier] += len(at)
        fields = {name: store.data for name, store in self.stores.items() if name not in without}
        return fetch_pages.start(fields, at, self.home, stream=beside(self.home)).wait

    def read(self, at: Int[Tensor, "piece"], without: tuple[str, ...] = ()) -> Fields:
        return self.start(at, without)()

    def resident(self, pieces: int = 0) -> Fields | None:
        """Where the model runs on the host, its kernels read pages in place."""
        if self.home.type != "cpu":
            return None
        self.served[self.tier] += pieces
        return {name: store.data for name, store in self.stores.items()}


@functools.cache
def beside(device: torch.device) -> torch.cuda.Stream | None:
    """A device's stream for fetches: one, as they share the bus. None where there are no streams."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None
