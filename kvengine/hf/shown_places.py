"""Before a pass of a model whose index keeps positions (`kvengine.hf.shown`), which it lays behind those that it has.

They are to be those of the new tokens: behind an image a model counts them by its mask, for all tokens so far. And those of
the rows that are held.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvengine.hf import shown
from kvengine.hf.names import PLACES
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
    """Leave the positions of the new tokens."""
    given = dict(zip(names, args, strict=False)) | kwargs
    made, places = made_of(given), given.get(PLACES)
    if made is None or places is None or places.shape[-1] <= made.shape[1]:
        return None
    return (), given | {PLACES: places[..., -made.shape[1] :]}
