"""R-KV (Cai et al., NeurIPS 2025, arXiv:2505.24133): drop what says the same as something newer, while a model thinks.

    paid_j     =  mean over the last `window` queries of softmax_j(max over the group of q k_j / sqrt(d))   (j older than these)
    I_j        =  the largest paid among j and its neighbours                          (a window of `kernel` tokens)
    S_ij       =  cos(k_i, k_j), but 0 for i = j, and 0 if j is the newest of the tokens with cos(k_i, k_j) > `alike`
    R          =  softmax over j of the mean over i of S_ij
    keep       =  the newest `window` tokens, and the best others by  mix I - (1 - mix) R,  up to `budget`

Tokens are judged when `buffer` more than the budget are held, and at a prompt's end: a text may become as long as it
likes, in memory that does not grow. With `mix=1` attention alone decides, as in SnapKV. Defaults are the paper's: mix 0.1,
a window of 8, buffers of 128, and those of its code where it names none: pooling over 7, alike from 0.5.

Of several tokens that are alike the newest counts as the one that says it, so the others are redundant. Its sum over
pairs is found without a matrix of pairs: the mean of unit vectors once, and for each token its newest likeness, looked
for from the newest tokens on.

Differs from the official code: a prompt beyond the budget is judged at its end (the code keeps it whole until the first
buffer is full); a token unlike all others counts nothing as its newest likeness (the code takes the first token, which
then is never redundant); heads that hold different numbers of tokens, padding and batches are each judged as alone. As in it,
logits of sinks (gpt-oss) are not counted.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn import functional as F

from kvengine.errors import PolicyError
from kvengine.kernels.best_tokens import best_tokens
from kvengine.policies._budget import Budget, check_budget, check_count, check_share, is_number
from kvengine.policies.retention import Retention, Seen, some_rows
from kvengine.tokens import in_order, pack, take

BLOCK, SPAN = 512, 1024  # tokens that are compared at once: the newer ones, and those that look for a likeness


@dataclass(frozen=True)
class RKV(Retention):
    """Keep what is attended to and said once, while decoding too.

    Args:
        budget: tokens kept per KV head at each verdict, or a fraction of the prompt.
        buffer: how many more are held before the next verdict. Tokens.
        window: the last queries that are asked, their tokens kept; if a fraction holds fewer, the newest. Tokens.
        kernel: width of the pooling, so that neighbours of a good token stay with it. Tokens, odd.
        mix: how much of a token's score is attention; the rest is how redundant it is, which counts against it. A share.
        alike: two keys say the same if their cosine exceeds this.
    """

    decodes: ClassVar[bool] = True
    remembers: ClassVar[bool] = False
    budget: Budget = 1024
    buffer: int = 128
    window: int = 8
    kernel: int = 7
    mix: float = 0.1
    alike: float = 0.5

    def __post_init__(self) -> None:
        check_budget(self, budget=self.budget)
        check_count(self, least=1, buffer=self.buffer, window=self.window, kernel=self.kernel)
        check_share(self, mix=self.mix)
        if not (is_number(self.alike) and 0 <= self.alike < 1):
            raise PolicyError(f"RKV: alike={self.alike!r} is a cosine, and must lie between 0 and below 1")
        if self.kernel % 2 == 0:
            raise PolicyError(f"RKV: kernel={self.kernel} must be odd, so that pooling keeps the length")
        if isinstance(self.budget, int) and self.budget <= self.window:
            raise PolicyError(
                f"RKV: budget={self.budget} must exceed window={self.window}: the window's tokens are kept too"
            )
        if self.buffer < self.window:
            raise PolicyError(
                f"RKV: buffer={self.buffer} must not be less than window={self.window}: each verdict asks new queries"
            )

    @property
    def observes(self) -> int:
        return self.window

    def full(self, seen: Seen) -> Int[Tensor, "row"]:
        return seen.count(self.budget) + self.buffer

    def limit(self, seen: Seen) -> int | None:
        return int(seen.count(self.budget).max()) + self.buffer - 1

    def score(self, seen: Seen) -> Float[Tensor, "row token"]:
        index, keys = in_order(seen.position), seen.read()[0]
        found = [self.wanted(seen, rows, keys[rows], index[rows]) for rows in some_rows(keys)]
        return put_back(torch.cat(found), index, seen.position)

    def wanted(
        self, seen: Seen, rows: slice, keys: Float[Tensor, "some token dim"], index: Int[Tensor, "some held"]
    ) -> Float[Tensor, "some held"]:
        """The scores of these rows' tokens, in order."""
        keys, position = take(keys.float(), index), take(seen.position[rows], index, -1)
        found = self.mix * self.importance(seen, rows, keys, position)
        if self.mix < 1:
            found = found - (1 - self.mix) * redundancy(keys, position >= 0, self.alike)
        return found

    def importance(
        self, seen: Seen, rows: slice, keys: Float[Tensor, "some token dim"], position: Int[Tensor, "some token"]
    ) -> Float[Tensor, "some token"]:
        """What the last queries pay to each token but their own, the largest among its neighbours."""
        logits = torch.einsum("rgqd,rtd->rgqt", seen.queries[rows].float() * seen.scale, keys)
        if seen.softcap is not None:
            logits = torch.tanh(logits / seen.softcap) * seen.softcap
        others = (position >= 0) & (position <= seen.newest - self.window)
        paid = logits.amax(1).masked_fill(~others[:, None], float("-inf")).softmax(-1).nan_to_num_(0.0)
        asks = (seen.query_position >= seen.asking[rows, None]).float()
        mean = torch.einsum("rqt,rq->rt", paid, asks) / asks.sum(1, keepdim=True).clamp(min=1)
        return F.max_pool1d(mean[:, None], self.kernel, 1, self.kernel // 2)[:, 0] if keys.shape[1] else mean

    def keep(self, seen: Seen) -> Bool[Tensor, "row token"]:
        index = in_order(seen.position)  # neighbours may share a score: the newer one stays, wherever it lies
        want = take(seen.score.masked_fill(seen.recent(self.window), float("inf")), index, float("-inf"))
        return put_back(best_tokens(want, seen.count(self.budget)), index, seen.position)


def put_back(
    x: Shaped[Tensor, "row held"], index: Int[Tensor, "row held"], slots: Int[Tensor, "row token"]
) -> Shaped[Tensor, "row token"]:
    """What was found for tokens in order, in their slots; 0 in the others."""
    out = x.new_zeros(slots.shape[0], slots.shape[1] + 1)
    return out.scatter_(1, index.masked_fill(index < 0, slots.shape[1]), x)[:, :-1]


def redundancy(
    keys: Float[Tensor, "row token dim"], there: Bool[Tensor, "row token"], alike: float
) -> Float[Tensor, "row token"]:
    """R, of tokens from the oldest to the newest; 0 where there is none."""
    unit = F.normalize(keys, dim=-1, eps=1e-8).masked_fill(~there[..., None], 0)
    total = torch.einsum("rtd,rd->rt", unit, unit.sum(1)) - (unit * unit).sum(-1)
    newest = newest_alike(unit, there, alike)
    apart = (unit * take(unit, newest)).sum(-1)
    total = F.pad(total, (0, 1)).scatter_add_(1, newest.masked_fill(newest < 0, total.shape[1]), -apart)[:, :-1]
    mean = total / there.sum(1, keepdim=True).clamp(min=1)
    return mean.masked_fill(~there, float("-inf")).softmax(-1).nan_to_num_(0.0)


def newest_alike(
    unit: Float[Tensor, "row token dim"], there: Bool[Tensor, "row token"], alike: float
) -> Int[Tensor, "row token"]:
    """For each token the newest other one whose cosine with it exceeds `alike`; -1 if there is none.

    >>> newest_alike(torch.tensor([[[1.0, 0], [0, 1], [1, 0], [1, 0]]]), torch.ones(1, 4, dtype=torch.bool), 0.5)
    tensor([[ 3, -1,  3,  2]])
    """
    found = torch.full((len(there), there.shape[1] + 1), -1, device=unit.device)  # the last for what is no token
    left = pack(there)
    for begin in range((unit.shape[1] - 1) // BLOCK * BLOCK, -1, -BLOCK):
        some = unit[:, begin : begin + BLOCK]
        column = torch.arange(begin, begin + some.shape[1], device=unit.device)
        rank = column.float()  # half the bytes
        for index in left.split(SPAN, 1):
            unlike = torch.bmm(take(unit, index), some.transpose(1, 2)) <= alike
            unlike |= index[..., None] == column
            newest = rank.expand(unlike.shape).masked_fill(unlike, -1).amax(-1)
            found.scatter_(1, index.masked_fill(index < 0, there.shape[1]), newest.long())
        left = take(left, pack((left >= 0) & (take(found, left, 0) < 0)), -1)  # most have found one by now
        if not left.shape[1]:
            break
    return found[:, :-1]
