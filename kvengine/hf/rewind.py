"""What a cache asks of the layers that are transformers' own, beside the engine's: taking back tokens, repeating rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvengine.errors import CacheError
from kvengine.heads import check_layer_back, check_settled, several
from kvengine.hf import states, window
from kvengine.hf.cross import CrossLayer
from kvengine.hf.held_window import HeldWindow
from kvengine.hf.layer import BREAKS, EngineLayer
from kvengine.session import BROKEN, Session


@torch.compiler.disable(reason=BREAKS)  # type: ignore[untyped-decorator]
def check_even(layers: list[Any], torn: bool = False) -> None:
    """Refuse layers of which some hold tokens of a pass that others have not seen, or one has `torn` off: it broke off."""
    kinds = EngineLayer | DynamicLayer
    seen = {x.get_seq_length() for x in layers if isinstance(x, kinds) and type(x) is not CrossLayer}
    if torn or len(seen) > 1:
        raise CacheError(BROKEN)


def check_between(cache: Any) -> int:
    """Refuse an engine cache over which a pass runs, or broke off, or in which rows are beyond their ends; the tokens that it has
    seen."""
    session: Session = cache.session
    if session.aside is not None and session.aside.kept:
        raise CacheError(
            "rows of this batch have ended before others, and what their states were is put back when generate() ends; save it "
            "then, or save a copy (copy.deepcopy)"
        )
    session.check_judged(cache.seen)
    check_even(cache.layers, session.torn or bool(session.waiting) or session.led == cache.seen)
    return int(cache.seen)


def adopt(layer: Any, its: Any, late: int) -> None:
    """Hold what another cache's layer with a window holds, but for its last `late` tokens.

    Nothing is copied: transformers' windows put new tensors in the place of old ones and change none.
    """
    if getattr(its, "sliding_window", None) is not None and its.is_initialized:
        vars(layer).update(states.tokens_of(its))
        layer._sliding_window_tensor = its._sliding_window_tensor
        back(layer, late)


def check_back(layer: Any, n: int, seen: int) -> None:
    """Refuse to take back the last `n` of `seen` tokens from what, of transformers' own, no longer has them or is held."""
    if isinstance(layer, HeldWindow):
        layer.check_free()
    if not n:
        return
    if states.has_states(layer):
        states.check_back(layer, n, seen)
    size = getattr(layer, "sliding_window", None)
    if size is not None and layer.is_initialized and layer.keys.shape[-2] < min(seen, size - 1 + n):
        raise CacheError(
            f"cannot go back by {n} tokens: a layer with a window of {size} has given up what would come back into it. "
            "Call cache.activate_past_recording() before the tokens that may have to be taken back"
        )


def back(layer: Any, n: int) -> None:
    """Take back `n` tokens of what is transformers' own in a layer, which may be asked again."""
    if not n or type(layer) is CrossLayer:
        return
    if states.has_states(layer):
        states.back(layer, n)
    if isinstance(layer, EngineLayer) or getattr(layer, "keys", None) is None:
        return
    # `crop` would cut a window's other end too.
    layer.keys, layer.values = layer.keys[:, :, :-n], layer.values[:, :, :-n]
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length -= n


def all_back(layers: list[Any], session: Session, n: int, seen: int, kept: states.Kept | None = None) -> None:
    """Take back the last `n` of `seen` tokens from every layer, or refuse and leave all as they are. States that have absorbed
    the tokens go back to those that were `kept`."""
    check_even(layers, session.led == seen)
    for layer in layers:
        if isinstance(layer, EngineLayer):
            check_layer_back(layer.cache, n)
        if kept is None or not states.has_states(layer):
            check_back(layer, n, seen)
    with session.changing():
        for layer in layers:
            if isinstance(layer, EngineLayer):
                layer.cache.rollback(n)
            if kept is None or not states.has_states(layer):
                back(layer, n)
        if kept is not None:
            kept.put_back()
    session.led = session.judging = None  # as many tokens may be seen again


def settle(layer: Any) -> None:
    """What transformers' own in a layer recorded is history."""
    if not getattr(layer, "record_past", False):
        return
    if states.has_states(layer):
        states.settle(layer)
    if getattr(layer, "sliding_window", None) is not None and layer.is_initialized:
        DynamicSlidingWindowLayer.crop(layer, 0)  # gives up what a window has passed
        window.let_go(layer)


@contextmanager
def changing_rows(layers: list[Any], session: Session) -> Iterator[None]:
    """Every layer takes other rows, or it is refused and all stay as they are."""
    for layer in layers:
        if isinstance(layer, EngineLayer):
            check_settled(layer.cache)
        elif isinstance(layer, HeldWindow):
            layer.check_free()
    with session.changing():
        yield


def chosen_rows(layers: list[Any], rows: Any) -> Int[Tensor, "chosen"]:
    """Which rows stay, in this order, as a list, a tensor or a mask of all rows tells; on a GPU the host does not look.

    Raises:
        CacheError: there is no such row, or none is to stay.
    """
    given, held = torch.as_tensor(rows), next((n for n in map(sequences, layers) if n is not None), None)
    mask = given.dtype == torch.bool
    chosen = given.nonzero()[:, 0] if mask else given
    if held is None:
        return chosen
    wrong = len(chosen) == 0 or (mask and len(given) != held)
    if not wrong and chosen.device.type == "cpu":
        wrong = bool(((chosen < -held) | (chosen >= held)).any())
    if wrong:
        raise CacheError(
            f"this cache holds {held} sequences, of which {given.tolist()} cannot stay: give the numbers of those that do, from "
            f"0 to {held - 1} and at least one, or a mask of {held}. For another batch call cache.reset()"
        )
    return torch.where(chosen < 0, chosen + held, chosen)  # layers of transformers' own take no negative ones


def check_rows(layers: list[Any], rows: int) -> None:
    """Refuse a pass of another number of rows than are held, before a window or a state has taken some of it."""
    held = next((n for n in map(sequences, layers) if n is not None), rows)
    if held != rows:
        raise CacheError(
            f"this cache holds {held} sequences, but the model was given {rows}; use one cache for one batch of one "
            f"model{several(held, rows)}"
        )


def sequences(layer: Any) -> int | None:
    """How many rows a layer holds; None if it holds nothing."""
    if isinstance(layer, EngineLayer):
        return layer.cache.sequences if layer.cache.parts else None
    if found := states.held_states(layer):
        return len(found[0])
    return len(layer.keys) if isinstance(layer, DynamicLayer) and layer.keys is not None else None


def repeat(layer: Any, repeats: int) -> None:
    """Repeat each row of one of transformers' own layers."""
    if not states.has_states(layer):
        layer.batch_repeat_interleave(repeats)
    elif held := states.held_states(layer):
        layer.reorder_cache(torch.arange(len(held[0])).repeat_interleave(repeats))


def emptied(layer: Any, new: Any) -> Any:
    """A layer that has forgotten everything, how many rows there were and that it was recorded included."""
    if isinstance(layer, HeldWindow):
        return new  # who holds the other may still let it go
    if isinstance(layer, EngineLayer) or type(layer) is not type(new):
        layer.reset()
    else:
        vars(layer).clear()
        vars(layer).update(vars(new))
    return layer
