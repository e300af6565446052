"""Every option of every method refuses what it cannot mean, and the error names it."""

import math
import typing
from dataclasses import fields
from typing import Any

import pytest

from kvengine.errors import PolicyError
from kvengine.policies import catalogue, load

SIGNED = {("elastic", "offset")}  # whole numbers that may be negative


def wrong(name: str) -> list[tuple[str, Any]]:
    """Options of a method, each with values that are out of its range, by its type."""
    axis, cls = load(name)
    hints, found = typing.get_type_hints(cls), []
    for option in fields(cls):
        kinds = {hints[option.name], *typing.get_args(hints[option.name])}
        values: list[Any] = []
        if isinstance(option.default, str):
            values = [7, None] + (["nonsense"] if str not in kinds else [])
        if bool in kinds:
            values = ["no", 1, None]
        if float in kinds:
            values = [-1, -0.5, math.nan, math.inf, "nonsense", True]
        elif int in kinds:
            values = [1.5, math.nan, "nonsense", True] + ([] if (name, option.name) in SIGNED else [-1])
            values += [] if axis == "placement" else [1 << 40]  # more than there are positions; of bytes there may be
        found += [(option.name, value) for value in values]
    return found


@pytest.mark.parametrize("name", sorted(catalogue()))
def test_what_an_option_cannot_mean_is_refused(name: str) -> None:
    for option, value in wrong(name):
        with pytest.raises(PolicyError, match=f"{option}="):
            load(name)[1](**{option: value})
