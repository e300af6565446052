"""Placement: where sealed pages live.

A placement opens one store per field; a store is a growable array of pages:

    reserve   room for so many pages
    write     put pages at these ids
    read      bring these pages to the compute device
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Int
from torch import Tensor


class Store(Protocol):
    """Pages of one field."""

    tier: str
    pages: int  # allocated

    @property
    def resident(self) -> Tensor | None:
        """All pages as one tensor on the compute device, if that is where they are."""

    def reserve(self, pages: int) -> None: ...

    def write(self, at: Int[Tensor, "page"], x: Tensor) -> None: ...

    def read(self, at: Int[Tensor, "page"]) -> Tensor: ...

    def nbytes(self) -> int: ...


@dataclass(frozen=True)
class Placement:
    """Everything stays on the compute device."""

    def open(self, field: str, like: Tensor) -> Store:
        """A store for pages shaped and typed as `like[0]`, read back to `like.device`."""
        return TensorStore(like, like.device, "device")

    def check(self, fields: tuple[str, ...]) -> None:
        """Refuse fields that cannot be placed as asked."""


class TensorStore:
    """Pages in one tensor, on the compute device or in (pinned) host memory."""

    def __init__(self, like: Tensor, device: torch.device, tier: str) -> None:
        self.tier, self.pages, self.home = tier, 0, like.device
        self.pin = device.type == "cpu" and like.device.type == "cuda"
        self.data = torch.empty(0, *like.shape[1:], dtype=like.dtype, device=device, pin_memory=self.pin)

    @property
    def resident(self) -> Tensor | None:
        return self.data if self.tier == "device" else None

    def reserve(self, pages: int) -> None:
        if pages <= self.pages:
            return
        more = torch.zeros(
            pages, *self.data.shape[1:], dtype=self.data.dtype, device=self.data.device, pin_memory=self.pin
        )
        more[: self.pages] = self.data
        self.data, self.pages = more, pages

    def write(self, at: Int[Tensor, "page"], x: Tensor) -> None:
        self.data[at.to(self.data.device)] = x.to(self.data.device)

    def read(self, at: Int[Tensor, "page"]) -> Tensor:
        return self.data[at.to(self.data.device)].to(self.home, non_blocking=True)

    def nbytes(self) -> int:
        return self.data.nbytes


INTERFACE = Placement
