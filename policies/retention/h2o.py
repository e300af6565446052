"""H2O (Zhang et al., NeurIPS 2023, arXiv:2306.14048): keep the tokens that have received most attention so far.

    score_j  =  sum over all queries i so far of softmax_i(q_i k^T)_j         (reduced over the query group)
    keep     =  the newest `recent` tokens, and the best others up to `budget`

Default: half of the budget is recent, as in the paper. While decoding, one token goes for each that comes.

A sum favours early tokens, which more queries could see. `average=True` divides it by their number: with `recent=0` and
`decode=False` that is kvpress's ObservedAttention, but for the newest token, which here always stays.

Differs from the official code: scores are per KV head, reduced over its query group (the code repeats keys first, and
keeps as many copies); a padded row scores only its real queries; the budget counts tokens, not fractions of each side.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.policies._budget import Budget, check_budget, check_choice, check_share, check_switch, part, tokens_by_row
from kvengine.policies.retention import REDUCE, Notes, Paid, Reduce, Retention, Seen, keep_top, once, over_group


@dataclass(frozen=True)
class H2O(Retention):
    """Keep the tokens that have received most attention, and the newest.

    Args:
        budget: tokens held per KV head, or a fraction of the prompt.
        recent: how much of the budget goes to the newest tokens, one token at the least. A fraction of the budget.
        decode: whether to go on judging while decoding; if not, what comes after the prompt stays.
        average: whether to rank by the mean over the queries that could see a token, not by their sum.
        reduce: how the heads of a query group agree ("mean", "max" or "sum"): over the prompt's sum, then over each
            decoded token's attention.
    """

    decodes: ClassVar[bool] = True
    wants_mass: ClassVar[bool] = True
    budget: Budget = 1024
    recent: float = 0.5
    decode: bool = True
    average: bool = False
    reduce: Reduce = "mean"

    def __post_init__(self) -> None:
        check_budget(self, budget=self.budget)
        check_share(self, recent=self.recent)
        check_choice(self, reduce=(self.reduce, REDUCE))
        check_switch(self, decode=self.decode, average=self.average)

    def at(self, layer: int, layers: int) -> Retention:
        return self if self.decode else once(self)

    @property
    def order(self) -> int | None:
        return None if self.average and self.remembers else 0

    def limit(self, seen: Seen) -> int | None:
        return int(seen.count(self.budget).max())

    def score(self, seen: Seen) -> Float[Tensor, "row token"]:
        if seen.mass is None:
            raise ValueError("H2O needs the attention that each token received")
        return seen.score + over_group(seen.mass, self.reduce)

    def keep(self, seen: Seen) -> Bool[Tensor, "row token"]:
        recent = seen.position > seen.newest - self.newest(seen.prompt_length)[:, None]
        return keep_top(seen, seen.score / self._queries(seen) if self.average else seen.score, self.budget, recent)

    def newest(self, prompt_length: Int[Tensor, "row"]) -> Int[Tensor, "row"]:
        return part(tokens_by_row(self.budget, prompt_length), self.recent).clamp(min=1)

    def rule(
        self, first: Int[Tensor, "row"], prompt_length: Int[Tensor, "row"], heads: int, notes: Notes
    ) -> Paid | None:
        if self.average or type(self).keep is not H2O.keep or type(self).score is not H2O.score:
            return None
        return Paid(tokens_by_row(self.budget, prompt_length), self.newest(prompt_length), self.reduce, adds=True)

    def _queries(self, seen: Seen) -> Int[Tensor, "row token"]:
        """How many queries could see each token, of those that the scores are sums over."""
        count = seen.newest - seen.position + 1
        if not self.remembers and seen.begin is not None:  # earlier prompts' scores are gone
            count = count.minimum((seen.newest - seen.begin + 1)[:, None])
        return count
