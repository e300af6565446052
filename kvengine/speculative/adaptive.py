"""Draft lengths decided at run time, none among them: the marginal rule with measured seconds and acceptance.

Drafting goes on while some number of further tokens is worth what it costs, seen from those drafted already:

    P(drafted ones stand) · (p1 + p1 p2 + …)  >  rate · (seconds of the longer round - seconds of the shorter one)

Looking more than one token ahead matters where the first drafted token is the dear one: a pass over two tokens may
cost far more than one over a single token, and a third hardly anything. The rule looks only at tokens already drafted,
so it cannot bias what comes out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from kvengine.speculative.ahead import Fixed, Round

BINS = 8
PRIOR = 0.7  # acceptance, before any is measured: optimistic, since a draft that is never tried teaches nothing


@dataclass
class Odds:
    """A decayed frequency, with a prior of `weight` observations."""

    weight: float = 4.0
    decay: float = 0.99
    yes: float = 0.0
    seen: float = 0.0

    def add(self, happened: bool) -> None:
        self.yes, self.seen = self.decay * self.yes + happened, self.decay * self.seen + 1

    def fade(self, share: float) -> None:
        """Let what was seen count for less."""
        self.yes, self.seen = share * self.yes, share * self.seen

    def estimate(self, prior: float) -> float:
        return (self.yes + self.weight * prior) / (self.seen + self.weight)


@dataclass
class Times:
    """Seconds by depth of the draft: medians of the last few at each depth, drawn to a line through all of them.

    rise: what one more token costs, as a share of a typical round, until two depths have been seen. Medians, since on
    a busy machine one round in ten may take three times as long as the others.
    """

    rise: float
    recent: int = 9
    kept: dict[int, deque[float]] = field(default_factory=dict, init=False)
    middle: dict[int, float] = field(default_factory=dict, init=False)

    def add(self, depth: int, seconds: float) -> None:
        kept = self.kept.setdefault(depth, deque(maxlen=self.recent))
        kept.append(seconds)
        self.middle[depth] = median(kept)

    def clear(self) -> None:
        self.kept.clear()
        self.middle.clear()

    def line(self) -> tuple[float, float]:
        """Seconds at depth 0 and per token, by least squares over depths from 1 on; never falling."""
        points = [(d, len(self.kept[d]), y) for d, y in self.middle.items() if d] or [(0, 1, self.middle.get(0, 0.0))]
        weight = sum(n for _, n, _ in points)
        x = sum(n * d for d, n, _ in points) / weight
        y = sum(n * t for _, n, t in points) / weight
        spread = sum(n * (d - x) ** 2 for d, n, _ in points)
        slope = (sum(n * (d - x) * t for d, n, t in points) + self.rise * y) / (spread + 1)
        return y - max(0.0, slope) * x, max(0.0, slope)

    def table(self, most: int) -> list[float]:
        """Seconds by depth from 0 to `most`, never falling."""
        start, slope = self.line()
        out = [self.middle.get(0, max(0.0, start))]
        for depth in range(1, most + 1):
            n, line = len(self.kept.get(depth, ())), start + slope * depth
            value = (n * self.middle.get(depth, 0.0) + 3 * line) / (n + 3)
            out.append(max(out[-1], value))
        return out


@dataclass
class Adaptive:
    """Draft while further tokens are worth their cost, by measured seconds, and acceptance by place and confidence.

    limit: never more than this many. The first round drafts one token and the second none, to see what both cost; the
    rule decides from the third on. While drafting does not pay it is tried again with one token after `probe` rounds,
    then after twice as many, and so on: hardly ever again where even drafts that always stood would not pay.
    """

    limit: int = 16
    probe: int = 16
    rounds: int = field(default=0, init=False)
    idle: int = field(default=0, init=False)
    wait: int = field(default=0, init=False)
    probing: bool = field(default=False, init=False)
    prompt: int = field(default=0, init=False)
    measured: int = field(default=0, init=False)  # the round in which drafting nothing was last measured
    draft: Times = field(default_factory=lambda: Times(1.0), init=False)
    judge: Times = field(default_factory=lambda: Times(0.05), init=False)
    tokens: float = field(default=0.0, init=False)
    seconds: float = field(default=0.0, init=False)
    overall: Odds = field(default_factory=Odds, init=False)
    places: list[Odds] = field(init=False)
    bins: list[Odds] = field(init=False)
    after: list[Odds] = field(init=False)
    chances: list[float] = field(init=False)
    bars: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        Fixed(self.limit)
        self.wait = self.probe
        self.places = [Odds() for _ in range(self.limit)]
        self.bins = [Odds() for _ in range(BINS)]
        self.after = [Odds() for _ in range(BINS)]
        self.chances = [PRIOR] * BINS

    def begin(self, tokens: int) -> None:
        """What rounds cost depends on the length of the context; what stands does so much less."""
        if self.prompt and not self.prompt / 1.5 < tokens < 1.5 * self.prompt:
            self.draft.clear()
            self.judge.clear()
            self.bars, self.tokens, self.seconds = [], 0.0, 0.0
        self.prompt = tokens

    def more(self, confidence: Sequence[float]) -> bool:
        drafted = len(confidence)
        if drafted >= self.limit:
            return False
        if not self.bars:  # what drafting costs, or what leaving it costs, is not known yet
            return drafted == 0 and not any(self.judge.middle)
        if drafted == 0 and self.rounds - self.measured > 16 * self.probe:
            return False  # that of not drafting may have changed
        if self.worth(confidence):
            self.wait = self.probe
            return True
        self.probing |= (again := drafted == 0 and self.idle >= self.wait)
        return again

    def worth(self, confidence: Sequence[float]) -> bool:
        """The rule, for the tokens after those drafted."""
        stands = self.next(confidence)
        for value in confidence:
            stands *= self.chances[_bin(value)]
        return stands > self.bars[len(confidence)]

    def next(self, confidence: Sequence[float]) -> float:
        """How often the token after those stands: easy passages stay easy, so the last one's confidence counts."""
        usual = self.place(len(confidence))
        return self.after[_bin(confidence[-1])].estimate(usual) if confidence else usual

    def place(self, index: int) -> float:
        """How often the token at that place stands when those before it do."""
        return self.places[index].estimate(self.overall.estimate(PRIOR))

    def learn(self, what: Round) -> None:
        self.rounds += 1
        self.draft.add(what.depth, what.draft_seconds)
        self.judge.add(what.depth, what.judge_seconds)
        for index in range(what.tested):
            self._tested(what, index)
        if self.probing:
            self._probed(what)
        self.idle = 0 if what.drafted else self.idle + 1
        self.measured = self.measured if what.drafted else self.rounds
        if 0 in self.judge.middle and any(self.judge.middle):
            self._decide(what)

    def _tested(self, what: Round, index: int) -> None:
        stood = index < what.stood
        self.overall.add(stood)
        self.places[min(index, self.limit - 1)].add(stood)
        if index < len(what.confidence):
            self.bins[_bin(what.confidence[index])].add(stood)
        if 0 < index <= len(what.confidence):
            self.after[_bin(what.confidence[index - 1])].add(stood)

    def _probed(self, what: Round) -> None:
        """Pace the next trial. One that stood casts doubt on what is remembered of those that did not."""
        self.probing = False
        hopeless = bool(self.bars) and self.bars[0] >= 1
        self.wait = min(2 * self.wait, (128 if hopeless else 16) * self.probe)
        if what.stood and not hopeless:
            for odds in (self.overall, *self.places, *self.bins, *self.after):
                odds.fade(0.25)

    def _decide(self, what: Round) -> None:
        """From what is known, how likely the next token must be to stand, by how many are drafted."""
        seconds = [a + b for a, b in zip(self.draft.table(self.limit), self.judge.table(self.limit), strict=True)]
        spent = min(what.draft_seconds + what.judge_seconds, 2 * seconds[min(what.depth, self.limit)])
        spent += what.other_seconds
        self.tokens, self.seconds = 0.98 * self.tokens + what.stood + 1, 0.98 * self.seconds + spent
        usual = self.overall.estimate(PRIOR)
        places = [place.estimate(usual) for place in self.places]
        rate = self._rate(places, seconds)
        self.bars = [bar(places, seconds, rate, drafted) for drafted in range(self.limit)]
        self.chances = [odds.estimate(usual) for odds in self.bins]

    def _rate(self, places: list[float], seconds: list[float]) -> float:
        """Tokens per second: those of the rounds so far, with a few rounds of the best fixed length for a prior."""
        best, stands, expected = (1.0, seconds[0]), 1.0, 1.0
        for place, cost in zip(places, seconds[1:], strict=True):
            stands *= place
            expected += stands
            if expected * best[1] > best[0] * cost:
                best = expected, cost
        return (self.tokens + 8 * best[0]) / (self.seconds + 8 * best[1])


def bar(places: Sequence[float], seconds: Sequence[float], rate: float, drafted: int) -> float:
    """How likely the next token must be to stand, for it and some number of further ones to be worth their cost.

    places: how often a token stands when those before it do; seconds: of a round, by drafted tokens; rate: tokens per
    second.

    >>> round(bar([0.5, 0.5], [1.0, 1.3, 1.4], 1.0, 0), 4)
    0.2667
    """
    least, chain, gain = float("inf"), 1.0, 0.0
    for end in range(drafted + 1, len(seconds)):
        gain += chain
        least = min(least, rate * (seconds[end] - seconds[drafted]) / gain)
        chain *= places[end] if end < len(places) else 0.0
    return least


def _bin(confidence: float) -> int:
    return min(BINS - 1, int(confidence * BINS))
