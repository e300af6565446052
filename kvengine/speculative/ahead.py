"""How far to draft: the arithmetic of speculation, and a rule that follows measured costs and acceptance.

Time is in any one unit. A round drafts g tokens at c each and judges them in one pass of v(g); it yields the drafted
tokens that stand and one more. One more drafted token is worth its cost while

    P(all before it stand and it stands too)  >  rate · (c + v(g + 1) - v(g))

where `rate` is the tokens per unit of time that rounds yield: the marginal rule. Taking the long-run rate makes it
optimal when rounds differ (a renewal-reward problem); taking the round's own gives the usual rule, and both agree when
all rounds are alike. `adaptive.py` follows it with measured costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def speedup(alpha: float, gamma: int, draft_cost: float, pass_cost: float = 1.0) -> float:
    """Against plain decoding at cost 1 a token; `pass_cost`: the judging pass over gamma + 1 tokens.

    >>> round(speedup(0.8, 5, 0.1), 6)
    2.45952
    """
    return expected_tokens(alpha, gamma) / (gamma * draft_cost + pass_cost)


def best_gamma(
    alpha: float, draft_cost: float, pass_cost: Callable[[int], float] = lambda g: 1.0, most: int = 64
) -> int:
    """The draft length with the largest speed-up, 0 if drafting does not pay.

    >>> best_gamma(0.9, 0.05)
    13
    """
    return max(range(most + 1), key=lambda g: speedup(alpha, g, draft_cost, pass_cost(g)))


def hierarchy(
    alphas: tuple[float, float], gammas: tuple[int, int], costs: tuple[float, float], pass_cost: float = 1.0
) -> float:
    """Speed-up of three tiers.

    alphas: (lowest judged by middle, middle judged by top); costs: (a lowest token, a middle pass).

    >>> round(hierarchy((0.35, 0.9), (1, 6), (0.03, 0.42)), 6)
    1.73901
    """
    token = (gammas[0] * costs[0] + costs[1]) / expected_tokens(alphas[0], gammas[0])
    return speedup(alphas[1], gammas[1], token, pass_cost)


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
