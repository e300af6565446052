"""The attention function that a patched model runs through."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface

from kvengine import latent
from kvengine.errors import ModelError, UnsupportedPolicy
from kvengine.gradients import tangents
from kvengine.hf import window
from kvengine.hf.held_window import HeldWindow
from kvengine.hf.indexed import IndexedLayer, named_only
from kvengine.hf.layer import BREAKS, DROPOUT, WEIGHTS, EngineLayer
from kvengine.hf.mask import UNPATCH, LazyMask
from kvengine.hf.previous import as_before
from kvengine.hf.shown import ShownMask
from kvengine.kernels.causal_attention import causal_attention, quicker
from kvengine.session import Call
from kvengine.stack import Stack

FOREIGN = ("position_bias", "indices", "block_indices", "sinks", "cu_seq_lens_q", "cu_seq_lens_k")
FORWARD = (
    "derivatives of forward mode (torch.func.jvp, dual tensors) do not pass through an engine cache, whose kernels would drop "
    "them. Pass use_cache=False, take gradients backward, or call kvengine.unpatch(model)"
)
PARTICULAR = frozenset(("softcap", "s_aux", "output_attentions", *FOREIGN))


class Seam(NamedTuple):
    """What the hook tells the attention function: the layer of the cache in use, and what ran before the patch.

    beside: where there is no such layer, what answers all the same (`EngineCache.beside`).
    """

    layer: EngineLayer | None
    previous: str
    beside: EngineLayer | HeldWindow | None = None


def engine_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    kvengine: Seam | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """`attend`, which a compiler is not to look into; most decoded tokens need less of it, and every call counts."""
    if torch.compiler.is_compiling():
        return apart(module, query, key, value, attention_mask, scaling, dropout, kvengine, **kwargs)  # type: ignore[no-any-return]
    if query.shape[2] == 1 and kvengine is not None and PARTICULAR.isdisjoint(kwargs):
        layer = kvengine.layer
        if (
            layer is not None
            and not dropout
            and not latent.is_latent(module)
            and type(attention_mask) is LazyMask
            and layer.session.paused is None
            and not tangents(query, key, value)
            and attention_mask.valid(1, layer.session.generating) is None
            and not attention_mask.hides(layer.session)
            and layer.session.turn != layer.cache.seen
        ):
            out = layer.quick(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling)
            if out is not None:
                return out, None
    return attend(module, query, key, value, attention_mask, scaling, dropout, kvengine, **kwargs)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    kvengine: Seam | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Attention through the engine if an engine cache is in use, else as before the patch.

    Shapes: query [seq, q_head, token, dim], key and value [seq, kv_head, token, dim] (the new tokens only, when a cache
    is in use); the result is [seq, token, q_head, dim_v].
    """
    if kvengine is None:
        raise ModelError(
            f"{type(module).__name__} came to the engine without its hook. Either the model is not patched, but has the "
            "configuration of one that is, or a copy: give it its own, or call model.set_attn_implementation('sdpa') on "
            "it. Or another thread has unpatched it while it ran. Or it does not pass its arguments on to the attention "
            "function, and cannot be patched"
        )
    own, asked = kvengine.layer, query.device
    layer = answering(module, kvengine, key)
    reads = own is None or layer.incoming is None  # as a later layer does under the same mask, and a window held still
    if layer is not None and reads and layer.where != asked and not latent.is_latent(module):
        query = query.to(layer.where)  # of a model that is split over several devices; latents are asked otherwise
    attention_mask = handed(layer, attention_mask, kwargs, query.device)
    options = {"scaling": scaling, "dropout": dropout, **kwargs}
    stock = Stock(module, query, attention_mask, kvengine.previous, options, (key, value))
    if layer is None:
        out = window.read(stock, attention_mask, key, value) if query.shape[2] > 1 and stock.simple else None
        return stock.run(key, value) if out is None else (out, None)
    check_answered(module, dropout, kwargs, query, key, value)
    if own is not None and not latent.is_latent(module):
        check_brought(module, layer, key, value)
    named = kwargs.get("indices") if type(layer) is IndexedLayer else None
    if type(attention_mask) is ShownMask:
        named = attention_mask.named
    foreign = [name for name in FOREIGN if kwargs.get(name) is not None and (named is None or name != "indices")]
    if foreign or not isinstance(attention_mask, LazyMask):
        what = f"the argument {foreign[0]!r}" if foreign else "a mask given as a tensor"
        return special(layer, stock, what).to(asked), None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    sinks = kwargs.get("s_aux")
    call = Call(scale, kwargs.get("softcap"), None if sinks is None else sinks.view(layer.kv_heads(key), -1), named)
    if reads or layer.session.again is not None:  # a replay's passes know what they feed
        return layer.attend(query, call, None, stock).contiguous().to(asked), None
    n = query.shape[2]
    if n > 1 and not (attention_mask.plain or layer.asks_stock(n, attention_mask.valid(n)) or attention_mask.causal):
        what = "a mask under which tokens see later ones (images, prefixes) or not all earlier ones"
        return special(layer, stock, what), None
    turn = attention_mask.turns(layer.cache, n)
    hidden = attention_mask.hidden(n, turn)
    if hidden is not None:
        layer.cache.hide(hidden)
    valid = attention_mask.valid(n, layer.session.generating and not turn)
    taking = None if n > 1 or turn else layer.session.taking(query.device)
    if taking is not None and layer.cache.fixed is None:  # a cache held still knows who pauses
        valid = taking
    return layer.attend(query, call, valid, stock).contiguous(), None


def check_answered(module: nn.Module, dropout: float, kwargs: dict[str, Any], *given: Tensor) -> None:
    """Refuse what the engine's attention has no answer to."""
    if kwargs.get("output_attentions"):
        raise ModelError(WEIGHTS)
    if dropout:
        raise ModelError(DROPOUT.format(type(module).__name__))
    if tangents(*given):
        raise ModelError(FORWARD)


def answering(module: nn.Module, seam: Seam, key: Tensor) -> Any:
    """The layer that took these keys, or whose keys the module reads; None where it is transformers' own."""
    own = seam.layer
    if own is not None and own.incoming is not None:
        return own
    found = getattr(key, "_kv_layer", gone)() or seam.beside  # a module may take turns in a pass, and a layer for each
    if own is not None and (found is None or found is own):
        raise ModelError(
            f"{type(module).__name__} attends to keys that it has not given to its layer of the cache, so the engine cannot tell "
            "which tokens it is to read. It cannot enter this model: call kvengine.unpatch(model)"
        )
    return found


def handed(layer: Any, mask: Any, kwargs: dict[str, Any], device: torch.device) -> Any:
    """The mask that an attention is given, on its queries' device; where a model does not hand it the rule of one and what is
    named, those that its layer was told (`kvengine.hf.packed_index`)."""
    if (told := getattr(layer, "told", None)) is not None:
        layer.told, mask, kwargs["indices"] = None, told.mask, told.named
    return mask.on(device) if isinstance(mask, LazyMask) else mask


def gone() -> None:
    """In place of a reference to the layer, for keys that no engine layer has taken."""


def check_brought(module: nn.Module, layer: EngineLayer, key: Tensor, value: Tensor) -> None:
    """Refuse attention to other keys and values than those that were cached: the engine would read what it holds."""
    if key.shape[2] == 1 and key.is_cuda and layer.cache.seen:
        return  # looking would make the host wait at every decoded token, and the prompt has been looked at
    for given, came in zip((key, value), layer.incoming or (), strict=False):
        if given is not came and (given.shape != came.shape or not torch.equal(given, came)):
            raise ModelError(
                f"{type(module).__name__} changes its keys or values after they were cached (differential attention, heads "
                f"repeated by the model), and the engine would read what was cached. It cannot enter this model{UNPATCH}"
            )


def special(layer: EngineLayer, stock: Stock, what: str) -> Tensor:
    """What only the model's own attention understands: let it run over everything, if that is all that is asked for."""
    if layer.stack == Stack() and layer.whole:
        return layer.attend_all(stock)
    raise UnsupportedPolicy(
        f"{what} is read by the model's own attention, over all tokens, which '{layer.stack}' does not leave as it is; use "
        "'full', do without, or pass use_cache=False where no token follows"
    )


class Stock:
    """The model's own attention of these queries over given keys and values, with the model's own mask."""

    def __init__(
        self,
        module: nn.Module,
        query: Tensor,
        mask: Any,
        previous: str,
        kwargs: dict[str, Any],
        brought: tuple[Tensor, Tensor],
    ) -> None:
        self.module, self.query, self.mask, self.previous, self.kwargs = module, query, mask, previous, kwargs
        self.brought = brought  # the new tokens' keys and values

    def run(self, key: Tensor, value: Tensor) -> tuple[Tensor, Any]:
        eager = getattr(sys.modules[type(self.module).__module__], "eager_attention_forward", None)
        name = self.previous
        if name == "sdpa" and self.kwargs.get("softcap") is not None and eager is not None:
            name = "eager"  # some versions run sdpa here and drop the softcap
        function: Any = AttentionInterface().get_interface(name, eager)  # type: ignore[arg-type]
        mask, options = self.mask.make(name) if isinstance(self.mask, LazyMask) else self.mask, self.kwargs
        if options.get("indices") is not None and name in ("sdpa", "eager"):
            mask, options = named_only(mask, options["indices"], key.shape[2]), options | {"indices": None}
        if value.dtype != self.query.dtype and not torch.is_autocast_enabled(self.query.device.type):
            # They were cached under autocast, which rounds values alone where keys are rotated.
            value = value.to(self.query.dtype)
        rule = self.mask.kwargs if isinstance(self.mask, LazyMask) else {}
        module = as_before(self.module, name, rule, self.kwargs.get("sliding_window"))
        found: tuple[Tensor, Any] = function(module, self.query, key, value, mask, **options)
        return found

    @property
    def causal(self) -> bool:
        """Whether every query sees all tokens up to its own, and nothing else is asked for: what `causal_attention` does."""
        mask, some = self.mask, self.kwargs
        return (
            self.previous == "sdpa"
            and isinstance(mask, LazyMask)
            and mask.plain
            and bool(mask.kwargs.get("allow_is_causal_skip"))
            and mask.valid(int(mask.kwargs["q_offset"]) + int(mask.kwargs["q_length"])) is None
            and getattr(self.module, "is_causal", True)
            and not some["dropout"]
            and all(some.get(name) is None for name in (*FOREIGN, "softcap", "s_aux", "is_causal", "sliding_window"))
        )

    @property
    def simple(self) -> bool:
        """Whether a rule says what is masked, and nothing is asked for but attention."""
        asked = ("output_attentions", *FOREIGN)
        always = getattr(getattr(self.module, "config", None), "output_attentions", False)
        plain = isinstance(self.mask, LazyMask) and not self.kwargs["dropout"] and self.previous in ("sdpa", "eager")
        return plain and not always and not any(self.kwargs.get(name) is not None for name in asked)

    @property
    def slow(self) -> bool:
        """Whether it would make all scores of a prompt, as where these are capped or join a sink, and the engine need not."""
        asked = any(self.kwargs.get(name) is not None for name in ("softcap", "s_aux"))
        return asked and self.simple and self.mask.plain and self.query.shape[2] > 1

    def over_latents(self, latents: Float[Tensor, "seq 1 token latent"]) -> Tensor:
        """Attention over latents: each read once where that pays, else as the model has it."""
        scale, tokens = self.kwargs["scaling"], self.query.shape[2]
        plain = isinstance(self.mask, LazyMask) and not self.kwargs["dropout"]
        plain = plain and all(self.kwargs.get(name) is None for name in (*FOREIGN, "softcap", "s_aux"))
        if not plain or not latent.pays(self.module, tokens):
            whole = latents.shape[2] == self.brought[0].shape[2]
            return self.run(*(self.brought if whole else latent.expanded(self.module, latents)))[0]
        seen = self.mask.make("sdpa")
        scale = self.query.shape[-1] ** -0.5 if scale is None else scale
        return latent.attend(self.module, self.query, latents, seen, scale)

    def __call__(self, key: Tensor, value: Tensor) -> Tensor:
        if latent.is_latent(self.module):
            return self.over_latents(key)
        if self.causal and quicker(self.query, key, value):
            scale = self.kwargs["scaling"]
            return causal_attention(self.query, key, value, scale=key.shape[-1] ** -0.5 if scale is None else scale)
        return self.run(key, value)[0]


apart: Any = torch.compiler.disable(attend, recursive=True, reason=BREAKS)
