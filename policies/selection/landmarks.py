"""Landmarks, the selection of ShadowKV (Sun et al., ICML 2025, arXiv:2410.21465): a chunk's mean key stands for it.

    landmark_j   =  mean of the chunk's keys
    coherence_j  =  min over its keys of cos(key, landmark_j)
    outliers     =  the least coherent chunks, always read: their mean says little about them
    score        =  softmax over the other landmarks of q . landmark / sqrt(d), per query head; the group's largest
    read         =  outliers, the newest `local` tokens and the open tail, and the best chunks, up to `budget` in all

Defaults: chunks of 8, 2048 tokens and 32 local ones as in the paper's runs; outliers are 0.1875 of the chunks that are
read, 46 or 47 at 2048 tokens.

Where keys are of low rank, outliers are that share of the budget instead, which makes the paper's 48 chunks at 2048
tokens and follows its code where that scales them (24 chunks per 1024 tokens). Those of the prompt are not of low
rank, but stay exact in the open tail: the paper's method, `shadowkv(budget=…, rank=…)`, which also puts the values
into host memory. There the tail grows with every generated token, and they count: with `lowrank`, a text much longer
than the budget leaves one chunk to choose.

Differs from the official code: outliers, local and generated tokens count against the budget (it adds them); any prompt
length, head count and batch; generated tokens become chunks too, unless keys are of low rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.kernels.best_tokens import best_tokens
from kvengine.policies._budget import Budget, check_budget, check_choice, check_count, is_number, part, tokens_by_row
from kvengine.policies.selection import Fields, Selection, Where
from kvengine.policies.selection._chunks import Reduce, coherence, mean_key, read_by_share
from kvengine.tokens import pack, take

PART = 1 << 12
"""Chunks whose coherence is found together."""


@dataclass(frozen=True)
class Landmarks(Selection):
    """Read the chunks whose mean keys match the query best, and those that their mean misrepresents.

    Args:
        budget: tokens read per decoded token and KV head, all included, or a fraction of the prompt.
        chunk: tokens chosen together.
        outliers: share of the chunks read (with `lowrank`: of the budget) that are the least coherent. A fraction.
        local: the newest tokens, always read.
        reduce: how the heads of a query group agree.
    """

    launched: ClassVar[bool] = True
    spare: ClassVar[tuple[str, ...]] = ("coherence",)
    budget: Budget = 2048
    chunk: int = 8
    outliers: float = 0.1875
    local: int = 32
    reduce: Reduce = "max"

    def __post_init__(self) -> None:
        check_budget(self, budget=self.budget)
        check_count(self, least=1, chunk=self.chunk)
        check_count(self, local=self.local)
        check_choice(self, reduce=(self.reduce, ("max", "mean")))
        if not (is_number(self.outliers) and 0 <= self.outliers < 1):
            raise PolicyError(f"Landmarks: outliers={self.outliers!r} must be a fraction of the budget, below 1")

    @property
    def unit(self) -> int:
        return self.chunk

    @property
    def room(self) -> int:
        return self.local

    @property
    def reads(self) -> Budget:
        return self.budget

    def summarise(self, k: Float[Tensor, "unit token dim"], valid: Bool[Tensor, "unit token"] | None) -> Fields:
        mean = mean_key(k, valid)
        return {"mean": mean, "coherence": coherence(k, valid, mean).half()} if self.outliers else {"mean": mean}

    def exact(
        self, k: Float[Tensor, "row token dim"], position: Int[Tensor, "row token"], prompt: Int[Tensor, "row"]
    ) -> Bool[Tensor, "row token"] | None:
        index = pack(position >= 0)
        length = (index >= 0).sum(1)
        chunks = ((length - self.local) // self.chunk).clamp(min=0)
        count = (part(tokens_by_row(self.budget, prompt), self.outliers) // self.chunk).minimum(chunks)
        if not bool(count.any()):
            return None
        most = int(chunks.max())
        at = (index.shape[1] - length)[:, None] + torch.arange(most * self.chunk, device=k.device)
        slots = index.gather(1, at.clamp(max=index.shape[1] - 1))
        units = take(k, slots).unflatten(1, (most, self.chunk)).flatten(0, 1)
        every = units.new_ones(units.shape[:2], dtype=torch.bool)
        # As floats all would take several times what they do.
        parts = zip(units.split(PART), every.split(PART), strict=True)
        low = -torch.cat([coherence(some, all_there, mean_key(some, all_there)) for some, all_there in parts])
        low = low.unflatten(0, (-1, most))
        low = low.masked_fill(torch.arange(most, device=k.device) >= chunks[:, None], float("-inf"))
        chosen = best_tokens(low, count).repeat_interleave(self.chunk, 1)
        kept = torch.zeros(len(k), position.shape[1] + 1, dtype=torch.bool, device=k.device)
        return kept.scatter_(1, slots.masked_fill(~chosen, position.shape[1]), True)[:, :-1]

    def select(
        self, q: Float[Tensor, "row group dim"], summary: Fields, alive: Bool[Tensor, "row unit"], at: Where
    ) -> Int[Tensor, "row chosen"]:
        far = None if not self.outliers or at.joint else summary["coherence"]
        return read_by_share(q, summary["mean"], alive, at, self.reduce, coherence=far, outliers=self.outliers)
