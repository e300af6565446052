"""Vertical and slanted lines of an attention map, as its last queries show them."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from kvengine.policies.prefill._blocks import capped, room


def shares(
    q: Float[Tensor, "row group query dim"],
    k: Float[Tensor, "row token dim"],
    scale: float,
    last: int,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "row group token"], Float[Tensor, "row group token"]]:
    """Of the causal attention of the last queries, at most `last`: what each token receives, and what goes to a token so
    many before the query's own. Both are fractions of the whole, in float32.

    >>> q, k = torch.zeros(1, 1, 2, 1), torch.zeros(1, 3, 1)
    >>> [x.mul(12).round().long().tolist() for x in shares(q, k, 1.0, 2)]
    [[[[5, 5, 2]]], [[[5, 5, 2]]]]
    """
    (rows, group, _, _), tokens = q.shape, k.shape[1]
    q = q[:, :, -last:].flip(2) * scale  # the newest first: what is as far before each is in rows that move on by one
    n = q.shape[2]
    late = torch.ones(n, n + 1, dtype=torch.bool, device=q.device).tril().flip(1)
    vertical, slash = (q.new_empty(rows, group, tokens, dtype=torch.float32) for _ in range(2))
    most = room(q) // (2 * n * tokens)  # of scores and of shares
    heads, step = max(1, most), max(1, most // group)
    for r in range(0, rows, step):
        keys = F.pad(k[r : r + step], (0, 0, 0, 1)).mT  # and a token that nobody sees, for a row to move by one
        for h in range(0, group, heads):
            part = q[r : r + step, h : h + heads]
            scores = (part.flatten(1, 2) @ keys).float().unflatten(1, part.shape[1:3])
            scores = capped(scores, softcap)
            scores[..., tokens - n :].masked_fill_(late, -torch.inf)
            p = scores.softmax(3)
            here = slice(r, r + step), slice(h, h + heads)
            vertical[here] = p[..., :tokens].sum(2)
            slash[here] = p.flatten(2)[..., : n * tokens].unflatten(2, (n, tokens)).sum(2).flip(2)
    return vertical / n, slash / n
