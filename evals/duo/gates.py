"""Attention with a gate on every KV head.

    out  =  alpha full(q, k, v)  +  (1 - alpha) streaming(q, k, v)
    streaming: the first `sinks` and the newest `recent` tokens

Both halves see the same input, as in the paper's formula. (The official code takes the full half from the ungated
model's forward pass instead.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvengine.errors import ModelError
from kvengine.hf.enterable import attention_modules, check_model
from kvengine.hf.states import beyond_tokens

NAME = "kvengine_duo"


@dataclass
class Gates:
    """The gates of a model, and what a closed one still sees.

    Attributes:
        alpha: [layer, KV head], between 0 (streams) and 1 (full).
        sinks: first tokens that a streaming head sees.
        recent: newest tokens that it sees.
        applied: whether gates apply; if not, every head is full.
    """

    alpha: Float[Tensor, "layer head"]
    sinks: int
    recent: int
    applied: bool = True

    def visible(self, n: int, device: torch.device) -> Bool[Tensor, "query token"]:
        """What a streaming head's queries see.

        >>> Gates(torch.ones(1, 1), sinks=1, recent=2).visible(4, torch.device("cpu")).int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]
        """
        at = torch.arange(n, device=device)
        back = at[:, None] - at
        return (back >= 0) & ((back < self.recent) | (at < self.sinks))


@contextmanager
def gated(model: PreTrainedModel, gates: Gates) -> Iterator[None]:
    """Inside, the model's attention runs through the gates.

    Raises:
        ModelError: a model whose attention is not plain causal attention in every layer.
    """
    check_model(model)
    text = model.config.get_text_config(decoder=True)
    modules = [m for m in attention_modules(model, text) if isinstance(getattr(m, "layer_idx", None), int)]
    if not modules or beyond_tokens(text):
        raise ModelError(
            f"{type(model).__name__} has layers without plain causal attention; Duo's gates are for models without"
        )
    before = text._attn_implementation_internal
    AttentionInterface.register(NAME, gated_attention)
    AttentionMaskInterface.register(NAME, no_mask)
    text._attn_implementation_internal = NAME
    hooks = [m.register_forward_pre_hook(partial(enter, gates=gates), with_kwargs=True) for m in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        text._attn_implementation_internal = before


def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], gates: Gates) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "duo": gates}


def no_mask(**kwargs: Any) -> None:
    """Samples are not padded: causality is all."""


def gated_attention(
    module: nn.Module,
    query: Float[Tensor, "seq q_head token dim"],
    key: Float[Tensor, "seq head token dim"],
    value: Float[Tensor, "seq head token dim_v"],
    attention_mask: None,
    scaling: float | None = None,
    dropout: float = 0.0,
    duo: Gates | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "seq token q_head dim_v"], None]:
    """A layer's attention, as the layer's gates mix it."""
    odd = [name for name in ("softcap", "s_aux", "sinks", "position_bias") if kwargs.get(name) is not None]
    if duo is None or odd:
        raise ModelError(
            f"{type(module).__name__} has attention that Duo's gates do not know: {odd or 'no arguments passed on'}"
        )
    attend = partial(F.scaled_dot_product_attention, query, key, value, scale=scaling, enable_gqa=True)
    full = attend(is_causal=True).transpose(1, 2)
    if not duo.applied:
        return full, None
    streaming = attend(attn_mask=duo.visible(query.shape[2], query.device)).transpose(1, 2)
    alpha = duo.alpha[int(module.layer_idx)].clamp(0, 1)  # type: ignore[arg-type]
    open_ = alpha.repeat_interleave(query.shape[1] // key.shape[1])[:, None].to(full.dtype)
    return open_ * full + (1 - open_) * streaming, None
