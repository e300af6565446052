"""How large a haystack may be."""

from __future__ import annotations

from collections.abc import Callable

from kvengine.errors import EvaluationError
from kvengine.evals.tasks import Sample


class TooShort(EvaluationError):
    """The length leaves no room for the task."""


class NoData(EvaluationError):
    """The task lives on data that the user must supply."""


def largest(fits: Callable[[int], bool], start: int, most: int = 10_000_000) -> int:
    """The largest n ≥ start with `fits(n)`, for a `fits` that turns false once.

    Doubles until something no longer fits, then halves the gap. Raises `TooShort` if not even `start` fits (the
    official loops spin for ever there).
    """
    if not fits(start):
        raise TooShort(
            f"the length is too small: not even {start} pieces of context (sentences, lines, words) fit; ask for a longer one"
        )
    good, bad = start, 2 * start + 1
    while bad < most and fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def shrink(draw: Callable[[int], Sample], fits: Callable[[Sample], bool], most: int, least: int, step: int) -> Sample:
    """The sample of the most units that fits, going down from `most` by `step`; `TooShort` if none does."""
    for units in range(most, least - 1, -step):
        sample = draw(units)
        if fits(sample):
            return sample
    raise TooShort(f"the length is too small for one of the samples even at {least} units; ask for a longer one")
