"""Draft lengths decided at run time: what is learnt of costs and acceptance, and that nothing unsettles it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvengine.speculative.accept import Draft, Verdict
from kvengine.speculative.adaptive import Adaptive
from kvengine.speculative.ahead import Round
from kvengine.speculative.costs import Times

LIMIT = 16


@dataclass(frozen=True)
class Stretch:
    """Some rounds that are alike: how deep their drafts may go, what they are confident in, how many tokens of ten stand.

    seconds: of a round, of which `draft` is drafting. widths: a tree's tokens at each depth, whose depth the rule does not
    choose; none: a chain. text: tokens of the prompt of a text that begins with them.
    """

    rounds: int
    cap: int
    sure: float
    stands: int
    seconds: float
    draft: float = 0.0
    widths: tuple[int, ...] = ()
    text: int | None = None


SECONDS = st.sampled_from([0.0, 1e-12, 1e-6, 0.001, 0.02, 20.0, 1e6]) | st.floats(0, 1e4)
STRETCHES = st.builds(
    Stretch, st.integers(1, 40), st.integers(0, 18), st.sampled_from([0.0, 0.5, 1.0, math.nan]) | st.floats(0, 1),
    st.integers(0, 10), SECONDS, st.sampled_from([0.0, 0.02, 0.7, 1.0]),
    st.just(()) | st.lists(st.integers(1, 9), min_size=1, max_size=20).map(tuple),
    st.none() | st.sampled_from([0, 1, 40, 50, 5000]),
)  # fmt: skip


def follow(ahead: Adaptive, stretch: Stretch) -> None:
    """One of its rounds."""
    sure = list[float]()
    while len(sure) < stretch.cap and ahead.more(sure):
        sure.append(stretch.sure)
    assert len(sure) <= ahead.limit
    levels = tuple(accumulate(stretch.widths)) if sure else ()
    depth = len(levels) or len(sure)
    stood = depth * stretch.stands // 10
    spent = stretch.draft * stretch.seconds, (1 - stretch.draft) * stretch.seconds
    judged = () if levels else tuple(sure[: stood + 1])
    ahead.learn(Round(depth, sum(stretch.widths) if levels else depth, stood, judged, depth + 1, *spent, 0.0, levels))


@given(st.sampled_from([1, 2, LIMIT]), st.lists(STRETCHES, min_size=1, max_size=6))
@example(LIMIT, [Stretch(1, 16, 0.9, 5, 0.0)])  # a clock that stands still
@example(
    LIMIT, [Stretch(1, 16, 0.9, 5, 1.0), Stretch(9, 0, 0.9, 5, 0.0), Stretch(9, 9, 0.9, 5, 1.0)]
)  # and one that stops
@example(LIMIT, [Stretch(3, 16, math.nan, 5, 1.0)])
def test_whatever_comes_the_rule_answers(limit: int, stretches: list[Stretch]) -> None:
    """Stalls, clocks that stand still, drafts that know no probabilities, trees deeper than any limit, other texts."""
    ahead = Adaptive(limit)
    for stretch in stretches:
        if stretch.text is not None:
            ahead.begin(stretch.text)
        for _ in range(stretch.rounds):
            follow(ahead, stretch)
        numbers = [x for x in vars(ahead).values() if isinstance(x, float)]
        assert all(
            map(math.isfinite, [*numbers, *ahead.losses, *ahead.expected, ahead.times.slope, ahead.times.spread])
        )
        assert all(0 < cost < math.inf for cost in ahead.costs) and not any(map(math.isnan, ahead.bars))
        assert all(0 < chance <= 1 for chance in (*ahead.usual, *ahead.chances))


def test_seconds_that_never_vary_say_no_more_than_they_can() -> None:
    """Those of one depth say nothing about others: a slope would come out of rounding errors."""
    times = Times()
    for number in range(1300):
        times.add(2, 0.07, 1.0, (4, 7 + number % 3))
    assert times.table(4)[4] < 1.5


def told(ahead: Adaptive, depth: int, stood: int = 0, sure: float = 0.5, seconds: float = 1.0, rounds: int = 1) -> None:
    """Rounds that are alike."""
    for _ in range(rounds):
        judged = (sure,) * min(depth, stood + 1)
        ahead.learn(Round(depth, depth, stood, judged, depth + 1, 0.1 * depth, seconds))


def test_what_a_round_was() -> None:
    chain, tree = Draft.chain([5, 6, 7], [None] * 3), Draft([5, 6, 7], [-1, -1, 0], [None] * 3, [0.9, 0.4, 0.8])
    chain.confidence = [0.9, 0.4, 0.8]
    round_ = Round.of(chain, Verdict([0], [5, 8]), 2, 0.5, 1.0, 0.25)
    assert round_ == Round(3, 3, 1, (0.9, 0.4), 5, 0.5, 1.0, 0.25, (1, 2, 3)) and round_.tested == 2
    assert Round.of(tree, Verdict([0, 2], [5, 7, 8]), 1, 0.5, 1.0) == Round(2, 3, 2, (), 4, 0.5, 1.0, 0.0, (2, 3))


def test_a_texts_first_round_is_not_measured() -> None:
    """It takes longer than others. Where every text is one round, nothing else would be known."""
    ahead = Adaptive()
    ahead.begin(1000)
    told(ahead, 2, 1, rounds=4)
    ahead.begin(1000)
    told(ahead, 2, 1, seconds=50.0)
    assert max(ahead.times.kept[2]) < 2
    ahead.begin(1000)
    told(ahead, 2, 1, seconds=60.0)
    assert max(ahead.times.kept[2]) > 50


def test_a_text_of_another_length_begins_with_what_holds_there() -> None:
    ahead = Adaptive()
    ahead.begin(1000)
    told(ahead, 2, 1, rounds=24)
    told(ahead, 0, rounds=8)
    for tokens in (1000, 1400, 1900, 2800):  # each little longer than the one before
        ahead.begin(tokens)
        told(ahead, 0, rounds=8)
        assert ahead.bars and len(ahead.plain) == 3
    ahead.begin(9000)
    assert not ahead.plain and not ahead.bars and not ahead.costs and not ahead.times.kept and not ahead.times.slope
    assert ahead.rounds == 64 and ahead.tokens == ahead.seconds == 0


def test_another_text_may_lose_a_pass_to_trials_unless_drafting_is_hopeless() -> None:
    for depth, stood in ((2, 2), (16, 0)):
        ahead = Adaptive()
        ahead.begin(1000)
        for _ in range(20):
            told(ahead, depth, stood)
            told(ahead, 0, seconds=1.0 if stood else 0.05)
        ahead.free = 0.0
        ahead.begin(1000)
        assert ahead.hopeless == (stood == 0)
        assert ahead.free == (ahead.costs[0] if stood else 0.0)


def test_a_first_token_is_likely_as_those_before_it_say() -> None:
    """After a draft that fell, in a text's first draft, and behind one of that confidence."""
    ahead = Adaptive()
    for _ in range(30):
        ahead.begin(1000)
        told(ahead, 4, 0)
        told(ahead, 4, 4, 0.95)
        told(ahead, 4, 1, 0.15)
        told(ahead, 4, 4, 0.95)
        told(ahead, 4, 0)
        told(ahead, 4, 4, 0.95)
    usual = ahead.next([])
    told(ahead, 4, 0)
    assert ahead.fell and ahead.next([]) > 0.9 > 0.8 > usual
    ahead.begin(1000)
    assert ahead.next([]) < 0.3
    told(ahead, 4, 4)
    assert ahead.next([]) == pytest.approx(usual, abs=0.1)
    assert ahead.next([0.95]) > 0.9 and ahead.next([0.15]) < 0.3
    assert ahead.next([math.nan]) == ahead.next([0.0])  # scores that overflowed say nothing good


def test_what_has_changed_is_learnt_anew() -> None:
    ahead = Adaptive()
    told(ahead, 2, 2, rounds=200)
    told(ahead, 2, 0, rounds=40)
    assert ahead.overall.estimate(0.7) < 0.5


def test_stalls_neither_count_as_spent_nor_are_remembered_for_long() -> None:
    """What trials may lose is a share of what was spent; a stall gives them no more."""
    ahead = Adaptive()
    told(ahead, 2, 2, rounds=30)
    told(ahead, 2, 2, seconds=1000.0)
    assert ahead.spent < 50
    told(ahead, 2, 2, rounds=300)
    assert 140 < ahead.tokens < 155 and ahead.seconds < 70
    told(ahead, 0, rounds=6)  # and where many are taken note of at once
    told(ahead, 0, rounds=400)
    assert ahead.tokens < 60


def test_every_trial_is_paid_for() -> None:
    """Of one more token, of drafting, of drafting nothing: out of the share, or of what a text may lose beyond it."""
    ahead, rng, kinds = Adaptive(), random.Random(3), set[str]()
    ahead.begin(1000)
    for _ in range(400):
        (lost, free, resting), sure = (ahead.lost, ahead.free, ahead.resting), list[float]()
        while len(sure) < LIMIT and ahead.more(sure):
            sure.append(0.9)
        tried = ahead.tried or 0
        kind = "rest" if ahead.resting > resting else "draft" if ahead.tried == 0 else "more" if tried > 0 else ""
        depth = len(sure)
        stood = next((i for i in range(depth) if rng.random() > 0.95), depth)
        spent = 0.3 * depth * rng.uniform(0.8, 1.2), (3.0 if depth else 1.0) * rng.uniform(0.8, 1.2)
        ahead.learn(Round(depth, depth, stood, tuple(sure[: stood + 1]), depth + 1, *spent))
        if kind:
            kinds.add(f"{kind}: {'lost' if ahead.lost > lost else 'free' if ahead.free < free else 'nothing'}")
    assert kinds == {"more: lost", "more: free", "draft: lost", "draft: free", "rest: lost", "rest: free"}
