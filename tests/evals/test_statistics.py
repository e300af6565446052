"""Intervals against hand-worked and simulated cases."""

from __future__ import annotations

import numpy as np
import pytest

from kvengine.evals.statistics import bootstrap, interval, paired, wilson


def test_wilson_by_hand() -> None:
    # p = 9/10, z = 1.96: centre 0.789, half-width 0.193
    assert wilson(9, 10) == (pytest.approx(0.5958, abs=1e-4), pytest.approx(0.9821, abs=1e-4))
    assert wilson(0, 20)[0] == 0.0 and wilson(20, 20)[1] == 1.0
    assert wilson(0, 20)[1] == pytest.approx(0.1611, abs=1e-4)


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
    less = {(str(i), 0): float(hard[i] - 0.1) for i in range(40)}
    found = paired(less | {("extra", 0): 1.0}, full)
    assert found is not None and found.n == 40
    assert found.mean == pytest.approx(-0.1) and found.high - found.low < 1e-9
    assert paired({("a", 0): 1.0}, {("b", 0): 1.0}) is None


def test_the_same_input_gives_the_same_interval() -> None:
    values, names = [0.1, 0.5, 0.9], ["a", "b", "c"]
    assert interval(values, names) == interval(values, names)
