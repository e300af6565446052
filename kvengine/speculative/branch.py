"""A model that drafts a tree: several children where the next token is uncertain, a chain where it is not.

Children are drawn without replacement, so the judge's rule for siblings applies (accept.py) and the text keeps the
judge's law at every temperature. The model reads each level of the tree in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.speculative.accept import ROOT, Draft, Rule
from kvengine.speculative.law import Law, Text
from kvengine.speculative.session import Asks, Session, drive
from kvengine.speculative.tier import More


@dataclass
class Branching:
    """widths[d]: how many children each node at depth d gets (the root is at depth 0)."""

    session: Session
    law: Law
    rule: Rule
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.widths or min(self.widths) < 1:
            raise PolicyError(f"widths of a draft tree are counts of at least 1, not {self.widths}")

    def propose(self, text: Text, tail: Sequence[int], more: More) -> Draft:
        return drive(self.proposing(text, tail, more))

    def proposing(self, text: Text, tail: Sequence[int], more: More, limit: int | None = None) -> Asks[Draft]:
        draft, level = Draft(), [ROOT]
        if not more([]):
            return draft
        logits = yield from self.session.feeding(self.session.align(text, tail), 1)
        for depth, width in enumerate(self.widths):
            if depth:
                if not more([1.0] * depth):
                    break
                logits = torch.cat([logits[:1], (yield from self.session.feeding_tree([], draft))])
            laws = self._laws(text, tail, draft, logits)
            position = len(text) + len(tail) + depth
            level = [child for node in level for child in self._grow(draft, node, laws[node + 1], width, position)]
        return draft

    def settle(self, text: Text) -> None:
        self.session.settle(text)

    def observe(self, tokens: Sequence[int], logits: Float[Tensor, "token vocab"]) -> None:
        return None

    def _laws(
        self, text: Text, tail: Sequence[int], draft: Draft, logits: Float[Tensor, "node vocab"]
    ) -> Float[Tensor, "node vocab"]:
        """Drawn from the processed law; when that is a certainty, the likeliest tokens are chosen instead."""
        tails = [[*tail, *draft.path(node)] for node in range(ROOT, len(draft))]
        return replace(self.law, greedy=False)(text, tails, logits)

    def _grow(self, draft: Draft, node: int, law: Float[Tensor, " vocab"], width: int, position: int) -> list[int]:
        draft.laws += [None] * (node + 2 - len(draft.laws))
        if self.law.greedy:
            tokens = law.topk(min(width, len(law))).indices.tolist()
        else:
            tokens, draft.laws[node + 1] = self.rule.pick(law, width, position), law
        first = len(draft)
        for token in tokens:
            draft.tokens.append(token)
            draft.parents.append(node)
            draft.confidence.append(float(law[token]))
        return list(range(first, len(draft)))
