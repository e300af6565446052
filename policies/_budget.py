"""Budgets: one meaning for all methods, in tokens or as a fraction of the prompt.

In a conversation that is a fraction of all prompts so far, each with the last token of the answer before it. The rest of the
answers does not raise a budget, so that it stays what it is while decoding; what is kept of them counts against it.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvengine.errors import PolicyError

Budget = int | float
MOST = 1 << 30
"""Tokens; positions are 32-bit integers."""
TOGETHER = 1 << 16
"""Tokens that may be coded together: a page has as many at the least, and is made once to see whether it can be."""
OVER = 1 + 1e-12
"""What a share is multiplied by, as products of decimals may lack of a whole number: 0.29 * 100 is less than 29."""


def check_budget(policy: object, unit: str = "tokens", **values: Budget) -> None:
    """Refuse what is neither a positive number of tokens, or of another `unit`, nor a fraction.

    >>> check_budget(object(), budget=0)
    Traceback (most recent call last):
    ...
    kvengine.errors.PolicyError: object: budget=0 must be 1 to 2**30 tokens (int) or a fraction between 0 and 1 (float)
    """
    name = type(policy).__name__
    for option, value in values.items():
        whole = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST
        part = isinstance(value, float) and 0 < value <= 1
        if not (whole or part):
            raise PolicyError(
                f"{name}: {option}={value!r} must be 1 to 2**30 {unit} (int) or a fraction between 0 and 1 (float)"
            )


def check_count(policy: object, least: int = 0, most: int = MOST, **values: int) -> None:
    """Refuse what is not a whole number from `least` to `most`, a power of two."""
    for option, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            power = most.bit_length() - 1
            above = f", and 2**{power} ({most}) at most" if isinstance(value, int) and value > most else ""
            raise PolicyError(
                f"{type(policy).__name__}: {option}={value!r} must be a whole number of at least {least}{above}"
            )


def check_share(policy: object, **values: float) -> None:
    """Refuse what is not a number from 0 to 1."""
    for option, value in values.items():
        if not (is_number(value) and 0 <= value <= 1):
            raise PolicyError(f"{type(policy).__name__}: {option}={value!r} must be a fraction between 0 and 1")


def is_number(value: object) -> bool:
    """Whether it is a number; truth values are none here.

    >>> is_number(0.5), is_number(1), is_number(True), is_number("half")
    (True, True, False, False)
    """
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_choice(policy: object, **values: tuple[Any, tuple[Any, ...]]) -> None:
    """Refuse a value that is not one of the choices: `check_choice(self, reduce=(self.reduce, ("max", "mean")))`."""
    for option, (value, known) in values.items():
        if value not in known or type(value) not in map(type, known):  # 1.0 and True equal 1
            raise PolicyError(
                f"{type(policy).__name__}: {option}={value!r} must be one of {', '.join(map(repr, known))}"
            )


def check_switch(policy: object, **values: bool) -> None:
    """Refuse what is neither True nor False."""
    for option, value in values.items():
        if not isinstance(value, bool):
            raise PolicyError(f"{type(policy).__name__}: {option}={value!r} must be True or False")


def check_text(policy: object, **values: str) -> None:
    """Refuse what is no text."""
    for option, value in values.items():
        if not isinstance(value, str):
            raise PolicyError(f"{type(policy).__name__}: {option}={value!r} must be a text in quotes")


def tokens(budget: Budget, prompt: int) -> int:
    """A budget in tokens, for a prompt of that many.

    >>> tokens(64, 1000), tokens(0.29, 100), tokens(0.1, 3)
    (64, 29, 1)
    """
    return budget if isinstance(budget, int) else max(1, int(budget * OVER * prompt))


def tokens_by_row(budget: Budget, prompt: Int[Tensor, "row"]) -> Int[Tensor, "row"]:
    """A budget in tokens for each row, so that a padded row has the budget it would have alone."""
    if isinstance(budget, int):
        return torch.full_like(prompt, budget)
    return part(prompt, budget).clamp(min=1)


def part(count: Int[Tensor, "*any"], share: float) -> Int[Tensor, "*any"]:
    """A share of so many tokens, in whole ones, whatever torch's default dtype is.

    >>> part(torch.tensor([100, 1001]), 0.29).tolist()
    [29, 290]
    """
    return (count.double() * (share * OVER)).long()
