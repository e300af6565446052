"""Elastic Cache (Liu et al., ECCV 2024, arXiv:2407.18121): anchors of importance take in their neighbours.

    score_j   =  sum over the prompt's queries of the attention that token j received  (mean over all heads)
    anchors   =  the best tokens, so many that with the first `sinks` and the last `recent` they make the budget
    bucket    =  an anchor and every dropped token that is nearest to it by position    (ties: the earlier anchor)
    anchor    <- the mean of its bucket's keys, and of its values
    decoding  :  once there are more than `budget`, the token in place `offset` goes, at each step

Places count what is held, in order of position; an offset below zero counts from the end of what the prompt left. So
the first tokens, the head of the instruction and the newest tokens survive. All heads of a layer keep the same
tokens. Defaults: 1 sink, 1 recent, offset -25, as in the official code.

Differs from the official code: anchors are the tokens with the highest scores (the code compares a sort order with a
threshold, which chooses as chance does); the indices of what is merged are right whatever `sinks` is (the code's miss
an offset); `budget` is what is kept (the code's ratio is what is removed) and holds while generating (the code's
target grows with each token, by the share that is kept); positions are the text's (the code's follow the cache's
length). Merged keys are averaged as they are cached, rotated, as in the code. Under a routing that splits a layer,
the mean is over the heads that follow this method.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.policies._budget import MOST, Budget, check_budget, check_count, tokens_by_row
from kvengine.policies.retention import Notes, Placed, Retention, Seen, keep_top, over_heads, some_rows

FAR = 1 << 30  # beyond all positions


@dataclass(frozen=True)
class Elastic(Retention):
    """Keep the tokens that have received most attention, with the average of those around them.

    Args:
        budget: tokens held per KV head, or a fraction of the prompt.
        sinks: the first tokens, always kept and never merged into, as far as `recent` leaves room. Tokens.
        recent: the prompt's last tokens, likewise; if the budget holds fewer, the newest of them. Tokens.
        offset: which place goes while decoding; zero or below: from the end of what the prompt left. Never a sink's, nor
            that of one of the `recent` newest.
    """

    decodes: ClassVar[bool] = True
    wants_mass: ClassVar[bool] = True
    mass_once: ClassVar[bool] = True
    merges: ClassVar[bool] = True
    remembers: ClassVar[bool] = False  # a prompt's tokens are ranked by its own queries, and later ones go by place
    budget: Budget = 1024
    sinks: int = 1
    recent: int = 1
    offset: int = -25

    def __post_init__(self) -> None:
        check_budget(self, budget=self.budget)
        check_count(self, sinks=self.sinks)
        check_count(self, least=1, recent=self.recent)
        if not isinstance(self.offset, int) or isinstance(self.offset, bool) or abs(self.offset) > MOST:
            raise PolicyError(
                f"Elastic: offset={self.offset!r} must be a whole number, and no more than texts are long"
            )

    def limit(self, seen: Seen) -> int:
        return int(seen.count(self.budget).max())

    def score(self, seen: Seen) -> Float[Tensor, "row token"]:
        return seen.score if seen.mass is None else over_heads(seen.mass.mean(1), seen.heads)

    def protected(self, seen: Seen) -> Bool[Tensor, "row token"]:
        room = (seen.count(self.budget) - self.recent).clamp(min=0, max=self.sinks)
        return seen.valid & (seen.position < (seen.first + room)[:, None]) | seen.recent(self.recent)

    def keep(self, seen: Seen) -> Bool[Tensor, "row token"]:
        if seen.prompt:
            kept = keep_top(seen, seen.score, self.budget, self.protected(seen))
            seen.notes["left"] = kept.sum(1)
            return kept
        budget = seen.count(self.budget)
        place = self.place(budget, seen.notes["left"]).clamp(max=seen.position.shape[1] - 1)
        at = seen.position.masked_fill(~seen.valid, FAR).sort(1).values.gather(1, place[:, None])
        over = seen.valid.sum(1) > budget
        return seen.valid & ~(over[:, None] & (seen.position == at))

    def place(self, budget: Int[Tensor, "row"], left: Int[Tensor, "row"]) -> Int[Tensor, "row"]:
        """Which place goes, between the sinks and the newest."""
        place = left + self.offset if self.offset <= 0 else torch.full_like(left, self.offset)
        last = torch.maximum(budget - self.recent, torch.zeros_like(budget))
        return torch.minimum(place.clamp(min=self.sinks), last)

    def rule(
        self, first: Int[Tensor, "row"], prompt_length: Int[Tensor, "row"], heads: int, notes: Notes
    ) -> Placed | None:
        if any(getattr(type(self), name) is not getattr(Elastic, name) for name in ("score", "keep", "place")):
            return None
        budget = tokens_by_row(self.budget, prompt_length)
        return Placed(budget, self.place(budget, notes["left"]))

    def fold(
        self, seen: Seen, keep: Bool[Tensor, "row token"]
    ) -> tuple[Float[Tensor, "row token dim"], Float[Tensor, "row token dim_v"]]:
        """Each anchor becomes the mean of its bucket."""
        keys, values = seen.read()
        anchor = keep & seen.valid & ~self.protected(seen)
        home = nearest(seen.position, anchor)
        member = (anchor | (seen.valid & ~keep)) & anchor.any(1, keepdim=True)
        return mean_at(keys, home, member), mean_at(values, home, member)


def nearest(position: Int[Tensor, "row token"], anchor: Bool[Tensor, "row token"]) -> Int[Tensor, "row token"]:
    """The slot of the anchor nearest to each token, the earlier of two as near; slots may be in any order.

    >>> nearest(torch.tensor([[0, 1, 2, 3, 4, 5]]), torch.tensor([[False, True, False, True, False, False]])).tolist()
    [[1, 1, 1, 3, 3, 3]]
    """
    known, slot = position.long().masked_fill(~anchor, FAR).sort(1)
    after = torch.searchsorted(known, position.long().contiguous())  # none is behind FAR, nor an anchor behind itself
    before = (after - 1).clamp(min=0)
    to_after, to_before = (known.gather(1, i) - position for i in (after, before))
    return slot.gather(1, torch.where(to_before.abs() <= to_after.abs(), before, after))


def mean_at(
    x: Float[Tensor, "row token dim"], home: Int[Tensor, "row token"], member: Bool[Tensor, "row token"]
) -> Float[Tensor, "row token dim"]:
    """`x` with every slot that is home to members replaced by their mean."""
    count, found = torch.zeros_like(home).scatter_add_(1, home, member.long()), torch.empty_like(x)
    for rows in some_rows(x):
        one, n = x[rows], count[rows, :, None]
        gone = one.float().masked_fill(~member[rows, :, None], 0)
        total = torch.zeros_like(gone).scatter_add_(1, home[rows, :, None].expand_as(gone), gone)
        found[rows] = torch.where(n > 1, (total / n.clamp(min=1)).to(x.dtype), one)
    return found
