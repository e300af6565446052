"""From logits to the law that a token is drawn from: every logit processor, then softmax, or certainty when greedy.

The law of a position depends on the tokens before it (repetition penalties, banned n-grams, grammars), so in a draft
each position is processed with the prefix that leads to it, drafted tokens included.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvengine.speculative.accept import Draft, Laws

Processor = Callable[[Int64[Tensor, "row token"], Float[Tensor, "row vocab"]], Float[Tensor, "row vocab"]]

# Of the processors that transformers builds, those that never look at the tokens: all positions go in one call.
MEMORYLESS = {
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "InfNanRemoveLogitsProcessor",
    "MinPLogitsWarper",
    "SuppressTokensLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopHLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "TypicalLogitsWarper",
}

# Those that look at the tokens, at all rows by one rule: a row may be given to them alone.
ALIKE = {
    "ExponentialDecayLengthPenalty",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "LogitNormalization",
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "SuppressTokensAtBeginLogitsProcessor",
}

# Those that remember earlier calls and take each to be one token further: a draft that is taken back misleads them.
REMEMBERING = {
    "ClassifierFreeGuidanceLogitsProcessor",
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
}


@dataclass(frozen=True)
class Placed:
    """A processor of a batch, for one row of it: the row is given at its place among others, which count for nothing."""

    processor: Processor
    row: int
    rows: int

    def __call__(self, ids: Int64[Tensor, "1 token"], scores: Float[Tensor, "1 vocab"]) -> Float[Tensor, "1 vocab"]:
        found = self.processor(ids.repeat(self.rows, 1), scores.repeat(self.rows, 1))
        return found[self.row : self.row + 1]


def known(one: Any, names: set[str]) -> bool:
    """Whether it is one of these classes of transformers: somebody's own may have the same name."""
    return type(one).__name__ in names and type(one).__module__.startswith("transformers.")


def for_row(processor: Processor, row: int, rows: int) -> Processor:
    """What processes a batch's scores, for one row of it alone."""
    if rows == 1 or known(processor, MEMORYLESS | ALIKE):
        return processor
    if known(processor, {"PrefixConstrainedLogitsProcessor"}):  # its function is told the row, and may know no other
        own: Any = copy.copy(processor)
        allowed = own._prefix_allowed_tokens_fn
        own._prefix_allowed_tokens_fn = lambda _, ids: allowed(row, ids)
        return own  # type: ignore[no-any-return]
    return Placed(processor, row, rows)


@dataclass
class Text:
    """The tokens of one sequence that are final: the prompt and what the top tier has let through.

    padding: left padding that only the processors and criteria see, as in `model.generate`.
    """

    tokens: list[int]
    padding: list[int] = field(default_factory=list)
    buffer: Int64[Tensor, " slot"] = field(default_factory=lambda: torch.empty(0, dtype=torch.long), repr=False)
    filled: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self.tokens)

    def since(self, start: int, tail: Sequence[int]) -> list[int]:
        """The text continued by `tail`, from token `start` on."""
        return self.tokens[start:] + list(tail) if start < len(self) else list(tail[start - len(self) :])

    def ids(self, tail: Sequence[int] = (), device: torch.device | str = "cpu") -> Int64[Tensor, "1 token"]:
        """Padding, text and tail as a tensor; costs what is new, not the whole text."""
        begin, end = len(self.padding) + self.filled, len(self.padding) + len(self)
        if end + len(tail) > len(self.buffer):
            self.buffer = torch.empty(2 * (end + len(tail)), dtype=torch.long)
            self.buffer[: len(self.padding)] = torch.tensor(self.padding)
            begin, self.filled = len(self.padding), 0
        self.buffer[begin : end + len(tail)] = torch.tensor([*self.tokens[self.filled :], *tail], dtype=torch.long)
        self.filled = len(self)
        return self.buffer[None, : end + len(tail)].to(device)


class OnDemand(dict[int, Tensor]):
    """Laws that are made when they are looked at, once."""

    def __init__(self, make: Callable[[int], Float[Tensor, " vocab"]]) -> None:
        super().__init__()
        self.make = make

    def __missing__(self, at: int) -> Float[Tensor, " vocab"]:
        self[at] = self.make(at)
        return self[at]


@dataclass(frozen=True)
class Law:
    """A model's law after its processors.

    processors: as in transformers, called with (tokens so far, scores); greedy: certainty of the largest score.
    """

    processors: Sequence[Processor] = ()
    greedy: bool = True

    @property
    def memoryless(self) -> bool:
        return all(known(processor, MEMORYLESS) for processor in self.processors)

    def laws(
        self, text: Text, tail: Sequence[int], guess: Draft, logits: Float[Tensor, "{len(guess)+1} vocab"]
    ) -> Laws:
        """The laws at the root (0) and after each node (node + 1) of a draft that follows text and tail.

        Of a tree only a few nodes are ever looked at: theirs are made when they are.
        """
        if guess.is_chain and self.memoryless:
            return self(text, (), logits)
        return OnDemand(lambda at: self(text, [[*tail, *guess.path(at - 1)]], logits[at : at + 1])[0])

    def __call__(
        self, text: Text, tails: Sequence[Sequence[int]], logits: Float[Tensor, "node vocab"]
    ) -> Float[Tensor, "node vocab"]:
        """logits[i] follows the text and then tails[i], which only processors that look at tokens need; fp32 out, or fp64."""
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if self.memoryless:
            scores = self._process(torch.zeros(len(scores), 1, dtype=torch.long, device=scores.device), scores)
        else:
            rows = zip(tails, scores.split(1), strict=True)
            scores = torch.cat([self._process(text.ids(tail, scores.device).clone(), row) for tail, row in rows])
        return _certain(scores) if self.greedy else scores.softmax(-1)

    def _process(
        self, ids: Int64[Tensor, "row token"], scores: Float[Tensor, "row vocab"]
    ) -> Float[Tensor, "row vocab"]:
        for processor in self.processors:
            scores = processor(ids, scores)
        return scores


def _certain(scores: Float[Tensor, "node vocab"]) -> Float[Tensor, "node vocab"]:
    return torch.zeros_like(scores).scatter_(-1, scores.argmax(-1, keepdim=True), 1)
