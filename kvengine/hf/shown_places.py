"""Before a pass of a model whose index keeps positions (`kvengine.hf.shown`), which it lays behind those that it has.

They are to be those of the new tokens: behind an image a model counts them by its mask, for all tokens so far. And those of
the rows that are held.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvengine.errors import CacheError
from kvengine.hf import shown
from kvengine.hf.cache import EngineCache
from kvengine.hf.names import PLACES, cache_given
from kvengine.hf.replay import made_of, reader


def hook_places(model: PreTrainedModel, text: Any) -> list[Any]:
    """A hook on the part that reads, before those that read a pass in parts; what undoes it."""
    if text.model_type not in shown.FAMILIES:
        return []
    part, names = reader(model, text)
    return [part.register_forward_pre_hook(partial(newest, names=names), with_kwargs=True)]


def newest(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Leave the positions of the new tokens. Raises CacheError for another batch than the cache has."""
    given = dict(zip(names, args, strict=False)) | kwargs
    made, places = made_of(given), given.get(PLACES)
    if made is None:
        return None
    cache = cache_given(args, kwargs, names)
    rows = [x.sequences for x in cache.engines if x.parts][:1] if type(cache) is EngineCache else []
    if rows not in ([], [len(made)]):
        raise CacheError(
            f"this cache holds {rows[0]} sequences, but the model was given {len(made)}; use one cache for one batch"
        )
    if places is None or places.shape[-1] <= made.shape[1]:
        return None
    return (), given | {PLACES: places[..., -made.shape[1] :]}
