"""FlexPrefill (Lai et al., ICLR 2025, arXiv:2502.20766): each head's pattern and budget by its last queries.

    p        =  softmax(scale q_i · k_j), causal, of the last `block` queries i        a(c) = mean_i sum of p over token block c
    e(c)     =  softmax over c of scale mean_i(q_i) · mean of k over c
    D        =  sqrt(JSD(a, e))                                                        natural logarithms
    D >= tau    vertical-slash:  the fewest blocks c with which sum a(c) >= gamma, and the fewest distances of blocks in which
                                 diagonals hold gamma of p
    D <  tau    query-aware:     the fewest pairs (b, c) with which softmax over c <= b of scale mean(q in b) · mean(k in c)
                                 holds gamma of its sum, and the `min_budget` heaviest blocks and distances

Of a model that caps its logits those of p, e and the pairs are capped: gamma is a share of attention, which a cap makes flatter.
The first block and the own one are always among them, and blocks and distances of `min_budget` tokens each. The estimate
costs `block` queries of dense attention.

Defaults: as in its examples, with the careful one of the paper's two gammas, 0.95 (the other is 0.9).

Differs from the paper, which takes single columns and diagonals: blocks, as in the code. Differs from the code: it counts
the single columns that hold gamma and takes a 128th as many blocks, whatever `block_size` is, and these may hold far less;
here the blocks hold gamma, so that more is read at the same gamma. A diagonal that is no multiple of a block away crosses
two blocks of tokens, of which the code reads one; here its share goes to both, by how many queries look at each. The code
leaves out the pair with which gamma would be reached. Blocks count from a row's first token and rows of a batch choose by
themselves, so that padding changes nothing; the code takes one sequence. It refuses a prompt in chunks; here each chunk is
judged by its own last queries, among all tokens up to it. So chunks matter, and a question is best given with its text.
`max_budget`, which is off in the code, is not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from kvengine.errors import PolicyError
from kvengine.kernels.span_attention import block_spans, causal_spans
from kvengine.policies import _budget
from kvengine.policies._budget import Budget, check_budget, check_count, check_share
from kvengine.policies.prefill import Choice, Prefill, _blocks, _lines


@dataclass(frozen=True)
class FlexPrefill(Prefill):
    """The prompt's queries read blocks of tokens: columns and diagonals, or pairs that pooled queries find, by head.

    Args:
        gamma: share of the estimated attention that what is read holds. A fraction; 1 reads everything.
        tau: distance between the last queries' attention and what pooling says of it below which a head's blocks are
            chosen by pooling. A fraction; 0 never.
        min_budget: tokens of the blocks and of the distances that are read at least, or a fraction of the prompt.
        block: tokens of a block. A multiple of 8.
    """

    chooses: ClassVar[bool] = True
    anew: ClassVar[bool] = True

    gamma: float = 0.95
    tau: float = 0.1
    min_budget: Budget = 1024
    block: int = 128

    def __post_init__(self) -> None:
        check_share(self, gamma=self.gamma, tau=self.tau)
        check_budget(self, min_budget=self.min_budget)
        check_count(self, least=8, block=self.block)
        if self.block % 8:
            raise PolicyError(f"FlexPrefill: block={self.block} must be a multiple of 8; the paper has 128")

    @property
    def exact(self) -> bool:
        return False

    def choose(
        self,
        q: Float[Tensor, "row group query dim"],
        k: Float[Tensor, "row token dim"],
        scale: float,
        softcap: float | None = None,
    ) -> Choice:
        queries, tokens = q.shape[2], k.shape[1]
        least, blocks = -(-_budget.tokens(self.min_budget, tokens) // self.block), -(-tokens // self.block)
        if self.gamma == 1 or blocks <= max(2, least):
            lead = (tokens - queries) % self.block
            return Choice(causal_spans(lead + queries, tokens, k.device, self.block), self.block)
        before, _ = _blocks.causal(queries, tokens, self.block, k.device)
        mean = _blocks.means(k, self.block)
        vertical, slash = self.shares(q, k, scale, softcap)
        aware = self.distance(q, mean, vertical, scale, softcap) < self.tau
        sets = []
        for mass in (vertical, slash):
            forced = heaviest(mass, least)
            sets.append(torch.where(aware[..., None], forced, _blocks.fewest(mass, self.gamma, forced)).flatten(0, 1))
        columns = torch.arange(blocks, device=k.device)
        away = columns[-len(before) :, None] - columns
        keep = (sets[0][:, None] | sets[1][:, away.clamp(min=0)]) & before
        lines = aware.flatten().nonzero()[:, 0]
        asked = _blocks.means(q, self.block, (tokens - queries) % self.block).flatten(0, 1)[lines] * scale
        keep[lines] |= self.pairs(asked, mean[lines // q.shape[1]], before, softcap)
        return Choice(block_spans(keep, self.block, tokens), self.block)

    def shares(
        self,
        q: Float[Tensor, "row group query dim"],
        k: Float[Tensor, "row token dim"],
        scale: float,
        softcap: float | None = None,
    ) -> tuple[Float[Tensor, "row group columns"], Float[Tensor, "row group columns"]]:
        """a(c), and the same of distances in blocks."""
        vertical, slash = (
            F.pad(x, (0, -x.shape[2] % self.block)).unflatten(2, (-1, self.block))
            for x in _lines.shares(q, k, scale, self.block, softcap)
        )
        # Of a diagonal so many tokens beyond whole blocks: the share of queries that it takes one block further back.
        crossing = torch.arange(self.block, dtype=torch.float32, device=q.device) / self.block
        far = F.pad((slash * crossing).sum(3), (1, 0))[..., :-1]
        return vertical.sum(3), (slash * (1 - crossing)).sum(3) + far

    def distance(
        self,
        q: Float[Tensor, "row group query dim"],
        mean: Float[Tensor, "row columns dim"],
        vertical: Float[Tensor, "row group columns"],
        scale: float,
        softcap: float | None = None,
    ) -> Float[Tensor, "row group"]:
        """D. At most sqrt(log 2)."""
        middle = q[:, :, -self.block :].mean(2, dtype=torch.float32)
        pooled = _blocks.capped(middle * scale @ mean.mT, softcap).softmax(2)
        both = (pooled + vertical) / 2
        terms = [torch.xlogy(x, x / both.clamp(min=torch.finfo(both.dtype).tiny)) for x in (pooled, vertical)]
        return ((terms[0] + terms[1]).sum(2) / 2).clamp(min=0).sqrt()

    def pairs(
        self,
        q: Float[Tensor, "line block dim"],
        k: Float[Tensor, "line columns dim"],
        before: Bool[Tensor, "block columns"],
        softcap: float | None = None,
    ) -> Bool[Tensor, "line block columns"]:
        """The pairs of blocks that query-aware lines read."""
        found = before.expand(len(q), *before.shape).clone()
        step = max(1, _blocks.room(q) // before.numel())
        for i in range(0, len(q), step):
            here = slice(i, i + step)
            share = _blocks.capped(q[here] @ k[here].mT, softcap).masked_fill(~before, -torch.inf).softmax(2)
            found[here] &= _blocks.fewest(share.flatten(1), self.gamma, ~before.flatten()).view_as(share)
        return found


def heaviest(mass: Float[Tensor, "*line columns"], count: int) -> Bool[Tensor, "*line columns"]:
    """The first, and of the others the heaviest, so many in all.

    >>> heaviest(torch.tensor([1.0, 2.0, 4.0, 3.0]), 2).tolist()
    [True, False, True, False]
    """
    first = torch.arange(mass.shape[-1], device=mass.device) == 0
    found = mass.masked_fill(first, torch.inf).topk(min(count, mass.shape[-1])).indices
    return torch.zeros_like(mass, dtype=torch.bool).scatter(-1, found, True)
