"""Disk: pages move down from the device to host memory to a file, the longest unused first.

    device   up to `device` bytes of pages
    host     up to `host` bytes
    disk     the rest, up to `disk` bytes: a file for each layer's lane in `folder`, gone with the cache

Caps are of one cache and divided among its layers evenly, since every token passes through all of them: with one
common list, the layer that is needed next would be the one used longest ago. While one layer is computed, what the next
one read at the last step is fetched from the file. Nobody waits for the file to be written either: up to 64 MiB of pages
wait in host memory for a thread that writes them, beside the cap of `host`.

Pages on disk are no backup: a file belongs to its process, and what must outlive it goes into a store
(`kvengine.offload.stores`) or a saved session (`kvengine.saved`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.offload.placement import Placement, Shelf, Site, check_known, check_names, divide
from kvengine.offload.placement._levels import Layout, Level, memory, room
from kvengine.offload.placement._tiered import Tiered
from kvengine.policies._budget import check_text


@dataclass(frozen=True)
class Disk(Placement):
    """Sealed pages on the device, in host memory and on disk, each up to a cap.

    Args:
        folder: where the files go, made if missing; empty takes the system's folder for temporary files.
        device: bytes of pages that stay on the compute device.
        host: bytes of pages in host memory.
        disk: bytes of pages on disk; None without limit.
        fields: names of the page fields to move; empty moves all.
    """

    folder: str = ""
    device: int = 0
    host: int = 1 << 28
    disk: int | None = None
    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_names(self, self.fields)
        check_text(self, folder=self.folder)
        check_caps(self, "disk", device=self.device, host=self.host, disk=self.disk)

    def open(self, like: Mapping[str, Tensor], site: Site) -> list[Shelf]:
        from kvengine.offload.placement._file import File  # not on every system

        moved, here = divide(like, self.fields)
        layout = Layout.of(moved)
        levels: list[Level] = memory(moved, layout, site, self.device, self.host)
        levels.append(File(layout, self.folder, room(self.disk, layout, site), site.ahead.swept))
        return [*here, Tiered(moved, levels, site)]

    def check(self, fields: tuple[str, ...]) -> None:
        check_known(self, self.fields, fields)


def check_caps(policy: object, last: str, **caps: int | None) -> None:
    """Refuse what is not a number of bytes; the `last` tier's may be None, without limit."""
    for name, value in caps.items():
        if value is None and name == last:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise PolicyError(f"{type(policy).__name__}: {name}={value!r} must be a number of bytes")
