"""Vertical-slash (MInference, Jiang et al., NeurIPS 2024, arXiv:2407.02490): single tokens, and distances.

    p          =  softmax(scale q_i · k_j), causal, of the last `window` queries i
    columns    =  the first `sinks` tokens, and those j with the greatest sum_i p(i, j)                    `vertical` in all
    diagonals  =  the first `recent` distances, and those o with the greatest sum_i p(i, i - o)             `slash` in all

    queries [s, s + block) read tokens [s - o, s + block - o) of each diagonal o, and the columns before s   (and j <= i)

A diagonal is read as a window as wide as the block of queries, so that what lies around it is read too; windows that touch
are one span, and columns inside of these are not read twice. The other columns are laid side by side. The estimate costs
`window` queries of dense attention, the rest grows with the prompt's length.

Defaults: its configuration for Llama 3.1 8B, which has 512 columns and 2048 diagonals for every head; 30 and 100 of them
always, 64 queries, blocks of 64, as in the code for all models. Budgets per head that its search found are not in here.
They are for long prompts: windows of 2048 diagonals that are far apart cover 131072 tokens, so a shorter prompt is read
nearly whole unless `slash` is less.

Differs from the official code: where windows overlap, it reads whole blocks of 64 from the first one on, up to 63 tokens
more than their union, and the first 64 tokens whole if a diagonal ends in them; here a span is the union. All of the
`recent` distances are read, also if `slash` is less. Blocks count from a row's first token and rows of a batch choose by
themselves, so that padding changes nothing; the code takes one sequence. It refuses a prompt in chunks; here each chunk is
judged by its own last queries, among all tokens up to it. So chunks matter, and a question is best given with its text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.kernels.span_attention import causal_spans
from kvengine.policies import _budget
from kvengine.policies._budget import Budget, check_budget, check_count
from kvengine.policies.prefill import Choice, Prefill, _lines


@dataclass(frozen=True)
class VerticalSlash(Prefill):
    """The prompt's queries read single tokens, and tokens at some distances, that its last queries look at.

    Args:
        vertical: tokens that all later queries of a head read, `sinks` included, or a fraction of the prompt.
        slash: distances at which a query reads, `recent` included. Tokens, or a fraction of the prompt.
        sinks: tokens at the start that every query reads.
        recent: the nearest distances, a query's own token included, which are always read. Tokens.
        window: the last queries that are asked. Tokens.
        block: queries that read the same tokens, and width of a distance's window. Tokens, a multiple of 8.
    """

    chooses: ClassVar[bool] = True
    anew: ClassVar[bool] = True

    vertical: Budget = 512
    slash: Budget = 2048
    sinks: int = 30
    recent: int = 100
    window: int = 64
    block: int = 64

    def __post_init__(self) -> None:
        check_budget(self, vertical=self.vertical, slash=self.slash)
        check_count(self, sinks=self.sinks)
        check_count(self, least=1, recent=self.recent, window=self.window)
        check_count(self, least=8, block=self.block)
        if self.block % 8:
            raise PolicyError(f"VerticalSlash: block={self.block} must be a multiple of 8; the official code has 64")

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
        tokens = k.shape[1]
        vertical = min(tokens, max(self.sinks, _budget.tokens(self.vertical, tokens)))
        slash = min(tokens, max(self.recent, _budget.tokens(self.slash, tokens)))
        if tokens in (vertical, slash):
            lead = (tokens - q.shape[2]) % self.block
            return Choice(causal_spans(lead + q.shape[2], tokens, k.device, self.block), self.block)
        columns, offsets = (x.flatten(0, 1) for x in _lines.shares(q, k, scale, self.window, softcap))
        columns[:, : self.sinks] = torch.inf
        offsets[:, : self.recent] = torch.inf
        columns, offsets = (x.topk(n).indices.sort().values for x, n in ((columns, vertical), (offsets, slash)))
        first = (tokens - q.shape[2]) // self.block * self.block
        start = torch.arange(first, tokens, self.block, device=k.device)
        runs, windows = lines(columns, offsets, start, self.block)
        group, laid = q.shape[1], q.shape[1] * vertical
        before = torch.arange(len(runs), device=k.device) % group * vertical  # each head has its part of what is laid
        windows = windows.clamp(max=tokens) + laid
        return Choice(torch.cat([runs + before[:, None, None, None], windows], 2), self.block, columns.view(-1, laid))


def lines(
    columns: Int[Tensor, "line column"], offsets: Int[Tensor, "line offset"], start: Int[Tensor, "block"], block: int
) -> tuple[Int[Tensor, "line block span 2"], Int[Tensor, "line block span 2"]]:
    """What blocks of queries read that start there: runs of `columns` before and between windows, and windows of tokens.

    `columns` and `offsets` are ascending, and the first offset is less than `block`. A span's window may be empty, and the
    first one may end after the last token.

    >>> columns, offsets = torch.tensor([[0, 3, 6, 9]]), torch.tensor([[0, 1, 5]])
    >>> runs, windows = lines(columns, offsets, torch.tensor([10]), 2)
    >>> windows.tolist(), [columns[0, a:b].tolist() for a, b in runs[0, 0]]
    ([[[[9, 12], [5, 7]]]], [[], [0, 3]])
    """
    gap = offsets.diff(dim=1) > block
    edge = gap.new_ones(len(gap), 1)
    opens, closes = torch.cat([edge, gap], 1), torch.cat([gap, edge], 1)
    rank, count = opens.cumsum(1) - 1, int(opens.sum(1).max())
    nothing = offsets.new_full((len(offsets), count), 1 << 40)  # so far that it lies before all
    nearest, farthest = nothing, nothing.clone()
    for ends, found in ((opens, nearest), (closes, farthest)):
        line, at = ends.nonzero(as_tuple=True)
        found[line, rank[line, at]] = offsets[line, at]
    begin = (start[:, None] - farthest[:, None]).clamp(min=0)
    end = (start[:, None] + block - nearest[:, None]).clamp(min=0)
    known = torch.searchsorted(columns, torch.stack([end, begin], 3).flatten(1)).view(*begin.shape, 2)
    behind = torch.cat([known[:, :, 1:, 0], torch.zeros_like(known[:, :, :1, 0])], 2)  # where the next window ends
    return torch.stack([behind, known[..., 1]], 3), torch.stack([begin, end], 3)
