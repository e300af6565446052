"""How far to draft: the arithmetic of speculation, and a rule that follows measured costs and acceptance.

Time is in any one unit. A round drafts g tokens at c each and judges them in one pass of v(g); it yields the drafted
tokens that stand and one more. One more drafted token is worth its cost while

    P(all before it stand and it stands too)  >  rate · (c + v(g + 1) - v(g))

where `rate` is the tokens per unit of time that rounds yield: the marginal rule. Taking the long-run rate makes it
optimal when rounds differ (a renewal-reward problem); taking the round's own gives the usual rule, and both agree when
all rounds are alike. The rule looks only at tokens already drafted, so it cannot bias what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvengine.errors import PolicyError
from kvengine.speculative.accept import Draft, Verdict

BINS = 8


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

    tested: positions that were judged; fed: tokens in the judging pass; seconds: below (drafting) and own (judging).
    """

    depth: int
    drafted: int
    stood: int
    confidence: tuple[float, ...]
    fed: int
    draft_seconds: float
    judge_seconds: float

    @classmethod
    def of(cls, guess: Draft, verdict: Verdict, missing: int, draft_seconds: float, judge_seconds: float) -> Round:
        depth = 1 + max(map(guess.depth, range(len(guess))), default=-1)
        stood = len(verdict.path)
        sure = tuple(guess.confidence[: stood + 1]) if guess.is_chain else ()
        return cls(depth, len(guess), stood, sure, missing + len(guess), draft_seconds, judge_seconds)

    @property
    def tested(self) -> int:
        return min(self.stood + 1, self.depth)


class Ahead(Protocol):
    """Decides how far the tier below drafts."""

    def more(self, confidence: Sequence[float]) -> bool:
        """Draft one more, having drafted these?"""

    def learn(self, what: Round) -> None:
        """Take note of a round."""


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


@dataclass
class Line:
    """A decayed least-squares line through (tokens, seconds); the slope is never negative."""

    decay: float = 0.97
    sums: list[float] = field(default_factory=lambda: [0.0] * 5)

    def add(self, x: float, y: float) -> None:
        if self.sums[0] > 3:  # one stall must not look like a law of nature
            y = min(y, 3 * self.at(x))
        new = (1.0, x, y, x * x, x * y)
        self.sums = [self.decay * old + value for old, value in zip(self.sums, new, strict=True)]

    @property
    def slope(self) -> float:
        n, x, y, xx, xy = self.sums
        spread = n * xx - x * x
        return max(0.0, (n * xy - x * y) / spread) if spread > 1e-6 * n * n else 0.0

    def at(self, x: float) -> float:
        n, sx, sy, _, _ = self.sums
        return sy / n + self.slope * (x - sx / n) if n else 0.0


@dataclass
class Odds:
    """A decayed frequency, with a prior of `weight` observations."""

    weight: float = 4.0
    decay: float = 0.99
    yes: float = 0.0
    seen: float = 0.0

    def add(self, happened: bool) -> None:
        self.yes, self.seen = self.decay * self.yes + happened, self.decay * self.seen + 1

    def estimate(self, prior: float) -> float:
        return (self.yes + self.weight * prior) / (self.seen + self.weight)


@dataclass
class Adaptive:
    """Draft while the next token is worth its cost, by measured seconds and by acceptance per position and confidence.

    limit: never more than this many. warm: rounds that draft `start` tokens before the rule takes over. When drafting
    does not pay at all, it is tried again with one token after `probe` rounds, then after twice as many, and so on.
    """

    limit: int = 16
    warm: int = 4
    start: int = 4
    probe: int = 8
    rounds: int = field(default=0, init=False)
    idle: int = field(default=0, init=False)
    wait: int = field(default=0, init=False)
    judge: Line = field(default_factory=Line, init=False)
    draft: Odds = field(default_factory=lambda: Odds(weight=0.0), init=False)
    rate: Odds = field(default_factory=lambda: Odds(weight=0.0), init=False)
    overall: Odds = field(default_factory=Odds, init=False)
    places: list[Odds] = field(init=False)
    bins: list[Odds] = field(init=False)
    after: list[Odds] = field(init=False)

    def __post_init__(self) -> None:
        Fixed(self.limit)
        self.places = [Odds() for _ in range(self.limit + 1)]
        self.bins = [Odds() for _ in range(BINS)]
        self.after = [Odds() for _ in range(BINS)]

    def more(self, confidence: Sequence[float]) -> bool:
        drafted = len(confidence)
        if drafted >= self.limit:
            return False
        if self.rounds < self.warm:
            return drafted < self.start + self.rounds % 2  # two lengths, so that a slope can be seen
        if self.worth(confidence):
            return True
        return drafted == 0 and self.idle >= max(self.wait, self.probe)

    def worth(self, confidence: Sequence[float]) -> bool:
        """The marginal rule for the token after those drafted."""
        stands = self.next(confidence)
        for value in confidence:
            stands *= self.chance(value)
        return stands > self.rate.estimate(0.0) * (self.draft.estimate(0.0) + self.judge.slope)

    def place(self, index: int) -> float:
        """How often the token at that place stands when those before it do."""
        return self.places[index].estimate(self.overall.estimate(0.5))

    def next(self, confidence: Sequence[float]) -> float:
        """How often the token after those stands: easy passages stay easy, so the last one's confidence counts."""
        usual = self.place(len(confidence))
        return self.after[_bin(confidence[-1])].estimate(usual) if confidence else usual

    def chance(self, confidence: float) -> float:
        """How often a token drafted with that confidence stands."""
        return self.bins[_bin(confidence)].estimate(self.overall.estimate(0.5))

    def learn(self, what: Round) -> None:
        self.rounds += 1
        self._pace(what)
        self.judge.add(what.fed, what.judge_seconds)
        for index in range(what.tested):
            stood = index < what.stood
            self.overall.add(stood)
            self.places[min(index, self.limit)].add(stood)
            if index < len(what.confidence):
                self.bins[_bin(what.confidence[index])].add(stood)
            if 0 < index <= len(what.confidence):
                self.after[_bin(what.confidence[index - 1])].add(stood)
        seconds = what.draft_seconds + what.judge_seconds
        self.rate.yes, self.rate.seen = 0.98 * self.rate.yes + what.stood + 1, 0.98 * self.rate.seen + seconds

    def _pace(self, what: Round) -> None:
        if what.drafted:
            tried = self.idle > 0
            self.wait = 2 * max(self.wait, self.probe) if tried and not what.stood else self.probe
            self.idle = 0
            self.draft.yes = 0.97 * self.draft.yes + what.draft_seconds
            self.draft.seen = 0.97 * self.draft.seen + what.drafted
        elif self.rounds > self.warm:
            self.idle += 1


def _bin(confidence: float) -> int:
    return min(BINS - 1, int(confidence * BINS))
