"""Budgets with no room for all that a method always keeps: what stays then, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support_retention import Case, positions

from kvengine.cache import LayerCache
from kvengine.errors import PolicyError
from kvengine.rope import Rope
from kvengine.session import Session
from kvengine.stack import Stack

Ends = Callable[[int, int, int], list[int]]  # (first token, newest, budget): what is held


def newest(first: int, last: int, budget: int) -> list[int]:
    return list(range(max(first, last + 1 - budget), last + 1))


def ends(first: int, last: int, budget: int, recent: int = 1) -> list[int]:
    """The newest, and of the first ones as many as there is room for beside them."""
    late = newest(first, last, min(recent, budget))
    return [*range(first, min(first + budget - len(late), late[0])), *late]


def two(first: int, last: int, budget: int) -> list[int]:
    return ends(first, last, budget, 2)


def firsts(first: int, last: int, budget: int) -> list[int]:
    return list(range(first, min(first + budget, last + 1)))


JUDGED: dict[str, Ends] = {
    "d2o(budget={}, sinks=5)": ends,
    "d2o(budget={}, sinks=5, recent=1.0)": ends,
    "elastic(budget={}, sinks=5)": ends,
    "elastic(budget={}, sinks=5, recent=2)": two,
    "elastic(budget={}, sinks=1, recent=8, offset=3)": newest,
    "h2o(budget={}, recent=1.0)": newest,
    "tova(budget={}, recent=8)": newest,
}
"""At every step."""
ONCE: dict[str, Ends] = {
    "keydiff(budget={}, recent=8)": newest,
    "expected_attention(budget={}, sinks=5)": firsts,
    "adakv(budget={}, base='expected_attention')": firsts,
    "tova(budget={}, recent=8, decode=False)": newest,
}
"""At the prompt's end, with any budget."""
WINDOWS = [f"{name}(budget={{}}, window=8)" for name in ("snapkv", "chunkkv", "pyramidkv", "adakv", "rkv")]
"""Which a fraction of a short prompt may not hold; a number of tokens must."""


def case(length: int) -> Case:
    rope = Rope(10_000.0 ** -(torch.arange(0, 8, 2) / 8))
    return Case(length=length, steps=8, pads=(0, 7), session=Session(rope=rope))


def same(one: Case, layer: LayerCache, last: int, budget: float, what: Ends) -> None:
    for row in range(one.rows):
        pad = one.row(row)[3]
        size = budget if isinstance(budget, int) else max(1, int(budget * (one.length - pad)))
        assert positions(layer, row) == what(pad, last, size), (row, last)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 0.1])
@pytest.mark.parametrize("length", [8, 40])
@pytest.mark.parametrize("policy", JUDGED)
def test_what_has_no_room_goes_at_every_step(policy: str, length: int, budget: float) -> None:
    one = case(length)
    layer = one.prompt(policy.format(budget))
    same(one, layer, length - 1, budget, JUDGED[policy])
    for last, _ in one.decode(layer):
        same(one, layer, last, budget, JUDGED[policy])


@pytest.mark.parametrize("length", [8, 40])
@pytest.mark.parametrize(
    ("policy", "budget"),
    [*((policy, budget) for policy in ONCE for budget in (1, 3, 0.1)), *((policy, 0.1) for policy in WINDOWS)],
)
def test_what_has_no_room_goes_with_the_prompt(policy: str, budget: float, length: int) -> None:
    one = case(length)
    same(one, one.prompt(policy.format(budget)), length - 1, budget, ONCE.get(policy, newest))


@pytest.mark.parametrize("policy", WINDOWS)
def test_a_number_of_tokens_must_hold_the_window(policy: str) -> None:
    Stack.parse(policy.format(9))
    with pytest.raises(PolicyError, match="budget=8 must exceed window=8"):
        Stack.parse(policy.format(8))
