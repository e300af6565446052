"""Which of a layer's KV heads a lane serves."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from kvengine.lane import Lane


@dataclass(frozen=True)
class Heads:
    """A lane, and which KV heads it serves (None: all)."""

    lane: Lane
    index: Int[Tensor, "head"] | None
    run: slice | None = None
    """The same, where these heads follow each other: a view then, not a copy."""

    def of(self, lane: Lane) -> Heads:
        """The same heads of another lane."""
        return Heads(lane, self.index, self.run)

    def pick(self, x: Float[Tensor, "seq head *rest"]) -> Float[Tensor, "row *rest"]:
        return (x if self.index is None else x[:, self.run or self.index]).flatten(0, 1)
