"""Layers of transformers' own that keep states instead of tokens: of linear attention, state spaces and short convolutions.

A recurrent state has absorbed its tokens, and nothing gets them out again. The state of a convolution is its last columns;
while it records, all that came since. transformers offers less of such layers than of others; here is what a cache is asked.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from kvengine.errors import CacheError


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
            size = layer.conv_kernel_size[i]
            last = state[..., -size:]
            layer.conv_states[i] = torch.nn.functional.pad(last, (size - last.shape[-1], 0)).clone()


def held_states(layer: Any) -> list[Tensor]:
    """The states that a layer has by now."""
    return [x for x in (*layer.conv_states.values(), *layer.recurrent_states.values()) if x is not None]


def thaw(layer: Any) -> None:
    """Go on with copies, which may be changed in place where what was made in torch's inference mode may not."""
    vars(layer).update(vars(copy.deepcopy(layer)))
