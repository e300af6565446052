"""A sliding-window layer of transformers' held still, so that a decode step can be recorded (`kvengine.hf.compiled`).

Its cache grows by moving: every token makes new tensors. Held still, a token's slot is its number modulo the window, so
that the newest token takes the place of the one that it pushes out of sight, and what is there is what is seen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import DynamicSlidingWindowLayer

from kvengine import latent
from kvengine.cache import Stock
from kvengine.errors import CacheError
from kvengine.kernels.attention import attention
from kvengine.session import HELD, Call


class HeldWindow(DynamicSlidingWindowLayer):
    """In the place of such a layer while a cache is held still.

    Args:
        layer: transformers', whose prompt is read.
        real: which of all tokens so far are tokens, [seq, token]; None: all.
        now: the position of the next token; whoever drives the layers moves it on.
    """

    stack, whole = "a recorded step", False  # for who refuses what only the model's own attention understands

    def __init__(self, layer: Any, real: Bool[Tensor, "seq token"] | None, now: Tensor) -> None:
        vars(self).update(vars(layer))
        self.layer, self.now = layer, now
        self.incoming: tuple[Tensor, Tensor] | None = None
        k, v = (x[:, :, 1 - self.sliding_window :] for x in (layer.keys, layer.values))
        n, seen = k.shape[2], self.cumulative_length
        at = torch.arange(seen - n, seen, device=k.device) % self.sliding_window
        if real is not None and (len(real) != len(k) or real.shape[1] < seen):
            raise CacheError(
                f"attention_mask is {list(real.shape)}, expected [{len(k)}, {seen}]: which of the tokens so far are tokens"
            )
        self.k, self.v = (x.new_zeros(*x.shape[:2], self.sliding_window, x.shape[3]) for x in (k, v))
        self.k[:, :, at], self.v[:, :, at] = k, v
        self.there = torch.zeros(len(k), self.sliding_window, dtype=torch.bool, device=k.device)
        self.there[:, at] = True if real is None else real[:, seen - n : seen].to(k.device)

    @property
    def where(self) -> torch.device:
        return self.k.device

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.incoming = (key_states, value_states)
        key_states._kv_layer = weakref.ref(self)  # type: ignore[attr-defined]
        return key_states, value_states

    def kv_heads(self, key: Tensor) -> int:
        return int(key.shape[1])

    def attend(
        self, query: Float[Tensor, "seq q_head 1 dim"], call: Call, valid: None, stock: Stock
    ) -> Float[Tensor, "seq 1 q_head dim_v"]:
        """Put the new token in its place, unless a later layer asks, and read what is there."""
        if self.incoming is not None:
            at, (k, v), self.incoming = self.now % self.sliding_window, self.incoming, None
            self.k.index_copy_(2, at, k)
            self.v.index_copy_(2, at, v)
            self.there.index_fill_(1, at, True)
        k, v = self.k, self.v
        if latent.is_latent(stock.module):  # type: ignore[attr-defined]
            k, v = stock.module.expand_kv(k, v)  # type: ignore[attr-defined]
        b, h = k.shape[:2]
        visible = self.there[:, None].expand(-1, h, -1).flatten(0, 1)[:, None]
        found = attention(
            query.unflatten(1, (h, -1)).flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), visible,
            call.scale, softcap=call.softcap, sinks=None if call.sinks is None else call.sinks.repeat(b, 1),
        )  # fmt: skip
        return found.out.to(query.dtype).unflatten(0, (b, h)).flatten(1, 2).transpose(1, 2)

    def advance(self) -> None:
        """After a step: count."""
        self.cumulative_length += 1

    def check_free(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse what would move its rows or tokens, or copy them."""
        raise CacheError(HELD)

    reorder_cache = batch_select_indices = batch_repeat_interleave = crop = __deepcopy__ = check_free  # type: ignore[assignment]

    def state(self) -> list[Tensor]:
        return [self.k, self.v, self.there]

    def lasting(self) -> list[Tensor]:
        """Of these, what a step taken twice would change twice: nothing, it writes to the same place."""
        return []

    def release(self) -> None:
        """Let the layer go on as it would have without."""
        seen = self.cumulative_length
        at: Int[Tensor, "token"] = torch.arange(max(0, seen - self.sliding_window + 1), seen, device=self.k.device)
        at = at % self.sliding_window
        self.layer.keys, self.layer.values = self.k[:, :, at], self.v[:, :, at]
        self.layer.cumulative_length = seen


def can_hold(config: Any, layer: Any) -> bool:
    """Whether this layer of transformers' can be held still: one of a window that moves on with every token."""
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    return type(layer) is DynamicSlidingWindowLayer and not chunked


def empty(layer: Any) -> bool:
    """Whether this stands for a layer that holds nothing, as one that reads an earlier one's keys."""
    return type(layer).__name__ == "DummyLayer"
