"""Passes that break off between a layer that keeps states and the first layer of the engine.

Layers of the engine notice by the tokens that each has seen. A state counts none, and where states lead (linear attention and
convolutions before the first attention), they have taken tokens that no layer of the engine knows of: tried again, they would
take them twice. So the first of them notes how many tokens had been seen; if the next pass finds as many, they were lost. Also
where a layer has both, and its states come first (Falcon-H1).
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvengine.errors import CacheError
from kvengine.hf.cache import EngineCache
from kvengine.hf.cross import engine_layers, stock_layers
from kvengine.hf.names import NAMES
from kvengine.hf.states import has_states
from kvengine.session import BROKEN, FOREIGN

TAKES = (*NAMES, "cache_params")
"""What modules with states call a cache."""
GRAMS = "ple_embedding"
"""A part of the module of a layer, in Qwen 4, whose states come before those of its linear attention."""


def hook_led(model: nn.Module, text: Any) -> list[Any]:
    """A hook on the first layer with states, if it comes before the engine's first; what undoes it."""
    ours, layers = engine_layers(text), stock_layers(text)
    first = next((i for i, layer in enumerate(layers) if has_states(layer)), len(layers))
    if first == len(layers) or True in ours[:first]:
        return []
    parts = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is text]
    found = [m for part in parts for m in part.modules() if getattr(m, "layer_idx", None) == first and takes(m)]
    found.sort(key=lambda m: not hasattr(m, GRAMS))
    return [m.register_forward_pre_hook(partial(leading, text=text), with_kwargs=True) for m in found[:1]]


def takes(module: nn.Module) -> bool:
    return bool(set(TAKES) & set(inspect.signature(type(module).forward).parameters))


def leading(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], text: Any) -> None:
    """The first states of a pass are about to take its tokens.

    Raises:
        CacheError: those of an earlier pass did, and no layer of the engine; or the cache is another model's, which is told
            before its states have changed.
    """
    if torch.compiler.is_compiling():
        return
    cache = next((x for x in (*kwargs.values(), *args) if isinstance(x, EngineCache)), None)
    if cache is None or cache.session.again is not None:  # a replay's tokens are thrown away, by states too
        return
    if cache.session.stepping:  # a recorded step, whose driver tells
        return
    if cache.config is not text:
        raise CacheError(FOREIGN)
    seen, parts = cache.seen, cache.session.parts
    if parts is not None and parts.single is not None and seen == parts.start:
        return  # tokens that are not counted come before others: who has them taken has noted it (`kvengine.hf.ragged`)
    if cache.session.led == seen:
        raise CacheError(BROKEN)
    cache.session.led = seen
