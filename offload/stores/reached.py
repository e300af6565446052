"""What client libraries raise, as the StoreError that a backend promises: theirs share no built-in base."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvengine.errors import StoreError

UNQUOTED = r"[^/@?#]*(?:#|\?(?!\w+=)).*(?=@)"
"""A password in which # or ? stands as it is, which ends the host's part of a URL."""
SECRET = re.compile(rf"(?<=://)[^?#]*(?=@)|(?<=password=)[^&]*|(?<=://){UNQUOTED}")
P = ParamSpec("P")
R = TypeVar("R")


def shown(url: str) -> str:
    """A URL as it may be printed: without its password."""
    return SECRET.sub("***", url)


def gist(error: Exception) -> str:
    """What a client library says, without the pages of its own state that obstore adds."""
    return str(error).partition("\n\nDebug source")[0]


def unusable(place: str, error: Exception) -> StoreError:
    """The error for a store that is down, too slow, or will not do what it was asked."""
    return StoreError(
        f"{place} cannot be used: {gist(error)}; start it, or check its address, what it allows and has room for, and the "
        "network between; what it held before is left as it was"
    )


def reached(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method of a backend, made to raise StoreError for what its client library raises: `raises`, from `place`."""

    @wraps(method)
    def call(self: Any, /, *arguments: P.args, **named: P.kwargs) -> R:
        try:
            return method(self, *arguments, **named)
        except self.raises as error:
            raise unusable(self.place, error) from error

    return call


def reached_each(method: Callable[[Any], Iterator[R]]) -> Callable[[Any], Iterator[R]]:
    """So for one that yields."""

    @wraps(method)
    def call(self: Any) -> Iterator[R]:
        try:
            yield from method(self)
        except self.raises as error:
            raise unusable(self.place, error) from error

    return call
