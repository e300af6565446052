"""Units that are on their way from elsewhere while a token attends to its open tail, and are read beside that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.attention import attention
from kvengine.kernels.state import State

Arriving = Callable[[], tuple[Tensor, Tensor, Tensor]]
"""Gives keys and values [row, token, dim] and positions [row, token], -1 for none. What is queued from then on waits for them."""


class Fetched:
    """They lie elsewhere in memory for every token.

    `rebuilt`: what attends to them instead of `attention`, where their keys are rebuilt (`Joint.reader`), and the tensors that
    it reads beside them.
    """

    units = None

    def __init__(self, unit: int, rebuilt: tuple[Callable[..., State], Sequence[Tensor]] | None = None) -> None:
        self.unit, self.rebuilt = unit, rebuilt
        self.arriving: Arriving | None = None
        self.chosen: tuple[int, ...] = ()

    def reading(self, arriving: Arriving, chosen: tuple[int, ...]) -> Fetched:
        """With these to read next, of rows and units so many."""
        self.arriving, self.chosen = arriving, chosen
        return self

    @property
    def kind(self) -> tuple[Any, ...]:
        """What decides how they are read."""
        return id(self), self.chosen

    def arrive(self) -> list[Tensor]:
        """What is read of them, once."""
        if self.arriving is None:
            raise KernelError("these units have been read already; tell what is to be read next")
        (k, v, position), self.arriving = self.arriving(), None
        return [k, v, position] if self.rebuilt is None else [v.unflatten(1, (-1, self.unit)).flatten(0, 1), position]

    def attend(self, q: Tensor, scale: float, here: list[Tensor]) -> State:
        """To what has arrived `here`."""
        *k, v, position = here
        if self.rebuilt is None:
            return attention(q, k[0], v, None, scale, position=position, wait=True)
        return self.rebuilt[0](q, v, None, position, page=self.unit, scale=scale, wait=True)

    def tensors(self) -> Sequence[Tensor]:
        """What is there for every token."""
        return () if self.rebuilt is None else self.rebuilt[1]
