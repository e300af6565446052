"""How sure a score is: intervals over samples, clustered where samples share a context, and paired differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

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


def interval(values: Sequence[float], clusters: Sequence[str]) -> Interval:
    """Wilson's interval for independent 0/1 values, else a percentile bootstrap over clusters.

    `clusters[i]` names the context that value i belongs to: questions about one context are drawn together.
    """
    if len(set(clusters)) == len(clusters) and set(values) <= {0.0, 1.0}:
        low, high = wilson(sum(values), len(values))
        return Interval(sum(values) / len(values), low, high, len(values), len(values))
    means = bootstrap(values, clusters)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(np.mean(values)), float(low), float(high), len(values), len(set(clusters)))


def wilson(successes: float, n: int, z: float = Z95) -> tuple[float, float]:
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


def paired(values: dict[tuple[str, int], float], baseline: dict[tuple[str, int], float]) -> Interval | None:
    """Interval of the mean difference on the samples that both have, by (sample, turn); None if they share none.

    Far tighter than comparing two intervals: what makes a sample hard cancels.
    """
    shared = sorted(values.keys() & baseline.keys())
    if not shared:
        return None
    differences = [values[at] - baseline[at] for at in shared]
    clusters = [sample for sample, _ in shared]
    low, high = np.quantile(bootstrap(differences, clusters), [0.025, 0.975])
    return Interval(float(np.mean(differences)), float(low), float(high), len(shared), len(set(clusters)))
