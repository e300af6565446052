"""Host: sealed pages live in host memory (pinned where there is CUDA); what a query reads is fetched."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvengine.errors import PolicyError, unknown
from kvengine.offload.placement import Placement, Store, TensorStore


@dataclass(frozen=True)
class Host(Placement):
    """Sealed pages in host memory.

    Args:
        fields: names of the page fields to move; empty moves all. ShadowKV moves the values only: `fields=("v",)`.
            A field that the representation does not have is refused when the first page is sealed.
    """

    fields: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.fields, tuple) or not all(isinstance(f, str) for f in self.fields):
            raise PolicyError(f"Host: fields={self.fields!r} must be a tuple of field names, such as ('v',)")

    def open(self, field: str, like: Tensor) -> Store:
        if self.fields and field not in self.fields:
            return TensorStore(like, like.device, "device")
        return TensorStore(like, torch.device("cpu"), "host")

    def check(self, fields: tuple[str, ...]) -> None:
        for name in self.fields:
            if name not in fields:
                raise PolicyError(f"Host: {unknown('page field', name, fields)}")
