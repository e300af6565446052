"""What is transformers' own of a cache's layers, in a saved session: windows, and the states of linear attention.

Kernels read windows, and a state without its mark would be begun anew, so what a file says of them must fit together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvengine.errors import IncompatibleCache
from kvengine.hf.cache import EngineCache
from kvengine.hf.indexed import IndexedLayer
from kvengine.hf.layer import EngineLayer
from kvengine.hf.shared_index import SharedIndex
from kvengine.hf.states import has_states, held_states, states_of
from kvengine.sound import MOST, expect

LATE = {"dtype": torch.dtype, "device": torch.device, "index_places": Tensor}
"""Of which a layer that has held nothing may know nothing."""
FIXED = ("sliding_window", "number_of_states")  # which follow from the model
KINDS = ("conv", "recurrent")


def beside(layer: Any) -> dict[str, Any]:
    """What a layer of the engine's has beside its tokens, by name: states, or index keys; empty if nothing. One of transformers'
    has nothing else."""
    if isinstance(layer, SharedIndex):
        return {"index_keys": layer.indexed}
    if isinstance(layer, IndexedLayer):
        return {"index_keys": layer.indexed} | places(layer)
    return states_of(layer) if has_states(layer) or not isinstance(layer, EngineLayer) else {}


def places(layer: IndexedLayer) -> dict[str, Any]:
    """Where its tokens stand, if it says so to a model."""
    held = layer.cache.seen and layer.index_places is not None
    return {"index_places": layer.indexer_position_ids} if held else {}


def restore(layer: Any, saved: Any) -> None:
    """Gives a new layer its saved attributes; one of the engine's, what it has beside its tokens.

    Raises:
        IncompatibleCache: it has other attributes here.
        CorruptBitstream: they do not fit together.
    """
    expect(isinstance(saved, dict), "the attributes of a layer have no names")
    new = beside(layer)
    if strange := (set(saved) ^ set(new)) - set(LATE):
        raise IncompatibleCache(
            f"a {type(layer).__name__} was saved with other attributes ({sorted(strange)}): the session comes from another "
            "version of transformers"
        )
    for name, x in saved.items():
        like = isinstance(x, LATE[name] | None) if name in LATE else alike(new[name], x)
        expect(like, f"{name} is not what a {type(layer).__name__} has")
    expect(all(saved[name] == new[name] for name in FIXED if name in new), "a window or states are not the model's")
    check_tokens(saved)
    if has_states(layer):
        check_states(saved)
    if isinstance(layer, IndexedLayer | SharedIndex):
        check_index(layer, saved["index_keys"])
    if isinstance(layer, IndexedLayer):
        check_places(layer, saved.get("index_places"))
    vars(layer).update(saved)


def restore_shift(cache: EngineCache, saved: Any) -> None:
    """Gives a session what was said of where its text goes on. Raises CorruptBitstream for what is no such thing."""
    if saved is None:
        return
    like = isinstance(saved, Tensor) and saved.ndim == 2 and saved.shape[1] == 1
    rows = {layer.sequences for layer in cache.engines if layer.parts}
    expect(like and rows <= {len(saved)}, "where its rows go on is not a number for each")
    cache.session.shifts.add(0, saved)


def check_same_rows(cache: EngineCache) -> None:
    """All layers hold the same sequences."""
    rows = {layer.cache.sequences for layer in cache.layers if isinstance(layer, EngineLayer) and layer.cache.parts}
    layers: list[Any] = cache.layers
    for layer in layers:
        own = None if isinstance(layer, EngineLayer) else getattr(layer, "keys", None)
        rows |= set() if own is None else {len(own)}
        rows |= {len(x) for x in held_states(layer)}
    expect(len(rows) <= 1, f"layers have {sorted(rows)} rows")


def alike(new: Any, x: Any) -> bool:
    """Whether this may be in the place of what a new layer has."""
    if new is None:
        return True
    if isinstance(new, Tensor):
        return isinstance(x, Tensor) and x.dtype == new.dtype and torch.equal(x.cpu(), new.cpu())
    if isinstance(new, dict):
        return isinstance(x, dict) and set(x) == set(new) and all(alike(new[i], x[i]) for i in new)
    return type(x) is type(new) and (type(x) is not int or 0 <= x < MOST)


def check_tokens(saved: Mapping[str, Any]) -> None:
    """The keys and values of a layer are there if it says so."""
    k: Any = saved.get("keys")
    v: Any = saved.get("values")
    if k is None and v is None:
        expect(not saved.get("cumulative_length"), "a layer has counted tokens that it does not hold")
        return
    like = isinstance(k, Tensor) and isinstance(v, Tensor) and k.ndim == v.ndim == 4 and k.shape[:3] == v.shape[:3]
    expect(like and saved["is_initialized"], "keys and values of a layer differ in their tokens")
    expect(k.dtype == v.dtype and k.is_floating_point(), "keys and values of a layer differ in their kind")
    seen, window = saved.get("cumulative_length", k.shape[2]), saved.get("sliding_window")
    least = seen if window is None else min(seen, window - 1)
    expect(least <= k.shape[2] <= seen, f"a layer that has seen {seen} tokens holds {k.shape[2]}")


def check_index(layer: IndexedLayer | SharedIndex, keys: Any) -> None:
    """There is an index key for each token, if this layer has an index: it may go by an earlier one's."""
    seen, rows = layer.cache.seen, layer.cache.sequences
    if keys is None:
        return
    like = isinstance(keys, Tensor) and keys.ndim == 3 and keys.is_floating_point()
    expect(like and keys.shape[:2] == (rows, seen), f"index keys are not those of {rows} rows of {seen} tokens")


def check_places(layer: IndexedLayer, held: Tensor | None) -> None:
    """Where all of them stand, if the layer says so."""
    seen, rows = layer.cache.seen, layer.cache.sequences
    like = held is None or (held.dtype == torch.long and held.shape == (3, rows, seen))
    expect(like, f"the positions of index keys are not those of {rows} rows of {seen} tokens")


def check_states(saved: Mapping[str, Any]) -> None:
    """The states of a layer are there if it says so."""
    for kind in KINDS:
        for i, x in saved[f"{kind}_states"].items():
            there = saved[f"is_{kind}_states_initialized"][i]
            ids = kind == "conv" and i > 0  # Qwen 4 keeps those of the newest tokens so
            known = isinstance(x, Tensor) and (x.is_floating_point() or (ids and x.dtype == torch.long))
            like = x is None or (known and x.ndim >= 2)
            expect(like and there is (x is not None), f"a {kind} state is not what is said of it")
    for i, size in saved["conv_kernel_size"].items():
        x = saved["conv_states"][i]
        expect(x is not None or not (size or saved["has_previous_state"][i]), "the state of a convolution is not there")
        right = x is None or (type(size) is int and size > 0 and (x.shape[-1] == size or saved["record_past"]))
        expect(right, f"the state of a convolution of {size!r} columns has others")
