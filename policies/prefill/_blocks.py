"""Blocks of queries and of tokens: which are before which, and the fewest that hold a share of the attention."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

ROOM = 1 << 26
"""Scores that are held at a time."""
NEAR = 1 << 22
"""The same on a CPU, where caches are to hold them."""


def room(x: Tensor) -> int:
    """How many scores made of this are to be held at a time."""
    return ROOM if x.is_cuda else NEAR


def capped(logits: Float[Tensor, "*line columns"], softcap: float | None) -> Float[Tensor, "*line columns"]:
    """Logits, or estimates of them, as the model caps them; in place."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def causal(
    queries: int, tokens: int, block: int, device: torch.device
) -> tuple[Bool[Tensor, "block columns"], Bool[Tensor, "block columns"]]:
    """For each block with a query of the last of so many tokens: the blocks of tokens up to it, and its own.

    >>> causal(3, 7, 2, torch.device("cpu"))[0].int().tolist()
    [[1, 1, 1, 0], [1, 1, 1, 1]]
    """
    columns = torch.arange(-(-tokens // block), device=device)
    own = columns[(tokens - queries) // block :, None]
    return columns <= own, columns == own


def fewest(
    mass: Float[Tensor, "*line columns"], share: float, always: Bool[Tensor, "*lines columns"]
) -> Bool[Tensor, "*line columns"]:
    """The columns in `always`, and the fewest of the others with which they hold `share` of the whole mass, heaviest first.

    >>> fewest(torch.tensor([5.0, 1.0, 3.0, 1.0]), 0.7, torch.tensor([False, True, False, False])).tolist()
    [True, True, True, False]
    >>> fewest(torch.tensor([5.0, 1.0, 3.0, 1.0]), 0.6, torch.tensor([False, True, False, False])).tolist()
    [True, True, False, False]
    """
    heavy, order = mass.masked_fill(always, torch.inf).sort(-1, descending=True)
    ranked = mass.gather(-1, order)
    before = ranked.cumsum(-1) - ranked
    enough = before >= share * mass.sum(-1, keepdim=True)
    return torch.zeros_like(always.expand_as(mass)).scatter(-1, order, ~enough | heavy.isinf())


def means(x: Float[Tensor, "*line token dim"], block: int, lead: int = 0) -> Float[Tensor, "*lines block dim"]:
    """Of each block's vectors, in float32; the first one begins `lead` places before them.

    >>> means(torch.tensor([[1.0], [2.0], [4.0], [7.0]]), 2, 1)[:, 0].tolist()
    [1.0, 3.0, 7.0]
    """
    if x.is_cpu and x.dim() > 2:  # one line at a time: there the sum makes floats of all that it is given
        return torch.stack([means(one, block, lead) for one in x])
    n = x.shape[-2]
    place = torch.arange(-lead, n + -(lead + n) % block, device=x.device)
    there = ((place >= 0) & (place < n)).unflatten(0, (-1, block)).sum(1, keepdim=True)
    sums = F.pad(x, (0, 0, lead, -(lead + n) % block)).unflatten(-2, (-1, block)).sum(-2, dtype=torch.float32)
    return sums / there
