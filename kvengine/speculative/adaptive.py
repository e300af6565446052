"""Draft lengths decided at run time, none among them: the marginal rule with measured seconds and acceptance.

Drafting goes on while some number of further tokens is worth what it costs, seen from those drafted already:

    P(drafted ones stand) · (p1 + p1 p2 + …)  >  rate · (seconds of the longer round - seconds of the shorter one)

Looking more than one token ahead matters where the first drafted token is the dear one: a pass over two tokens may
cost far more than one over a single token, and a third hardly anything. The rule looks only at tokens already drafted,
so it cannot bias what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from math import isnan
from operator import mul

from kvengine.speculative.ahead import Fixed, Round
from kvengine.speculative.costs import Times

BINS = 8
PRIOR = 0.7  # acceptance, before any is measured: optimistic, since a draft that is never tried teaches nothing
FIRST = 2  # tokens of the first draft
NONE = -1
EARLY = 24  # rounds; the first are learnt from one by one
TOGETHER = 8  # rounds without a draft that are learnt from at once
FORGET = 8  # rounds without a draft after which the last one says little
# Rounds without a draft until they take as long as others: a draft's passes leave other things in the caches. On the bundled
# model they took 8.0, 5.6, 4.6, 4.2, 4.0 and then 3.6 ms.
WARM = 5
BEHIND = 0.4  # of its time, that such a round may take longer right behind a draft
SURE = 3  # measurements of such rounds that are known to be enough
START = 2.0  # plain passes that the first trials may lose
ANEW = 1.0  # and those in another text: what others taught says little
STALE = 256  # rounds after which the cost of drafting nothing is in doubt


@dataclass
class Odds:
    """A decayed frequency, with a prior of `weight` observations."""

    weight: float = 4.0
    decay: float = 0.997
    yes: float = 0.0
    seen: float = 0.0

    def add(self, happened: bool) -> None:
        self.yes, self.seen = self.decay * self.yes + happened, self.decay * self.seen + 1

    def fade(self, share: float) -> None:
        """Let what was seen count for less."""
        self.yes, self.seen = share * self.yes, share * self.seen

    def estimate(self, prior: float) -> float:
        return (self.yes + self.weight * prior) / (self.seen + self.weight)

    def doubt(self, chance: float) -> float:
        """How much more often than estimated it may happen: one and a half standard errors."""
        return 1.5 * (chance * (1 - chance) / (self.seen + self.weight)) ** 0.5


@dataclass
class Adaptive:
    """Draft while further tokens are worth their cost, by measured seconds, and acceptance by place and confidence.

    limit: never more than this many. explore: share of all seconds that may be lost to trials; twice that to trials of
    drafting where it is not clear that it does not pay, a quarter where not even drafts that always stood would. Beyond
    that, the first trials may lose two plain passes, and in each further text one, if drafts that stood would pay.
    What drafting nothing costs is measured when the rule would stop drafting, or after some rounds that drafted.
    """

    limit: int = 16
    explore: float = 0.007
    rounds: int = field(default=0, init=False)
    tried: int | None = field(default=None, init=False)  # in this round, where against the rule
    prompt: int = field(default=0, init=False)
    plain: list[Round] = field(default_factory=list, init=False)  # rounds yet to be learnt from
    here: int = field(default=0, init=False)  # rounds in this text
    cold: bool = field(default=False, init=False)  # a text's first round finds nothing in the caches: it takes longer
    free: float = field(default=0.0, init=False)  # seconds that trials in this text may lose beyond their share
    pays_for: bool = field(default=True, init=False)  # whether the trial counts towards that share
    idle: int = field(default=0, init=False)  # rounds without a draft in a row
    waits: float = field(default=0.0, init=False)  # for another trial, until so many seconds are spent
    resting: int = field(default=0, init=False)  # rounds yet to go without one, to see what that costs
    asked: int = field(default=0, init=False)  # the longest draft that more was asked for
    deepest: int = field(default=0, init=False)  # the longest draft
    measured: int = field(default=0, init=False)  # the round in which drafting nothing was last measured
    times: Times = field(default_factory=Times, init=False)
    tokens: float = field(default=0.0, init=False)
    seconds: float = field(default=0.0, init=False)
    spent: float = field(default=0.0, init=False)  # seconds, in all
    lost: float = field(default=0.0, init=False)  # of them, to trials
    overall: Odds = field(default_factory=Odds, init=False)
    places: list[Odds] = field(init=False)
    bins: list[Odds] = field(init=False)
    after: list[Odds] = field(init=False)
    fell: bool = field(default=False, init=False)  # the last draft, lately, for the larger part
    drafted: int = field(default=0, init=False)  # the round in which that was
    again: Odds = field(default_factory=lambda: Odds(8.0), init=False)  # how often the next one's first token stands
    opening: bool = field(default=False, init=False)  # no draft was judged in this text, and it is not the first
    anew: Odds = field(default_factory=Odds, init=False)  # how often the first token of a text's first draft stands
    chances: list[float] = field(init=False)
    usual: list[float] = field(init=False)  # how often a token stands when those before it do, by place
    recent: float = field(default=PRIOR, init=False)  # acceptance of late
    rate: float = field(default=0.0, init=False)
    expected: list[float] = field(default_factory=list, init=False)  # tokens of a round, by its depth
    losses: list[float] = field(default_factory=list, init=False)  # seconds that such a round loses
    worse: float = field(default=0.0, init=False)  # seconds more that a trial loses if it goes as the last draft did
    probe: int = field(default=1, init=False)  # tokens of a trial of drafting: where most is learnt for what it loses
    hopeful: bool = field(default=False, init=False)  # whether drafting may pay, acceptance being known as it is
    costs: list[float] = field(default_factory=list, init=False)
    bars: list[float] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        Fixed(self.limit)
        self.places = [Odds(8.0) for _ in range(self.limit)]
        self.bins = [Odds() for _ in range(BINS)]
        self.after = [Odds() for _ in range(BINS)]
        self.chances, self.usual = [PRIOR] * BINS, [PRIOR] * self.limit

    def begin(self, tokens: int) -> None:
        """What rounds cost depends on the length of the context; what stands differs from text to text."""
        if self.plain:
            self._idled()
        self.cold, self.here, self.tried, self.idle, self.resting, self.waits = self.here != 1, 0, None, 0, 0, 0.0
        self.fell, self.opening = False, self.rounds > 0
        if self.bars and not self.hopeless:
            self.free = ANEW * self.costs[0]
        if self.prompt and not self.prompt / 1.5 < tokens < 1.5 * self.prompt:
            self.times.clear()
            self.bars, self.costs, self.tokens, self.seconds = [], [], 0.0, 0.0
        self.prompt = tokens

    def more(self, confidence: Sequence[float]) -> bool:
        drafted = len(confidence)
        self.asked = max(self.asked, drafted)
        if drafted >= self.limit:
            return False
        if not self.bars:  # what drafting costs is not known yet
            return drafted < FIRST
        if drafted == 0 and (self.tried == NONE or self.resting > 0):
            self.tried = NONE
            return False
        if drafted == 0 and self.spent < self.waits:
            return False
        if self.tried == drafted or (self.tried == 0 and drafted < self.probe):
            return True
        if self.worth(confidence):
            return not (drafted == 0 and self.rest())
        return self.trial(confidence)

    def worth(self, confidence: Sequence[float]) -> bool:
        """The rule, for the tokens after those drafted."""
        return self.stands(confidence) > self.bars[len(confidence)]

    def stands(self, confidence: Sequence[float]) -> float:
        """How likely those drafted and one more are to stand."""
        found = self.next(confidence)
        for value in confidence:
            found *= self.chances[_bin(value)]
        return found

    def trial(self, confidence: Sequence[float]) -> bool:
        """One more against the rule, once a round, if what it is expected to lose is little beside all that was spent."""
        drafted = len(confidence)
        if self.tried is not None or 0 not in self.times.middle or (0 < self.idle <= WARM and not self.sure):
            return False
        usual, share = self.usual[0], self.explore
        self.worse = max(0.0, 1 - self.next(()) / usual) * (self.expected[self.probe] - 1) / self.rate
        loss = self.losses[self.probe] + self.worse
        if drafted:
            loss = self.costs[drafted + 1] - self.costs[drafted] - self.stands(confidence) / self.rate
        elif self.hopeful:
            share *= 2
        elif self.hopeless:
            share /= 4
        loss = max(loss, 0.05 * self.costs[0])
        within = self.lost + loss <= share * self.spent
        if not within and loss > self.free:
            self.waits = 0.0 if drafted else (self.lost + loss) / share
            return False
        if not within:
            self.free -= loss
        self.tried, self.pays_for = drafted, within
        self.lost += loss if drafted and within else 0.0
        return True

    def rest(self) -> bool:
        """Draft nothing against the rule, to see what that costs, where it can hardly lose."""
        first = 0 not in self.times.middle
        wide = not (first or self.sure) and max(self.times.middle.values()) > 3 * self.costs[0]
        # behind such drafts it takes longer than among others like it, perhaps by so much
        loss = (1 - BEHIND) * self.costs[0] - 1 / self.rate if wide else self.losses[0]
        loss, rounds = max(loss, 0.05 * self.costs[0]), WARM + SURE if wide else 1
        near = loss < 0.3 * self.costs[0] and self.rounds - self.measured > 8
        within = self.lost + rounds * loss <= self.explore / 2 * self.spent
        if first:
            within = near = self.rounds > 8
        if not near or not (within or (wide and rounds * loss <= self.free)):
            return False
        if within:
            self.lost += rounds * loss
        else:
            self.free -= rounds * loss
        self.tried, self.resting = NONE, rounds
        return True

    @property
    def sure(self) -> bool:
        """Whether it is known what drafting nothing costs among rounds that do not either."""
        return len(self.times.kept.get(0, ())) >= SURE

    def next(self, confidence: Sequence[float]) -> float:
        """How often the token after those stands: easy passages stay easy, so the last one's confidence counts, and before
        any is drafted, how the last draft did."""
        usual = self.place(len(confidence))
        if confidence:
            return self.after[_bin(confidence[-1])].estimate(usual)
        if self.opening:
            return self.anew.estimate(usual)
        return self.again.estimate(usual) if self.fell else usual

    def place(self, index: int) -> float:
        """How often the token at that place stands when those before it do."""
        return self.usual[index]

    @property
    def hopeless(self) -> bool:
        """Whether not even drafts that always stood would pay."""
        return bool(self.bars) and self.bars[0] >= 1

    def learn(self, what: Round) -> None:
        """Take note of a round; of those without a draft some together."""
        if not what.drafted and self.tried is None and self.rounds >= EARLY and self.idle >= WARM:
            self.plain.append(what)
            if len(self.plain) == TOGETHER:
                self._idled()
            return
        if self.plain:
            self._idled()
        self._learn(what)

    def _idled(self) -> None:
        """Take note of rounds without a draft, among others like them."""
        count, seconds = len(self.plain), sum(one.draft_seconds + one.judge_seconds for one in self.plain)
        self.times.add(0, 0.0, seconds / count)
        before, self.rounds = self.rounds, self.rounds + count
        self.here, self.idle, self.measured = self.here + count, self.idle + count, self.rounds
        if self.fell and self.rounds - self.drafted >= FORGET:
            self.fell, self.waits = False, 0.0
        self.spent += min(seconds, 2 * count * self.costs[0]) if self.costs else seconds
        kept, other = 0.98**count, sum(one.other_seconds for one in self.plain)
        self.tokens, self.seconds = kept * self.tokens + count, kept * self.seconds + seconds + other
        self.plain.clear()
        if self.times.drafted and (self.rounds // 16 > before // 16 or not self.bars):
            self._decide()

    def _learn(self, what: Round) -> None:
        self.rounds, self.here = self.rounds + 1, self.here + 1
        behind, self.deepest = not what.depth and self.idle < WARM, max(self.deepest, what.depth)
        self.resting, self.waits = 0 if what.depth else max(0, self.resting - 1), 0.0
        if not (self.cold and self.times.kept):
            self.times.add(what.depth, what.draft_seconds, what.judge_seconds, what.levels, behind)
        self.cold, self.idle, tried = False, 0 if what.depth else self.idle + 1, self.tried is not None
        for index in range(what.tested):
            self._tested(what, index)
        if what.tested:
            if self.opening:
                self.anew.add(what.stood > 0)
                self.opening = False
            elif self.fell:
                self.again.add(what.stood > 0)
            self.fell, self.drafted = 2 * what.stood <= what.depth, self.rounds
        elif self.rounds - self.drafted >= FORGET:
            self.fell = False
        if self._changed():
            for odds in (self.overall, *self.places, *self.bins, *self.after, self.again):
                odds.fade(0.1)
        self.measured = self.measured if what.drafted else self.rounds
        spent = what.draft_seconds + what.judge_seconds
        if self.costs:
            spent = min(spent, 2 * self.costs[min(what.depth, self.limit)])
        self.spent += spent
        if self.tried == 0 and self.pays_for:
            loss = self.losses[min(what.depth, self.limit)] + what.other_seconds + self.worse * bool(what.drafted)
            self.lost += max(loss, 0.05 * self.costs[0])
        self.tried = None
        spent += what.other_seconds
        self.tokens, self.seconds = 0.98 * self.tokens + what.stood + 1, 0.98 * self.seconds + spent
        due = tried or self.rounds < EARLY or self.rounds % (4 if what.drafted else 16) == 0 or not self.bars
        if due and self.times.drafted:
            self._decide()

    def _tested(self, what: Round, index: int) -> None:
        stood = index < what.stood
        self.overall.add(stood)
        self.recent += 0.06 * (stood - self.recent)
        self.places[min(index, self.limit - 1)].add(stood)
        if index < len(what.confidence):
            self.bins[_bin(what.confidence[index])].add(stood)
        if 0 < index <= len(what.confidence):
            self.after[_bin(what.confidence[index - 1])].add(stood)

    def _changed(self) -> bool:
        """Whether acceptance of late is not what it was: three and a half standard deviations off."""
        usual = self.overall.estimate(PRIOR)
        return self.overall.seen > 30 and abs(self.recent - usual) > 3.5 * (0.031 * usual * (1 - usual) + 1e-4) ** 0.5

    def _decide(self) -> None:
        """From what is known, how likely the next token must be to stand, by how many are drafted."""
        self.waits = 0.0
        first, self.costs = not self.costs, self.times.table(self.limit)
        reach = self.limit if self.asked >= self.deepest else min(self.limit, self.deepest)  # a tree has its own depth
        seconds = self.costs[: reach + 1]
        self.free = START * seconds[0] if first else self.free
        usual = self.overall.estimate(PRIOR)
        self.usual = places = list(accumulate(self.places, lambda prior, odds: odds.estimate(prior), initial=usual))[1:]
        self.expected = expected = [1.0, *(1 + chain for chain in accumulate(accumulate(places, mul)))]
        tokens, cost = max(zip(expected, seconds, strict=False), key=lambda pair: pair[0] / pair[1])
        self.rate = max(tokens / cost, (self.tokens + 8 * tokens) / (self.seconds + 8 * cost))
        self.losses = [t - n / self.rate for n, t in zip(expected, self.costs, strict=True)]
        least = 0.05 * seconds[0]
        self.probe = max(range(1, reach + 1), key=lambda depth: expected[depth - 1] / max(self.losses[depth], least))
        self.hopeful = self.pays([min(1.0, chance + self.overall.doubt(usual)) for chance in places], seconds)
        self.bars = bars(places, seconds, self.rate) + [float("inf")] * (self.limit - reach)
        doubt = 0.25 * min(1.0, (self.rounds - self.measured) / STALE)  # it may have become cheaper since
        self.bars[0] = bar(places, [seconds[0] * (1 - doubt), *seconds[1:]], self.rate, 0)
        self.chances = [odds.estimate(usual) for odds in self.bins]

    def pays(self, places: Sequence[float], seconds: Sequence[float]) -> bool:
        """Whether drafting some number of tokens would, if they stood so often."""
        chains = accumulate(accumulate(places, mul), initial=1.0)
        return any(tokens > self.rate * cost for tokens, cost in islice(zip(chains, seconds, strict=False), 1, None))


def bars(places: Sequence[float], seconds: Sequence[float], rate: float) -> list[float]:
    """`bar` for every number of drafted tokens."""
    return [bar(places, seconds, rate, drafted) for drafted in range(len(seconds) - 1)]


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
    if isnan(confidence):  # logits that overflowed
        return 0
    return min(BINS - 1, int(confidence * BINS))
