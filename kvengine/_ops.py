"""Attention of a few queries over some tokens, as partial results that merge exactly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

BLOCK = 1 << 22  # logits computed at once, per group of rows


@dataclass(frozen=True)
class State:
    """Attention over some tokens: the output normalised over them, and the log of their total weight, both fp32."""

    out: Float[Tensor, "row group query dim"]
    lse: Float[Tensor, "row group query"]
    probs: Float[Tensor, "row group query token"] | None = None


def attention(
    q: Float[Tensor, "row group query dim"],
    k: Float[Tensor, "row token dim"],
    v: Float[Tensor, "row token dim_v"],
    visible: Bool[Tensor, "row query token"] | None,
    scale: float,
    softcap: float | None = None,
    want_probs: bool = False,
) -> State:
    """softmax(q k^T * scale) v in fp32. A query that sees nothing gives 0, and lse = -inf."""
    logits = torch.matmul(q.float().flatten(1, 2), k.float().transpose(1, 2)).unflatten(1, q.shape[1:3]) * scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if visible is not None:
        logits = logits.masked_fill(~visible[:, None], float("-inf"))
    lse = logits.logsumexp(-1)
    probs = (logits - lse.masked_fill(lse == float("-inf"), 0)[..., None]).exp()
    safe = v.float() if visible is None else v.float().masked_fill(~visible.any(1)[..., None], 0)
    out = torch.matmul(probs.flatten(1, 2), safe).unflatten(1, q.shape[1:3])
    return State(out, lse, probs if want_probs else None)


def quick(
    q: Float[Tensor, "row group query dim"],
    k: Float[Tensor, "row token dim"],
    v: Float[Tensor, "row token dim_v"],
    visible: Bool[Tensor, "row query token"] | None,
    scale: float,
) -> Float[Tensor, "row group query dim_v"]:
    """The output alone, in the queries' dtype: the group folded into the query axis, so that k and v are read once."""
    r, g, n, _ = q.shape
    mask = None if visible is None else visible[:, None].expand(r, g, *visible.shape[1:]).flatten(1, 2)
    return F.scaled_dot_product_attention(q.flatten(1, 2), k, v, attn_mask=mask, scale=scale).unflatten(1, (g, n))


def merge(states: Sequence[State]) -> State:
    """Attention over the union of disjoint sets of tokens."""
    if len(states) == 1:
        return states[0]
    lse = torch.stack([s.lse for s in states])
    total = lse.logsumexp(0)
    weight = (lse - total.masked_fill(total == float("-inf"), 0)).exp()
    out = sum(w[..., None] * s.out for w, s in zip(weight, states, strict=True))
    return State(out, total)  # type: ignore[arg-type]


def spread(part: State, total: Float[Tensor, "row group query"]) -> Float[Tensor, "row group query token"]:
    """A part's probabilities as shares of the whole."""
    if part.probs is None:
        raise ValueError("this part was computed without probabilities")
    return part.probs * (part.lse - total).exp()[..., None]


def blocks(q: Tensor, tokens: int) -> list[slice]:
    """Spans of queries whose logits over `tokens` tokens fit in memory comfortably."""
    step = max(1, BLOCK // max(1, tokens * q.shape[1]))
    return [slice(i, min(i + step, q.shape[2])) for i in range(0, q.shape[2], step)]
