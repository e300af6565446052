"""Layers that attend to images beside the text (Mllama), and keep the images' keys and values in the same cache.

They stay transformers' own. What they hold are no tokens: it neither grows with the text nor is taken back with it, and of a text
without images it is nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from kvengine.hf import states
from kvengine.readers import sources


class CrossLayer(DynamicLayer):
    """The cache of such a layer."""


def stock_layers(config: Any) -> list[Any]:
    """The layers of a new cache before the engine takes its own; those of images are told from those of text."""
    cross = getattr(config, "cross_attention_layers", None) or ()
    return [CrossLayer() if i in cross else x for i, x in enumerate(states.text_layers(config))]


def engine_layers(config: Any) -> list[bool]:
    """Which layers the engine replaces: those with a plain, growing key-value cache of their own, be it beside states."""
    read = sources(config)
    return [states.grows(layer, config) and i not in read for i, layer in enumerate(stock_layers(config))]


def show_empty(layers: list[Any]) -> None:
    """Mllama asks every layer how many keys it has, to tell by it whether it has seen an image."""
    if any(type(layer) is CrossLayer for layer in layers):
        for layer in layers:
            layer.keys = torch.empty(0) if layer.keys is None and type(layer) is not CrossLayer else layer.keys
