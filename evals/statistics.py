"""How sure a score is: intervals over samples, clustered where samples share a context, and paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import atan, cos, inf, pi, sin, sqrt
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Z95 = 1.959963984540054
RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval, over `n` values in `clusters` independent groups."""

    mean: float
    low: float
    high: float
    n: int
    clusters: int


def interval(values: Sequence[float], clusters: Sequence[str], *, shares: bool = True) -> Interval:
    """Wilson's interval for values in [0, 1], at the number of independent values that they are worth; else a
    percentile bootstrap over clusters (`middle`), of no finite width for a single cluster. Where a few clusters had to tell
    how much they differ, both are as much wider as Student's law is than the normal one.

    `clusters[i]` names the context that value i belongs to: questions about one context are drawn together.
    `shares`: values in [0, 1] are bound to it, as a score is and a log-likelihood is not.
    """
    n, groups, mean = len(values), len(set(clusters)), float(np.mean(values))
    if shares and min(values) >= 0 and max(values) <= 1:
        worth, told = effective(values, clusters)
        low, high = wilson(mean * worth, worth, student(groups - 1) if told else Z95)
    else:
        low, high = middle(values, clusters)
    return Interval(mean, float(low), float(high), n, groups)


def effective(values: Sequence[float], clusters: Sequence[str]) -> tuple[float, bool]:
    """How many independent 0/1 values these are worth (Kish's effective sample size, between clusters and values), and
    whether the clusters' spread told that.

    That is p (1 - p) over the variance of the mean as clusters show it. Clusters that do not differ show nothing: they
    then count once each, so that ten right answers about two contexts do not look like certainty.

    >>> effective([1.0, 1.0, 1.0, 1.0], ["a", "a", "b", "b"])
    (2.0, False)
    """
    n, groups, mean = len(values), len(set(clusters)), float(np.mean(values))
    variance = apart(values, clusters)
    if groups == n and set(values) <= {0.0, 1.0}:
        return float(n), False
    if variance <= 1e-12:  # as a single cluster's
        return float(groups), False
    return float(min(max(mean * (1 - mean) / variance, groups), n)), True


def apart(values: Sequence[float], clusters: Sequence[str]) -> float:
    """Variance of the mean, as clusters show it; 0 of a single one."""
    _, where, sizes = np.unique(np.asarray(clusters), return_inverse=True, return_counts=True)
    data = np.asarray(values, dtype=float)
    residuals = np.bincount(where, weights=data - data.mean())
    return float((residuals**2).sum()) / len(data) ** 2 * len(sizes) / max(1, len(sizes) - 1)


@cache
def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t with whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4, inverted).

    >>> [round(student(n), 3) for n in (1, 2, 9, 30)]
    [12.706, 4.303, 2.262, 2.042]
    """
    low, high = 0.0, 16.0
    while high - low > 1e-12:
        t = (low + high) / 2
        angle, odd = atan(t / sqrt(freedom)), freedom % 2
        term, total = (cos(angle), 0.0) if odd else (1.0, 0.0)
        for i in range(freedom // 2):
            total, term = total + term, term * cos(angle) ** 2 * (2 * i + 1 + odd) / (2 * i + 2 + odd)
        inside = 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total
        low, high = (t, high) if inside < 0.95 else (low, t)
    return low


def wilson(successes: float, n: float, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval for a proportion (E. B. Wilson 1927).

    >>> [round(bound, 4) for bound in wilson(9, 10)]
    [0.5958, 0.9821]
    """
    if n == 0:
        return 0.0, 1.0
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap(values: Sequence[float], clusters: Sequence[str], *, seed: int = 0) -> NDArray[np.float64]:
    """Means of `RESAMPLES` resamples of whole clusters, the same for the same input."""
    names = sorted(set(clusters))
    place = {name: index for index, name in enumerate(names)}
    sums, sizes = np.zeros(len(names)), np.zeros(len(names))
    where = [place[cluster] for cluster in clusters]
    np.add.at(sums, where, np.asarray(values, dtype=float))
    np.add.at(sizes, where, 1.0)
    drawn = np.random.default_rng(seed).integers(len(names), size=(RESAMPLES, len(names)))
    means: NDArray[np.float64] = sums[drawn].sum(1) / sizes[drawn].sum(1)
    return means


def middle(values: Sequence[float], clusters: Sequence[str]) -> tuple[float, float]:
    """The bootstrap's percentiles, further out the fewer clusters there are (T. Hesterberg 2015, expanded percentiles).

    Of up to seven clusters fewer than ten resamples are as far out (of up to four none can be): there Student's interval.
    """
    groups = len(set(clusters))
    if groups == 1:
        return -inf, inf
    tail = NormalDist().cdf(-sqrt(groups / (groups - 1)) * student(groups - 1))
    if tail * RESAMPLES < 10:
        mean, half = float(np.mean(values)), student(groups - 1) * sqrt(apart(values, clusters))
        return mean - half, mean + half
    low, high = np.quantile(bootstrap(values, clusters), [tail, 1 - tail])
    return float(low), float(high)


def paired(
    values: dict[tuple[str, int], float], baseline: dict[tuple[str, int], float], *, shares: bool = True
) -> Interval | None:
    """Interval of the mean difference on the samples that both have, by (sample, turn); None if they share none.

    For scores in [0, 1] that of `shrunken`; else a bootstrap over clusters, of no finite width for a single one. Far
    tighter than comparing two intervals: what makes a sample hard cancels. `shares`: as for `interval`.
    """
    shared = sorted(values.keys() & baseline.keys())
    if not shared:
        return None
    differences = np.array([values[at] - baseline[at] for at in shared])
    clusters = [sample for sample, _ in shared]
    mean, groups = float(differences.mean()), len(set(clusters))
    both = [[where[at] for at in shared] for where in (values, baseline)]
    if shares and min(map(min, both)) >= 0 and max(map(max, both)) <= 1:
        low, high = shrunken(differences, clusters)
    else:
        low, high = middle(differences.tolist(), clusters)
    return Interval(mean, low, high, len(shared), groups)


def shrunken(differences: NDArray[np.float64], clusters: Sequence[str]) -> tuple[float, float]:
    """Interval of a mean of differences in [-1, 1], which clusters pull by the number that they hold of them.

    Agresti and Min (2005), for matched pairs: as if two more clusters had been seen, one without a difference and half
    a one in each direction. So a few clusters that all agree do not give an interval of no width. By Student's t, as their
    variance is told by as many.

    >>> shrunken(np.array([-1.0]), ["a"])[1] > 0
    True
    """
    _, where, sizes = np.unique(np.asarray(clusters), return_inverse=True, return_counts=True)
    mean, n = float(differences.mean()), len(sizes) + 2
    centre = mean * len(sizes) / n
    pulls = np.bincount(where, weights=differences - centre) * len(sizes) / len(differences)
    # Of the two more: what lies 1 above and 1 below counts half, and what lies at 0 whole.
    half = student(n - 1) * sqrt((float((pulls**2).sum()) + 1 + 2 * centre**2) / n / n)
    return max(-1.0, min(centre - half, mean)), min(1.0, max(centre + half, mean))
