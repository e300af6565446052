"""PyramidKV (Cai et al., 2024, arXiv:2406.02069): SnapKV with more for early layers than for late ones.

    b        =  budget - window                         (what a layer chooses on average)
    least    =  b // beta;  most = 2 b - least          (if most exceeds what there is: most = that, least = 2 b - most)
    choose_l =  most - l (most - least) / (layers - 1)  (rounded so that all layers together choose layers * b)
    keep     =  the window, and the best `choose_l` others by SnapKV's votes

Defaults: beta 20 and SnapKV's window and pooling, as in the paper's code.

Differs from the official code: it rounds the step between layers down, and so spends more than the budget, by up to
(layers - 1) / 2 tokens a layer; here the layers' shares add up to the budget exactly, also in models where others have a
window instead, which take no part. It gives all layers the same when the prompt is shorter than 2 b; here `most` is
capped by the prompt instead. One verdict per KV head.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.kernels.best_tokens import best_tokens
from kvengine.policies._budget import is_number
from kvengine.policies.retention import Seen
from kvengine.policies.retention.snapkv import SnapKV


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """Keep what the prompt's last queries attend to, more of it in early layers.

    Args:
        budget: tokens kept of the prompt per KV head on average over the layers, or a fraction of the prompt.
        window: the last queries that vote, kept themselves; if a fraction holds fewer, the newest of them. Tokens.
        kernel: width of the pooling. Tokens, odd.
        pool: how to pool.
        reduce: how the heads of a query group agree.
        beta: the last layer chooses a `beta`-th of the average.
    """

    beta: float = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (is_number(self.beta) and 1 <= self.beta < math.inf):
            raise PolicyError(
                f"PyramidKV: beta={self.beta!r} must be a number of at least 1; 1 gives all layers the same"
            )

    def keep(self, seen: Seen) -> Bool[Tensor, "row token"]:
        window = seen.recent(self.window)
        average = (seen.count(self.budget) - self.window).clamp(min=0)
        text = (seen.newest + 1 - seen.first - self.window).clamp(min=0)  # not what an earlier verdict left of it here
        chosen = share(average, text, self.beta, *seen.place)
        count = chosen + torch.minimum(seen.count(self.budget), window.sum(1))
        want = seen.score.float().masked_fill(window, float("inf")).masked_fill(~seen.valid, float("-inf"))
        return best_tokens(want, count)


def share(
    average: Int[Tensor, "row"], others: Int[Tensor, "row"], beta: float, layer: int, layers: int
) -> Int[Tensor, "row"]:
    """How many of the tokens outside the window a layer keeps: whole numbers that add up to layers * average.

    >>> [share(torch.tensor([10]), torch.tensor([99]), 20, layer, 4).item() for layer in range(4)]
    [20, 13, 7, 0]
    """
    least = (average.double() / beta).floor().long()
    most = 2 * average - least
    least = torch.where(most > others, 2 * average - others, least)
    most = torch.minimum(most, others)
    if layers == 1:
        return average

    def before(n: int) -> Tensor:  # what the first n layers keep together
        steps = 2 * (layers - 1)
        return torch.div(n * steps * most - n * (n - 1) * (most - least), steps, rounding_mode="floor")

    return before(layer + 1) - before(layer)
