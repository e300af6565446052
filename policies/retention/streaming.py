"""StreamingLLM (Xiao et al., ICLR 2024, arXiv:2309.17453): keep the first `sinks` and the newest `recent` tokens.

    keep(j)  =  j < sinks  or  j > newest - recent          (j counts real tokens: padding is no sink)

Defaults: 4 sinks as in the paper; 1020 recent tokens make a budget of 1024.
Keys keep the rotation of their true positions here.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float
from torch import Tensor

from kvengine.policies._budget import Budget, check_budget, check_count
from kvengine.policies.retention import Retention, Seen


@dataclass(frozen=True)
class Streaming(Retention):
    """Keep the first `sinks` and the newest `recent` tokens.

    Args:
        sinks: the first tokens of the sequence, which attention leans on. Tokens.
        recent: the newest tokens, the current one included. Tokens, or a fraction of the prompt.
    """

    decodes: ClassVar[bool] = True
    sinks: int = 4
    recent: Budget = 1020

    def __post_init__(self) -> None:
        check_count(self, sinks=self.sinks)
        check_budget(self, recent=self.recent)

    def limit(self, seen: Seen) -> int:
        return self.sinks + int(seen.count(self.recent).max())

    def score(self, seen: Seen) -> Float[Tensor, "row token"]:
        return seen.score

    def keep(self, seen: Seen) -> Bool[Tensor, "row token"]:
        recent = seen.position > seen.newest - seen.count(self.recent)[:, None]
        return seen.sinks(self.sinks) | (recent & seen.valid)
