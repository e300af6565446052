"""Patching a Hugging Face model.

The engine enters a model at three seams, and replaces none of its code:

    cache       `generate` asks the model for a cache, or a forward pass wants one: it gets an `EngineCache`
    mask        a registered mask function returns the mask's *rule* instead of a tensor (`LazyMask`)
    attention   a registered attention function hands queries, keys and values to the layer of the cache in use

A hook on each attention module tells the attention function which cache that is, call by call. So the model carries
no state of a session, and any number of caches, of any stacks, may take turns on it. Without an engine cache (training,
gradients, `use_cache=False`, a stock cache) the model runs as it did before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, GenerationMixin, PreTrainedModel

from kvengine.errors import ModelError
from kvengine.hf.attention import Seam, engine_attention
from kvengine.hf.cache import NAME, STATE, Chosen, EngineCache
from kvengine.hf.compiled import compile_decode
from kvengine.hf.devices import device_of, wraps
from kvengine.hf.enterable import attention_modules, check_attention, check_layers, check_model, check_numbers
from kvengine.hf.fitting import check_stack
from kvengine.hf.forgetful import hook_forgetful
from kvengine.hf.forward import hook_passes, hook_vectors
from kvengine.hf.generate import METHODS, RECORDING, Method
from kvengine.hf.interrupted import hook_led
from kvengine.hf.mask import LazyMask
from kvengine.hf.names import CACHE
from kvengine.hf.outgrown import PREPARING
from kvengine.hf.packed_index import hook_groups, hook_packed
from kvengine.hf.parts import check_size
from kvengine.hf.parts import check_stack as check_parts
from kvengine.hf.ragged import hook_ragged
from kvengine.hf.replay import hook_replays
from kvengine.hf.rope import rope_for
from kvengine.hf.rope_deltas import hook_shifts
from kvengine.hf.shown import ShownMask, mask_of
from kvengine.hf.shown_places import hook_places
from kvengine.hf.steps import How
from kvengine.hf.trial import check_modules
from kvengine.stack import Stack

Record = bool | How


class Patch:
    """What was done to a model."""

    record: Record = False
    fuse: bool = False
    judge_every: int | None = None

    def __init__(self, chosen: Chosen) -> None:
        self.chosen = chosen
        self.hooks: list[Any] = []
        self.implementation: str | None = None
        self.methods: list[Method] = []

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        register()  # the process in which a model is unpickled may not have patched one before


def register() -> None:
    """Make the engine's attention and mask known to transformers."""
    AttentionInterface.register(NAME, engine_attention)
    AttentionMaskInterface.register(NAME, lazy_mask)


def patch(
    model: PreTrainedModel,
    policy: str | Stack = "full",
    record: Record = False,
    fuse: bool = False,
    judge_every: int | None = None,
) -> PreTrainedModel:
    """Give a model the engine's cache; `model.generate()` then works as always, and so does a loop of one's own.

    `torch.compile` works too, but for `fullgraph=True`: caches do their work between the graphs.

    Args:
        model: any decoder model of transformers that can switch its attention implementation. The one whose `generate` is
            called: of a part that was patched alone, the whole does not know, and makes a cache of transformers'.
        policy: a policy string or a `Stack`. Patching a patched model only changes its policy and what follows.
        record: whether `generate` records a decode step and replays it for every token, where the model is on a GPU: without,
            a step there takes as long as Python does. It then takes greedy decoding and sampling alone. Recording takes some
            steps' time for each call. See `kvengine.compile_decode`, whose `how` it may also be.
        fuse: whether what a recorded step does beside attention and products of matrices is fused by torch's compiler: less than
            half of the launches, for tens of seconds at the model's first token. See `kvengine.compile_decode`.
        judge_every: have `generate` read a prompt in parts of so many tokens, and judge each (evict, quantise, move away) before
            it reads the next, so that a cache never holds more than what was kept and one part. By default a prompt is judged
            at its end, as papers do, and what it leaves does not depend on chunks. In a loop of one's own, each pass of several
            tokens is a prompt by itself, unless `cache.announce` says otherwise.

    Returns:
        The same model.

    Raises:
        ModelError: the model is not one that the engine can work with, or shares its configuration with a patched one; or its
            `generate` is its own, which `record` does not reach; or `fuse` comes without `record`.
        PolicyError: the policy is wrong, or this model cannot do it; or its step cannot be recorded, or a prompt not be judged
            in parts.
    """
    check_model(model)  # before the policy: the two may have been swapped
    check_size(judge_every)
    check_parts(wanted := Stack.of(policy), judge_every)
    before: Patch | None = vars(model).get(STATE)
    stack = None if before is None else before.chosen.stack
    enter_model(model, wanted)
    try:
        record_by_itself(model, record, fuse)
    except Exception:
        if stack is not None and vars(model).get(STATE) is before:
            getattr(model, STATE).chosen.stack = stack
        else:
            unpatch(model)
        raise
    getattr(model, STATE).judge_every = judge_every
    return model


def record_by_itself(model: PreTrainedModel, record: Record, fuse: bool) -> None:
    """Have `generate` of what was patched record its steps, or no longer."""
    if fuse and not record:
        raise ModelError("fuse says how steps are recorded; give record=True as well")
    state: Patch = getattr(model, STATE)
    parts = [part for part in {id(x): x for x in (m.model() for m in state.methods)}.values() if part is not None]
    if record:
        compile_decode(model, None if record is True else record, fuse)
        parts = [part for part in parts if getattr(type(part), RECORDING, None) is GenerationMixin.generate]
        parts = [part for part in parts if isinstance(vars(part).get(RECORDING), Method | None)]  # no user's own
        if not parts:
            raise ModelError(
                f"{type(model).__name__} has a generate() of its own, so nothing would be recorded; leave out record"
            )
    state.record, state.fuse = record, fuse
    for method in [m for m in state.methods if m.name == RECORDING]:
        state.methods.remove(method)
        if (part := method.model()) is not None:
            vars(part).pop(RECORDING, None)
    for part in parts if record else ():
        state.methods.append(Method(RECORDING, part))
        setattr(part, RECORDING, state.methods[-1])


def enter_model(model: PreTrainedModel, stack: Stack) -> None:
    """Let the engine's attention in, under a stack."""
    text = model.config.get_text_config(decoder=True)
    modules = attention_modules(model, text)
    check_attention(model, text, modules)
    check_layers(model, text, modules)
    check_numbers(model, text, modules)
    state = getattr(model, STATE, None) or Patch(Chosen(stack))
    check_stack(stack, text, state.chosen.channels)
    if STATE not in vars(model) and text._attn_implementation == NAME:
        raise ModelError(
            f"this {type(model).__name__} has the configuration of a model that is patched, or a copy of it. Patch only one "
            "model of those that share a configuration; for a copy, call model.set_attn_implementation('sdpa') first"
        )
    rope_for(stack, model, state.chosen.known)
    if STATE in vars(model) and text._attn_implementation == NAME:
        state.chosen.stack = stack
        return
    unpatch(model)
    channels = check_modules(model, text, modules)
    check_stack(stack, text, channels)
    previous = text._attn_implementation
    state = Patch(Chosen(stack, state.chosen.known, channels=channels))
    state.implementation = text._attn_implementation_internal
    register()
    state.hooks = [m.register_forward_pre_hook(partial(enter, previous=previous), with_kwargs=True) for m in modules]
    state.hooks += hook_passes(model, text, state.chosen) + hook_places(model, text) + hook_groups(model, text)
    state.hooks += hook_forgetful(model, text) + hook_ragged(model, text)
    state.hooks += hook_replays(model, text) + hook_packed(model, text)
    state.hooks += hook_led(model, text) + hook_shifts(model, text)
    state.hooks += hook_vectors(parts := generating(model, text))
    for part in parts:
        for name in METHODS:
            if hasattr(part, name) and name != RECORDING and (name != PREPARING or prepares(part)):
                state.methods.append(Method(name, part))
                setattr(part, name, state.methods[-1])
        setattr(part, STATE, state)
    # Last, as a pass of another thread may be under way. Of this part alone: others (vision, a second decoder) have no hooks.
    text._attn_implementation_internal = NAME


def unpatch(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `patch`, exactly. A model that is not patched stays as it is.

    What `set_attn_implementation` has chosen since is kept. Raises ModelError for what is no model, or wraps a patched one.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"expected a transformers PreTrainedModel, got {type(model).__name__}")
    state = vars(model).get(STATE)
    if state is None:
        if hasattr(model, STATE):
            raise ModelError(f"{type(model).__name__} wraps a patched model; unpatch {wraps(model)}")
        return model
    for hook in state.hooks:
        hook.remove()
    for method in state.methods:
        if (part := method.model()) is not None:
            vars(part).pop(method.name, None)
            vars(part).pop(STATE, None)
    for name in METHODS:
        if isinstance(vars(model).get(name), Method):  # of a model whose shallow copy this is
            delattr(model, name)
    vars(model).pop(STATE, None)
    text = model.config.get_text_config(decoder=True)
    if text._attn_implementation == NAME:
        text._attn_implementation_internal = state.implementation
    return model


@contextmanager
def patched(
    model: PreTrainedModel,
    policy: str | Stack = "full",
    record: Record = False,
    fuse: bool = False,
    judge_every: int | None = None,
) -> Iterator[PreTrainedModel]:
    """`with patched(model, "quest(budget=1024)"): ...`: patched inside, as before outside."""
    state: Patch | None = getattr(model, STATE, None)
    before = None if state is None else (state.chosen.stack, state.record, state.fuse, state.judge_every)
    try:
        yield patch(model, policy, record, fuse, judge_every)
    finally:
        if before is None:
            unpatch(model)
        elif STATE not in vars(model):  # it was unpatched inside
            patch(model, *before)
        else:
            state = getattr(model, STATE)
            state.chosen.stack, state.judge_every = before[0], before[3]
            if (state.record, state.fuse) != before[1:3]:
                record_by_itself(model, *before[1:3])


def generating(model: PreTrainedModel, text: Any) -> list[PreTrainedModel]:
    """The model, and those in it that generate with the same text model, as some ask one inside them to (BLIP-2)."""
    able: list[Any] = [m for m in model.modules() if isinstance(m, GenerationMixin)]
    return [model, *(m for m in able if m is not model and m.config.get_text_config(decoder=True) is text)]


def prepares(part: PreTrainedModel) -> bool:
    """Whether it prepares its inputs itself, and PEFT does not at this moment."""
    own = getattr(type(part), PREPARING) is not getattr(GenerationMixin, PREPARING)
    return own and PREPARING not in vars(part)


def lazy_mask(**kwargs: Any) -> LazyMask:
    made = kwargs.get("attention_mask")
    return made if isinstance(made, LazyMask) else mask_of(kwargs)  # a model may have its text model ask again


def enter(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], previous: str
) -> tuple[Any, dict[str, Any]]:
    """Before an attention module runs: say which layer of which cache it is to use."""
    cache = kwargs.get(CACHE)
    if type(cache) is not EngineCache:  # some models call it otherwise
        cache = next((x for x in kwargs.values() if isinstance(x, EngineCache)), None)
    layer = None if cache is None else cache.layer_for(module)
    if type(mask := kwargs.get("attention_mask")) is ShownMask:  # which is no tensor, and nobody else brings it here
        kwargs["attention_mask"] = mask.on(device_of(module))
    kwargs["kvengine"] = Seam(layer, previous, None if cache is None or layer is not None else cache.beside(module))
    return args, kwargs


__all__ = ["patch", "patched", "unpatch"]
