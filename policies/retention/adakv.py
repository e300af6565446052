"""AdaKV (Feng et al., 2024, arXiv:2407.11550): a layer's heads share one budget, by where attention concentrates.

    b       =  budget - what the base always keeps            (per head)
    n_h     =  tokens of head h among the layer's heads * b best, all heads compared by the base's score
    cap_h   =  (1 - floor) n_h  +  floor b                    (rounded so that they add up to heads * b; what a head
               that an earlier prompt left with few tokens cannot use goes to the best others of all heads)
    keep    =  what the base always keeps, and head h's `cap_h` best others

The base is a method that scores each token. Rows end up with different numbers of tokens, which live in pages, so
that the bytes of what is dropped are freed. Defaults: floor 0.2 as in the paper (its code's
configurations say 0.5), and SnapKV with max-pooling over 7 as in its code.

Differs from the official code: shares are rounded by largest remainder, so none of the budget is lost or overspent;
the base's score is reduced over the query group first, and budgets belong to KV heads. Under a routing that splits a
layer, the heads that follow this method share.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.kernels.best_tokens import best_tokens
from kvengine.policies._budget import Budget, check_budget, check_choice, is_number
from kvengine.policies.retention import REDUCE, Notes, Reduce, Retention, Seen
from kvengine.policies.retention.expected_attention import ExpectedAttention
from kvengine.policies.retention.keydiff import KeyDiff
from kvengine.policies.retention.snapkv import SnapKV
from kvengine.rope import Rope

BASES = ("snapkv", "expected_attention", "keydiff")


@dataclass(frozen=True)
class AdaKV(Retention):
    """Share a layer's budget among its heads.

    Args:
        budget: tokens kept of the prompt per KV head, on average over the layer's heads, or a fraction of the prompt.
        floor: the part of the budget that every head has to itself; the heads share the rest. A fraction.
        base: the method that scores: "snapkv", "expected_attention" or "keydiff".
        window: SnapKV's, if that is the base: the last queries that vote, kept themselves. Tokens.
        kernel: SnapKV's, if that is the base: width of the pooling. Tokens, odd.
        pool: how to pool, where SnapKV is the base.
        reduce: how the heads of a query group agree, if the base asks them.
    """

    ragged: ClassVar[bool] = True
    remembers: ClassVar[bool] = False
    budget: Budget = 1024
    floor: float = 0.2
    base: Literal["snapkv", "expected_attention", "keydiff"] = "snapkv"
    window: int = 32
    kernel: int = 7
    pool: Literal["avg", "max"] = "max"
    reduce: Reduce = "mean"

    def __post_init__(self) -> None:
        check_budget(self, budget=self.budget)
        check_choice(self, base=(self.base, BASES), reduce=(self.reduce, REDUCE))
        if not (is_number(self.floor) and 0 <= self.floor <= 1):
            raise PolicyError(f"AdaKV: floor={self.floor!r} must lie between 0 (all is shared) and 1 (all is even)")
        self.scorer  # noqa: B018 - its options are checked when it is made

    @cached_property
    def scorer(self) -> SnapKV | ExpectedAttention | KeyDiff:
        if self.base == "expected_attention":
            return ExpectedAttention(self.budget, reduce=self.reduce)
        if self.base == "keydiff":
            return KeyDiff(self.budget)
        return SnapKV(self.budget, self.window, self.kernel, self.pool, self.reduce)

    @property
    def observes(self) -> int:
        return self.scorer.observes

    @property
    def watches(self) -> bool:
        return self.scorer.watches

    @property
    def needs_rope(self) -> bool:
        return self.scorer.needs_rope

    def watch(
        self,
        notes: Notes,
        queries: Float[Tensor, "row group query dim"],
        position: Int[Tensor, "row query"],
        rope: Rope | None,
    ) -> None:
        self.scorer.watch(notes, queries, position, rope)

    def score(self, seen: Seen) -> Float[Tensor, "row token"]:
        return self.scorer.score(seen)

    def keep(self, seen: Seen) -> Bool[Tensor, "row token"]:
        always = self.scorer.always(seen)
        want = seen.score.float().masked_fill(~seen.valid, float("-inf"))
        budget = seen.count(self.budget)
        fixed = torch.minimum(always.sum(1), budget)
        cap = shares(want.masked_fill(always, float("-inf")), budget - fixed, self.floor, seen.heads)
        return best_tokens(want.masked_fill(always, float("inf")), fixed + cap)


def shares(score: Float[Tensor, "row token"], even: Int[Tensor, "row"], floor: float, heads: int) -> Int[Tensor, "row"]:
    """How many tokens each row keeps, of those with a score, if the heads of a sequence share `heads * even`.

    >>> score = torch.tensor([[9.0, 8.0, 7.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    >>> shares(score, torch.tensor([2, 2]), 0.0, heads=2).tolist(), shares(score, torch.tensor([2, 2]), 0.5, 2).tolist()
    ([3, 1], [2, 2])
    """
    together = even.unflatten(0, (-1, heads)).sum(1)
    best = best_tokens(score.unflatten(0, (-1, heads)).flatten(1), together)
    won = best.unflatten(1, (heads, -1)).sum(2)
    part = (1 - floor) * won.double() + floor * even.unflatten(0, (-1, heads)).double()
    whole = (part + 1e-9).floor()
    missing = together - whole.long().sum(1)
    found = (whole.long() + best_tokens(part - whole, missing)).flatten(0, 1)
    there = (score > float("-inf")).sum(1)
    return found if bool((found <= there).all()) else handed_on(score, torch.minimum(found, there), together, heads)


def handed_on(
    score: Float[Tensor, "row token"], count: Int[Tensor, "row"], together: Int[Tensor, "sequence"], heads: int
) -> Int[Tensor, "row"]:
    """`count`, and what is still missing from `together` for the best of all heads' other tokens.

    After an earlier prompt a head may hold fewer tokens than its share of the next.
    """
    others = score.masked_fill(best_tokens(score, count), float("-inf")).unflatten(0, (-1, heads)).flatten(1)
    more = best_tokens(others, together - count.unflatten(0, (-1, heads)).sum(1))
    return count + more.unflatten(1, (heads, -1)).sum(2).flatten()
