"""A session is one model reading one cache, with a record of which tokens are in it.

Tokens are fed tentatively; `forget` takes back the last ones, `settle` makes the rest history. The cache is the
engine's, under any stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel

from kvengine.errors import CacheError
from kvengine.hf_cache import EngineCache
from kvengine.speculative.accept import ROOT, Draft
from kvengine.speculative.law import Text

Logits = Float[Tensor, "token vocab"]


@dataclass
class Session:
    """model: a decoder with a language-model head; cache: its own, empty at first.

    settled: how many tokens of the text are history in the cache; open: tokens fed since, still to be judged.
    """

    model: PreTrainedModel
    cache: EngineCache
    settled: int = 0
    open: list[int] = field(default_factory=list)

    @torch.no_grad()
    def prefill(self, prompt: Sequence[int]) -> Logits:
        """Read the prompt in one pass; the logits after its last token, [1, vocab]."""
        logits = self._forward(prompt, logits_to_keep=1)
        self._record()
        self._commit()
        self.settled = len(prompt)
        return logits

    @torch.no_grad()
    def feed(self, tokens: Sequence[int]) -> Logits:
        """Append tokens tentatively; the logits after each."""
        self.open += tokens
        return self._forward(tokens)

    @torch.no_grad()
    def feed_tree(self, tokens: Sequence[int], draft: Draft) -> Logits:
        """Append `tokens` as a chain and read a tree under the last of them; the logits after that one and each node.

        Without `tokens` the tree hangs under what was fed last, and the logits are those after each node. The tree
        leaves no trace in the cache: the nodes that stand are fed again with the next pass, which costs a few more
        rows in a pass that runs anyway and works for every policy.
        """
        known = self.settled + len(self.open)
        depths = [len(tokens) + draft.depth(node) for node in range(len(draft))]
        places = torch.tensor([[*range(known, known + len(tokens)), *(known + depth for depth in depths)]])
        self.cache.session.tree = ancestors(draft).to(self._device)
        try:
            logits = self._forward([*tokens, *draft.tokens], position_ids=places.to(self._device))
        finally:
            self.cache.session.tree = None
        self.open += tokens
        return logits[max(len(tokens) - 1, 0) :]

    def align(self, text: Text, tail: Sequence[int]) -> list[int]:
        """Forget what is not on the way to text + tail, and return what is missing: one token at the least."""
        wanted = text.since(self.settled, tail)
        same = 0
        while same < min(len(self.open), len(wanted) - 1) and self.open[same] == wanted[same]:
            same += 1
        self.forget(len(self.open) - same)
        return wanted[same:]

    def forget(self, count: int) -> None:
        """Take back the last `count` open tokens."""
        if not 0 <= count <= len(self.open):
            raise CacheError(f"cannot take back {count} tokens: {len(self.open)} are open, the rest is settled")
        if count:
            self._rollback(count)
            del self.open[-count:]

    def settle(self, text: Text) -> None:
        """Make history of the open tokens that the text confirms."""
        self.align(text, ())
        self._commit()
        self.settled += len(self.open)
        self.open = []

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _forward(self, tokens: Sequence[int], **options: Any) -> Logits:
        ids = torch.tensor([list(tokens)], device=self._device)
        logits: Tensor = self.model(ids, past_key_values=self.cache, use_cache=True, **options).logits[0]
        return logits

    def _record(self) -> None:
        self.cache.activate_past_recording()

    def _rollback(self, count: int) -> None:
        self.cache.rollback(count)

    def _commit(self) -> None:
        self.cache.commit()


def ancestors(draft: Draft) -> Bool[Tensor, "node node"]:
    """[i, j]: node j is node i or above it.

    >>> ancestors(Draft(tokens=[5, 6, 7], parents=[-1, -1, 0])).int().tolist()
    [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    """
    sees = torch.eye(len(draft), dtype=torch.bool)
    for node, parent in enumerate(draft.parents):
        if parent != ROOT:
            sees[node] |= sees[parent]
    return sees
