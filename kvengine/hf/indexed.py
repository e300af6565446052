"""Models that choose what they read by an index of their own: DeepSeek sparse attention (arXiv:2512.02556, section 2.1).

    index key   of a token s:  k_s [dim], one for all heads, cached beside its latent
    score       I_ts  =  sum over index heads j of  w_tj relu(q_tj . k_s)
    named       by query t: the `index_topk` tokens that it may see with the largest I_ts

The model computes this, and hands what it has named to its attention. The engine caches the index keys, and the tokens under the
policy: a decoded token reads those that are named, wherever they are, and no others. So a policy may say how tokens are stored
and where, and not which are kept or read. `kvengine.hf.held_index` holds index keys still while a step is recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from kvengine import latent
from kvengine.errors import CacheError, ModelError, UnsupportedPolicy
from kvengine.heads import check_batch
from kvengine.hf import shown
from kvengine.hf.layer import BREAKS, EngineLayer
from kvengine.policies import name_of
from kvengine.stack import Stack

if TYPE_CHECKING:
    from kvengine.hf.held_index import HeldIndex

KIND = "DynamicIndexedLayer"
PLACES = "indexer_position_ids"
FAMILIES = frozenset((
    "deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "hy_v4_vl_text", "dots3_note_text", "mistral_large4_text",
    "glm5_next_text",
))  # fmt: skip
"""Model types whose index is this one, or scores groups of tokens (`kvengine.hf.packed_index`). Others choose by a mask
(`kvengine.hf.shown`)."""
FREE = 64
"""Index keys have room for a 64th more than there are, and for so many at the least."""


class IndexedLayer(EngineLayer):
    """A layer of the engine's, with the index keys of its tokens, by their numbers in the text."""

    told: Any = None
    """What a model does not hand to its attention (`kvengine.hf.packed_index.Told`), until that asks."""

    def reset(self) -> None:
        super().reset()
        self.cache.named = True
        self.index_keys: Float[Tensor, "seq room dim"] | None = None
        self.index_places: Int[Tensor, "axis seq token"] | None = None
        self.held: HeldIndex | None = None  # while a step is recorded

    def update_indexer(self, indexer_key_states: Float[Tensor, "seq token dim"]) -> Float[Tensor, "seq all dim"]:
        """Keep the new tokens' index keys; all so far. What was kept of tokens that were taken back, or of a pass that broke off,
        is written over.

        Raises CacheError for another batch than the cache has, or if it has no index keys of earlier tokens.
        """
        new, seen, held = indexer_key_states, self.cache.seen, self.index_keys
        if self.held is not None:
            return self.held.take(self, new)
        end = seen + new.shape[1]
        if self.incoming is not None and self.cache.parts:
            check_batch(self.cache, self.incoming[0])
        if not seen:
            self.index_keys = new.new_empty(len(new), 0, new.shape[2])
        held = self.with_room(end)
        held[:, seen:end] = new
        return held[:, :end]

    def with_room(self, end: int) -> Float[Tensor, "seq room dim"]:
        """As `roomy`, for the tokens of this layer."""
        self.index_keys = held = roomy(self.index_keys, self.cache.seen, end, self.session.prompt_end)
        return held

    @property
    def indexed(self) -> Float[Tensor, "seq token dim"] | None:
        """The index keys of what was seen."""
        return None if self.index_keys is None else self.index_keys[:, : self.cache.seen]

    @property
    def indexer_position_ids(self) -> Int[Tensor, "axis seq token"] | None:
        """The positions of what was seen, as a model says them to the first of its layers that have an index.

        Raises CacheError if it has none of earlier tokens.
        """
        held, seen = self.index_places, self.cache.seen
        if not seen:
            return None
        if held is None or held.shape[2] < seen:
            raise CacheError(f"this cache has no positions of the {seen} tokens that it has seen; call cache.reset()")
        return held[..., :seen]

    @indexer_position_ids.setter
    def indexer_position_ids(self, places: Int[Tensor, "axis seq token"]) -> None:
        self.index_places = places

    def batch_select_indices(self, indices: Int[Tensor, "chosen"]) -> None:
        super().batch_select_indices(indices)
        if not self.cache.seen:  # they are of tokens that were all taken back, in whatever rows
            self.index_keys = self.index_places = None
        if self.index_keys is not None:
            self.index_keys = self.index_keys[indices.to(self.index_keys.device)]
        if self.index_places is not None:
            self.index_places = self.index_places[:, indices.to(self.index_places.device)]


def roomy(
    held: Float[Tensor, "seq room dim"] | None, seen: int, end: int, prompt_end: int | None
) -> Float[Tensor, "seq room dim"]:
    """Index keys of `seen` tokens, with room for the first `end`, or for the whole of a prompt that comes in chunks.

    Raises CacheError if there are none of what was seen.
    """
    if held is None or held.shape[1] < seen:
        raise CacheError(f"this cache has no index keys of the {seen} tokens that it has seen; call cache.reset()")
    if held.shape[1] < end or (held.is_inference() and not torch.is_inference_mode_enabled()):
        most = max(end, prompt_end or 0)
        room = held.new_empty(len(held), most + max(FREE, most // 64), held.shape[2])
        room[:, :seen] = held[:, :seen]
        return room
    return held


def update_indexer(
    self: Cache, indexer_key_states: Float[Tensor, "seq token dim"], layer_idx: int, *args: Any, **kwargs: Any
) -> Float[Tensor, "seq all dim"]:
    """What a cache is asked for."""
    if torch.compiler.is_compiling():  # which would compile for each layer's number
        return aside(self, indexer_key_states, layer_idx, *args, **kwargs)  # type: ignore[no-any-return]
    found: Tensor = Cache.update_indexer(self, indexer_key_states, layer_idx, *args, **kwargs)
    return found


aside: Any = torch.compiler.disable(update_indexer, reason=BREAKS)


def followed(text: Any, modules: Sequence[nn.Module]) -> bool:
    """Whether the engine can follow the index of a model with these attention modules: it is of one of the `FAMILIES`, and caches
    latents (with transformers 5.17 it caches keys and values that it has made of them: its code expands, and then caches)."""
    if text.model_type in shown.FAMILIES:  # nor do these keep positions there
        return any(hasattr(layer, PLACES) for layer in DynamicCache(config=text).layers)
    made = [inspect.unwrap(type(m).forward).__code__.co_names for m in modules if latent.is_latent(m)]
    return text.model_type in FAMILIES and all(x.index("update") < x.index("expand_kv") for x in made)


def has_index(layer: Any) -> bool:
    """Whether one of transformers' layers keeps index keys beside its tokens."""
    return type(layer).__name__ == KIND


def named_only(mask: Tensor | None, named: Int[Tensor, "seq token chosen"], tokens: int) -> Tensor:
    """A mask, as torch's attention or a model's own has it, that leaves of so many tokens the named ones."""
    rows, queries, _ = named.shape
    other = torch.ones(rows, queries, tokens + 1, dtype=torch.bool, device=named.device)
    other = other.scatter_(2, named.long().masked_fill(named < 0, tokens), False)[..., :tokens]
    if mask is None:
        return ~other[:, None]
    if mask.dtype == torch.bool:
        return mask & ~other[:, None]
    return mask.masked_fill(other[:, None], torch.finfo(mask.dtype).min)


def check_prefix(text: Any) -> None:
    """Refuse a prefix of tuned keys and values, which is no latents and has no index keys. Raises ModelError."""
    if latent.configured(text):
        why = "caches latents (MLA), which a prefix of tuned keys and values is not"
    elif any(map(has_index, DynamicCache(config=text).layers)):
        why = "has an index of its own, in which a prefix of tuned keys and values has no place"
    else:
        return
    raise ModelError(f"{text.model_type} {why}. Call kvengine.unpatch(model)")


def check_stack(stack: Stack, text: Any) -> None:
    """Refuse what would choose tokens where the model does. Raises UnsupportedPolicy."""
    if not any(map(has_index, DynamicCache(config=text).layers)):
        return
    plain, form, name = Stack(), stack.representation, text.model_type
    for axis, does in (
        ("retention", "drops or merges tokens"), ("selection", "chooses what is read"), ("routing", "tells heads apart"),
        ("prefill", "leaves out a part of a prompt's attention"),
    ):  # fmt: skip
        if (chosen := getattr(stack, axis)) != getattr(plain, axis):
            raise UnsupportedPolicy(
                f"{name} names the tokens that it reads, by an index of its own, but {name_of(chosen)!r} {does}; say only how "
                "tokens are stored and where (kivi, turboquant, host …), or nothing (full)"
            )
    if form.probes or form.joint:
        raise UnsupportedPolicy(
            f"{name_of(form)!r} judges a prompt's tokens together, or by what its queries attend to, but {name} names what is "
            "read, by an index of its own; use kivi, quantspec or turboquant"
        )


__all__ = ["IndexedLayer", "check_prefix", "check_stack", "followed", "has_index", "named_only", "roomy"]
