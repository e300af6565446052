"""What transformers' drafters take of a patched model: its configuration, for layers beside it, or its keys and values.

Drafts only ever cost time, as the model judges them all; drafts made from something else than was meant are refused, because
nobody would see why they are never right.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from kvengine.errors import UnsupportedPolicy
from kvengine.hf.cache import NAME, EngineCache
from kvengine.stack import Stack

SHARED = "return_shared_kv_states"
"""Asked of Gemma 4, for an assistant that reads the model's keys and values instead of caching its own."""


def unpatch_drafter(drafter: Any, model: PreTrainedModel, implementation: str | None) -> None:
    """Layers that predict several tokens (MTP), made from a patched model's configuration, attend as it did before the patch.

    They have no hooks, and a cache of transformers' that is their own.
    """
    made: nn.Module | None = getattr(drafter, "mtp_model", None)
    text = model.config.get_text_config(decoder=True)
    parts = [] if made is None else made.modules()
    for config in {id(x): x for part in parts if (x := getattr(part, "config", None)) is not None}.values():
        # The configuration that they share with the model stays as it is.
        if config is not text and getattr(config, "_attn_implementation", None) == NAME:
            config._attn_implementation_internal = implementation


def check_shared(kwargs: dict[str, Any], cache: Any) -> None:
    """Refuse a pass that is to give out its layers' keys and values, where the cache does not have them all as they were.

    Raises:
        UnsupportedPolicy: the cache has a policy.
    """
    if kwargs.get(SHARED) and isinstance(cache, EngineCache) and cache.engines and cache.stack != Stack():
        raise UnsupportedPolicy(
            f"{SHARED}=True asks for all keys and values of a layer, as a Gemma 4 assistant does, and '{cache.stack}' does not "
            "leave them as they are. Use 'full', another assistant_model, or prompt_lookup_num_tokens"
        )


def share(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """After a pass that gives out keys and values: those of the layers that the engine serves, which saw the new ones only."""
    given: Any = getattr(output, "shared_kv_states", None) if kwargs.get(SHARED) else None
    for kind in list(given or ()):
        layer = getattr(given[kind][0], "_kv_layer", lambda: None)()
        if layer is not None and layer.whole:
            given[kind] = tuple(x.clone() for x in layer.cache.contents())  # which later tokens are written into
