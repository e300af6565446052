"""Intervals against hand-worked and simulated cases."""

from __future__ import annotations

from collections import defaultdict
from math import sqrt

import numpy as np
import pytest

from kvengine.evals.statistics import bootstrap, effective, interval, paired, shrunken, student, wilson


def test_wilson_by_hand() -> None:
    # p = 9/10, z = 1.96: centre 0.789, half-width 0.193
    assert wilson(9, 10) == (pytest.approx(0.5958, abs=1e-4), pytest.approx(0.9821, abs=1e-4))
    assert wilson(0, 20)[0] == 0.0 and wilson(20, 20)[1] == 1.0
    assert wilson(0, 20)[1] == pytest.approx(0.1611, abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0) and all(0 <= wilson(0, n)[0] and wilson(n, n)[1] <= 1 for n in range(1, 200))


def test_binary_independent_values_get_wilson_and_others_the_bootstrap() -> None:
    names = [str(i) for i in range(10)]
    assert interval([1.0] * 9 + [0.0], names).low == pytest.approx(wilson(9, 10)[0])
    spread = interval([0.5] * 9 + [0.0], names)
    assert spread.mean == pytest.approx(0.45) and spread.low < 0.45 < spread.high


def test_questions_about_one_context_count_as_one_cluster() -> None:
    """Five identical answers per context carry no more than one: the clustered interval must not shrink."""
    rng = np.random.default_rng(0)
    once = rng.integers(0, 2, 30).astype(float)
    values, clusters = np.repeat(once, 5).tolist(), [str(i) for i in range(30) for _ in range(5)]
    clustered = interval(values, clusters)
    naive = np.quantile(bootstrap(values, [str(i) for i in range(150)]), [0.025, 0.975])
    alone = np.quantile(bootstrap(once.tolist(), [str(i) for i in range(30)]), [0.025, 0.975])
    width = clustered.high - clustered.low
    assert width == pytest.approx(alone[1] - alone[0], rel=0.1)
    assert width > 1.8 * (naive[1] - naive[0])  # negative control: ignoring clusters is too sure by about √5
    assert (clustered.n, clustered.clusters) == (150, 30)


def test_bootstrap_covers_the_truth_about_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    hits = 0
    for _ in range(200):
        values = rng.beta(2, 2, 40)
        low, high = np.quantile(bootstrap(values.tolist(), [str(i) for i in range(40)]), [0.025, 0.975])
        hits += low <= 0.5 <= high
    assert 0.88 <= hits / 200 <= 0.99


def test_paired_difference_is_tighter_and_uses_only_shared_samples() -> None:
    rng = np.random.default_rng(2)
    hard = rng.random(40)
    full = {(str(i), 0): float(hard[i]) for i in range(40)}
    less = {(str(i), 0): float(max(0.0, hard[i] - 0.1)) for i in range(40)}
    found = paired(less | {("extra", 0): 1.0}, full)
    assert found is not None and found.n == 40
    apart = interval(list(full.values()), [str(i) for i in range(40)])
    assert found.low < found.mean < found.high < 0 and found.mean == pytest.approx(-0.1, abs=0.02)
    assert found.high - found.low < 0.6 * (apart.high - apart.low)
    assert paired({("a", 0): 1.0}, {("b", 0): 1.0}) is None


def test_the_same_input_gives_the_same_interval() -> None:
    values, names = [0.1, 0.5, 0.9], ["a", "b", "c"]
    assert interval(values, names) == interval(values, names)


def test_few_contexts_that_agree_are_no_certainty() -> None:
    """The bootstrap gives an interval of no width there, and with it every difference would be proven."""
    one = ["a"] * 5
    assert bootstrap([1.0] * 5, one).std() == 0
    assert interval([1.0] * 5, one).low == pytest.approx(wilson(1, 1)[0])
    assert interval([1.0] * 10, one + ["b"] * 5).low == pytest.approx(wilson(2, 2)[0])
    lost = paired({("a", turn): 0.0 for turn in range(5)}, {("a", turn): 1.0 for turn in range(5)})
    assert lost is not None and lost.mean == -1.0 and lost.low == -1.0 and lost.high > 0
    many = paired({(str(i), 0): 0.0 for i in range(12)}, {(str(i), 0): 1.0 for i in range(12)})
    assert many is not None and many.low == -1.0 and -1.0 < many.high < -0.5


def test_agresti_and_min_by_hand() -> None:
    # 12 pairs: -1 ten times, 0 twice. Centre -10/14; variance (10 + 1)/14 - (10/14)^2 = 0.2755; half 2.160 sqrt(0.2755/14),
    # as Student's t with 13 degrees of freedom has it.
    low, high = shrunken(np.array([-1.0] * 10 + [0.0] * 2), [str(i) for i in range(12)])
    assert (low, high) == (-1.0, pytest.approx(-0.4112, abs=1e-3))


def test_a_difference_is_one_of_answers_where_contexts_have_unequal_numbers_of_them() -> None:
    """Contexts of twelve questions lose three of five answers, those of three one of ten: 49 of 114 in the long run."""
    rng, hits = np.random.default_rng(5), 0
    for _ in range(200):
        sizes = np.where(rng.random(25) < 0.3, 12, 3)
        rates = np.repeat(np.where(sizes == 12, rng.choice([0.4, 0.8], 25), 0.1), sizes)
        lost, names = rng.random(sizes.sum()) < rates, np.repeat(np.arange(25).astype(str), sizes)
        at = list(zip(names.tolist(), range(len(names)), strict=True))
        found = paired(dict(zip(at, 1.0 - lost, strict=True)), dict.fromkeys(at, 1.0))
        assert found is not None and found.low < found.mean < found.high
        hits += found.low <= -(0.3 * 12 * 0.6 + 0.7 * 3 * 0.1) / (0.3 * 12 + 0.7 * 3) <= found.high
    assert 0.9 <= hits / 200 <= 0.99


def test_unbounded_values_of_one_context_have_no_interval() -> None:
    assert interval([2.5, 3.0], ["a", "a"]).high == np.inf
    found = paired({("a", 0): 2.5}, {("a", 0): 2.0})
    assert found is not None and (found.low, found.high) == (-np.inf, np.inf)


@pytest.mark.parametrize("spread", [0.0, 0.3])
def test_clustered_intervals_cover_the_truth(spread: float) -> None:
    """Contexts of five questions, easier and harder ones: the interval covers at least about as often as it says."""
    rng = np.random.default_rng(3)
    names = [str(i) for i in range(12) for _ in range(5)]
    hits = 0
    for _ in range(300):
        rates = np.clip(0.6 + spread * rng.choice([-1, 1], 12), 0, 1)
        values = (rng.random((12, 5)) < rates[:, None]).astype(float).flatten().tolist()
        found = interval(values, names)
        hits += found.low <= 0.6 <= found.high
        assert 12 <= effective(values, names)[0] <= 60
    assert hits / 300 >= 0.9


def test_students_quantiles_by_the_table() -> None:
    known = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 10: 2.228, 29: 2.045, 100: 1.984, 1000: 1.962}
    assert {n: round(student(n), 3) for n in known} == known


def covered(law: str, runs: int, contexts: int = 10, questions: int = 5) -> float:
    """How often the interval holds the true mean, of questions that mostly go by their context."""
    rng, names, hits = np.random.default_rng(7), [str(i) for i in range(contexts) for _ in range(questions)], 0
    for _ in range(runs):
        if law == "scores":
            rates = (rng.random(contexts) < 0.7).astype(float)
            values, truth = (rng.random((contexts, questions)) < rates[:, None]).astype(float), 0.7
        elif law == "differences":
            values, truth = np.repeat(rng.choice([-1.0, 0.0, 1.0], (contexts, 1), p=[0.3, 0.4, 0.3]), questions, 1), 0.0
        else:
            values, truth = rng.standard_normal((contexts, 1)) + 0.3 * rng.standard_normal((contexts, questions)), 0.0
        flat = values.flatten().tolist()
        if law == "differences":
            low, high = shrunken(values.flatten(), names)
        else:
            found = interval(flat, names, shares=law == "scores")
            low, high = found.low, found.high
        hits += low <= truth <= high
    return hits / runs


@pytest.mark.parametrize(("law", "runs"), [("scores", 1000), ("differences", 1000), ("losses", 600)])
def test_ten_contexts_are_enough_for_what_an_interval_says(law: str, runs: int) -> None:
    """With the normal law's 1.96 these cover 93, 93 and 90 times of 100."""
    assert 0.94 <= covered(law, runs) <= 0.98


TABLE = {1: 12.706205, 2: 4.302653, 3: 3.182446, 9: 2.262157, 11: 2.200985}
"""Student's 97.5 % quantiles, as printed."""

SEEN = {
    "clusters that differ": ([1, 1, 1, 0, 1, 0, 0, 0, 0.5, 1], "aaabbbbccd"),
    "two clusters": ([1, 1, 1, 0, 1, 0, 0], "aaaabbb"),
    "alike within": ([1, 1, 0, 0, 1, 1, 0], "aabbccc"),  # worth no fewer than the clusters
    "alike between": ([1, 0, 1, 0, 1, 0, 1, 0, 0], "aabbccddd"),  # and no more than the values
    "one value each": ([1, 0.25, 0, 0.75], "abcd"),
    "one right or wrong each": ([1, 0, 0, 1], "abcd"),
    "no differences": ([0.5, 0.5, 0.5], "aab"),
    "one cluster": ([1, 0, 1, 1], "aaaa"),
}


def kish(values: list[float], clusters: str) -> tuple[float, bool]:
    """Independent values that these are worth, and whether their clusters tell it: sums over lists."""
    n, names, mean = len(values), sorted(set(clusters)), sum(values) / len(values)
    if n == len(names) and all(x in (0, 1) for x in values):
        return n, False
    off = [sum(x - mean for x, c in zip(values, clusters, strict=True) if c == name) for name in names]
    if len(names) == 1 or all(abs(x) < 1e-9 for x in off):
        return len(names), False
    variance = sum(x * x for x in off) / (n * n) * len(names) / (len(names) - 1)
    return min(n, max(len(names), mean * (1 - mean) / variance)), True


@pytest.mark.parametrize("case", SEEN)
def test_an_interval_is_wilsons_at_what_the_values_are_worth(case: str) -> None:
    """Solved anew: the bounds are where the mean is as many standard errors away as Student's law or the normal one says."""
    values, clusters = SEEN[case]
    worth, told = kish([float(x) for x in values], clusters)
    assert effective(values, list(clusters)) == (pytest.approx(worth), told)
    found, groups = interval(values, list(clusters)), len(set(clusters))
    z = TABLE[groups - 1] if told else 1.959964
    for bound in (found.low, found.high):
        assert abs(found.mean - bound) == pytest.approx(z * sqrt(bound * (1 - bound) / worth), rel=1e-4)
    assert found.low < found.mean < found.high and (found.n, found.clusters) == (len(values), groups)


def resampled(values: list[float], clusters: list[str]) -> list[float]:
    """Means of the clusters that the generator draws, by their names in order."""
    held, names = defaultdict(list), sorted(set(clusters))
    for x, name in zip(values, clusters, strict=True):
        held[name].append(x)
    drawn = np.random.default_rng(0).integers(len(names), size=(2000, len(names))).tolist()
    pools = [[x for i in row for x in held[names[i]]] for row in drawn]
    return sorted(sum(pool) / len(pool) for pool in pools)


def test_values_without_bounds_get_the_percentiles_of_clusters_drawn_anew() -> None:
    """Of ten clusters those that the normal law has beyond 2.262 times the square root of 10/9: 0.8555 % on each side."""
    names = [f"context {i % 10}" for i in range(27)]
    values = np.random.default_rng(4).normal(2.0, 1.0, 27).tolist()
    means = resampled(values, names)
    assert sorted(bootstrap(values, names).tolist()) == pytest.approx(means)
    want = np.quantile(means, [0.008555, 1 - 0.008555]).tolist()
    found = interval(values, names)
    assert [found.low, found.high] == pytest.approx(want, abs=1e-3)
    pair = paired(
        {(c, i): x for i, (x, c) in enumerate(zip(values, names, strict=True))},
        {(c, i): 0.0 for i, c in enumerate(names)},
    )
    assert pair is not None and [pair.low, pair.high] == pytest.approx(want, abs=1e-3)


def t_interval(values: list[float], clusters: list[str]) -> tuple[float, float]:
    """Student's, of means that each cluster pulls by the sum of what its values are off: sums over lists."""
    mean, n, names = sum(values) / len(values), len(values), sorted(set(clusters))
    off = [sum(x - mean for x, c in zip(values, clusters, strict=True) if c == name) for name in names]
    error = sqrt(sum(x * x for x in off) * len(names) / (len(names) - 1)) / n
    return mean - TABLE[len(names) - 1] * error, mean + TABLE[len(names) - 1] * error


@pytest.mark.parametrize("beyond", [-0.01, 1.01])
def test_a_single_value_beyond_a_share_makes_none_of_them_one(beyond: float) -> None:
    names = ["a", "b", "c", "d"]
    for values in ([0.5, beyond, 0.75, 0.25], [beyond, 0.5, 0.5, 0.5]):
        want = t_interval(values, names)
        found = interval(values, names)
        assert [found.low, found.high] == pytest.approx(want, abs=1e-3)
        for a, b, sign in ((values, [0.0] * 4, 1), ([0.0] * 4, values, -1)):
            pair = paired(*({(c, 0): x for c, x in zip(names, some, strict=True)} for some in (a, b)))
            assert pair is not None
            assert sorted([sign * pair.low, sign * pair.high]) == pytest.approx(want, abs=1e-3)


def test_losses_below_one_are_no_shares() -> None:
    """They are read as what they are: two contexts of log-likelihoods say next to nothing."""
    found, names = interval([0.2, 0.4], ["a", "b"], shares=False), ["a", "b"]
    assert (found.low, found.high) == (pytest.approx(0.3 - 12.7062 * 0.1), pytest.approx(0.3 + 12.7062 * 0.1))
    pair = paired(
        {(c, 0): x for c, x in zip(names, (0.2, 0.4), strict=True)}, {(c, 0): 0.1 for c in names}, shares=False
    )
    assert pair is not None and (pair.low, pair.high) == pytest.approx((0.2 - 1.27062, 0.2 + 1.27062))


@pytest.mark.parametrize("contexts", [2, 3, 4, 5, 8])
def test_few_losses_are_as_sure_as_they_say(contexts: int) -> None:
    """What they differ from is inside about 95 times of 100. Between the least and the greatest of two it is 50 times."""
    rng, names = np.random.default_rng(contexts), [str(i) for i in range(contexts)]
    hits = 0
    for _ in range(400):
        found = interval(rng.normal(2.0, 0.3, contexts).tolist(), names, shares=False)
        hits += found.low <= 2.0 <= found.high
    assert hits / 400 > 0.91


def test_no_difference_of_shares_is_beyond_one() -> None:
    assert shrunken(np.array([1.0]), ["a"])[1] == 1.0 and shrunken(np.array([-1.0]), ["a"])[0] == -1.0
