"""A prompt read in parts, each judged before the next is read (`judge_every` of `kvengine.patch`).

A prompt is judged when all of it has been read. Until then its keys and values are there: those of one layer after the other
where it comes in one pass, whose activations grow with it, and those of all layers where it comes in chunks. In parts a cache
holds no more than what was kept so far, and one part.

Each part is a turn of its own: what it leaves is what `model(part, cache=cache)` does for one after the other. Parts are counted
from the prompt's end, so that those of a padded row are the ones that it has alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from kvengine.errors import ModelError, PolicyError, UnsupportedPolicy
from kvengine.hf.brought import KINDS
from kvengine.hf.cache import EngineCache
from kvengine.hf.forward import tensors_in
from kvengine.hf.names import CACHE
from kvengine.hf.rope import LONG, turning_point
from kvengine.policies import name_of
from kvengine.stack import Stack

PLACED = ("attention_mask", "position_ids", *KINDS)
"""What comes with every token of a text."""


def check_size(size: Any) -> None:
    """Refuse what is no number of tokens, or of so few that a part would be a decoded token."""
    if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 2):
        raise PolicyError(f"judge_every is a number of tokens, 2 or more, or None for a prompt's end; got {size!r}")


def check_stack(stack: Stack, size: int | None) -> None:
    """Refuse a representation that is found over a whole prompt."""
    if size is not None and stack.representation.joint:
        raise UnsupportedPolicy(
            f"'{name_of(stack.representation)}' is found over a prompt's first pages and would leave the parts behind them as "
            "they are; leave judge_every out"
        )


def ends(seen: int, total: int, size: int) -> list[int]:
    """Where parts end, of a prompt of `total` tokens of which `seen` were read before.

    >>> ends(0, 10, 4), ends(2, 10, 4)
    ([2, 6, 10], [6, 10])
    """
    return list(range(total - (total - seen - 1) // size * size, total + 1, size))


def parted(size: int | None, cache: EngineCache, total: int | None) -> bool:
    """Whether a prompt of `total` tokens, those in the cache included, is to be read in parts."""
    if size is None or total is None:
        return False
    return total - cache.seen > size and cache.stack != Stack() and not cache.session.following


def first(size: int | None, cache: EngineCache, total: int) -> int:
    """Where the first part ends of a prompt of `total` tokens; all of it, where it is not read in parts."""
    if size is None or cache.stack == Stack() or cache.session.following:
        return total
    return ends(0, total, size)[0]


def announce(cache: EngineCache, size: int | None, total: int | None, drafting: bool, assisted: bool) -> None:
    """`EngineCache.announce`, unless it is assisted decoding of a long text: transformers reads that in one pass."""
    if (drafting or assisted) and parted(size, cache, total):
        raise ModelError(
            f"transformers reads the whole text in one pass for assisted decoding, and judge_every={size} would have it read in "
            "parts. Leave the assistant or the prompt look-up out, or call kvengine.patch(model, policy) without judge_every"
        )
    cache.announce(total, drafting=drafting)


def so_far(model_kwargs: Mapping[str, Any], end: int) -> dict[str, Tensor]:
    """What comes with every token of a text, of its first ones, up to `end`."""
    return {name: model_kwargs[name][..., :end] for name in PLACED if model_kwargs.get(name) is not None}


def read(
    whole: Callable[..., Any],
    model: Any,
    size: int | None,
    total: int | None,
    input_ids: Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kw: Any,
) -> Any:
    """What `whole` finds in a prompt of `total` tokens, or in the last part of one that is longer than `size` more.

    Raises:
        UnsupportedPolicy: the cache's policy needs all of a prompt.
        ModelError: what came with the tokens cannot be split with them, or the text outgrows the shorter of two rotations.
    """
    cache = model_kwargs.get(CACHE)
    if size is None or total is None or not isinstance(cache, EngineCache) or not parted(size, cache, total):
        return whole(input_ids, generation_config, model_kwargs, *args, **kw)
    check_stack(cache.stack, size)
    if more := [name for name, x in model_kwargs.items() if name not in PLACED and any(True for _ in tensors_in(x))]:
        raise ModelError(
            f"judge_every={size} has tokens read in parts, but not {more[0]!r}, which came with them (images, sounds, vectors). "
            "Call kvengine.patch(model, policy) without judge_every for such a prompt"
        )
    turn = turning_point(model, LONG)
    if turn is not None and cache.seen <= turn < total:
        raise ModelError(
            f"this model turns keys of texts beyond {turn} tokens otherwise, so that parts read before would have other keys "
            "than those behind; leave judge_every out"
        )
    for end in ends(cache.seen, total, size):
        cache.announce(end)
        part = input_ids[:, cache.seen - total : end - total or None]
        found = whole(part, generation_config, model_kwargs | so_far(model_kwargs, end), *args, **kw)
        args, kw = (), {"is_first_iteration": False}
    return found
