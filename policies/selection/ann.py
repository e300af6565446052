"""ANN: each query head asks an index of the sealed keys in host memory for those it would attend to most.

    candidates_h  =  the budget's best of q_h . k, as the index finds them (faiss, one index per KV head)
    share_h,j     =  softmax over h's candidates
    want_j        =  the largest share_h,j of the query group
    read          =  the best of all candidates, up to `budget` tokens with the open tail

The idea of RetrievalAttention (Liu et al., arXiv:2409.10516): the context is a vector database, the open tail stays on
the device, and the two attentions are merged exactly by their log-sum-exp. Placed with `host`, keys and values of what
was found are the only pages that are fetched.

    flat    exact: every key is looked at
    ivf     cells of keys whose directions are alike, of which those whose mean matches the query best are looked at (`probe`)
    hnsw    a graph that is walked from key to key, `probe` x 64 of them in view

Queries and keys come from different distributions, so recall found with keys as queries says nothing; our benchmark
takes the model's own queries. Keys are indexed less their mean, which changes no softmax and evens out the cells.
Contexts of fewer than 256 sealed tokens are searched exactly. A cap on logits (Gemma 2) changes no candidates; shares are
computed without it, as an index says logits less a constant.

Differs from the official code: it has an exact index only (its graph built from queries is not public); one choice per
KV head, so that a token is read once for the group; tokens that are generated enter the index as pages are sealed.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.errors import UnsupportedPolicy
from kvengine.policies._budget import Budget, check_budget, check_choice, check_count
from kvengine.policies.selection import Fields, Selection, Where

if TYPE_CHECKING:
    from kvengine.stack import Stack


@dataclass(frozen=True)
class Ann(Selection):
    """Read the tokens that an index in host memory finds for each query.

    Args:
        budget: tokens read per decoded token and KV head, the open tail included, or a fraction of the prompt.
        index: how keys are searched: exactly ("flat"), in cells ("ivf"), or along a graph ("hnsw").
        probe: how thoroughly: cells looked at ("ivf"), or 64 times as many keys in view ("hnsw").
    """

    steady: ClassVar[bool] = False
    budget: Budget = 1024
    index: Literal["flat", "ivf", "hnsw"] = "flat"
    probe: int = 8

    def __post_init__(self) -> None:
        check_budget(self, budget=self.budget)
        check_choice(self, index=(self.index, ("flat", "ivf", "hnsw")))
        check_count(self, least=1, probe=self.probe)

    def check(self, stack: Stack) -> None:
        if importlib.util.find_spec("faiss") is None:
            raise UnsupportedPolicy("'ann' needs faiss: pip install 'kvengine[ann]', or use 'oracle_topk' or 'quest'")

    @property
    def reads(self) -> Budget:
        return self.budget

    def select(
        self, q: Float[Tensor, "row group dim"], summary: Fields, alive: Bool[Tensor, "row unit"], at: Where
    ) -> Int[Tensor, "row chosen"]:
        from kvengine.policies.selection._index import Rows  # faiss, only where it is used

        rows = at.beside.setdefault("ann", Rows(self.index, self.probe))
        rows.update(at.stamps(), at.keys)
        queries, there = q.detach().float().cpu().numpy() * at.scale, alive.cpu().numpy()
        chosen = np.full((len(q), at.most), -1)
        for row, count in enumerate(at.count.tolist()):
            ids, logits = rows.search(row, queries[row], count, there[row])
            found = agree(ids, logits, count)
            chosen[row, : len(found)] = found
        return torch.from_numpy(chosen).to(q.device)


def agree(ids: np.ndarray, logits: np.ndarray, count: int) -> np.ndarray:
    """The best `count` of what a group's heads found: ids and logits are [head, candidate], id -1 for none.

    >>> agree(np.array([[4, 2], [7, 2]]), np.array([[3.0, 1.0], [9.0, 8.9]]), 2)
    array([4, 7])
    """
    finds = (ids >= 0).any(1)
    if not finds.any():
        return np.zeros(0, dtype=np.int64)
    ids = ids[finds]
    logits = np.where(ids < 0, -np.inf, logits[finds])
    top = logits.max(1, keepdims=True)
    share = logits - top - np.log(np.exp(logits - top).sum(1, keepdims=True))
    found, which = np.unique(ids[ids >= 0], return_inverse=True)
    best = np.full(len(found), -np.inf, dtype=share.dtype)
    np.maximum.at(best, which, share[ids >= 0])
    return found[np.argsort(-best, kind="stable")[:count]]
