"""SnapKV (Li et al., NeurIPS 2024, arXiv:2404.14469): the prompt's last queries vote for what to keep of it.

    vote_j   =  sum over the last `window` queries i of softmax_i(q_i k^T / sqrt(d))_j  (causal; reduced over the group)
    score    =  pool(vote)                                                           (same length, odd kernel)
    keep     =  the window itself, and the best others up to `budget`

Defaults: window 32 and average pooling over 5, as its code sets them where a run does not (its LongBench runs take the
maximum over 7). Tokens generated later all stay. A cap on logits (Gemma 2) and logits of sinks (gpt-oss) count as in the
model's own attention.

Differs from the official code: one verdict per KV head (mean over its query group) instead of per query head on
repeated keys; a prompt shorter than the budget is kept whole, one shorter than the window votes with what it has;
padding neither votes nor is voted for.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from kvengine.errors import PolicyError
from kvengine.policies._budget import Budget, check_budget, check_choice, check_count
from kvengine.policies.retention import REDUCE, Reduce, Retention, Seen, keep_top, over_group
from kvengine.tokens import pack, take

LOGITS = 1 << 22
"""Of the last queries and all tokens, that are computed at once: those of a row, at the least."""


@dataclass(frozen=True)
class SnapKV(Retention):
    """Keep what the prompt's last queries attend to.

    Args:
        budget: tokens kept of the prompt per KV head, the window included, or a fraction of the prompt.
        window: the last queries that vote, kept themselves; if a fraction holds fewer, the newest of them. Tokens.
        kernel: width of the pooling, so that neighbours of a good token stay with it. Tokens, odd.
        pool: how to pool.
        reduce: how the heads of a query group agree.
    """

    remembers: ClassVar[bool] = False
    budget: Budget = 1024
    window: int = 32
    kernel: int = 5
    pool: Literal["avg", "max"] = "avg"
    reduce: Reduce = "mean"

    def __post_init__(self) -> None:
        check_budget(self, budget=self.budget)
        check_count(self, least=1, window=self.window, kernel=self.kernel)
        check_choice(self, pool=(self.pool, ("avg", "max")), reduce=(self.reduce, REDUCE))
        if self.kernel % 2 == 0:
            raise PolicyError(
                f"{type(self).__name__}: kernel={self.kernel} must be odd, so that pooling keeps the length"
            )
        if isinstance(self.budget, int) and self.budget <= self.window:
            raise PolicyError(
                f"{type(self).__name__}: budget={self.budget} must exceed window={self.window}: the window is kept too"
            )

    @property
    def observes(self) -> int:
        return self.window

    @property
    def order(self) -> int | None:
        return 0

    def score(self, seen: Seen) -> Float[Tensor, "row token"]:
        return self.pooled(votes(seen, self.reduce, self.window), seen)

    def pooled(self, vote: Float[Tensor, "row token"], seen: Seen) -> Float[Tensor, "row token"]:
        """Neighbours are the tokens held before and after, whatever slots without a token are between them."""
        if bool(seen.valid.all()):
            return self.pool_row(vote)
        index = pack(seen.valid)
        found = self.pool_row(take(vote, index))
        slots = index.masked_fill(index < 0, vote.shape[1])
        return F.pad(torch.zeros_like(vote), (0, 1)).scatter_(1, slots, found)[:, :-1]

    def pool_row(self, vote: Float[Tensor, "row token"]) -> Float[Tensor, "row token"]:
        pad = self.kernel // 2
        if not vote.shape[1]:
            return vote  # padding alone, in every row
        if self.pool == "max":
            return F.max_pool1d(vote[:, None], self.kernel, 1, pad)[:, 0]
        return F.avg_pool1d(vote[:, None], self.kernel, 1, pad)[:, 0]

    def always(self, seen: Seen) -> Bool[Tensor, "row token"]:
        return seen.recent(self.window)

    def keep(self, seen: Seen) -> Bool[Tensor, "row token"]:
        return keep_top(seen, seen.score, self.budget, self.always(seen))


def votes(seen: Seen, reduce: Reduce, window: int) -> Float[Tensor, "row token"]:
    """Attention that the observed queries pay to each token but the newest `window`, summed over them.

    The queries are those of the window's tokens, or fewer in a later turn that is shorter than it.
    """
    keys, (rows, group, asked, _) = seen.read()[0], seen.queries.shape
    each = max(1, LOGITS // max(1, group * asked * keys.shape[1]))
    paid = torch.cat([_paid(seen, keys, slice(row, row + each)) for row in range(0, rows, each)])
    return over_group(paid, reduce).masked_fill(seen.recent(window), 0)


def _paid(seen: Seen, keys: Float[Tensor, "row token dim"], rows: slice) -> Float[Tensor, "some group token"]:
    """Attention that the observed queries of some rows pay to each token, summed over them."""
    at, q, position = seen.query_position, seen.queries[rows].float(), seen.position[rows]
    # Keys once for the whole group, and as floats no longer than that.
    logits = torch.matmul(q.flatten(1, 2) * seen.scale, keys[rows].float().transpose(1, 2))
    if seen.softcap is not None:
        logits = torch.tanh(logits / seen.softcap) * seen.softcap
    logits = logits.unflatten(1, q.shape[1:3])
    asks = at >= seen.asking[rows, None]
    late = max(0, position.shape[1] - len(at))  # in most prompts only the last slots are hidden from anyone
    usual = (position[:, :late] >= 0) & (position[:, :late] <= at[0])
    start = late if bool(usual.all() & asks.all()) else 0
    shown = position[:, None, start:]
    sees = (shown >= 0) & (shown <= at[:, None]) & asks[..., None]
    logits[..., start:].masked_fill_(~sees[:, None], float("-inf"))
    paid = logits.softmax(-1) if start else logits.softmax(-1).nan_to_num_(0.0)  # padding sees nothing
    if seen.sink_logits is not None:
        left = (
            logits.logsumexp(-1) - seen.sink_logits[rows].float()[..., None]
        ).sigmoid_()  # what the sink leaves to tokens
        paid *= left[..., None]
    return paid.sum(2)
