"""Forward passes that come without a cache: where a patched model would make one of transformers', it gets the engine's."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from kvengine.errors import ModelError
from kvengine.hf.cache import NAME, Chosen, EngineCache
from kvengine.hf.drafts import SHARED, check_shared, share
from kvengine.hf.layer import BREAKS, WEIGHTS, EngineLayer
from kvengine.hf.mask import LazyMask
from kvengine.hf.names import IDS, MASK, NAMES, OTHER, VECTORS, name_of_cache, own_name, renamed
from kvengine.hf.rewind import check_even, check_rows
from kvengine.stack import Stack

PREPARED: ContextVar[EngineCache | None] = ContextVar("prepared", default=None)
"""The cache that `generate` has just made, while it reads the prompt: PEFT puts one with a tuned prefix in its place."""
STOCK = "A pass without a cache makes the engine's cache under torch.no_grad(), or if it is given use_cache=True"
TUNED = (
    ". Outside of generate(), PEFT brings a tuned prefix in a cache of its own to every pass; to go on from one under the "
    "policy: cache = kvengine.EngineCache(base); cache.adopt(peft_model.get_prompt(rows)); base(ids, cache=cache), "
    "where base is peft_model.get_base_model() and an attention_mask covers the prefix"
)
log = logging.getLogger(__name__)
PAGED = (
    "continuous batching (generate_batch) keeps its own paged cache and has no place for another. Call "
    "model.generate() with a padded batch, or kvengine.unpatch(model) first"
)
LONE = 3
"""Passes in a row whose caches are dropped, until somebody is told that such passes say nothing of a policy."""
MATRICES = "output_attentions"
BESIDE = ("encoder_hidden_states", "encoder_outputs")
"""What layers attend to beside the text, and keep too: who gives these wants a cache of two."""
ASKED = ("use_cache", *BESIDE)
"""What decides beside a cache."""
TWO = (
    "{} is given {} beside its text, whose keys and values it caches too, and an engine cache has no place for them. Leave "
    "the cache to the model in a loop of your own, or call kvengine.unpatch(model)"
)


def refuse_batching(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
    """Stands in for continuous batching."""
    raise ModelError(PAGED)


def refuse_static(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
    """Stands in for `_prepare_static_cache`, which a `generate` of a model's own may call (Janus, for images)."""
    raise ModelError(
        f"{type(self).__name__} makes a cache of fixed size by itself here, whose masks the engine's attention does not take. "
        "Pass cache=kvengine.EngineCache(model), or call kvengine.unpatch(model)"
    )


def caching(model: PreTrainedModel, text: Any) -> list[tuple[PreTrainedModel, list[str]]]:
    """The parts that run the text's layers or make their cache, the model itself among them; their arguments' names in order."""
    parts: list[Any] = [
        m for m in model.modules() if isinstance(m, PreTrainedModel) and (m.config is text or makes(m, text))
    ]
    named = [(part, list(inspect.signature(type(part).forward).parameters)[1:]) for part in parts]
    return [(part, names) for part, names in named if set(NAMES) & set(names)]


def makes(part: PreTrainedModel, text: Any) -> bool:
    """Whether a part beside the text makes the cache that the text model is handed (Idefics 2 and 3, SmolVLM)."""
    run = inspect.unwrap(type(part).forward)
    known = DynamicCache.__name__ in getattr(getattr(run, "__code__", None), "co_names", ())
    return known and part.config.get_text_config(decoder=True) is text


def hook_passes(model: PreTrainedModel, text: Any, chosen: Chosen) -> list[Any]:
    """Hooks on the parts that take a cache; what undoes them."""
    parts, hooks = caching(model, text), []
    for part, names in parts:
        name = name_of_cache(names)
        at = {x: names.index(x) for x in (name, *ASKED, IDS, VECTORS, MASK) if x in names}
        hooks.append(part.register_forward_pre_hook(partial(before, chosen=chosen, at=at, name=name), with_kwargs=True))
        if hasattr(text, "num_kv_shared_layers"):
            hooks.append(part.register_forward_hook(share, with_kwargs=True))
    if model not in [part for part, _ in parts]:  # the whole, which hands it on
        hooks.append(model.register_forward_pre_hook(rename, with_kwargs=True))
    return hooks


def hook_vectors(parts: Iterable[nn.Module]) -> list[Any]:
    """Hooks on the parts that are called with a text, behind those that give them a cache; what undoes them."""
    return [part.register_forward_pre_hook(note_vectors, with_kwargs=True) for part in parts]


def note_vectors(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note of a cache that a pass brings numbers beside its mask: vectors, images or sounds in the place of tokens."""
    if any(name != "attention_mask" and has_numbers(x) for name, x in kwargs.items()):
        mark(next((x for x in (*kwargs.values(), *args) if isinstance(x, EngineCache)), None))


def has_numbers(x: Any) -> bool:
    return any(found.is_floating_point() for found in tensors_in(x))


def tensors_in(x: Any) -> Iterator[Tensor]:
    """A tensor, or those in lists and dictionaries of them."""
    if isinstance(x, Tensor):
        yield x
    for part in x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ():
        yield from tensors_in(part)


@torch.compiler.disable(reason=BREAKS)  # type: ignore[untyped-decorator]
def mark(cache: EngineCache | None) -> None:
    if cache is not None:
        cache.session.without_ids = True


def rename(
    module: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    name = own_name(module)
    return (args, renamed(kwargs, name)) if OTHER[name] in kwargs else None


def before(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], chosen: Chosen, at: dict[str, int], name: str
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Before a part runs: `provide`, and its cache by the name that it takes it by."""
    new = renamed(kwargs, name)
    found = provide(module, args, new, chosen, at, name) or ((args, new) if OTHER[name] in kwargs else None)
    check_asked(module, *(found or (args, kwargs)), at, name)
    check_first(*(found or (args, kwargs)), at, name)
    return found


def check_first(args: tuple[Any, ...], kwargs: dict[str, Any], at: dict[str, int], name: str) -> None:
    """Refuse a batch of other rows, and a mask that hides what a policy no longer knows apart, where a window or a state comes
    first: the engine's layers would be asked too late."""
    cache: Any = args[at[name]] if at[name] < len(args) else kwargs.get(name)
    if not isinstance(cache, EngineCache) or type(cache.layers[0]) is EngineLayer or torch.compiler.is_compiling():
        return
    given = {x: args[at[x]] for x in (IDS, VECTORS, MASK) if at.get(x, len(args)) < len(args)} | kwargs
    for made in (IDS, VECTORS):
        if isinstance(x := given.get(made), Tensor):
            check_rows(cache.layers, len(x))
            check_hidden(cache, given.get(MASK), *x.shape[:2])


def check_hidden(cache: EngineCache, mask: Any, rows: int, n: int) -> None:
    """Ask every layer of the engine what it is asked before it takes tokens (`LayerCache.hide`), and have nothing done."""
    if not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) != rows:  # drafts of a view have none
        return
    session, first = cache.session, next(iter(cache.engines), None)
    if first is None or not first.seen or first.fixed is not None or session.again is not None:
        return
    if session.ragged is not None:  # a later part of a pass, which was asked as a whole
        return
    rule = LazyMask({"attention_mask": mask, "batch_size": rows, "q_offset": first.seen, "q_length": n})
    was = session.mask
    hidden = rule.hidden(n, rule.turns(first, n))
    session.mask = was  # the pass is to find the same
    if hidden is not None:
        check_even(cache.layers)  # of those that a first pass did not reach nothing can be asked
        for layer in cache.engines:
            layer.gone(hidden.to(layer.parts[0].lane.first.device))


def check_asked(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], at: dict[str, int], name: str
) -> None:
    """Refuse a pass that is to give what the engine does not have: keys and values of all tokens, under a policy, or attention
    matrices, as some models do not tell their attention.

    A configuration that asks for them always is nobody's question to a text that `generate` makes.
    """
    asked = kwargs.get(MATRICES)
    weights = asked or (asked is None and getattr(module.config, MATRICES, False))
    if not weights and SHARED not in kwargs:
        return
    cache: Any = args[at[name]] if at[name] < len(args) else kwargs.get(name)
    check_shared(kwargs, cache)
    if weights and isinstance(cache, EngineCache) and (asked or not cache.session.generating):
        if any(isinstance(layer, EngineLayer) for layer in cache.layers):
            raise ModelError(WEIGHTS)


def provide(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], chosen: Chosen, at: dict[str, int], name: str
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give a part the engine's cache if it has none and wants one.

    Left alone are training, passes with gradients that do not ask for a cache in so many words, and a model whose attention
    is not the engine's any more.

    Raises:
        ModelError: it runs for a manager of continuous batches, made before the patch or without asking the model; or its
            layers would drop the cache that it was given, or keep in it what is not text.
    """
    if (cache := kwargs.get(name)) is not None:  # nearly always, so it comes first
        if type(cache) is DynamicCache:
            return stock(module, args, kwargs, cache, chosen, name)
        if isinstance(cache, PagedAttentionCache):
            raise ModelError(PAGED)
        if isinstance(getattr(cache, "self_attention_cache", cache), EngineCache):
            if beside := next((x for x in BESIDE if kwargs.get(x) is not None), None):
                raise ModelError(TWO.format(type(module).__name__, beside))
        if module.training and isinstance(cache, EngineCache):
            check_kept(module)
        if getattr(cache, "unread", None) is not None and cache.seen:
            cache.unread = None  # not its first pass
            chosen.lone = chosen.lone if chosen.lone >= LONE else 0
        return None
    given = {x: args[place] for x, place in at.items() if place < len(args)} | kwargs
    asked, config = given.get("use_cache"), cast(Any, module.config)
    wanted = getattr(config, "use_cache", False) and not torch.is_grad_enabled() if asked is None else asked
    if not wanted or module.training or given.get(name) is not None:
        return None
    text = config.get_text_config(decoder=True)
    if text._attn_implementation != NAME:
        return None
    if any(given.get(x) is not None for x in BESIDE):
        tell(
            chosen,
            "a pass that attends to an encoder's states is cached as in transformers",
            "Give the model text alone",
        )
        return None
    cache, place = made(text, chosen), at[name]
    if chosen.lone < LONE and chosen.stack != Stack() and not torch.compiler.is_compiling():
        cache.unread = partial(unread, chosen=chosen)
    if place < len(args):
        return (*args[:place], cache, *args[place + 1 :]), kwargs
    return args, kwargs | {name: cache}


def stock(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], cache: DynamicCache, chosen: Chosen, name: str
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A cache of transformers' was given: a prefix within `generate`, or the model is to run as it did before."""
    mine = PREPARED.get()
    if mine is not None and mine.config is cast(Any, module.config).get_text_config(decoder=True) and not mine.seen:
        mine.adopt(cache)
        return args, kwargs | {name: mine}
    # A loop that forgot to turn gradients off goes on without the policy.
    if not module.training and cache.get_seq_length():
        tell(
            chosen,
            "a patched model goes on from a cache of transformers'",
            STOCK + (TUNED if "peft" in sys.modules else ""),
        )
    return None


def tell(chosen: Chosen, why: str, hint: str) -> None:
    """Say, once for each reason, that the policy is not applied."""
    if chosen.stack != Stack() and why not in chosen.told:
        chosen.told.add(why)
        log.warning("%s, so '%s' is not applied. %s", why, chosen.stack, hint)


def check_kept(module: nn.Module) -> None:
    """Refuse layers that take a cache from their attention: each pass would see its own tokens, and nothing before."""
    config = cast(Any, module.config)
    if config.get_text_config(decoder=True) is not config:
        return  # the text model inside is asked too
    for part in module.modules():
        if (
            getattr(part, "gradient_checkpointing", False)
            and getattr(part, "_can_checkpoint_with_cache", None) is False
        ):
            raise ModelError(
                f"{type(part).__name__} recomputes its activations in training mode (gradient checkpointing) and drops the cache "
                "that it is given, so every pass would see its own tokens only. Call model.eval() to generate, or "
                "turn checkpointing off, or pass use_cache=False"
            )


def unread(cache: EngineCache, chosen: Chosen) -> None:
    """A cache that a pass was given has gone, and no other pass read it: the text was scored, most likely, and the policy not."""
    exact = all(layer.parts and layer.exact for layer in cache.engines)
    if not cache.seen or not exact or cache.session.torn:
        return
    chosen.lone += 1
    if chosen.lone == LONE:
        log.warning(
            "%d passes in a row read a text each, and nobody went on from their caches. A text that comes in one pass is read "
            "exactly, and a policy acts on what follows: these logits are the full cache's, '%s' has no part in them. To score "
            "continuations under it: kvengine.evals.likelihood.loglikelihoods, for lm-evaluation-harness see docs/evaluation.md. "
            "If no policy is to be measured, use_cache=False saves the work",
            LONE,
            chosen.stack,
        )


@torch.compiler.disable(reason=BREAKS)  # type: ignore[untyped-decorator]
def made(config: Any, chosen: Chosen) -> EngineCache:
    cache = EngineCache.under(chosen, config)
    cache.thaw()  # its first masks may be made before it is there to be asked
    return cache
