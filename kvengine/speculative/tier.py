"""A tier asks the one below for tokens, judges them in one pass, and adds a token of its own.

What comes out has the tier's own law, token by token, and says so (`Draft.laws`); to the tier above it is a drafter
like any other. Exactness is thus a property of each tier alone, and the depth of the hierarchy does not matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from kvengine.speculative.accept import ROOT, Draft, Laws, Rule, Verdict, walk
from kvengine.speculative.ahead import Ahead, Fixed, Round
from kvengine.speculative.law import Law, Text
from kvengine.speculative.session import Asks, Session, drive

More = Callable[[Sequence[float]], bool]
"""Is one more token worth drafting, given the drafter's confidence in those it has?"""


@runtime_checkable
class Drafter(Protocol):
    """Whatever can guess how a text goes on."""

    def propose(self, text: Text, tail: Sequence[int], more: More) -> Draft:
        """Tokens after `text` and `tail`, with the law of each."""

    def settle(self, text: Text) -> None:
        """The text has grown: what was drafted otherwise is void."""

    def observe(self, tokens: Sequence[int], logits: Float[Tensor, "token vocab"]) -> None:
        """The tier above has computed the logits after each of these tokens."""


@runtime_checkable
class Reader(Drafter, Protocol):
    """A drafter with a model, whose passes others may run."""

    session: Session

    def proposing(self, text: Text, tail: Sequence[int], more: More, limit: int | None = None) -> Asks[Draft]:
        """`propose`, in steps; never more than `limit` tokens one behind the other, nor a pass over more of them."""


Step = tuple[Verdict, Laws, Float[Tensor, "node vocab"]]


@dataclass
class Tier:
    """session: the model and its cache; law: what it draws from; rule: how; below: who drafts for it, how far: ahead.

    ends: tokens after which nothing more is drafted. rounds: what happened, for the report. clock: seconds, to measure
    rounds with; other: those that went into settling and catching up since the last round.
    """

    session: Session
    law: Law
    rule: Rule
    below: Drafter | None = None
    ahead: Ahead = field(default_factory=Fixed)
    ends: frozenset[int] = frozenset()
    name: str = "target"
    rounds: list[Round] = field(default_factory=list)
    clock: Callable[[], float] = time.perf_counter
    other: float = 0.0

    @cached_property
    def reader(self) -> Reader | None:
        """What is below, if it has a model. To ask that anew in every round would take longer than many a decision."""
        return self.below if isinstance(self.below, Reader) else None

    def propose(self, text: Text, tail: Sequence[int], more: More) -> Draft:
        """A chain of tokens, each drawn from this tier's law given those before it."""
        return drive(self.proposing(text, tail, more))

    def proposing(self, text: Text, tail: Sequence[int], more: More, limit: int | None = None) -> Asks[Draft]:
        out = Draft()
        while more(out.confidence) and not (out.tokens and out.tokens[-1] in self.ends):
            yield from self._extend(out, text, tail, None if limit is None else limit - len(out) - 1)
        return out

    def _extend(self, out: Draft, text: Text, tail: Sequence[int], limit: int | None) -> Asks[None]:
        verdict, laws, logits = yield from self.stepping(text, [*tail, *out.tokens], limit)
        for node, token in zip([ROOT, *verdict.path], verdict.tokens, strict=True):
            sure = float(logits[node + 1].float().softmax(-1)[token])
            out.append(token, laws[node + 1], sure)
            if token in self.ends:
                return

    def step(self, text: Text, tail: Sequence[int], limit: int | None = None) -> Step:
        """One round: draft at most `limit` tokens, judge them.

        Returns the verdict, and the tier's law and logits at the root and at each node.
        """
        return drive(self.stepping(text, tail, limit))

    def stepping(self, text: Text, tail: Sequence[int], limit: int | None = None) -> Asks[Step]:
        """`step`, in steps."""
        began, before = self.clock(), self.other
        guess = yield from self._guess(text, tail, limit)
        drafted, lag = self.clock(), self.other - before
        missing = self.session.align(text, tail)
        logits = yield from self._read(missing, guess)
        laws = self.law.laws(text, tail, guess, logits)
        verdict = walk(guess, laws, self.rule, len(text) + len(tail))
        self._keep(guess, verdict)
        if self.below:
            self.below.observe([missing[-1], *guess.tokens], logits)
        done, other, self.other = self.clock(), self.other, 0.0
        self._learn(Round.of(guess, verdict, len(missing), drafted - began - lag, done - drafted, other))
        return verdict, laws, logits

    def settle(self, text: Text) -> None:
        reads = self.reader is not None or self.session.settles_by_reading
        began = self.clock() if reads else None  # who has no model takes next to nothing
        self.session.settle(text)
        if self.below:
            self.below.settle(text)
        if began is not None:
            self.other += self.clock() - began

    def observe(self, tokens: Sequence[int], logits: Float[Tensor, "token vocab"]) -> None:
        """A model learns nothing from the tier above; what drafts for it may."""
        if self.below:
            self.below.observe(tokens, logits)

    def _guess(self, text: Text, tail: Sequence[int], limit: int | None) -> Asks[Draft]:
        if self.below is None or limit == 0:
            return Draft()
        ahead = self.ahead.more
        if not ahead(()):
            return Draft()
        more: More = lambda sure: (limit is None or len(sure) < limit) and ahead(sure)  # noqa: E731
        if self.reader is None:
            return self.below.propose(text, tail, more)
        began = self.clock()
        self.reader.session.prepare(text)
        self.other += self.clock() - began
        return (yield from self.reader.proposing(text, tail, more, limit))

    def _read(self, missing: Sequence[int], guess: Draft) -> Asks[Float[Tensor, "node vocab"]]:
        if guess.is_chain:
            return (yield from self.session.feeding([*missing, *guess.tokens], len(guess) + 1))
        return (yield from self.session.feeding_tree(missing, guess))

    def _keep(self, guess: Draft, verdict: Verdict) -> None:
        if guess.is_chain:
            self.session.forget(len(guess) - len(verdict.path))

    def _learn(self, what: Round) -> None:
        self.ahead.learn(what)
        self.rounds.append(what)
