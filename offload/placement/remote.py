"""Remote: pages move down from the device to host memory, to disk, to a store on another machine.

As `disk`, with one more tier: any store that `kvengine.offload.stores.backend` knows by URL (Redis or Valkey, S3 and
other object stores). Pages that go down together travel as one value. What the next layer read at the last step is
fetched while this one is computed, and values are written by a thread: up to 64 MiB of pages wait for it in host memory.

A store that cannot be written costs room only: pages stay in memory, if `device` and `host` leave it any. A page whose
only copy is in a store that does not answer is a StoreError; `kvengine.recover.generate` then computes its tokens again.
Values are deleted with the cache, and expire if its process is killed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kvengine.errors import PolicyError, StoreError
from kvengine.offload.placement import Placement, Shelf, Site, check_known, check_names, divide
from kvengine.offload.placement._levels import Layout, Level, memory, room
from kvengine.offload.placement._remote import Remote as Values
from kvengine.offload.placement._tiered import Tiered
from kvengine.offload.placement.disk import check_caps
from kvengine.offload.stores.urls import parse, shown, tells
from kvengine.policies._budget import check_text


@dataclass(frozen=True)
class Remote(Placement):
    """Sealed pages on the device, in host memory, on disk, and in a store on another machine.

    Args:
        url: of the store: redis://, rediss://, unix://, s3://, gs://, az://, or a folder as ./pages. A policy's text is shown,
            and saved with sessions, so a password is named by a variable of the environment:
            redis://me:${REDIS_PASSWORD}@host:6379/0.
        device: bytes of pages that stay on the compute device.
        host: bytes of pages in host memory.
        disk: bytes of pages on disk, between host and store.
        remote: bytes of pages in the store; None without limit.
        folder: where files go, if `disk` is not 0.
        ttl: seconds after which a value expires, which a killed process leaves; also one that a longer generation still wants.
        fields: names of the page fields to move; empty moves all.
    """

    url: str = "redis://127.0.0.1:6379/0"
    device: int = 0
    host: int = 1 << 28
    disk: int = 0
    remote: int | None = None
    folder: str = ""
    ttl: float = 86400.0
    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_names(self, self.fields)
        check_text(self, url=self.url, folder=self.folder)
        check_caps(self, "remote", device=self.device, host=self.host, disk=self.disk, remote=self.remote)
        if not self.url:
            raise PolicyError(f"Remote: url={self.url!r} must say where the store is, as in 'redis://host:6379/0'")
        try:
            parse(self.url)
        except StoreError as error:
            raise PolicyError(f"Remote: {error}") from error
        if tells(self.url):
            raise PolicyError(
                f"Remote: url={shown(self.url)!r} has a password in it, and a policy's text is shown and saved with sessions. "
                "Put it into a variable of the environment and name that: redis://me:${REDIS_PASSWORD}@host:6379/0"
            )
        if not isinstance(self.ttl, int | float) or isinstance(self.ttl, bool) or not 0 < self.ttl < math.inf:
            raise PolicyError(f"Remote: ttl={self.ttl!r} must be a positive number of seconds")

    def open(self, like: Mapping[str, Tensor], site: Site) -> list[Shelf]:
        moved, here = divide(like, self.fields)
        layout = Layout.of(moved)
        levels: list[Level] = memory(moved, layout, site, self.device, self.host)
        if self.disk and (pages := room(self.disk, layout, site)):
            from kvengine.offload.placement._file import File  # not on every system

            levels.append(File(layout, self.folder, pages, site.ahead.swept))
        levels.append(Values(layout, site.ahead.backend(self.url), room(self.remote, layout, site), self.ttl))
        return [*here, Tiered(moved, levels, site)]

    def check(self, fields: tuple[str, ...]) -> None:
        check_known(self, self.fields, fields)
