"""Models whose index scores groups of tokens (GLM 5 Next): a group's key is made of its tokens' keys, by a gate that each brings.

    index key   of a token:  [its key | its gate | whether it is a token], cached for each; groups are counted from a row's first
    named       by query t:  the tokens of the groups with the largest scores, and those behind the last whole group; -1 for none

The model has no mask over all tokens, and hands its attention what is named as one that it has made of the new tokens alone. So
hooks tell its index how many tokens there are, and ask what it has named; the rule of a mask comes from what the model is given.

Padding behind a row's first token would shift its groups, and the model counts on as if there were none. That is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function

from kvengine import latent
from kvengine.errors import CacheError, ModelError
from kvengine.hf.cache import EngineCache
from kvengine.hf.indexed import IndexedLayer
from kvengine.hf.layer import BREAKS
from kvengine.hf.mask import LazyMask
from kvengine.hf.names import MASK, NAMES, cache_among, cache_given
from kvengine.hf.replay import made_of, reader
from kvengine.session import FOREIGN

PACKED = frozenset(("glm5_next_text",))
HANDED = "prev_topk_indices"
"""What an earlier layer has named, as a layer without an index is given it."""
KINDS = "attention_mask is a dictionary by kinds of layers; give one mask of shape (rows, tokens so far)"
BETWEEN = (
    "{} packs what it indexes in groups that it counts from a row's first token, and padding among a row's tokens shifts them: "
    "rows that ended before others, or turns of several lengths, cannot go on in one batch. Give each row by itself, with a "
    "cache of its own, or keep it with cache.reorder_cache"
)


@dataclass
class Told:
    """What a layer's attention is not given: the rule of its mask, and what is named."""

    mask: LazyMask
    named: Int[Tensor, "seq token chosen"] | None = None


@dataclass
class Counted:
    """A cache as an index asks it: it has the tokens of this pass already."""

    cache: EngineCache
    layer: IndexedLayer
    end: int

    @property
    def layers(self) -> dict[int, Counted]:
        return {self.layer.layer: self}

    @property
    def keys(self) -> Float[Tensor, "all 0"]:
        """Of as many tokens; nothing is in them."""
        return torch.empty(self.end, 0)

    def get_seq_length(self) -> int:
        return self.end

    def update_indexer(self, keys: Float[Tensor, "seq token dim"], layer: int) -> Float[Tensor, "seq all dim"]:
        return self.cache.update_indexer(keys, layer)


def hook_groups(model: PreTrainedModel, text: Any) -> list[Any]:
    """A hook on the part that reads, before those that divide its passes; what undoes it."""
    if text.model_type not in PACKED:
        return []
    part, names = reader(model, text)
    return [part.register_forward_pre_hook(partial(reading, names=names, text=text, does=check), with_kwargs=True)]


def hook_packed(model: PreTrainedModel, text: Any) -> list[Any]:
    """Hooks on the part that reads, behind those, and on layers' indexes; what undoes them."""
    if text.model_type not in PACKED:
        return []
    part, names = reader(model, text)
    hooks = [part.register_forward_pre_hook(partial(reading, names=names, text=text, does=lay_out), with_kwargs=True)]
    for module in filter(latent.is_latent, part.modules()):
        index: Any = module.indexer
        if index is None:
            hooks.append(module.register_forward_pre_hook(hand_on, with_kwargs=True))
        else:
            hooks.append(index.register_forward_pre_hook(ask, with_kwargs=True))
            hooks.append(index.register_forward_hook(note, with_kwargs=True))
    return hooks


def reading(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str], text: Any, does: Any) -> None:
    """A pass begins over an engine cache. Raises CacheError if that is another model's."""
    cache = cache_given(args, kwargs, names)
    given = dict(zip(names, args, strict=False)) | kwargs
    made = made_of(given)
    if not isinstance(cache, EngineCache) or made is None:
        return
    if cache.config is not text:
        raise CacheError(FOREIGN)
    mask = given.get(MASK)
    if isinstance(mask, Mapping):
        raise ModelError(KINDS)
    mask = mask.bool() if mask is not None and mask.ndim == 2 else None  # the model looks at no others
    does(cache, made, mask, module.dtype)


def indexes(cache: EngineCache) -> list[IndexedLayer]:
    return [layer for layer in cache.layers if isinstance(layer, IndexedLayer)]


@torch.compiler.disable(reason=BREAKS)  # type: ignore[untyped-decorator]
def check(cache: EngineCache, made: Tensor, mask: Tensor | None, dtype: torch.dtype) -> None:
    """Refuse padding among a row's tokens: those that come, or those that are there, by a later mask.

    Raises CacheError, before anything is taken. Nobody looks at tokens that `generate` adds, nor at single ones on a GPU.
    """
    seen, n = cache.seen, made.shape[1]
    held = next((x for layer in indexes(cache) if (x := layer.indexed) is not None), None)
    session = cache.session
    chunk = session.turn == seen or (session.prompt_end or 0) > seen  # single, but given to `generate`
    if n == 1 and seen and not chunk and (made.is_cuda or (session.generating and not session.following)):
        return
    real = made.new_ones(made.shape[:2], dtype=torch.bool)
    before = real.new_ones(len(real), 0) if held is None or not seen else held[..., -1].bool().to(real.device)
    if len(before) != len(real):
        return  # another batch, as is told where layers take it
    gone = False
    if mask is not None and mask.shape[1] >= seen + n:
        given = mask.to(real.device)
        real, gone = given[:, seen : seen + n], bool((before & ~given[:, :seen]).any())
    every = torch.cat([before, real], 1)
    padding = (every.cumsum(1) > 0) & ~every
    if gone or bool(((padding.cumsum(1) > 0) & every)[:, seen:].any()):
        raise CacheError(BETWEEN.format(cache.config.model_type))


@torch.compiler.disable(reason=BREAKS)  # type: ignore[untyped-decorator]
def lay_out(cache: EngineCache, made: Tensor, mask: Tensor | None, dtype: torch.dtype) -> None:
    """Tell layers the rule of a mask."""
    layers, (rows, n) = indexes(cache), made.shape[:2]
    total, start = cache.get_mask_sizes(n, layers[0].layer)
    rule = LazyMask({
        "batch_size": rows, "q_length": n, "kv_length": total, "q_offset": total - n, "kv_offset": start, "dtype": dtype,
        "mask_function": causal_mask_function, "attention_mask": mask, "allow_is_causal_skip": False, "device": made.device,
    })  # fmt: skip
    for layer in layers:
        layer.told = Told(rule)


def of(cache: Any, module: Any) -> IndexedLayer | None:
    """The layer of an engine cache that is a module's."""
    found = cache.layers[module.layer_idx] if isinstance(cache, EngineCache) else None
    return found if isinstance(found, IndexedLayer) else None


def hand_on(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A layer is to read what an earlier one has named."""
    if (layer := of(cache_among(kwargs), module)) is not None:
        layer.told.named = kwargs[HANDED]


def ask(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """An index is asked: it is told how many tokens there are, and which of the new ones are none."""
    if (layer := of(cache := cache_among(kwargs), module)) is None:
        return None
    real, session, aside = kwargs[MASK], layer.session, layer.session.aside
    n = real.shape[1]
    if (some := layer.told.mask.on(real.device).valid(n, session.generating)) is not None:
        real = real & some
    if n == 1 and session.generating and aside is not None and len(aside.rows) == len(real):
        # Padding for rows that have ended, whose states are put back.
        real = real & ~aside.rows[:, None].to(real.device)
    name = next(name for name in NAMES if kwargs.get(name) is not None)
    return args, kwargs | {name: Counted(cache, layer, layer.cache.seen + n), MASK: real}


def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
    """It has named what is read."""
    asked = cache_among(kwargs)
    if isinstance(asked, Counted):
        asked.layer.told.named = output


__all__ = ["PACKED", "hook_groups", "hook_packed"]
