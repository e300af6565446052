"""Bring pages from host memory, but for those that the last call brought: they are still on the compute device.

    kept = empty({"v": v}, rows, slots)            # [row, slot]: what of each row's pages may stay
    pending = start(kept, {"v": host_v}, at, device)
    fields = pending.wait()                        # as of `fetch_pages`, with less on the bus

From one token to the next a head reads much the same (ShadowKV, arXiv:2410.21465, section 4: "temporal locality"). Which
pages are there is found on the device, so the host waits for nothing and a step can be recorded: a row's pages are compared
with the ids of its slots, those found are copied on the device, the others come over the bus, and then the first of them, as
many as there are slots, take the places of the old ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from kvengine.kernels.dispatch import pick
from kvengine.kernels.fetch_pages import Pending, backend_for, begun

MOST = 2048
"""Pages of a row that are looked for among its slots, and slots; more are fetched as if none were there."""
PARTS = 8
"""Programs that share a row."""


@dataclass
class Kept:
    """What stays on the device.

    Attributes:
        data: the pages of each field, [row * slot, ...].
        ids: which page each slot has, -1 for none.
        counts: pages that were there, and that were not, so far; by who counted them.
    """

    data: dict[str, Tensor]
    ids: Int[Tensor, "row slot"]
    counts: Int[Tensor, "row part 2"]

    @property
    def nbytes(self) -> int:
        """Of what is no page."""
        return self.ids.nbytes + self.counts.nbytes


def empty(like: Mapping[str, Tensor], rows: int, slots: int) -> Kept:
    """Nothing yet, for pages shaped and typed as `like[name][0]`, on its device."""
    slots, device = min(slots, MOST), next(iter(like.values())).device
    data = {name: x.new_empty(rows * slots, *x.shape[1:]) for name, x in like.items()}
    ids = torch.full((rows, slots), -1, dtype=torch.int64, device=device)
    return Kept(data, ids, torch.zeros(rows, PARTS, 2, dtype=torch.int64, device=device))


def forget(kept: Kept, at: Int[Tensor, "page"] | slice) -> None:
    """These pages are about to be written: what was kept of them is another page's."""
    ids = kept.ids
    gone = (ids >= at.start) & (ids < at.stop) if isinstance(at, slice) else torch.isin(ids, at.to(ids.device))
    ids.masked_fill_(gone, -1)


def fits(kept: Kept, pages: int) -> bool:
    """Whether so many can be the rows' pages, and few enough to look for."""
    rows = len(kept.ids)
    return pages > 0 and pages % rows == 0 and pages // rows <= MOST


def start(
    kept: Kept,
    fields: Mapping[str, Tensor],
    at: Int[Tensor, "page"],
    device: torch.device,
    *,
    remember: bool = True,
    stream: torch.cuda.Stream | None = None,
    backend: str | None = None,
) -> Pending:
    """As `fetch_pages.start`, of pages that `fits`: as many for each row, one row after the other.

    `remember`: whether they are kept for the next call. Without it, fewer fields than are kept may be asked for.
    """
    how = {"remember": remember, "backend": backend}
    return begun(lambda at: fetch_kept(kept, fields, at, device, **how), fields, at, device, stream)  # type: ignore[arg-type]


def fetch_kept(
    kept: Kept,
    fields: Mapping[str, Tensor],
    at: Int[Tensor, "page"],
    device: torch.device,
    *,
    remember: bool = True,
    backend: str | None = None,
) -> dict[str, Tensor]:
    """Pages `at` of every field, on the device, in that order; on the current stream."""
    chosen = backend_for("fetch_kept", fields, at, device, backend)
    found: dict[str, Tensor] = pick("fetch_kept", (at,), chosen, native=False).fetch(kept, fields, at, device, remember)
    return found
