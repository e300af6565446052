"""The launches that choose units on a GPU, made again for the next token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvengine.kernels.gpu import noted

if TYPE_CHECKING:
    from kvengine.kernels.gpu.launches import Launches

MOST = 8
"""Kinds that are noted though none comes again, as where each token seals a unit."""


class Remembered:
    """They are the same for as long as queries are of one kind, and bounds and who is alive lie where they lay."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Let go of the tensors."""
        self.kind: tuple[Any, ...] = ()
        self.shape: tuple[int, ...] = ()  # of what is chosen
        self.launches: Launches | None = None
        self.missed = 0  # kinds in a row that did not come again

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A copy has bounds of its own."""
        return type(self), ()

    def top(
        self, q: Tensor, bounds: tuple[Tensor, Tensor, Tensor], count: int, reduce: str, choose: Callable[[], list[Tensor]]
    ) -> Tensor:  # fmt: skip
        """What `choose` gives behind the scores that it is made of: of so many units the best."""
        where = [(x.data_ptr(), x.shape, x.stride()) for x in bounds]
        kind = (q.shape, q.stride(), q.dtype, count, reduce, *where)
        if kind == self.kind and self.launches is not None:
            ids = q.new_empty(self.shape, dtype=torch.int64)
            if self.launches.again((q, ids), ()):
                self.missed = 0
                return ids
        with noted() as notes:
            scores, ids = choose()
        if kind != self.kind and self.missed < MOST:
            self.kind, self.shape, self.launches, self.missed = kind, tuple(ids.shape), None, self.missed + 1
            if len(notes) == 2:
                from kvengine.kernels.gpu.launches import remembered  # which needs Triton

                self.launches = remembered(notes, (q, ids), (scores,), bounds, ())
        return ids
