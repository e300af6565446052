"""What selections by the mean key of a chunk share."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.kernels.best_tokens import best_tokens
from kvengine.kernels.page_scores import log_shares, units_by_share
from kvengine.policies.selection import Where, best

Reduce = Literal["max", "mean"]


def mean_key(k: Float[Tensor, "unit token dim"], valid: Bool[Tensor, "unit token"] | None) -> Float[Tensor, "unit dim"]:
    """The mean of a chunk's keys, in their dtype; 0 if it has none. `valid`: None if all are there."""
    if valid is None:
        total = k.float().sum(1)
        return (total / total.new_full((1, 1), k.shape[1])).to(k.dtype)  # by a number, a GPU multiplies by its inverse
    alive = valid[..., None]
    return ((k.float() * alive).sum(1) / alive.sum(1).clamp(min=1)).to(k.dtype)


def coherence(
    k: Float[Tensor, "unit token dim"], valid: Bool[Tensor, "unit token"] | None, mean: Float[Tensor, "unit dim"]
) -> Float[Tensor, "unit"]:
    """The least cosine between a chunk's mean and one of its keys: how badly the mean can stand for them.

    >>> k = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[2.0, 0.0], [1.0, 0.0]]])
    >>> coherence(k, torch.ones(2, 2, dtype=torch.bool), k.mean(1))
    tensor([0.7071, 1.0000])
    """
    near = torch.cosine_similarity(k.float(), mean.float()[:, None], dim=-1)
    return (near if valid is None else near.masked_fill(~valid, float("inf"))).amin(1)


def attention_to(
    q: Float[Tensor, "row group dim"],
    mean: Float[Tensor, "row unit dim"],
    alive: Bool[Tensor, "row unit"],
    scale: float,
    reduce: Reduce,
    softcap: float | None,
) -> Float[Tensor, "row unit"]:
    """Each query head's softmax over the chunks' mean keys, then one value per KV head: the logarithm of their largest or their
    sum, so that no chunk is too small to be told from another.

    A cap on logits (Gemma 2) changes no head's order, but how much it wants what beside the others of its group.
    """
    share = log_shares(q, mean, alive, scale, softcap=softcap if q.shape[1] > 1 else None)
    return share.amax(1) if reduce == "max" else share.logsumexp(1)


def read_by_share(
    q: Float[Tensor, "row group dim"],
    mean: Float[Tensor, "row unit dim"],
    alive: Bool[Tensor, "row unit"],
    at: Where,
    reduce: Reduce,
    *,
    coherence: Float[Tensor, "row unit"] | None = None,
    outliers: float = 0.0,
    first: bool = False,
) -> Int[Tensor, "row chosen"]:
    """The chunks that are best by `attention_to`, and before them those that are always read: the first that is alive, or with
    `coherence` the least coherent, a share `outliers` of all that are read, which no softmax counts."""
    if q.is_cuda:  # two launches
        return units_by_share(
            q, mean, alive, at.most, at.scale, counts=None if at.even else at.count, coherence=coherence, outliers=outliers,
            first=first, reduce=reduce, softcap=at.softcap if q.shape[1] > 1 else None,
        )  # fmt: skip
    always = None
    if coherence is not None:
        low = (-coherence.float()).masked_fill(~alive, float("-inf"))
        always = best_tokens(low, (at.count.float() * outliers).long())
    want = attention_to(q, mean, alive if always is None else alive & ~always, at.scale, reduce, at.softcap)
    if always is not None:
        want = want.masked_fill(always, float("inf"))
    elif first:
        earliest = alive.to(torch.int8).argmax(1, keepdim=True)  # unit 0 may be empty while another row's is not
        want = want.scatter(1, earliest, float("inf"))
    return best(want, alive, at)
