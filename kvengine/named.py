"""Tokens that a model names itself: which its queries read, of all that are cached (`kvengine.hf.indexed`).

    read by a query  =  the named ones that it may see,      named: their numbers in the text, padding counted

A decoded token reads these where they lie and no others, in pages, in tiers below the device, and in the open tail. A prompt's
queries name tokens each for itself; there they are a mask.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

FEW = 2
"""A tail is gathered from where it is more than so many times what is named; else it is read whole, under a mask."""


def among(
    named: Int[Tensor, "row query chosen"], position: Int[Tensor, "row slot"], seen: int
) -> Bool[Tensor, "row query slot"]:
    """Which slots hold a token that a query names; `seen`: tokens so far."""
    rows, queries, _ = named.shape
    said = torch.zeros(rows, queries, seen + 1, dtype=torch.bool, device=named.device)
    none = (named < 0) | (named >= seen)  # where fewer may be read than are named, tokens to come are named too
    said.scatter_(2, named.masked_fill(none, seen).long(), True)
    at = position.masked_fill(position < 0, seen).long()[:, None].expand(-1, queries, -1)
    said[..., seen] = False
    return said.gather(2, at)


def slots(named: Int[Tensor, "row chosen"], position: Int[Tensor, "row slot"], seen: int) -> Int[Tensor, "row most"]:
    """Where the named tokens lie among these slots, -1 in rows where fewer do."""
    there = among(named[:, None], position, seen)[:, 0]
    found, at = there.to(torch.int8).topk(min(named.shape[1], position.shape[1]), 1)
    return at.masked_fill(found == 0, -1)
