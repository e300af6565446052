"""TOVA (Oren et al., EMNLP 2024, arXiv:2401.06104): the newest query decides, for all heads of the layer.

    score_j  =  mean over all query heads of softmax(q_newest k^T)_j
    keep     =  the best `budget` tokens, the same for every head

At the prompt's end its last query decides; afterwards every decoded token does, and one token goes for each that
comes. There is no recent window unless asked for, as in the paper: the newest token itself may go.

Differs from the official code: a prompt shorter than the budget is kept whole whatever its batch, padding is never
counted, and the verdict is reached without forming the prompt's attention matrix. Under a routing that splits a layer
the mean is over the heads that follow this method.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.policies._budget import Budget, check_budget, check_count, check_switch, tokens_by_row
from kvengine.policies.retention import Notes, Paid, Retention, Seen, keep_top, once, over_heads


@dataclass(frozen=True)
class TOVA(Retention):
    """Keep what the newest query attends to most, over all heads.

    Args:
        budget: tokens held per KV head, or a fraction of the prompt.
        recent: the newest tokens that stay whatever their score, within the budget. Tokens.
        decode: whether to go on judging while decoding; if not, what comes after the prompt stays.
    """

    decodes: ClassVar[bool] = True
    remembers: ClassVar[bool] = False
    wants_mass: ClassVar[bool] = True
    last_mass: ClassVar[bool] = True
    budget: Budget = 1024
    recent: int = 0
    decode: bool = True

    def __post_init__(self) -> None:
        check_budget(self, budget=self.budget)
        check_count(self, recent=self.recent)
        check_switch(self, decode=self.decode)

    def at(self, layer: int, layers: int) -> Retention:
        return self if self.decode else once(self)

    @property
    def order(self) -> int | None:
        return 0

    def limit(self, seen: Seen) -> int | None:
        return int(seen.count(self.budget).max())

    def score(self, seen: Seen) -> Float[Tensor, "row token"]:
        if seen.mass is None:
            raise ValueError("TOVA needs the attention that each token received")
        return over_heads(seen.mass.mean(1), seen.heads)

    def keep(self, seen: Seen) -> Bool[Tensor, "row token"]:
        newest = self.newest(seen.prompt_length)
        return keep_top(seen, seen.score, self.budget, seen.valid & (seen.position > seen.newest - newest[:, None]))

    def newest(self, prompt_length: Int[Tensor, "row"]) -> Int[Tensor, "row"]:
        """No more than fit: slots are in no order by age."""
        return tokens_by_row(self.budget, prompt_length).clamp(max=self.recent)

    def rule(
        self, first: Int[Tensor, "row"], prompt_length: Int[Tensor, "row"], heads: int, notes: Notes
    ) -> Paid | None:
        if type(self).keep is not TOVA.keep or type(self).score is not TOVA.score:
            return None
        return Paid(tokens_by_row(self.budget, prompt_length), self.newest(prompt_length), together=heads)
