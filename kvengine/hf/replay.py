"""Replays on a model: the part that has the layers reads the prompt once more, where a retention asks for it.

A hook before that part notes what each pass is made of; one behind it, with which the pass is over, runs the replay's passes
over the same cache. Their results are dropped, as are what transformers' own layers beside the engine's take from them.
"""

from __future__ import annotations

import inspect
from contextvars import Context
from functools import partial
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from kvengine.errors import ModelError, UnsupportedPolicy
from kvengine.hf import states
from kvengine.hf.cache import EngineCache
from kvengine.hf.forward import caching
from kvengine.hf.layer import BREAKS, EngineLayer
from kvengine.hf.mask import ATTENDS, LazyMask
from kvengine.hf.names import IDS, MASK, NAMES, PLACES, VECTORS, cache_given, name_of_cache, put_off, taken_up
from kvengine.replay import conclude
from kvengine.text import Fed

COUNTED = "cache_position"  # of every token, where transformers still says so
BESIDE = "ple_input_ids"  # the ids beside vectors, of whose n-grams Qwen 4 has vectors of their own
KNOWN = frozenset((IDS, VECTORS, MASK, PLACES, COUNTED, *NAMES))
REFUSED = "'{}' reads the prompt a second time, and cannot: {}"


def reader(model: PreTrainedModel, text: Any) -> tuple[PreTrainedModel, list[str]]:
    """The innermost part that runs all of the text's layers, and its arguments' names in order."""
    mine = {m for m in model.modules() if getattr(m, "config", None) is text and isinstance(
        getattr(m, "layer_idx", None), int)}  # fmt: skip
    found = [(part, names) for part, names in caching(model, text) if mine <= set(part.modules())]
    return found[-1] if found else (model, list(inspect.signature(type(model).forward).parameters)[1:])


def around_reader(model: PreTrainedModel, text: Any, before: Any, after: Any) -> list[Any]:
    """Hooks before and behind that part, which are told its arguments' names; what undoes them."""
    part, names = reader(model, text)
    return [
        part.register_forward_pre_hook(partial(before, names=names), with_kwargs=True),
        part.register_forward_hook(partial(after, names=names), with_kwargs=True),
    ]


def hook_replays(model: PreTrainedModel, text: Any) -> list[Any]:
    """Hooks on the part that reads; what undoes them."""
    return around_reader(model, text, before, after)


def replaying(cache: Any) -> EngineCache | None:
    """The cache of a pass, if its policy asks for replays and this is not one of those."""
    if not isinstance(cache, EngineCache) or cache.stack.retention.replay is None or cache.session.again is not None:
        return None
    return cache


def before(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Note what a pass is made of. Behind a prompt's end, what comes with it waits for a pass of its own."""
    cache = replaying(cache_given(args, kwargs, names))
    return None if cache is None else apart(cache, dict(zip(names, args, strict=False)) | kwargs)


def noted(cache: EngineCache, given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    more = [name for name, x in given.items() if name not in KNOWN and made_of_tensors(x)]
    if more:
        why = f"this model's text part is given {more[0]!r} beside its tokens, and what was in it for them is not known again"
        raise UnsupportedPolicy(REFUSED.format(cache.stack, f"{why}. Give it text alone, or choose another retention"))
    made = made_of(given)
    if made is None:
        return None  # the model says what is wrong
    begin, n = cache.seen, made.shape[1]
    layers, session = cache.engines, cache.session
    if layers and layers[0].fixed is not None:
        return None  # a recorded step: who runs it knows the tokens
    if layers and layers[0].parts and layers[0].sequences != len(made):
        return None  # another batch's pass, which the layers refuse: what was noted of theirs stays
    session.rest = None  # of a pass that broke off
    prompt = layers[0].prompt_tokens(n) if layers else n
    cut = None
    if 0 < prompt < n and session.tree is None:  # an assistant's or a look-up's first draft
        session.rest = put_off(parted(given, begin, prompt, n))
        cut = parted(given, begin, 0, prompt)
        made = made[:, :prompt]
    mask = padding(given.get(MASK))
    session.text.add(begin, made, (given if cut is None else cut).get(PLACES), mask)
    return None if cut is None else ((), cut)


apart: Any = torch.compiler.disable(noted, reason=BREAKS)


def made_of_tensors(x: Any) -> bool:
    return isinstance(x, Tensor) or (isinstance(x, list | tuple) and any(isinstance(y, Tensor) for y in x))


def padding(mask: Any) -> Tensor | None:
    """Which tokens so far are tokens, by what a model was given: a mask, the rule for one, or a rule for each kind of layer."""
    if isinstance(mask, dict):
        return next((found for x in mask.values() if (found := padding(x)) is not None), None)
    if isinstance(mask, LazyMask):
        return mask.padding
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def made_of(given: dict[str, Any]) -> Any:
    """What a pass is made of: ids, or vectors in their place. None if the model is given neither, which it says."""
    return given.get(VECTORS) if given.get(IDS) is None else given[IDS]


def parted(given: dict[str, Any], begin: int, first: int, end: int) -> dict[str, Any]:
    """A pass over some of the tokens that are given."""
    out, mask = dict(given), given.get(MASK)
    for name in (IDS, VECTORS, BESIDE):
        if given.get(name) is not None:
            out[name] = given[name][:, first:end]
    for name in (PLACES, COUNTED):
        if given.get(name) is not None:
            out[name] = given[name][..., first:end]
    if isinstance(mask, Tensor) and mask.ndim == 2:
        out[MASK] = mask[:, : begin + end]
    elif mask is not None:  # made before this part runs: behind a prompt comes text, of which the part makes its own
        out[MASK] = padding(mask) if first else first_of(mask, end)
    return out


def first_of(mask: Any, tokens: int) -> Any:
    """A rule, or one for each kind of layer, for the first of the tokens that it was made for."""
    if isinstance(mask, dict):
        return {kind: first_of(x, tokens) for kind, x in mask.items()}
    if not isinstance(mask, LazyMask):
        return mask
    rule = mask.kwargs
    fewer = {"q_length": tokens, "kv_length": rule["kv_length"] - rule["q_length"] + tokens}
    return type(mask)(rule | fewer)


def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, names: list[str]) -> Any:
    """The pass is over: see that the engine was asked, and replay the prompt that it ended."""
    its = cache_given(args, kwargs, names)
    if not torch.compiler.is_compiling():
        check_asked_of(module, its)
    cache = replaying(its)
    return None if cache is None or not (cache.session.due is not None or cache.session.rest) else over(
        module, cache, output, names)  # fmt: skip


def check_asked_of(module: Any, cache: Any) -> None:
    """Refuse layers that gave the engine keys and values and then attended by themselves: to a pass's own tokens alone."""
    layers: Any = cache.layers if isinstance(cache, EngineCache) else ()
    alone = [i for i, layer in enumerate(layers) if getattr(layer, "incoming", None) is not None]
    for i in alone:
        layers[i].incoming = None
    if alone:
        raise ModelError(ATTENDS.format(f"layer {', '.join(map(str, alone))} of this {type(module).__name__}"))


@torch.compiler.disable(reason=BREAKS)  # type: ignore[untyped-decorator]
def over(module: Any, cache: EngineCache, output: Any, names: list[str]) -> Any:
    rest, cache.session.rest = cache.session.rest, None
    complete(module, names, cache)
    if rest is None:
        return None
    if cache.session.judging is not None:
        cache.session.judging = cache.seen  # the draft comes now
    return followed(module, output, taken_up(rest))


def followed(module: Any, output: Any, rest: dict[str, Any]) -> Any:
    """What a model says of a pass's first tokens, with what it says of the rest, which it is given now."""
    return together(output, Context().run(partial(module, **rest)), len(made_of(rest)))


def together(first: Any, second: Any, rows: int) -> Any:
    """What a model says of tokens that came in two passes. Two axes: of the tokens of all rows, as routers of experts say it."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.ndim == 2:
            return torch.cat([x.unflatten(0, (rows, -1)) for x in (first, second)], 1).flatten(0, 1)
        return torch.cat([first, second], 1)
    if isinstance(first, dict):
        for name in list(first):
            first[name] = together(first[name], second[name], rows)
        return first
    if isinstance(first, tuple):
        return tuple(together(a, b, rows) for a, b in zip(first, second, strict=True))
    return second


def given(model: Any, cache: EngineCache, ids: Int[Tensor, "seq token"]) -> None:
    """A cache was given the keys and values of these tokens, its first, instead of reading them: what it asks for is done."""
    if cache.stack.retention.replay is None:
        return
    cache.session.text.add(0, ids, None, None)
    if cache.session.due is not None:
        complete(*reader(model, cache.config), cache)


def complete(part: Any, names: list[str], cache: EngineCache) -> None:
    """Run the replay that a cache waits for, if it does, and judge its layers."""
    session, layers, mask, unread = cache.session, cache.layers, cache.session.mask, cache.unread
    how, due = cache.stack.retention.replay, session.due
    if due is None or how is None:
        return
    embed = part.get_input_embeddings()
    cache.unread = None
    try:
        for fed in session.text.plan(how, due, embed):
            # transformers' own layers take what is fed, and states do, so it is copies that do
            cache.layers = [x if type(x) is EngineLayer else states.spare(x) for x in layers]
            session.again, run = fed.again, partial(part, **inputs(cache, fed, names))
            with torch.no_grad():
                Context().run(run)  # whoever listens to the pass outside hears nothing
    finally:
        cache.layers, session.again, session.mask, cache.unread = layers, None, mask, unread
    conclude(session)
    session.torn = False


def inputs(cache: EngineCache, fed: Fed, names: list[str]) -> dict[str, Any]:
    """The arguments of a pass of a replay."""
    given = {name_of_cache(names): cache, IDS if fed.made_of.ndim == 2 else VECTORS: fed.made_of}
    if PLACES in names:
        given[PLACES] = fed.position if len(fed.position) > 1 else fed.position[0]
    text = cache.session.text
    if text.mask is not None:  # of what is fed, padding comes last, where nobody looks
        given[MASK] = text.here(text.mask, 0, cache.seen + fed.made_of.shape[1]).to(fed.made_of.device).long()
    if "use_cache" in names:
        given["use_cache"] = True
    return given
