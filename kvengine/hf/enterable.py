"""Which models the engine can enter: others are refused, and why is said."""

from __future__ import annotations

from inspect import signature
from typing import Any

from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvengine import latent
from kvengine.errors import ModelError
from kvengine.hf import indexed
from kvengine.hf.cross import CrossLayer, stock_layers
from kvengine.hf.devices import wraps
from kvengine.hf.forward import caching
from kvengine.hf.states import STATES

KINDS = {
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "DummyLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
}
"""Caches of layers that the engine replaces, or that may stay transformers' own beside it."""
TURNS = {"layer_idx", "cycle_offset"}
"""By which a module that takes turns is told whose it is (Zamba 2, HRM)."""
ANEW = (
    ", from 0 on in the order in which they run (layer_idx of their modules), and have num_hidden_layers and layer_types of the "
    "configuration say the same"
)


def check_model(model: Any) -> None:
    if not isinstance(model, PreTrainedModel):
        hint = f"; give {found}" if (found := wraps(model)) else ""
        raise ModelError(f"expected a transformers PreTrainedModel, got {type(model).__name__}{hint}")
    if model.config.is_encoder_decoder:
        raise ModelError(f"{type(model).__name__} is an encoder-decoder model; the engine works on decoder-only models")
    text = model.config.get_text_config(decoder=True)
    parts = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m.config is text]
    if not any(part._can_set_attn_implementation() for part in (model, *parts)):  # others may attend as they always do
        raise ModelError(
            f"{type(model).__name__} cannot switch its attention implementation in this version of transformers, "
            "so the engine cannot enter it"
        )


def check_attention(model: PreTrainedModel, text: Any, modules: list[nn.Module]) -> None:
    """Refuse models without layers to enter or whose attention is for paged caches, and encoders: nothing would be cached."""
    if (name := str(text._attn_implementation)).startswith("paged|"):
        raise ModelError(
            f"the attention {name!r} of this {type(model).__name__} is for continuous batching alone, and reads no cache but its "
            "own. Call model.set_attn_implementation('sdpa') first"
        )
    layers = [m for m in modules if numbers([m])]
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no attention module with a layer index; the engine cannot enter it"
        )
    # A decoder whose first tokens see each other (PaliGemma) says so of its layers too, but nothing of being no decoder.
    able, asked = getattr(text, "is_decoder", None) is False, made_encoder(model, text)
    every = all(getattr(m, "is_causal", None) is False for m in layers)
    if asked or (every and (able or not caching(model, text))):
        hint = f": {asked} in its configuration" if asked else "; a model that generates is built with is_decoder=True"
        raise ModelError(
            f"{type(model).__name__} is an encoder: its tokens attend to later ones too, so it caches none and a policy would do "
            f"nothing{hint if asked or able else ''}"
        )


def made_encoder(model: PreTrainedModel, text: Any) -> str | None:
    """What of a decoder's configuration has its tokens see all others, as in embedding models made of decoders."""
    if getattr(text, "is_causal", True) is False:  # transformers' masks follow it, whatever the family
        return "is_causal=False"
    # Models of images say so of a text model whose masks they make themselves.
    found = getattr(text, "use_bidirectional_attention", None) if model.config is text else None
    return f"use_bidirectional_attention={found!r}" if found in (True, "all") else None


def check_layers(model: PreTrainedModel, text: Any, modules: list[nn.Module]) -> None:
    """Refuse models whose attention reads more than the keys and values of the tokens before, which it is handed."""
    strange = {type(layer).__name__ for layer in DynamicCache(config=text).layers} - KINDS
    strange -= {indexed.KIND} if indexed.followed(text, modules) else set()
    if strange:
        what = (
            f"keeps caches of kinds of its own ({', '.join(sorted(strange))}), by which it chooses or compresses tokens"
        )
    elif not GenerationMixin._supports_default_dynamic_cache.__func__(type(model)):  # type: ignore[attr-defined, misc]
        what = "takes no caches but its own"
    elif any("cache_offset" in signature(type(m).forward).parameters for m in modules):
        what = "runs layers several times over, and adds to its cache one for each time"
    elif any(name in vars(m) for m in model.modules() for name in STATES):
        what = "keeps states beside its weights, those of the text that it read last, whichever cache that went to"
    else:
        return
    raise ModelError(f"{type(model).__name__} {what}; the engine cannot enter it")


def check_numbers(model: PreTrainedModel, text: Any, modules: list[nn.Module]) -> None:
    """Refuse models whose layers were taken out, copied or moved since they were made, and not numbered anew.

    A layer of the cache is found by its number, and so is the last one, for which prompts' verdicts wait.
    """
    if any(TURNS & {*signature(type(m).forward).parameters} for m in modules):
        return
    mine, kinds, name = {id(m) for m in modules}, {type(m) for m in modules}, type(model).__name__
    for layers in (m for m in model.modules() if isinstance(m, nn.ModuleList)):
        within = [[m for m in layer.modules() if type(m) in kinds] for layer in layers]
        inside = {id(m) in mine for layer in within for m in layer}
        if inside == {True, False}:
            raise ModelError(
                f"a layer of this {name} has a configuration of its own, as copy.deepcopy makes one: give its modules the config "
                f"of the others, and number the layers anew{ANEW}"
            )
        found = [number for layer in within for number in numbers(layer)]
        if True in inside and found != sorted(set(found)):
            raise ModelError(
                f"the layers of this {name} have the numbers {found}, as they were copied or moved; number them anew{ANEW}"
            )
    stock = enumerate(stock_layers(text))
    tokens = {i for i, layer in stock if isinstance(layer, DynamicLayer) and type(layer) is not CrossLayer}
    if gone := sorted(tokens.difference(numbers(modules))):
        raise ModelError(
            f"this {name} has no layer of number {gone[0]}, and by its configuration it has one: where layers were taken out, "
            f"number the others anew{ANEW}"
        )


def numbers(modules: list[nn.Module]) -> list[int]:
    """Of their layers, each once."""
    found = (getattr(m, "layer_idx", None) for m in modules)
    return sorted({number for number in found if isinstance(number, int)})


def attention_modules(model: nn.Module, text: Any) -> list[nn.Module]:
    """Modules that attend as the text's configuration says, if they hand on what they do not know to the attention function;
    some (Kosmos-2's last one of images) have no layer index."""
    mine = [m for m in model.modules() if getattr(m, "config", None) is text]
    named = [m for m in mine if "Attention" in type(m).__name__ or latent.is_latent(m)]
    return [m for m in named if any(x.kind is x.VAR_KEYWORD for x in signature(type(m).forward).parameters.values())]
