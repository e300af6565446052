"""Layers that keep states instead of tokens, or beside them: of linear attention, state spaces and short convolutions.

A recurrent state has absorbed its tokens, and nothing gets them out again. The state of a convolution is its last columns;
while it records, all that came since. transformers offers less of such layers than of others; here is what a cache is asked.
They stay transformers' own, but for those that keep tokens too (Falcon-H1, Zamba 2, Zaya): there the engine has the tokens.
"""

from __future__ import annotations

import copy
from itertools import product
from typing import Any
from weakref import ref

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from kvengine.errors import CacheError
from kvengine.hf import indexed
from kvengine.hf.layer import EngineLayer
from kvengine.hf.shared_index import SharedIndex
from kvengine.session import Session
from kvengine.stack import Stack

STATES = ("conv_states", "recurrent_states")
OWN = frozenset(vars(LinearAttentionLayer()))
"""What a layer has for its states."""
TOKENS = ("keys", "values", "cumulative_length", "is_initialized", "dtype", "device")
"""What it has for its tokens; of this, as a dtype is among it up to transformers 5.23."""
FORGETFUL = frozenset(("jamba",))
"""Model types whose states begin anew in every pass of several tokens (`kvengine/hf/forgetful.py`)."""


class StatefulLayer(EngineLayer, LinearAttentionLayer):
    """A layer of the engine's that keeps states too, as transformers' `LinearAttentionAndFullAttentionLayer` does."""

    is_croppable = LinearAttentionLayer.is_croppable  # type: ignore[assignment]

    def __init__(self, stack: Stack, layer: int, layers: int, session: Session, readers: int, states: int) -> None:
        self.number_of_states = states
        super().__init__(stack, layer, layers, session, readers)

    def reset(self) -> None:
        super().reset()
        LinearAttentionLayer.__init__(self, self.number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Keys and values come by place, states by name."""
        kind: Any = EngineLayer if args else LinearAttentionLayer
        kind.lazy_initialization(self, *args, **kwargs)

    def batch_select_indices(self, indices: Int[Tensor, "chosen"]) -> None:
        super().batch_select_indices(indices)
        LinearAttentionLayer.reorder_cache(self, indices)  # type: ignore[arg-type]


def grows(layer: Any, config: Any) -> bool:
    """Whether the tokens of one of transformers' layers are the engine's to keep. Not Inkling's: scores have a bias there, which
    its attention makes for all tokens."""
    if type(layer) is LinearAttentionAndFullAttentionLayer:
        return getattr(config, "rel_extent", None) is None
    return type(layer) is DynamicLayer or indexed.has_index(layer)


def text_layers(config: Any) -> list[Any]:
    """The layers of the cache that transformers makes for a text model, as many as it has.

    Decoders of BART's and Whisper's kin count their encoder's in `num_hidden_layers`, and transformers does in a cache.
    """
    if getattr(config, "attribute_map", {}).get("num_hidden_layers") == "encoder_layers":
        config = copy.copy(config)
        config.num_hidden_layers = config.decoder_layers
    layers: list[Any] = DynamicCache(config=config).layers
    return layers


def beyond_tokens(config: Any) -> list[str]:
    """The kinds of a model's layers that keep something else than keys and values of every token."""
    return sorted({type(x).__name__ for x in text_layers(config) if type(x) is not DynamicLayer})


def keeps_states(config: Any) -> bool:
    """Whether a model has layers with states."""
    return any(map(has_states, text_layers(config)))


def engine_layer(stock: Any, stack: Stack, layer: int, layers: int, session: Session, readers: int) -> EngineLayer:
    """The engine's layer in the place of one of transformers'."""
    if has_states(stock):
        return StatefulLayer(stack, layer, layers, session, readers, stock.number_of_states)
    if indexed.has_index(stock):
        return indexed.IndexedLayer(stack, layer, layers, session, readers)
    return EngineLayer(stack, layer, layers, session, readers)


def has_states(layer: Any) -> bool:
    """Whether a layer keeps states, be it beside keys and values."""
    return hasattr(layer, "recurrent_states")


def check_back(layer: Any, n: int, seen: int) -> None:
    """Refuse to take back the last `n` of `seen` tokens from states that do not let them go."""
    if any(layer.is_recurrent_states_initialized.values()):
        raise CacheError(
            f"cannot go back by {n} tokens: a layer with a recurrent state has absorbed them. Make a copy of the cache before "
            "the tokens that may have to be taken back (copy.deepcopy), and go on with that"
        )
    for i, state in layer.conv_states.items():
        if state is not None and not (
            layer.record_past and state.shape[-1] - n >= min(layer.conv_kernel_size[i], seen - n)
        ):
            raise CacheError(
                f"cannot go back by {n} tokens: a layer with a convolution has given up what would come back into it. "
                "Call cache.activate_past_recording() before the tokens that may have to be taken back"
            )


def back(layer: Any, n: int) -> None:
    """Take back `n` tokens of a convolution's states; more may be taken back later."""
    for i, state in layer.conv_states.items():
        if state is not None:
            layer.conv_states[i] = state[..., :-n]


def settle(layer: Any) -> None:
    """What a convolution recorded is history: its last columns stay, in memory of their own, as if nothing had been recorded."""
    for i, state in layer.conv_states.items():
        if state is not None:
            missing = layer.conv_kernel_size[i] - state.shape[-1]  # less than none: padding leaves out what is too much
            layer.conv_states[i] = torch.nn.functional.pad(state, (missing, 0))


def held_states(layer: Any) -> list[Tensor]:
    """The states that a layer has by now."""
    if not has_states(layer):
        return []
    return [x for x in (*layer.conv_states.values(), *layer.recurrent_states.values()) if x is not None]


def stock_tensors(layer: Any) -> list[Tensor]:
    """What a layer holds that is not the engine's: a window's keys and values, also where they are held still, and states."""
    ours = isinstance(layer, EngineLayer | SharedIndex)
    names = ("indexed", "index_places") if ours else ("keys", "values", "k", "v", "there")
    return [x for name in names if isinstance(x := getattr(layer, name, None), Tensor)] + held_states(layer)


def in_place(layer: Any) -> bool:
    """Whether this keeps states alone, which a decoded token changes where they are, so that its step can be recorded."""
    return type(layer) is LinearAttentionLayer


class Aside:
    """States of rows as they were when they ended: what is fed for these since is absorbed all the same.

    It is kept in a session, which such layers may know, and does not keep them. A state of ids (Qwen 4's n-grams) is begun as
    behind the id that ends texts.
    """

    def __init__(self, layers: list[Any], config: Any) -> None:
        end = getattr(config, "eos_token_id", None)
        self.end = end[0] if isinstance(end, list) else end
        self.layers, self.rows = [ref(layer) for layer in layers], torch.zeros(0, dtype=torch.bool)
        self.kept: list[tuple[int, str, int, Int[Tensor, "chosen"], Tensor | None]] = []

    def keep(self, rows: Bool[Tensor, "seq"]) -> None:
        """Those of these rows that are not kept yet."""
        if rows is self.rows:
            return
        new = rows if len(self.rows) != len(rows) else rows & ~self.rows
        self.rows, chosen = rows, new.nonzero()[:, 0]
        for (place, layer), name in product(enumerate(self.layers), STATES):
            for i, x in getattr(layer(), name).items():
                self.kept.append((place, name, i, chosen, None if x is None else x[chosen.to(x.device)]))

    def put_back(self, layers: list[Any] | None = None) -> None:
        """In these layers, or else in its own."""
        held = layers or [layer() for layer in self.layers]
        for place, name, i, rows, kept in self.kept:
            now = getattr(held[place], name)[i]
            if now is None:
                continue
            if kept is not None and (older := now.shape[-1] - kept.shape[-1]):  # it has begun to record its past
                kept = torch.nn.functional.pad(kept, (older, 0))
            begun = 0 if now.is_floating_point() else self.end
            now[rows.to(now.device)] = begun if kept is None else kept


def put_back(cache: Any) -> None:
    """Of a copy that was made while `generate` ran, which puts them back in the one that it was given."""
    if (aside := cache.session.aside) is not None:
        aside.put_back([layer for layer in cache.layers if has_states(layer)])
        cache.session.aside = None


class Kept:
    """States as they were after some token, to be put back when later ones are taken back; and the tokens beside them in layers
    that are transformers' own."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers = [layer for layer in layers if has_states(layer)]
        self.states: list[Tensor] = []
        self.take()

    def now(self) -> list[Tensor]:
        return [state for layer in self.layers for state in held_states(layer)]

    def take(self) -> None:
        """Keep what they are now."""
        if self.states:
            torch._foreach_copy_(self.states, self.now())
        else:
            self.states = [state.clone() for state in self.now()]
        self.tokens = [tokens_of(layer) for layer in self.layers]

    def put_back(self) -> None:
        for layer, tokens in zip(self.layers, self.tokens, strict=True):
            vars(layer).update(tokens)
        if self.states:
            torch._foreach_copy_(self.now(), self.states)


def tokens_of(layer: Any) -> dict[str, Any]:
    """The attributes of one of transformers' layers that are about its tokens, which it replaces and never changes in place."""
    return {} if isinstance(layer, EngineLayer) else {name: x for name, x in vars(layer).items() if name in TOKENS}


def states_of(layer: Any) -> dict[str, Any]:
    """The attributes of a layer that are about its states; of transformers' own, all."""
    return {name: x for name, x in vars(layer).items() if name in OWN or not isinstance(layer, EngineLayer)}


def take_over(layer: Any, its: Any) -> None:
    """Go on with copies of another layer's states; of one that is transformers' own, with its tokens too."""
    vars(layer).update(copy.deepcopy(states_of(its)))


def thaw(layer: Any) -> None:
    """Go on with copies, which may be changed in place where what was made in torch's inference mode may not."""
    take_over(layer, layer)


def spare(layer: Any) -> Any:
    """A layer for a pass that is to leave no trace in this one's states, which are changed in place."""
    twin = copy.copy(layer)
    if has_states(layer):
        thaw(twin)
    return twin
