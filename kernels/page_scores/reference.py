"""Plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kvengine.kernels.best_tokens.reference import best_tokens
from kvengine.kernels.gpu import next_power_of_2


def page_scores(q: Tensor, low: Tensor, high: Tensor, alive: Tensor, reduce: str) -> Tensor:
    """See `kvengine.kernels.page_scores`. The bound is `relu(q) . high - relu(-q) . low`: two products, no [unit, dim]
    intermediate."""
    wide = torch.promote_types(q.dtype, torch.float32)
    q = q.to(wide)
    bound = q.clamp_min(0) @ high.to(wide).mT + q.clamp_max(0) @ low.to(wide).mT
    if reduce == "each":
        return bound.masked_fill(~alive[:, None], -torch.inf)
    reduced = bound.amax(1) if reduce == "max" else bound.mean(1)
    return reduced.masked_fill(~alive, -torch.inf)


def log_shares(q: Tensor, mean: Tensor, alive: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """See `kvengine.kernels.page_scores.log_shares`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dead = ~alive[:, None]
    logits = q.to(wide) @ mean.to(wide).mT * scale
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(dead, -torch.inf)
    return logits.log_softmax(-1).masked_fill(dead, -torch.inf)  # of nothing alive, the softmax is NaN


def top_units(scores: Tensor, count: int, counts: Tensor | None = None, alive: Tensor | None = None) -> Tensor:
    """See `kvengine.kernels.page_scores.top_units`. One integer orders (score, lower id first), so keys are unique."""
    units, scores = scores.shape[1], scores if alive is None else scores.masked_fill(~alive, -torch.inf)
    bits = (scores.to(torch.float32) + 0.0).view(torch.int32).long()  # + 0.0 makes -0 the same as 0
    ordered = torch.where(bits >= 0, bits, -(bits & 0x7FFFFFFF))
    ids = torch.arange(units, device=scores.device)
    best = (ordered * 2**32 + (units - ids)).topk(count, dim=1, sorted=counts is not None).indices
    dead = scores.gather(1, best) == -torch.inf
    if counts is not None:
        dead |= torch.arange(count, device=scores.device) >= counts[:, None]
    best = best.masked_fill(dead, units).sort(1).values
    return best.masked_fill(best == units, -1)


ALIKE = 16
"""A GPU looks at numbers of units up to a multiple of this by the same launches, from this on; before, up to a power of two."""


def parts_of(most: int, outliers: float) -> int:
    """Into how many parts a GPU's program divides a row, of whose units it chooses `most`, to find the outliers among them."""
    return next_power_of_2(int(most * outliers) + 1)


class Ops(NamedTuple):
    """What a choice by shares is made of."""

    shares: Callable[..., Tensor]
    best: Callable[..., Tensor]
    top: Callable[..., Tensor]


PLAIN = Ops(log_shares, best_tokens, top_units)


def units_by_share(
    q: Tensor, mean: Tensor, alive: Tensor, most: int, scale: float, counts: Tensor | None, coherence: Tensor | None,
    outliers: float, first: bool, reduce: str, softcap: float | None, ops: Ops = PLAIN,
) -> Tensor:  # fmt: skip
    """See `kvengine.kernels.page_scores.units_by_share`."""
    forced = torch.zeros_like(alive)
    if coherence is not None:
        low = (-coherence.float()).masked_fill(~alive, -torch.inf)
        allowed = torch.full_like(low[:, 0], most, dtype=torch.int64) if counts is None else counts.clamp(max=most)
        forced = ops.best(low, (allowed.float() * outliers).long())
    share = ops.shares(q, mean, alive & ~forced, scale, softcap)
    if first:
        forced = forced.scatter(1, alive.to(torch.int8).argmax(1, keepdim=True), True)
    want = share.amax(1) if reduce == "max" else share.logsumexp(1)
    return ops.top(want.masked_fill(forced, torch.inf), min(most, alive.shape[1]), counts, alive)
