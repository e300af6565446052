"""Retrieval, the middle cache of TriForce (Sun et al., COLM 2024, arXiv:2404.11912): chunks by their mean key.

    score  =  softmax over chunks of q . mean(keys of the chunk) / sqrt(d), per query head; reduced over the query group
    read   =  the first chunk held (attention's sink), and the best others, up to `budget` tokens with the open tail

Defaults: 4096 tokens in chunks of 8, as in the paper.

Differs from the official code: a choice for every decoded token (it fills a fixed buffer once per prompt, with what the
prompt's last query chose); softmax and query groups (it ranks the logits, one query head to a KV head); batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.policies._budget import Budget, check_budget, check_choice, check_count
from kvengine.policies.selection import Fields, Selection, Where
from kvengine.policies.selection._chunks import Reduce, mean_key, read_by_share


@dataclass(frozen=True)
class Retrieval(Selection):
    """Read the chunks whose mean keys match the query best.

    Args:
        budget: tokens read per decoded token and KV head, the open tail included, or a fraction of the prompt.
        chunk: tokens chosen together.
        reduce: how the heads of a query group agree.
    """

    launched: ClassVar[bool] = True
    budget: Budget = 4096
    chunk: int = 8
    reduce: Reduce = "max"

    def __post_init__(self) -> None:
        check_budget(self, budget=self.budget)
        check_count(self, least=1, chunk=self.chunk)
        check_choice(self, reduce=(self.reduce, ("max", "mean")))

    @property
    def unit(self) -> int:
        return self.chunk

    @property
    def reads(self) -> Budget:
        return self.budget

    def summarise(self, k: Float[Tensor, "unit token dim"], valid: Bool[Tensor, "unit token"] | None) -> Fields:
        return {"mean": mean_key(k, valid)}

    def select(
        self, q: Float[Tensor, "row group dim"], summary: Fields, alive: Bool[Tensor, "row unit"], at: Where
    ) -> Int[Tensor, "row chosen"]:
        return read_by_share(q, summary["mean"], alive, at, self.reduce, first=True)
