"""StreamingLLM (Xiao et al., ICLR 2024, arXiv:2309.17453): keep the first `sinks` and the newest `recent` tokens.

    keep(j)  =  j < sinks  or  j > newest - recent          (j counts real tokens: padding is no sink)

Defaults: 4 sinks as in the paper; 1020 recent tokens make a budget of 1024.

Positions. "true" leaves every key at the position it had in the text. "in-cache" counts positions within what is
held, as the paper does: 0, 1, 2, … without the gap that dropping leaves. Attention depends on differences of
positions alone, and among the recent tokens these are the same either way; so the sinks' keys are turned forward by
the gap when they are read, and nothing is stored anew. The distance of any two held tokens then stays below sinks +
recent, in texts of any length, and that of a decoded query, which reads what was held before it, is no more than that.

Differs from the official code: it caches keys before rotation and rotates all of them at each step; the result is the
same, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvengine.errors import UnsupportedPolicy
from kvengine.policies._budget import Budget, check_budget, check_choice, check_count, check_switch
from kvengine.policies.retention import Retention, Seen, once

if TYPE_CHECKING:
    from kvengine.stack import Stack


@dataclass(frozen=True)
class Streaming(Retention):
    """Keep the first `sinks` and the newest `recent` tokens.

    Args:
        sinks: the first tokens of the sequence, which attention leans on. Tokens.
        recent: the newest tokens, the current one included. Tokens, or a fraction of the prompt.
        positions: whether kept tokens stay at their "true" positions or move together ("in-cache").
        decode: whether to go on judging while decoding; if not, what comes after the prompt stays.
    """

    decodes: ClassVar[bool] = True
    remembers: ClassVar[bool] = False
    sinks: int = 4
    recent: Budget = 1020
    positions: Literal["true", "in-cache"] = "true"
    decode: bool = True

    def __post_init__(self) -> None:
        check_count(self, sinks=self.sinks)
        check_budget(self, recent=self.recent)
        check_choice(self, positions=(self.positions, ("true", "in-cache")))
        check_switch(self, decode=self.decode)

    def check(self, stack: Stack) -> None:
        if self.needs_rope and stack.selects:
            raise UnsupportedPolicy(
                "streaming(positions='in-cache') turns keys when they are read, but a selection ranks them as they are "
                "stored; use positions='true', or no selection"
            )

    @property
    def needs_rope(self) -> bool:
        return self.positions == "in-cache"

    def at(self, layer: int, layers: int) -> Retention:
        return self if self.decode else once(self)

    @property
    def order(self) -> int | None:
        return None if self.needs_rope else self.sinks

    @property
    def ends(self) -> tuple[int, Budget] | None:
        return None if self.needs_rope or type(self).keep is not Streaming.keep else (self.sinks, self.recent)

    def limit(self, seen: Seen) -> int | None:
        return self.sinks + int(seen.count(self.recent).max())

    def keep(self, seen: Seen) -> Bool[Tensor, "row token"]:
        recent = seen.position > seen.newest - seen.count(self.recent)[:, None]
        return seen.sinks(self.sinks) | (recent & seen.valid)

    def shift(self, position: Int[Tensor, "row token"], first: Int[Tensor, "row"]) -> Int[Tensor, "row token"] | None:
        if not self.needs_rope:
            return None
        after = (first + self.sinks)[:, None]  # the position behind the sinks
        others = position >= after
        far = torch.iinfo(position.dtype).max
        oldest = position.masked_fill(~others, far).amin(1, keepdim=True)
        gap = torch.where(others.any(1, keepdim=True), oldest - after, 0)
        return gap.expand_as(position).masked_fill(others, 0)
