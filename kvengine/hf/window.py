"""How layers with a sliding window read a prompt: what lies outside the window is skipped, not masked.

Such layers keep the cache that transformers gives them, but its attention computes every pair of tokens and hides most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from kvengine.gradients import live, tangents
from kvengine.kernels.span_attention import Band, band_spans, span_attention

if TYPE_CHECKING:
    from kvengine.hf.attention import Stock
    from kvengine.hf.mask import LazyMask


def handed_over(layer: Any, keys: Tensor, values: Tensor, new: int) -> tuple[Tensor, Tensor]:
    """What a layer with a window gives to attention, of the `keys` and `values` that its `update` returned for `new` tokens."""
    window = layer.sliding_window
    if layer.record_past:  # transformers 5.17 hands over more than it makes a mask for
        seen = window - 1 + new
        return keys[:, :, -seen:], values[:, :, -seen:]
    if keys.shape[2] > 2 * window:
        let_go(layer)
    return keys, values


def let_go(layer: Any) -> None:
    """Copy what a layer with a window keeps, where that is a small part of what it keeps alive.

    Of a prompt these are views, which hold all of it until the next token comes: over all layers a whole prompt's keys and
    values.
    """
    if layer.keys.untyped_storage().nbytes() > 2 * layer.keys.nbytes:
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()


def window_of(rule: Any) -> int | None:
    """The window, if this mask function is transformers' own for windows and nothing beside it."""
    known: Any = sliding_window_causal_mask_function(1)
    if getattr(rule, "__code__", None) is not known.__code__:
        return None
    parts, (near, _) = (f.__closure__[0].cell_contents for f in (rule, known))
    if (
        len(parts) != 2
        or parts[1] is not causal_mask_function
        or getattr(parts[0], "__code__", None) is not near.__code__
    ):
        return None
    return int(parts[0].__closure__[0].cell_contents)


def read(stock: Stock, mask: LazyMask, key: Tensor, value: Tensor) -> Float[Tensor, "seq token q_head dim_v"] | None:
    """The attention of several queries, a prompt's, where that saves work; None where the model's own is to be asked."""
    q, options, made = stock.query, stock.kwargs, mask.kwargs
    window, softcap, logits = window_of(made.get("mask_function")), options.get("softcap"), options.get("s_aux")
    (b, _, n, _), (heads, tokens) = q.shape, key.shape[1:3]
    offsets = made["q_offset"], made["kv_offset"]
    if window is None or any(isinstance(x, Tensor) and x.is_cuda for x in offsets):
        return None
    ends = int(offsets[0]) + n, int(offsets[1]) + tokens
    if ends[0] != ends[1] or made["q_length"] != n or not getattr(stock.module, "is_causal", True):
        return None  # a cache of fixed size: its slots are no sequence
    if tokens <= 2 * window and softcap is None and logits is None:
        return None
    if live(q, key, value) or tangents(q, key, value):
        return None
    place = torch.arange(tokens, dtype=torch.int32, device=q.device).expand(b, -1)
    padding = made.get("attention_mask")
    if padding is not None:
        padding = padding[:, ends[1] - tokens : ends[1]].bool().to(q.device)
        padding = torch.nn.functional.pad(padding, (0, tokens - padding.shape[1]), value=True)
        place = place.masked_fill(~padding, -1)
    rows, group = q.unflatten(1, (heads, -1)).flatten(0, 1), q.shape[1] // heads
    band = Band(torch.zeros(len(rows), dtype=torch.long, device=q.device), 0, window)
    out = span_attention(
        rows, key.flatten(0, 1), value.flatten(0, 1), place.repeat_interleave(heads, 0),
        band_spans(n, tokens, band), band=band, softcap=softcap,
        scale=q.shape[-1] ** -0.5 if options["scaling"] is None else options["scaling"],
        sinks=None if logits is None else logits.view(heads, group).repeat(b, 1),
    )  # fmt: skip
    return out.unflatten(0, (b, heads)).flatten(1, 2).transpose(1, 2).contiguous()
