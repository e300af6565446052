"""What a tier gives up when it has no room. `RULES` has the names that options use."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Rule = Callable[[np.ndarray, int, int], np.ndarray]
"""Which to give up: from when each was last used, how many must go, and the time of this read, the numbers of those."""


def oldest(used: np.ndarray, count: int, now: int) -> np.ndarray:
    """Those longest unused, of equals the first.

    >>> oldest(np.array([3, 1, 2, 5]), 2, 5)
    array([1, 2])
    """
    return np.argsort(used, kind="stable")[:count]


def all_others(used: np.ndarray, count: int, now: int) -> np.ndarray:
    """Everything that this read does not want, as ShadowKV does: what stays is what the previous step read.

    >>> all_others(np.array([3, 1, 2, 5]), 1, 5)
    array([0, 1, 2])
    """
    return np.flatnonzero(used < now)


RULES: dict[str, Rule] = {"lru": oldest, "previous": all_others}
