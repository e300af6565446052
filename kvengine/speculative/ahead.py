"""How far to draft: the arithmetic of speculation, and a rule that follows measured costs and acceptance.

Time is in any one unit. A round drafts g tokens at c each and judges them in one pass of v(g); it yields the drafted
tokens that stand and one more. One more drafted token is worth its cost while

    P(all before it stand and it stands too)  >  rate · (c + v(g + 1) - v(g))

where `rate` is the tokens per unit of time that rounds yield: the marginal rule. Taking the long-run rate makes it
optimal when rounds differ (a renewal-reward problem); taking the round's own gives the usual rule, and both agree when
all rounds are alike. `adaptive.py` follows it with measured costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvengine.errors import PolicyError
from kvengine.speculative.accept import Draft, Verdict


def expected_tokens(alpha: float, gamma: int) -> float:
    """Tokens of a round, the judge's own included, when each of `gamma` drafts stands with probability `alpha`.

    >>> round(expected_tokens(0.8, 5), 6)
    3.68928
    """
    return float(sum(alpha**i for i in range(gamma + 1)))


@dataclass(frozen=True)
class Round:
    """What one round did: depth of the draft, drafted tokens, how many stood, the confidence in those that were judged.

    tested: positions that were judged; fed: tokens in the judging pass; seconds: below (drafting), own (judging), and
    other ones, that do not depend on the draft's length: settling, and what the draft had to catch up with.
    levels: drafted tokens down to each depth, 1, 2, 3, ... for a chain.
    """

    depth: int
    drafted: int
    stood: int
    confidence: tuple[float, ...]
    fed: int
    draft_seconds: float
    judge_seconds: float
    other_seconds: float = 0.0
    levels: tuple[int, ...] = ()

    @classmethod
    def of(cls, guess: Draft, verdict: Verdict, missing: int, draft: float, judge: float, other: float = 0.0) -> Round:
        stood, levels = len(verdict.path), guess.levels
        sure = tuple(guess.confidence[: stood + 1]) if guess.is_chain else ()
        return cls(len(levels), len(guess), stood, sure, missing + len(guess), draft, judge, other, levels)

    @property
    def tested(self) -> int:
        return min(self.stood + 1, self.depth)


@runtime_checkable
class Ahead(Protocol):
    """Decides how far the tier below drafts."""

    def more(self, confidence: Sequence[float]) -> bool:
        """Draft one more, having drafted these?"""

    def learn(self, what: Round) -> None:
        """Take note of a round."""

    def begin(self, tokens: int) -> None:
        """A text begins, with a prompt of so many tokens."""


@dataclass
class Fixed:
    """Always `gamma` tokens."""

    gamma: int = 4

    def __post_init__(self) -> None:
        if self.gamma < 1:
            raise PolicyError(
                f"gamma counts drafted tokens and is at least 1, not {self.gamma}; leave the draft out to draft none"
            )

    def more(self, confidence: Sequence[float]) -> bool:
        return len(confidence) < self.gamma

    def learn(self, what: Round) -> None:
        return None

    def begin(self, tokens: int) -> None:
        return None
