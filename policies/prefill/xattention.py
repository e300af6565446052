"""XAttention (Xu et al., ICML 2025, arXiv:2503.16428): blocks of tokens whose antidiagonals weigh most.

    s(t, u) = 1 / (sqrt(d) S) * sum over r of q[S t + r] · k[S u + c]    where c = S - 1 - r, of odd u one more (mod S)
    p(t, ·) = softmax of s(t, u) over u <= t
    m(b, c) = sum of p over the tiles of query block b and token block c

    block b reads the fewest blocks c <= b that hold `threshold` of sum_c m(b, c); the first and its own among them
    the prompt's last `last` queries read everything

Of a model that caps its logits s is capped: `threshold` is a share of attention, which a cap makes flatter.

A tile's sum is a product of two vectors of S d numbers, so the estimate costs 1 / (2 S) of the attention it is made of.

Differs from the paper, which says that every vertical and every slanted line of a map crosses each tile's antidiagonal. But
where S is even, query and token are an odd distance apart on all of these: a line at an even distance is never met. Here every
second tile's antidiagonal is moved by one token, so that each line is met, the slanted ones in every second tile. A block
reads what most of its queries look at, and the few that look something up for an answer are outvoted; the last queries, a
question among them, therefore read everything, as in SeerAttention (arXiv:2410.13276). `last=0` is the paper's.

Differs from the official code: its `keep_sink` marks the first block's queries, here it is the first block of tokens that
all read, as the paper says. One threshold for all heads; the tables found per head of Llama are not in here. Blocks count
from a row's first token and rows of a batch choose by themselves, so that padding changes nothing; the code takes one
sequence. A prompt may come in chunks: where these end with blocks the choices are those of the whole prompt, and a block that
a chunk's end divides chooses twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from kvengine.errors import PolicyError
from kvengine.kernels.span_attention import block_spans
from kvengine.policies._budget import check_count, check_share
from kvengine.policies.prefill import Choice, Prefill, _blocks


@dataclass(frozen=True)
class XAttention(Prefill):
    """The prompt's queries read, block by block, the blocks of tokens that antidiagonal sums say weigh most.

    Args:
        threshold: share of a block's estimated attention that the blocks it reads hold. A fraction; 1 reads everything.
        stride: S, side of the tiles that are summed along their antidiagonals. Tokens; a part of `block`.
        block: tokens of a block. A multiple of 8.
        last: a prompt's last queries, which read everything. Tokens.
    """

    chooses: ClassVar[bool] = True

    threshold: float = 0.9
    stride: int = 8
    block: int = 128
    last: int = 128

    def __post_init__(self) -> None:
        check_share(self, threshold=self.threshold)
        check_count(self, least=1, stride=self.stride)
        check_count(self, least=8, block=self.block)
        check_count(self, last=self.last)
        if self.block % 8 or self.block % self.stride:
            raise PolicyError(
                f"XAttention: block={self.block} must be a multiple of 8 and of stride={self.stride}; "
                "the paper has block=128 and stride=4, 8 or 16"
            )

    @property
    def exact(self) -> bool:
        return False

    @property
    def whole(self) -> int:
        return self.last

    def choose(
        self,
        q: Float[Tensor, "row group query dim"],
        k: Float[Tensor, "row token dim"],
        scale: float,
        softcap: float | None = None,
    ) -> Choice:
        before, own = _blocks.causal(q.shape[2], k.shape[1], self.block, k.device)
        if self.threshold == 1:  # sums of roundings do not decide
            keep = before.expand(len(k), *before.shape)
        else:
            first = torch.arange(before.shape[1], device=k.device) == 0
            mass = self.mass(q, k, scale, softcap)
            keep = (_blocks.fewest(mass, self.threshold, first | own) & before).flatten(0, 1)
        return Choice(block_spans(keep, self.block, k.shape[1]), self.block)

    def mass(
        self,
        q: Float[Tensor, "row group query dim"],
        k: Float[Tensor, "row token dim"],
        scale: float,
        softcap: float | None = None,
    ) -> Float[Tensor, "row group block columns"]:
        """m(b, c), of blocks with a query."""
        each = max(1, _blocks.room(q) // max(1, q[0].numel()))  # rows at a time, as the queries are laid out anew
        return torch.cat(
            [self.of_rows(*some, scale, softcap) for some in zip(q.split(each), k.split(each), strict=True)]
        )

    def of_rows(
        self,
        q: Float[Tensor, "some group query dim"],
        k: Float[Tensor, "some token dim"],
        scale: float,
        softcap: float | None,
    ) -> Float[Tensor, "some group block columns"]:
        """`mass` of rows that are made together."""
        (rows, group, queries, _), tokens, s = q.shape, k.shape[1], self.stride
        lead, per = (tokens - queries) % self.block, self.block // s
        q = F.pad(q * (scale / s), (0, 0, lead, -(lead + queries) % self.block))
        q = q.unflatten(2, (-1, s)).flip(3).flatten(3)  # [row, group, tile, S dim], each tile from its last query
        k = F.pad(k, (0, 0, 0, -tokens % self.block)).unflatten(1, (-1, s))
        k = torch.where(torch.arange(k.shape[1], device=k.device)[:, None, None] % 2 == 1, k.roll(-1, 2), k).flatten(2)
        tiles, before = q.shape[2], k.shape[1] - q.shape[2]
        out = q.new_zeros(rows, group, tiles // per, k.shape[1] // per, dtype=torch.float32)
        there = torch.arange(tiles, device=q.device)
        there = (there >= lead // s) & (there < -(-(lead + queries) // s))
        step = min(max(1, _blocks.room(q) // (rows * group * k.shape[1] * per)) * per, tiles)
        late = torch.ones(step, step, dtype=torch.bool, device=q.device).triu(1)
        for t in range(0, tiles, step):
            n = min(step, tiles - t)
            scores = (q[:, :, t : t + n].flatten(1, 2) @ k[:, : before + t + n].mT).float().unflatten(1, (group, n))
            scores = _blocks.capped(scores, softcap)
            scores[..., before + t :].masked_fill_(late[:n, :n], -torch.inf)
            scores.sub_(scores.amax(3, keepdim=True)).exp_()
            blocks = scores.unflatten(3, (-1, per)).sum(4)
            blocks *= there[t : t + n, None] / blocks.sum(3, keepdim=True)
            out[:, :, t // per : (t + n) // per, : blocks.shape[3]] = blocks.unflatten(2, (-1, per)).sum(3)
        return out
