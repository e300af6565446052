"""Quest (Tang et al., ICML 2024, arXiv:2406.10774): bound each page's best logit by its keys' channel-wise range.

    low, high  =  min, max over the page's keys, per channel
    score      =  sum_i max(q_i low_i, q_i high_i)   >=   max over the page of q . k
    read       =  the best pages, up to `budget` tokens with the open tail

Default: pages of 16, as in the paper. Every layer selects, so that the budget means the same everywhere; the paper
reads the first two layers whole (`dense_layers=2`).

In a query group, `reduce="max"` and `"mean"` compare bounds of different heads with each other, so that a head whose
queries are long decides alone. With `"each"` the heads choose in turn: every head's best page, then every head's second
best, until the budget is spent; it costs an ordering of all pages per query head.

Bounds are those of logits before a cap (Gemma 2); only a mean over heads would tell.

Differs from the official code: one choice per KV head, by the best of its query group, so that a page is read once for
the group (its kernels know no groups, its evaluation chooses per query head); the open page is always read, as in its
kernels, and counts; dense layers are the first ones whatever the number of layers.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.kernels.page_scores import best_units, head_scores, page_bounds, top_units
from kvengine.policies._budget import Budget, check_budget, check_choice, check_count
from kvengine.policies.selection import Fields, Selection, Where, best


@dataclass(frozen=True)
class Quest(Selection):
    """Read the pages whose keys could match the query best.

    Args:
        budget: tokens read per decoded token and KV head, the open tail included, or a fraction of the prompt.
        page: tokens chosen together.
        dense_layers: how many of the first layers read everything.
        reduce: how the heads of a query group agree: by the "max" or "mean" of their bounds, or "each" head chooses in
            turn.
    """

    launched: ClassVar[bool] = True
    budget: Budget = 1024
    page: int = 16
    dense_layers: int = 0
    reduce: Literal["max", "mean", "each"] = "max"

    def __post_init__(self) -> None:
        check_budget(self, budget=self.budget)
        check_count(self, least=1, page=self.page)
        check_count(self, dense_layers=self.dense_layers)
        check_choice(self, reduce=(self.reduce, ("max", "mean", "each")))

    @property
    def unit(self) -> int:
        return self.page

    @property
    def reads(self) -> Budget:
        return self.budget

    def summarise(self, k: Float[Tensor, "unit token dim"], valid: Bool[Tensor, "unit token"] | None) -> Fields:
        low, high = page_bounds(k, valid, self.page)
        return {"low": low[:, 0], "high": high[:, 0]}

    def select(
        self, q: Float[Tensor, "row group dim"], summary: Fields, alive: Bool[Tensor, "row unit"], at: Where
    ) -> Int[Tensor, "row chosen"] | None:
        if at.layer < self.dense_layers:
            return None
        if self.reduce == "each":
            return best(self._turns(q, summary, alive, at.most), alive, at)
        low, high, count = summary["low"], summary["high"], None if at.even else at.count
        return best_units(q, low, high, alive, at.most, counts=count, reduce=self.reduce, coarse=at.bounds)

    def _turns(
        self, q: Float[Tensor, "row group dim"], summary: Fields, alive: Bool[Tensor, "row unit"], most: int
    ) -> Float[Tensor, "row unit"]:
        """Minus the turn at which a page is chosen, the heads of a group choosing one after the other; -inf of a page that is not
        among the best `most` of any, as one head alone has chosen so many before its turn."""
        group, units = q.shape[1], alive.shape[1]
        each = head_scores(q, summary["low"], summary["high"], alive).flatten(0, 1)
        ids = top_units(each, most)  # in ascending order, so that of equal bounds the earlier page comes first
        bound = each.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, float("-inf"))
        ids = ids.gather(1, bound.argsort(stable=True, dim=1, descending=True)).unflatten(0, (-1, group))
        turn = torch.arange(ids.shape[2], device=q.device) * group + torch.arange(group, device=q.device)[:, None]
        turns = (-turn.float()).expand_as(ids).masked_fill(ids < 0, float("-inf"))
        want = turns.new_full((len(q), units), float("-inf"))
        return want.scatter_reduce_(1, ids.clamp(min=0).flatten(1), turns.flatten(1), "amax")
