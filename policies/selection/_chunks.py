"""What selections by the mean key of a chunk share."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.kernels.page_scores import units_by_share
from kvengine.policies.selection import Where

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
    """The chunks that a row's query heads want most, by each head's softmax over the mean keys, and before them those that are
    always read: the first that is alive, or with `coherence` the least coherent, a share `outliers` of all that are read, which
    no softmax counts.

    A cap on logits (Gemma 2) changes no head's order, but how much it wants what beside the others of its group.
    """
    return units_by_share(
        q, mean, alive, at.most, at.scale, counts=None if at.even else at.count, coherence=coherence, outliers=outliers,
        first=first, reduce=reduce, softcap=at.softcap if q.shape[1] > 1 else None,
    )  # fmt: skip
