"""Plain torch: the oracle, and what runs where nothing faster can."""

from __future__ import annotations

import torch
from torch import Tensor

from kvengine.kernels.state import State


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    want_probs: bool,
) -> State:
    """See `kvengine.kernels.attention`. Computes in float32, or float64 if the query is."""
    wide = torch.promote_types(q.dtype, torch.float32)
    row, group, query, _ = q.shape
    scores = (q.to(wide).flatten(1, 2) @ k.to(wide).mT).mul_(scale).unflatten(1, (group, query))
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        v = v.masked_fill(~visible.any(1)[..., None], 0)  # 0 * NaN is NaN: an unseen value must not reach the product
    lse = _logsumexp(scores, None if sinks is None else sinks.to(wide)[..., None].expand(row, group, query))
    probs = torch.exp(scores - torch.where(lse == -torch.inf, 0, lse)[..., None])
    out = (probs.flatten(1, 2) @ v.to(wide)).unflatten(1, (group, query))
    return State(out, lse, probs if want_probs else None)


def _logsumexp(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is not None:
        scores = torch.cat([scores, sinks[..., None]], -1)
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:-1], -torch.inf)
    return torch.logsumexp(scores, -1)
