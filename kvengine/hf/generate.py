"""What `generate` asks of a patched model, and what a decoder of ours is told of its arguments."""

from __future__ import annotations

import copy
import inspect
import re
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib import metadata
from typing import Any, cast

import transformers
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from kvengine.errors import ModelError
from kvengine.hf import parts
from kvengine.hf.cache import STATE, EngineCache
from kvengine.hf.drafts import unpatch_drafter
from kvengine.hf.ended import Ends
from kvengine.hf.forward import PREPARED, refuse_batching, refuse_static
from kvengine.hf.names import CACHE, NAMES, renamed
from kvengine.hf.outgrown import PREPARING, in_chunks, prepare_inputs
from kvengine.hf.rope_deltas import SAID, note, positions
from kvengine.hf.states import Aside, has_states
from kvengine.stack import Stack

CHUNKS = 5, 21  # the first transformers whose chunked reading begins behind what is cached
OLD_PEFT = 0, 21, 2  # the last that knows a cache by its older name only
OWN = "{} makes caches in a way of its own, and the engine has no place there; call kvengine.unpatch(model)"
PLAIN = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
BEGUN: ContextVar[tuple[weakref.ref[EngineCache], bool] | None] = ContextVar("begun", default=None)
"""The engine's cache that `generate` has prepared last, and whether others may go on with it."""


class Decoder:
    """What `custom_generate` of a patched model takes, and hears of every argument: transformers would keep some."""


class Method:
    """A method that stands in for a model's own, and goes where the model is copied or pickled.

    It does not keep the model alive, which carries it: a circle would leave the weights to the garbage collector.
    """

    def __init__(self, name: str, model: PreTrainedModel | None) -> None:
        self.name, self.model = name, (lambda: None) if model is None else weakref.ref(model)
        if model is not None:  # transformers looks up which arguments it may pass
            self.__signature__ = inspect.signature(getattr(type(model), name).__get__(model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model()
        if model is not None and not hasattr(model, STATE):  # another thread has unpatched it since it was looked up
            return getattr(type(model), self.name)(model, *args, **kwargs)
        return METHODS[self.name](model, *args, **kwargs)

    def __reduce__(self) -> Any:
        return Method, (self.name, self.model())

    @property
    def __func__(self) -> Any:
        """The model's own: some models lend it to others."""
        return getattr(type(self.model()), self.name)


def prepare_cache(
    self: PreTrainedModel,
    generation_config: Any,
    model_kwargs: dict[str, Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Stands in for `_prepare_cache_for_generation`."""
    refuse(generation_config)
    if model_kwargs is None:
        raise ModelError(OWN.format(type(self).__name__))
    check_tuner(self, model_kwargs.get(CACHE))
    BEGUN.set(None)
    stock: Any = type(self)._prepare_cache_for_generation  # type: ignore[attr-defined]
    given = model_kwargs.get(CACHE)
    if getattr(given, "is_compileable", False):
        raise ModelError(
            f"{type(given).__name__} on a patched model: generate() would make its masks ahead, which the engine's attention "
            "does not take. Leave the cache out, or call kvengine.unpatch(model)"
        )
    stock(self, generation_config, model_kwargs, *args, **kwargs)
    if generation_config.use_cache is False and isinstance(given, EngineCache):
        raise ModelError(
            "generate() was given an engine cache, but use_cache is False: it would give the whole text again at every token, "
            "and the cache would hold it as often. Pass use_cache=True"
        )
    if generation_config.use_cache is False or (given is not None and not isinstance(given, EngineCache)):
        return
    if given is None:
        if type(model_kwargs.get(CACHE)) is not DynamicCache:
            raise ModelError(OWN.format(type(self).__name__))
        given = model_kwargs[CACHE] = EngineCache(self)
        given.nameless = True
    assisted = GenerationMode.ASSISTED_GENERATION in (*args, *kwargs.values())
    if generation_config.is_assistant:
        given.activate_past_recording()
    elif given.seen and assisted:
        raise ModelError(
            f"transformers begins assisted decoding and prompt look-up by reading the whole text, but this cache has seen "
            f"{given.seen} tokens of it and would hold them twice. Leave assistant_model, prompt_lookup_num_tokens and use_mtp "
            "out of turns after the first, or call cache.reset()"
        )
    note(given, generation_config)
    total, drafting = prompt_length(generation_config, model_kwargs), bool(generation_config.is_assistant)
    parts.announce(given, getattr(self, STATE).judge_every, total, drafting, assisted)
    vars(given.session).update(options=weakref.ref(generation_config), lent=assisted and not given.session.recording)
    BEGUN.set((weakref.ref(given), not given.nameless or generation_config.return_dict_in_generate))


def criteria(self: PreTrainedModel, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `_get_stopping_criteria`: a cache that is gone on with is told which rows have ended."""
    stock: Any = type(self)._get_stopping_criteria  # type: ignore[attr-defined]
    found, (begun, lasts) = stock(self, generation_config, *args, **kwargs), BEGUN.get() or (None, False)
    cache = None if begun is None else begun()
    plain = generation_config.get_generation_mode() in PLAIN
    if cache is None or cache.session.options is None or cache.session.options() is not generation_config or not plain:
        return found
    # Without a token that ends texts, rows that have ended go on with what they say.
    lasts, session = lasts and any(hasattr(x, "eos_token_id") for x in found), cache.session
    states = [layer for layer in cache.layers if has_states(layer)] if lasts else []
    session.aside = Aside(states, cache.config) if states else None
    pauses = lasts and cache.stack != Stack()
    return Ends(found, session, pauses) if pauses or states or session.heeded else found


@contextmanager
def decoding(self: PreTrainedModel) -> Iterator[None]:
    """Stands in for `_optimize_model_for_decode`, which `generate` leaves when it has ended, or was interrupted.

    The settings, by whose life a cache knows that it runs, outlive it where an error has stopped it: Python keeps the last
    one's traceback, and notebooks do.
    """
    begun, _ = BEGUN.get() or (None, False)
    stock: Any = type(self)._optimize_model_for_decode  # type: ignore[attr-defined]
    try:
        with stock(self):
            yield
    finally:
        if begun is not None and (cache := begun()) is not None:
            cache.session.options = None
            if cache.session.aside is not None:
                cache.session.aside.put_back()
            cache.session.aside = None


def refuse(generation_config: Any) -> None:
    if generation_config.cache_implementation is not None:
        raise ModelError(
            f"cache_implementation={generation_config.cache_implementation!r} on a patched model: the engine brings its "
            "own cache. Drop it, or call kvengine.unpatch(model)"
        )
    if getattr(generation_config, "output_attentions", False):
        raise ModelError(
            "output_attentions=True on a patched model: the engine never forms the attention matrix. "
            "Call kvengine.unpatch(model)"
        )


def check_tuner(model: PreTrainedModel, cache: Any) -> None:
    """Refuse tuned prompts and prefixes in later turns, of which PEFT reads the last token alone; and where it looks for the
    cache by its older name: it puts them in at every token."""
    tuned = getattr(getattr(model.prepare_inputs_for_generation, "__self__", None), "active_peft_config", None)
    if not getattr(tuned, "is_prompt_learning", False):
        return
    if isinstance(cache, EngineCache) and cache.seen:
        raise ModelError(
            f"PEFT puts what it has tuned before a text's first turn, and does not count it. This cache has seen {cache.seen} "
            "tokens: of a later turn the last token alone would be read. Give the whole text with a new cache, or the turn's "
            "tokens in a loop of your own: peft_model.get_base_model()(ids, cache=cache)"
        )
    if CACHE == NAMES[1]:
        return
    version = metadata.version("peft")
    if tuple(map(int, re.findall(r"\d+", version)[:3])) <= OLD_PEFT:
        raise ModelError(
            f"PEFT {version} does not find the cache of transformers {transformers.__version__}, which has renamed it, and would "
            "put what it has tuned before every token, on a patched model or not. Use a PEFT that knows the new name, or "
            "transformers < 5.24"
        )


def prompt_length(generation_config: Any, model_kwargs: dict[str, Any]) -> int | None:
    """Length of the whole sequence given to `generate`, what is cached already included."""
    mask = model_kwargs.get("attention_mask")
    if mask is not None:
        return int(mask.shape[-1])
    known = getattr(generation_config, "_mask_length", None)
    return None if known is None else int(known)


def prefill(
    self: PreTrainedModel,
    input_ids: Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kw: Any,
) -> Any:
    """Stands in for `_prefill`, and says meanwhile which cache was prepared."""
    cache, total = model_kwargs.get(CACHE), prompt_length(generation_config, model_kwargs)
    token = PREPARED.set(cache if isinstance(cache, EngineCache) else None)
    whole, given = partial(read, self), (input_ids, generation_config, model_kwargs, *args)
    try:
        return parts.read(whole, self, getattr(self, STATE).judge_every, total, *given, **kw)
    except BaseException:  # Control-C too
        if isinstance(cache, EngineCache) and cache.session.turn == cache.seen and not cache.half_read:
            cache.session.prompt_end = None  # nothing of it was read, and what comes next is not its beginning
        raise
    finally:
        PREPARED.reset(token)


def read(
    self: PreTrainedModel,
    input_ids: Tensor,
    generation_config: Any,
    model_kwargs: dict[str, Any],
    *args: Any,
    **kw: Any,
) -> Any:
    """`_prefill`: earlier versions read a later turn's text from its first token on, if in chunks."""
    stock: Any = type(self)._prefill  # type: ignore[attr-defined]
    total = prompt_length(generation_config, model_kwargs)
    generation_config = in_chunks(self, generation_config, model_kwargs.get(CACHE), total)
    cache, size = model_kwargs.get(CACHE), generation_config.prefill_chunk_size
    seen = cache.seen if isinstance(cache, EngineCache) else 0
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if size is None or not seen or total is None or version >= CHUNKS:
        return stock(self, input_ids, generation_config, model_kwargs, *args, **kw)
    whole = copy.copy(generation_config)
    whole.prefill_chunk_size = None
    for piece in input_ids[:, seen - total :].split(size, 1):
        seen += piece.shape[1]
        found = stock(self, piece, whole, model_kwargs | parts.so_far(model_kwargs, seen), is_first_iteration=False)
    return found


def drafter(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `_get_candidate_generator`."""
    found: Any = type(self)._get_candidate_generator(self, *args, **kwargs)  # type: ignore[attr-defined]
    unpatch_drafter(found, self, getattr(self, STATE).implementation)
    cache = (kwargs.get("model_kwargs") or {}).get(CACHE)
    if isinstance(cache, EngineCache):
        found.get_candidates = partial(candidates, cache, weakref.ref(found))  # no circle: it holds a cache of its own
    return found


def candidates(cache: EngineCache, drafter: Callable[[], Any], text: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What follows a text as transformers' drafter has it; until that is judged, the cache is to hold more than the text."""
    layers = cache.config.num_hidden_layers
    try:
        found = type(drafter()).get_candidates(drafter(), text, *args, **kwargs)
    finally:
        if cache.config.num_hidden_layers != layers:  # an early exit takes them away, and an error would leave it so
            cache.config.num_hidden_layers = layers
    cache.session.judging = cache.seen if found[0].shape[1] > text.shape[1] else None
    return found


def mode_options(
    self: PreTrainedModel, custom_generate: Any, kwargs: dict[str, Any], synced: Any, assistant: Any, streamer: Any
) -> dict[str, Any]:
    """Stands in for `_extract_generation_mode_kwargs`, which drops what a callable might have to know."""
    tokenizer = kwargs.get("tokenizer")
    stock: Any = type(self)._extract_generation_mode_kwargs  # type: ignore[attr-defined]
    found: dict[str, Any] = stock(self, custom_generate, kwargs, synced, assistant, streamer)
    if isinstance(custom_generate.func if isinstance(custom_generate, partial) else custom_generate, Decoder):
        more = {"tokenizer": tokenizer, "synced_gpus": synced, "assistant_model": assistant, "streamer": streamer}
        found |= {name: value for name, value in more.items() if value is not None}
    return found


def check_mode(what: str, config: Any, assistant: Any) -> None:
    """Refuse ways of decoding that a decoder of ours would pass over in silence."""
    mode = config.get_generation_mode(assistant)
    if mode not in PLAIN:
        raise ModelError(
            f"{what} does greedy decoding and sampling, no beams and no drafts of transformers'; these arguments ask for "
            f"{mode.value.replace('_', ' ')}. Leave them out, or custom_generate (or what kvengine.patch was told: record)"
        )


def chosen_options(self: PreTrainedModel, generation_config: Any = None, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
    """Stands in for `_prepare_generation_config`: who has not asked for a policy to do nothing is told that it would."""
    stock: Any = type(self)._prepare_generation_config  # type: ignore[attr-defined]
    stack, own = getattr(self, STATE).chosen.stack, cast(Any, self).generation_config
    SAID.set(None)  # of a call that broke off
    options, rest = stock(self, generation_config, **renamed(kwargs, CACHE))
    given = None if generation_config is own else getattr(generation_config, "use_cache", None)
    if options.use_cache is False and given is None and "use_cache" not in kwargs and stack != Stack():
        raise ModelError(
            f"the generation_config of this {type(self).__name__} says use_cache=False, so generate() would cache nothing and "
            f"'{stack}' would do nothing. Pass use_cache=True, or set model.generation_config.use_cache = True; to generate "
            "without a cache, pass use_cache=False"
        )
    return options, rest


def generate(self: PreTrainedModel | None, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `generate` of a model that was patched with `record`."""
    from kvengine.hf.compiled import compile_decode  # which needs what is here

    if self is None:
        raise ModelError("the model whose generate() this is, is gone: keep it in a variable, and call it there")
    state = getattr(self, STATE)
    record = state.record
    if kwargs.get("custom_generate") is None and (record is not True or self.device.type == "cuda"):
        kwargs["custom_generate"] = compile_decode(self, None if record is True else record, state.fuse)
    return cast(Any, type(self)).generate(self, *args, **kwargs)


RECORDING = "generate"
METHODS: dict[str, Callable[..., Any]] = {
    RECORDING: generate,
    "_extract_generation_mode_kwargs": mode_options,
    "_prefill": prefill,
    "_optimize_model_for_decode": decoding,
    PREPARING: prepare_inputs,
    "_prepare_generation_config": chosen_options,
    "_prepare_position_ids_for_generation": positions,
    "_prepare_cache_for_generation": prepare_cache,
    "_get_stopping_criteria": criteria,
    "_get_candidate_generator": drafter,
    "_prepare_static_cache": refuse_static,
    "generate_batch": refuse_batching,
    "init_continuous_batching": refuse_batching,
    "continuous_batching_context_manager": refuse_batching,
}
