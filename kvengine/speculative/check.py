"""Refusals before anything is computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import index
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvengine import latent
from kvengine.errors import ModelError, PolicyError, UnsupportedPolicy, unknown
from kvengine.hf.cache import EngineCache
from kvengine.hf.enterable import check_model
from kvengine.hf.generate import check_mode
from kvengine.hf.names import NAMES, cache_among
from kvengine.hf.recordable import knows_places
from kvengine.hf.states import FORGETFUL, beyond_tokens, keeps_states
from kvengine.policies.routing.uniform import Uniform
from kvengine.readers import sources
from kvengine.speculative.law import REMEMBERING
from kvengine.speculative.places import why_not
from kvengine.stack import Stack

DRAFTS = ("lookup", "recycling")
LOOKED_AT = ("attention_mask", "position_ids", *NAMES, "use_cache", "assistant_model", "tokenizer")
HARMLESS = ("logits_to_keep", "output_hidden_states")  # no argument of these changes what `generate` returns here
MOST = 17  # tokens that "auto" drafts at the most, and one

Gamma = tuple[int, int] | Literal["auto"]


def check_prompt(ids: Any, options: Mapping[str, Any]) -> Tensor:
    """The prompts, if they are tokens."""
    if options.get("inputs_embeds") is not None:
        raise ModelError("drafts are judged as tokens, and inputs_embeds are none; give the prompt as input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not len(ids):
        what = f"a tensor of {ids.dtype} {list(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ModelError(
            "input_ids are a tensor of token ids [row, token], as of tokenizer(text, return_tensors='pt').input_ids, "
            f"not {what}"
        )
    return ids


def check_arguments(config: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse every argument of `generate` that would make no difference here, though it does elsewhere."""
    what, given = "speculative decoding", {name: value for name, value in kwargs.items() if not missing(value)}
    check_mode(what, config, given.get("assistant_model"))
    if config.return_dict_in_generate:
        raise ModelError(f"{what} returns tokens and nothing else: no return_dict_in_generate")
    if config.use_cache is False:
        raise ModelError(f"{what} is done on caches; leave use_cache=False out")
    if config.prefill_chunk_size is not None:
        raise ModelError(f"{what} reads a prompt in one pass; leave prefill_chunk_size out")
    if given.pop("synced_gpus", False):
        raise ModelError(f"{what} takes as many passes as its drafts need, and synced_gpus must not differ among ranks")
    cache = cache_among(given)
    if cache is not None and not (isinstance(cache, EngineCache) and cache.nameless):
        raise ModelError(f"{what} makes caches of its own from the whole prompt; leave out the one that is given")
    if more := sorted(given.keys() - {*LOOKED_AT, *HARMLESS}):
        raise ModelError(f"{what} reads tokens and nothing else, and {more[0]!r} would be passed over; leave it out")


def missing(value: Any) -> bool:
    """Whether an argument says nothing, as that of a prompt without images that `generate` gives to models that see."""
    return value is None or (isinstance(value, dict) and not value)


def check_places_given(position: Tensor | None, ids: Tensor, mask: Tensor | None) -> None:
    """Refuse a mask of another shape than the prompts, and positions that are not counted from a row's first token."""
    if mask is not None and mask.shape != ids.shape:
        raise ModelError(
            f"attention_mask is {list(mask.shape)} and input_ids are {list(ids.shape)}; they belong together"
        )
    if position is None:
        return
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    usual = real.long().cumsum(-1) - 1
    fits = position.shape[-1] == ids.shape[-1] and (position.ndim < 2 or position.shape[-2] in (1, len(ids)))
    if not fits or bool(((position != usual) & real).any()):
        raise ModelError(
            "the tokens of a draft are placed by counting, so position_ids must be 0, 1, 2, ... from each row's first token; "
            f"leave them out, and any attention_mask that is not of the prompts' shape {list(ids.shape)}"
        )


def check_stop(strings: Any, tokenizer: Any) -> None:
    if tokenizer is None:
        raise ModelError(f"stop_strings={strings!r} are looked for in text: give the tokenizer too, tokenizer=...")


def check_seed(seed: Any) -> int:
    try:
        return index(seed)
    except TypeError as error:
        raise PolicyError(f"seed={seed!r} is not a whole number") from error


def check_processors(processors: Iterable[Any]) -> None:
    """Refuse those that a draft would mislead."""
    for processor in processors:
        if type(processor).__name__ in REMEMBERING:
            raise ModelError(
                f"{type(processor).__name__} remembers earlier calls, each one token further than the last: a draft that "
                "is taken back would mislead it. Generate without drafts, or leave guidance_scale and SynthID out"
            )


def check_gamma(gamma: Gamma) -> None:
    if gamma == "auto":
        return
    if not isinstance(gamma, tuple) or len(gamma) != 2 or any(not isinstance(g, int) or g < 1 for g in gamma):
        raise PolicyError(
            "gamma is 'auto' or two counts of at least 1 (drafted for the middle, drafted for the target), "
            f"not {gamma!r}"
        )


def drawn_trees(draft: Any, widths: tuple[int, ...] | None) -> list[str]:
    """The arguments that ask for drafts which are trees."""
    return [x for x, drawn in (("draft='recycling'", draft == "recycling"), ("widths", widths)) if drawn]


def check_nodes(model: Any, draft: Any, widths: tuple[int, ...] | None, middle: Stack | None, stack: Stack) -> None:
    """Refuse trees for a target whose stack acts on each token that it takes: their nodes look, and take nothing."""
    trees, layers = drawn_trees(draft, widths), model.config.get_text_config(decoder=True).num_hidden_layers
    if trees and middle is None and not only_adds(stack, layers):
        raise UnsupportedPolicy(
            f"{trees[0]} drafts trees, whose nodes only look at what the target holds, but '{stack}' drops, seals or selects "
            "with each token that it takes, so the text would not have its law. Use draft='lookup', a draft model without "
            "widths, or a middle, which drafts chains"
        )


def only_adds(stack: Stack, layers: int) -> bool:
    """Whether a decoded token is added to what is held, and reads all of it, and that is all that happens, in all layers."""
    form, judges = stack.representation, any(stack.retention.at(layer, layers).decodes for layer in range(layers))
    return not (judges or stack.selects) and isinstance(stack.routing, Uniform) and (form.lossless or form.joint)


def check_models(target: Any, draft: Any, tokenizers: tuple[Any, Any] | None, widths: tuple[int, ...] | None) -> None:
    """Refuse models that the tiers cannot be built of, before anything is computed."""
    check_model(target)
    if (kind := target.config.get_text_config(decoder=True).model_type) in FORGETFUL:
        raise ModelError(
            f"a pass of {kind} over several tokens behind others begins with empty states in transformers, so no draft can be "
            "judged in one; generate without drafts"
        )
    if isinstance(draft, str) and draft not in DRAFTS:
        raise PolicyError(unknown("draft", draft, DRAFTS))
    if widths is not None and not isinstance(draft, torch.nn.Module):
        raise PolicyError(
            f"widths={widths} are of the tree that a small model drafts, and draft={draft!r} is none; leave them out"
        )
    trees = drawn_trees(draft, widths)
    for model in (target, draft) if trees else ():
        if isinstance(model, PreTrainedModel) and beyond_tokens(model.config.get_text_config(decoder=True)):
            raise ModelError(
                f"{trees[0]} drafts trees, but {type(model).__name__} has layers with a sliding window or states, "
                "or an index of its own, which know no branches. Use draft='lookup', or a draft model without widths"
            )
        if isinstance(model, PreTrainedModel) and not knows_places(model):
            raise ModelError(
                f"{trees[0]} drafts trees, but {type(model).__name__} counts by itself where its tokens stand, one behind the "
                "other, so that branches would stand behind each other. Use draft='lookup', or a draft model without widths"
            )
    if isinstance(draft, torch.nn.Module):
        check_model(draft)
        check_tokenizers(target, draft, tokenizers)
    elif draft is not None and not isinstance(draft, str):
        raise ModelError(f"a draft is a model, one of {', '.join(DRAFTS)}, or None, not {type(draft).__name__}")


def check_tokenizers(target: Any, draft: Any, tokenizers: tuple[Any, Any] | None) -> None:
    sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (target, draft)]
    if sizes[0] != sizes[1]:
        raise ModelError(
            f"the draft has another tokenizer: its vocabulary has {sizes[1]} entries, the target's {sizes[0]}. A draft "
            "must speak the target's tokens; use draft='lookup', which needs no model"
        )
    if tokenizers is not None and tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
        raise ModelError("the draft has another tokenizer: the same ids stand for other tokens. Use draft='lookup'")


def check_room(name: str, stack: Stack, gamma: Gamma) -> None:
    """A cheap cache must hold the tokens drafted on it."""
    ahead = MOST if gamma == "auto" else sum(gamma) + 1
    budget = room(stack)
    if budget is not None and budget <= ahead:
        raise PolicyError(
            f"{name}='{stack}' holds {budget} tokens, and gamma={gamma} drafts up to {ahead} on it: the draft would "
            "push out what it is to be read with. Give it a larger budget, or a smaller gamma"
        )


def check_no_middle(in_place: bool, refresh: Any) -> None:
    """Refuse what says how a middle reads, where there is none."""
    for name, value in (("in_place", in_place), ("refresh", refresh)):
        if value:
            raise PolicyError(
                f"{name}={value} says how a middle reads, and middle=None; leave it out, or give a middle"
            )


def has_latents(model: Any) -> bool:
    """Whether its heads share latents (MLA): what a cache of everything holds then has no values beside its keys."""
    return latent.configured(model.config.get_text_config(decoder=True))


def is_read_again(model: Any) -> bool:
    """Whether it has layers that read an earlier one's keys and values, which a view gives to that one alone."""
    return bool(sources(model.config.get_text_config(decoder=True)))


def check_places(middle: Stack, stack: Stack, model: Any, in_place: bool) -> None:
    reason = None
    if middle == Stack() and has_latents(model):
        raise UnsupportedPolicy(
            "a middle that is 'full' drafts at the target's price, and of latents (MLA) it would hold no values: use a policy "
            "that reads less, or middle=None"
        )
    if in_place and has_latents(model):
        reason = "its rows are latents (MLA), without values"
    elif in_place and keeps_states(model.config.get_text_config(decoder=True)):
        reason = "layers of the model have states, which hold no tokens to be read"
    elif in_place and is_read_again(model):
        reason = "later layers of the model read them too"
    elif in_place:
        reason = why_not(middle, stack, model.config.get_text_config(decoder=True).num_hidden_layers)
    if reason is not None:
        raise UnsupportedPolicy(f"'{middle}' cannot read the target's tokens in place: {reason}. Leave in_place out")


def room(stack: Stack) -> int | None:
    """Tokens that a query reads at the most, as far as the stack's options say so without a prompt."""
    chosen = stack.selection if stack.selects else stack.retention
    options = vars(chosen)
    parts = [options.get("budget", options.get("recent")), options.get("sinks", 0)]
    return sum(parts) if all(isinstance(part, int) for part in parts) else None
