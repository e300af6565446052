"""What arguments of a pass are called; its cache is `cache` to transformers from 5.24 on, and `past_key_values` before.

There the older name still works, under a warning; models of one's own may have been written for either. On a patched model
both names work with every version.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Container, Hashable, Mapping, Sequence
from typing import Any, cast
from weakref import ref

from transformers.masking_utils import create_causal_mask

from kvengine.errors import ModelError

IDS, VECTORS, MASK, PLACES = "input_ids", "inputs_embeds", "attention_mask", "position_ids"
NAMES = ("cache", "past_key_values")
OTHER = dict(zip(NAMES, reversed(NAMES), strict=True))


def name_of_cache(known: Container[str], default: str = NAMES[1]) -> str:
    """What it is called among these names."""
    return next((name for name in NAMES if name in known), default)


CACHE = name_of_cache(inspect.signature(create_causal_mask).parameters)
"""What this version of transformers calls it."""


def passed(model: Any, cache: Any) -> dict[str, Any]:
    """A cache as an argument of a model's pass, patched or not."""
    return {own_name(model): cache}


def own_name(model: Any) -> str:
    """What a model's pass calls it."""
    return _own(cast(Hashable, type(model)))


@functools.cache
def _own(kind: Any) -> str:
    run = getattr(kind, "forward", None)
    return name_of_cache(() if run is None else inspect.signature(run).parameters, CACHE)


def renamed(given: dict[str, Any], name: str) -> dict[str, Any]:
    """The same arguments, the cache among them by this name. Raises ModelError where there are two that differ, or a policy is
    one."""
    for policy in (given.get(name), given.get(OTHER[name])):
        if isinstance(policy, str):
            raise ModelError(f"{policy!r} is no cache; pass cache=kvengine.EngineCache(model, {policy!r})")
    if (other := OTHER[name]) not in given:
        return given
    rest = {key: value for key, value in given.items() if key != other}
    mine = rest.get(name)
    if mine is not None and given[other] is not None and given[other] is not mine:
        raise ModelError("a pass takes one cache: past_key_values is the older name of cache, so give one of the two")
    return rest if given[other] is None else rest | {name: given[other]}


def cache_among(given: Mapping[str, Any]) -> Any:
    """The cache among arguments, whichever of its names it has; None if there is none."""
    return next((given[name] for name in NAMES if given.get(name) is not None), None)


def put_off(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a pass that waits in the session of its cache, which they do not hold: that would be a circle."""
    return {name: ref(x) if name in NAMES and x is not None else x for name, x in given.items()}


def taken_up(given: Mapping[str, Any]) -> dict[str, Any]:
    """The same, when its time has come."""
    return {name: x() if isinstance(x, ref) else x for name, x in given.items()}


def cache_given(args: Sequence[Any], kwargs: Mapping[str, Any], names: list[str]) -> Any:
    """The cache that a part is called with, by name or at its place among the `names` of its arguments; None if there is none."""
    cache, name = cache_among(kwargs), name_of_cache(names)
    at = names.index(name) if name in names else len(args)
    return args[at] if cache is None and at < len(args) else cache
