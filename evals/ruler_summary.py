"""RULER's summary over lengths: averages, weighted averages, and the effective length."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from kvengine.evals.aggregate import CellResult, overall

BAR = 85.6
"""Llama-2-7B-chat's mean at 4k: a length counts as effective if the mean exceeds it."""


def weighted(scores: Sequence[float], *, later: bool) -> float:
    """Mean with weights 1, 2, … n (`later`: the last length counts most) or n, … 2, 1.

    >>> weighted([90.0, 60.0], later=True)
    70.0
    """
    weights = range(1, len(scores) + 1) if later else range(len(scores), 0, -1)
    return sum(w * score for w, score in zip(weights, scores, strict=True)) / sum(weights)


def effective(scores: dict[int, float]) -> int | None:
    """The longest length whose mean exceeds the bar."""
    return max((length for length, score in scores.items() if score > BAR), default=None)


def lines(found: list[CellResult]) -> list[list[str]]:
    """One line per policy and mode: mean by length, average, both weighted averages, effective length.

    Averages are over all lengths: a policy without a mean at one of them has none.
    """
    ruler = [cell for cell in found if cell.suite == "ruler"]
    means, lengths = overall(ruler), sorted({cell.length for cell in ruler})
    made = []
    for policy, mode, stack in dict.fromkeys((at[0], at[2], at[3]) for at in means):
        scores = {at[1]: 100 * value for at, value in means.items() if (at[2], at[3]) == (mode, stack)}
        values = [scores.get(length) for length in lengths]
        whole = [value for value in values if value is not None]
        averages: list[float | None] = [None] * 3
        if len(whole) == len(lengths):
            averages = [fmean(whole), weighted(whole, later=True), weighted(whole, later=False)]
        shown = ["–" if value is None else f"{value:.1f}" for value in (*values, *averages)]
        made.append([f"`{policy}`", mode, *shown, str(effective(scores) or "–")])
    return made
