"""Saliency: the mean attention that a token receives from the queries that can see it (ZipCache, equation 8).

    saliency_i  =  sum over probes k >= i of A_ki  /  number of probes k >= i          (A summed over the query group)

A prompt's probes are half its last queries, half spread over the others by a fixed sequence, counted from its end:
so they do not depend on the chunks it comes in, nor on the padding of the batch. While decoding, every query is a
probe, over the open tail only, and the mean runs on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it, modulo 1, fill the unit interval evenly


@dataclass
class Saliency:
    """The saliency of a prompt's tokens, as far as it has been read.

    Attributes:
        share: of the prompt's queries that are probes.
        start: position of the prompt's first token.
        end: position after its last.
        mass: what the probes so far have paid to each slot.
    """

    share: float
    start: int
    end: int
    mass: Float[Tensor, "row group token"] | None = None

    def probes(self, at: Int[Tensor, "*row query"], first: Int[Tensor, "row"]) -> Bool[Tensor, "row query"]:
        """Which queries, by position (of all rows, or of each), are probes of a row, whose first token of this prompt is at
        `first`."""
        back = self.end - 1 - at
        begin = first.clamp(min=self.start)[:, None]
        last = ((self.end - begin).float() * self.share / 2).ceil().clamp(min=1)
        rest = self.share / 2 / max(1 - self.share / 2, 1e-9)
        spread = (back.double() * GOLDEN) % 1 < rest
        return ((back < last) | spread) & (at >= begin)

    def mean(self, position: Int[Tensor, "row token"], first: Int[Tensor, "row"]) -> Float[Tensor, "row token"]:
        """The saliency of every slot; 0 where there is no token."""
        if self.mass is None:
            raise ValueError("no query has been observed")
        at = torch.arange(self.start, self.end, device=position.device)
        after = self.probes(at, first).long().flip(1).cumsum(1).flip(1)
        count = after.gather(1, (position.long() - self.start).clamp(min=0)).clamp(min=1)
        return (self.mass.sum(1) / count).masked_fill(position < 0, 0)


def running(
    mean: Float[Tensor, "row token"],
    mass: Float[Tensor, "row token"],
    position: Int[Tensor, "row token"],
    at: Int[Tensor, "query"],
    judged: int | Int[Tensor, "row 1"],
    valid: Bool[Tensor, "row query"] | None = None,
) -> Float[Tensor, "row token"]:
    """The mean after the queries at `at` have added `mass`. What a prompt that ended at `judged` left counts once.

    `valid`: which of the queries are tokens' (None: all).
    """
    seen = (at[-1] - position.clamp(min=judged - 1) + 1).clamp(min=1)
    asked = at - position[..., None] >= 0
    new = (asked if valid is None else asked & valid[:, None]).sum(-1)
    return (mean * (seen - new).clamp(min=0) + mass) / seen
