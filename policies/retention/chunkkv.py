"""ChunkKV (Liu et al., NeurIPS 2025, arXiv:2502.00299): what SnapKV's votes say of whole chunks of neighbours.

    vote_j   =  attention of the last `window` queries to token j, summed           (SnapKV's, not pooled)
    chunk c  =  tokens c * chunk ... (c + 1) * chunk - 1 of what the row holds
    score_c  =  mean of the votes of its tokens outside of the window
    keep     =  the window itself, and the best chunks up to `budget`

Tokens that mean something together stay together, or go together. Defaults: the paper's chunks of 10 tokens, and SnapKV's
window. Tokens generated later all stay.

Differs from the paper: budgets are spent to the last token, so of the last chosen chunk only the newest tokens may fit.
The mean stands for the sum, which is the same for whole chunks and unfair to one that the window cuts short. Every layer
judges for itself; the paper's reuse of a layer's choice by its neighbours saves time, at some loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.policies._budget import Budget, check_budget, check_choice, check_count
from kvengine.policies.retention import REDUCE, Reduce, Retention, Seen, keep_top
from kvengine.policies.retention.snapkv import votes


@dataclass(frozen=True)
class ChunkKV(Retention):
    """Keep the chunks that the prompt's last queries attend to.

    Args:
        budget: tokens kept of the prompt per KV head, the window included, or a fraction of the prompt.
        window: the last queries that vote, kept themselves; if a fraction holds fewer, the newest of them. Tokens.
        chunk: neighbours that stay or go together. Tokens.
        reduce: how the heads of a query group agree.
    """

    remembers: ClassVar[bool] = False
    budget: Budget = 1024
    window: int = 32
    chunk: int = 10
    reduce: Reduce = "mean"

    def __post_init__(self) -> None:
        check_budget(self, budget=self.budget)
        check_count(self, least=1, window=self.window, chunk=self.chunk)
        check_choice(self, reduce=(self.reduce, REDUCE))
        if isinstance(self.budget, int) and self.budget <= self.window:
            raise PolicyError(f"ChunkKV: budget={self.budget} must exceed window={self.window}: the window is kept too")

    @property
    def observes(self) -> int:
        return self.window

    @property
    def order(self) -> int | None:
        return 0

    def score(self, seen: Seen) -> Float[Tensor, "row token"]:
        vote, votable = votes(seen, self.reduce, self.window), seen.valid & ~self.always(seen)
        at = (seen.valid.cumsum(1) - 1).clamp_(min=0) // self.chunk
        total = torch.zeros_like(vote).scatter_add_(1, at, vote)
        count = torch.zeros_like(vote).scatter_add_(1, at, votable.to(vote.dtype))
        return (total / count.clamp_(min=1)).gather(1, at)

    def always(self, seen: Seen) -> Bool[Tensor, "row token"]:
        return seen.recent(self.window)

    def keep(self, seen: Seen) -> Bool[Tensor, "row token"]:
        return keep_top(seen, seen.score, self.budget, self.always(seen))
