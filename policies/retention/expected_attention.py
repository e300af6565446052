"""Expected attention (Devoto et al., 2025, arXiv:2510.00636): keep what queries to come are likely to attend to.

    q_pre       ~   N(mu, Sigma), estimated per query head on the prompt's queries before rotation
    R           =   mean over the next `horizon` positions of the rotation to that position
    logit_j     =   s k_j . R mu  +  s^2 / 2  k_j^T (R Sigma R^T) k_j     (s: the logits' scale; k_j as cached: rotated)
    score_j     =   (softmax(logit)_j, reduced over the query group, + epsilon) |v_j|
    keep        =   the first `sinks` tokens, and the best others up to `budget`

Defaults as in the reference code (kvpress): 4 sinks, which count neither in mu and Sigma nor in the softmax; horizon
512; epsilon 0. The prompt is judged at its end; tokens generated later all stay.

mu and Sigma are gathered while the prompt is read, in memory that does not grow with it, and do not depend on its
chunks. A cap on logits (Gemma 2) and logits of sinks (gpt-oss) are not modelled.

Differs from the reference code: queries are those the model computed, turned back, instead of projected anew from
hidden states (the same, and right for models that normalise queries); the softmax runs over a row's real tokens only.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.errors import PolicyError, UnsupportedPolicy
from kvengine.policies._budget import Budget, check_budget, check_choice, check_count, check_switch, is_number
from kvengine.policies.retention import REDUCE, Notes, Reduce, Retention, Seen, keep_top, over_group
from kvengine.rope import Rope

SPAN = 1024  # queries turned back at once
PART = 1 << 12  # tokens scored at once


@dataclass(frozen=True)
class ExpectedAttention(Retention):
    """Keep what queries to come are likely to attend to, judging by the prompt's.

    Args:
        budget: tokens kept of the prompt per KV head, or a fraction of the prompt.
        sinks: the first tokens, always kept; if the budget holds fewer, the first of them. Tokens.
        horizon: how far the queries to come reach. Tokens.
        covariance: whether Sigma counts, or only mu.
        values: whether the length of the value counts.
        epsilon: added to the expected attention before it meets the value's length. A share of attention.
        reduce: how the heads of a query group agree.
    """

    remembers: ClassVar[bool] = False
    budget: Budget = 1024
    sinks: int = 4
    horizon: int = 512
    covariance: bool = True
    values: bool = True
    epsilon: float = 0.0
    reduce: Reduce = "mean"

    def __post_init__(self) -> None:
        check_budget(self, budget=self.budget)
        check_count(self, sinks=self.sinks)
        check_count(self, least=1, horizon=self.horizon)
        check_choice(self, reduce=(self.reduce, REDUCE))
        check_switch(self, covariance=self.covariance, values=self.values)
        if not (is_number(self.epsilon) and 0 <= self.epsilon < math.inf):
            raise PolicyError(f"ExpectedAttention: epsilon={self.epsilon!r} must be a number, and not negative")

    @property
    def needs_rope(self) -> bool:
        return True

    @property
    def order(self) -> int | None:
        return self.sinks

    def watch(
        self,
        notes: Notes,
        queries: Float[Tensor, "row group query dim"],
        position: Int[Tensor, "row query"],
        rope: Rope | None,
    ) -> None:
        if rope is None:
            raise UnsupportedPolicy(
                "'expected_attention' turns queries back to before their rotation, but the model's is not known"
            )
        for i in range(0, position.shape[1], SPAN):
            at = position[:, i : i + SPAN]
            counted = at >= self.sinks
            skip = int(counted.any(0).int().argmax())  # in all rows: sinks, padding
            turned = rope.turn(queries[:, :, i : i + SPAN][:, :, skip:].float(), -at[:, None, skip:])
            add_sample(notes, turned, counted[:, skip:])

    def score(self, seen: Seen) -> Float[Tensor, "row token"]:
        valid = seen.valid
        # Slots without a token may hold NaN, and their scores are NaN then; `keep_top` passes them over.
        keys, values = seen.read()
        logits = self.logits(seen, keys).masked_fill_(~(valid & ~self.always(seen))[:, None], float("-inf"))
        expected = over_group(logits.softmax(-1).nan_to_num_(0.0), self.reduce) + self.epsilon
        if not self.values:
            return expected
        return expected * torch.cat([some.float().norm(dim=-1) for some in values.split(PART, 1)], 1)

    def logits(self, seen: Seen, keys: Float[Tensor, "row token dim"]) -> Float[Tensor, "row group token"]:
        mean, spread, count = (seen.notes.pop(name) for name in ("mean", "spread", "count"))
        if seen.rope is None:
            raise UnsupportedPolicy("'expected_attention' needs the model's rotation, which is not known")
        ahead = torch.arange(1, self.horizon + 1, device=keys.device)
        places = (seen.newest - seen.first)[:, None] + ahead
        mean = seen.rope.average(mean, places[:, None])
        sigma = spread / count.clamp(min=1)[:, None, None, None]
        for _ in range(2):  # R Sigma R^T: Sigma is symmetric, so each side is the last axis in turn
            sigma = seen.rope.average(sigma, places[:, None, None]).transpose(2, 3)
        found = []
        for some in keys.split(PART, 1):  # as floats, with their products, all would take eight times what they do
            x = some.float()
            found.append(torch.einsum("rgd,rtd->rgt", mean, x) * seen.scale)
            if self.covariance:
                square = [((x @ sigma[:, g]) * x).sum(-1) for g in range(sigma.shape[1])]
                found[-1] += torch.stack(square, 1) * (seen.scale**2 / 2)
        return torch.cat(found, 2)

    def always(self, seen: Seen) -> Bool[Tensor, "row token"]:
        most = seen.count(self.budget).clamp(max=self.sinks)  # of too small a budget the first ones, which matter most
        return seen.valid & (seen.position < (seen.first + most)[:, None])

    def keep(self, seen: Seen) -> Bool[Tensor, "row token"]:
        return keep_top(seen, seen.score, self.budget, self.always(seen))


def add_sample(notes: Notes, x: Float[Tensor, "row group query dim"], counted: Bool[Tensor, "row query"]) -> None:
    """Update count, mean and sum of squared deviations by more samples (Chan, Golub, LeVeque 1979)."""
    more = counted.sum(1).float()
    if bool(counted.all()):
        mean = x.mean(2)
        centred = x - mean[:, :, None]
    else:
        gone = ~counted[:, None, :, None]
        mean = x.masked_fill(gone, 0).sum(2) / more.clamp(min=1)[:, None, None]
        centred = (x - mean[:, :, None]).masked_fill_(gone, 0)
    spread = centred.transpose(2, 3) @ centred
    if "count" in notes:
        had = notes["count"]
        total = (had + more).clamp(min=1)
        apart = mean - notes["mean"]
        mean = notes["mean"] + apart * (more / total)[:, None, None]
        between = apart[..., :, None] * apart[..., None, :] * (had * more / total)[:, None, None, None]
        spread, more = notes["spread"] + spread + between, had + more
    notes.update(count=more, mean=mean, spread=spread)
