"""A tier asks the one below for tokens, judges them in one pass, and adds a token of its own.

What comes out has the tier's own law, token by token, and says so (`Draft.laws`); to the tier above it is a drafter
like any other. Exactness is thus a property of each tier alone, and the depth of the hierarchy does not matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from kvengine.speculative.accept import ROOT, Draft, Rule, Verdict, walk
from kvengine.speculative.ahead import Ahead, Fixed, Round
from kvengine.speculative.law import Law, Text
from kvengine.speculative.session import Session

More = Callable[[Sequence[float]], bool]
"""Is one more token worth drafting, given the drafter's confidence in those it has?"""


class Drafter(Protocol):
    """Whatever can guess how a text goes on."""

    def propose(self, text: Text, tail: Sequence[int], more: More) -> Draft:
        """Tokens after `text` and `tail`, with the law of each."""

    def settle(self, text: Text) -> None:
        """The text has grown: what was drafted otherwise is void."""

    def observe(self, tokens: Sequence[int], logits: Float[Tensor, "token vocab"]) -> None:
        """The tier above has computed the logits after each of these tokens."""


@dataclass
class Tier:
    """session: the model and its cache; law: what it draws from; rule: how; below: who drafts for it, how far: ahead.

    ends: tokens after which nothing more is drafted. rounds: what happened, for the report.
    """

    session: Session
    law: Law
    rule: Rule
    below: Drafter | None = None
    ahead: Ahead = field(default_factory=Fixed)
    ends: frozenset[int] = frozenset()
    name: str = "target"
    rounds: list[Round] = field(default_factory=list)

    def propose(self, text: Text, tail: Sequence[int], more: More) -> Draft:
        """A chain of tokens, each drawn from this tier's law given those before it."""
        out = Draft()
        while more(out.confidence) and not (out.tokens and out.tokens[-1] in self.ends):
            self._extend(out, text, tail)
        return out

    def _extend(self, out: Draft, text: Text, tail: Sequence[int]) -> None:
        verdict, laws, logits = self.step(text, [*tail, *out.tokens])
        for node, token in zip([ROOT, *verdict.path], verdict.tokens, strict=True):
            sure = float(logits[node + 1].float().softmax(-1)[token])
            out.append(token, laws[node + 1], sure)
            if token in self.ends:
                return

    def step(
        self, text: Text, tail: Sequence[int], limit: int | None = None
    ) -> tuple[Verdict, Float[Tensor, "node vocab"], Float[Tensor, "node vocab"]]:
        """One round: draft at most `limit` tokens, judge them.

        Returns the verdict, and the tier's law and logits at the root and at each node.
        """
        began = time.perf_counter()
        guess = self._guess(text, tail, limit)
        drafted = time.perf_counter()
        missing = self.session.align(text, tail)
        logits = self._read(missing, guess)
        laws = self.law(text, [[*tail, *guess.path(node)] for node in range(ROOT, len(guess))], logits)
        verdict = walk(guess, laws, self.rule, len(text) + len(tail))
        self._keep(guess, verdict)
        done = time.perf_counter()
        if self.below:
            self.below.observe([missing[-1], *guess.tokens], logits)
        self._learn(Round.of(guess, verdict, len(missing), drafted - began, done - drafted))
        return verdict, laws, logits

    def settle(self, text: Text) -> None:
        self.session.settle(text)
        if self.below:
            self.below.settle(text)

    def observe(self, tokens: Sequence[int], logits: Float[Tensor, "token vocab"]) -> None:
        """A model learns nothing from the tier above; what drafts for it may."""
        if self.below:
            self.below.observe(tokens, logits)

    def _guess(self, text: Text, tail: Sequence[int], limit: int | None) -> Draft:
        if self.below is None or limit == 0:
            return Draft()
        more = self.ahead.more
        return self.below.propose(text, tail, lambda sure: (limit is None or len(sure) < limit) and more(sure))

    def _read(self, missing: Sequence[int], guess: Draft) -> Float[Tensor, "node vocab"]:
        if guess.is_chain:
            return self.session.feed([*missing, *guess.tokens])[-(len(guess) + 1) :]
        return self.session.feed_tree(missing, guess)

    def _keep(self, guess: Draft, verdict: Verdict) -> None:
        if guess.is_chain:
            self.session.forget(len(guess) - len(verdict.path))

    def _learn(self, what: Round) -> None:
        self.ahead.learn(what)
        self.rounds.append(what)
