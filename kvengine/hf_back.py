"""Taking back tokens of the layers whose cache is transformers' own, beside the engine's."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache

from kvengine.errors import CacheError

STATE = ("keys", "values", "cumulative_length", "is_initialized", "dtype", "device")  # of a layer with a window


GO_BACK = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}


def goes_back(config: Any) -> bool:
    """Whether tokens can be taken back from every layer of a model; a recurrent state has absorbed them."""
    return {type(layer).__name__ for layer in DynamicCache(config=config).layers} <= GO_BACK


def adopt(layer: Any, its: Any, late: int) -> None:
    """Hold what another cache's layer with a window holds, but for its last `late` tokens.

    Nothing is copied: transformers' windows put new tensors in the place of old ones and change none.
    """
    if getattr(its, "sliding_window", None) is not None and its.is_initialized:
        vars(layer).update({name: getattr(its, name) for name in STATE})
        layer._sliding_window_tensor = its._sliding_window_tensor
        back(layer, late)


def check_back(layer: Any, n: int) -> None:
    """Refuse to take back what one of transformers' own layers no longer has."""
    window = getattr(layer, "sliding_window", None)
    if not n or window is None or not layer.is_initialized:
        return
    seen = layer.get_seq_length()
    if seen >= window and layer.keys.shape[-2] < min(seen, window - 1 + n):
        raise CacheError(
            f"cannot go back by {n} tokens: a layer with a window of {window} has given up what would come back into it. "
            "Call cache.activate_past_recording() before the tokens that may have to be taken back"
        )


def back(layer: Any, n: int) -> None:
    """Take back `n` tokens of one of transformers' own layers, which may be asked again."""
    if not n or not layer.is_initialized:
        return
    if getattr(layer, "sliding_window", None) is None:
        layer.crop(-n)
        return
    layer.keys, layer.values = layer.keys[:, :, :-n], layer.values[:, :, :-n]  # `crop` would cut the other end too
    layer.cumulative_length -= n
