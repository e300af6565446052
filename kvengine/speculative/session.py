"""A session is one model reading one cache, with a record of which tokens are in it.

Tokens are fed tentatively; `forget` takes back the last ones, `settle` makes the rest history. The cache may be an
engine's cache under any stack, or any cache of transformers that can be cropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvengine.errors import CacheError
from kvengine.speculative.accept import ROOT, Draft
from kvengine.speculative.law import Text

Logits = Float[Tensor, "token vocab"]


@dataclass
class Session:
    """model: a decoder with a language-model head; cache: its own, empty at first.

    settled: how many tokens of the text are history in the cache; open: tokens fed since, still to be judged.
    """

    model: torch.nn.Module
    cache: Any
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

        Without `tokens` the tree hangs under what was fed last, and the logits are those after each node.

        The tree leaves no trace in the cache: the nodes that stand are fed again with the next pass, which costs a few
        more rows in a pass that runs anyway and works for every cache.
        """
        known = self.settled + len(self.open)
        places = [
            *range(known, known + len(tokens)),
            *(known + len(tokens) + draft.depth(n) for n in range(len(draft))),
        ]
        logits = self._forward(
            [*tokens, *draft.tokens],
            position_ids=torch.tensor([places], device=self._device),
            attention_mask=self._mask(len(tokens), draft),
        )
        self._rollback(len(draft))
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

    def _mask(self, chain: int, draft: Draft) -> Float[Tensor, "1 1 new seen"]:
        """Additive: 0 where a new token sees a token, the lowest number elsewhere."""
        past, new = self.settled + len(self.open), chain + len(draft)
        sees = torch.ones(new, past + new, dtype=torch.bool)
        sees[:, past:] = torch.ones(new, new, dtype=torch.bool).tril()
        sees[chain:, past + chain :] = ancestors(draft)
        dtype = next(self.model.parameters()).dtype
        lowest = torch.full(sees.shape, torch.finfo(dtype).min, dtype=dtype)
        return lowest.masked_fill(sees, 0)[None, None].to(self._device)

    def _record(self) -> None:
        """Sliding layers keep what a rollback may need only when told to."""
        if hasattr(self.cache, "activate_past_recording"):
            self.cache.activate_past_recording()

    def _rollback(self, count: int) -> None:
        if hasattr(self.cache, "rollback"):
            self.cache.rollback(count)
        else:
            self.cache.crop(-count)

    def _commit(self) -> None:
        if hasattr(self.cache, "commit"):
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
