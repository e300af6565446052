"""Padding among the tokens of a later pass, where layers keep states: of a row that ended before others, or has less to say.

A state knows no mask. Behind other tokens, padding shifts a convolution's columns and lets a recurrent state fade, even where a
model feeds zeros for it. So a pass is read in parts, in each of which a row has padding alone or none, and after each the
states of the rows with padding are what they were. Before a row's first token there is nothing to shift or fade, unless it comes
by itself: of single tokens transformers takes none for padding.

What a part knows of the others is `Session.parts`. What none can know is that a row's token is its only one while others' come:
such a row is judged as at the end of a prompt, where alone it would be as behind a decoded token.
"""

from __future__ import annotations

from contextvars import Context
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvengine.errors import CacheError
from kvengine.hf_cache import EngineCache
from kvengine.hf_layer import BREAKS
from kvengine.hf_names import cache_given
from kvengine.hf_replay import IDS, MASK, VECTORS, around_reader, parted, together
from kvengine.hf_states import Aside, has_states, keeps_states
from kvengine.session import Parts

RECORDS = (
    "some rows have padding among these tokens, and a convolution that records its columns cannot leave it out for them alone. "
    "Call cache.deactivate_past_recording(), or give each row by itself"
)


def hook_ragged(model: PreTrainedModel, text: Any) -> list[Any]:
    """Hooks on the part that reads, if the model has states; what undoes them. They come before those of replays."""
    if not keeps_states(text):
        return []
    return around_reader(model, text, before, after)


def reading(args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> EngineCache | None:
    """The cache of a later pass that is no recorded step, or a replay's."""
    cache = cache_given(args, kwargs, names)
    if type(cache) is not EngineCache or cache.session.again is not None or cache.session.stepping:
        return None
    return cache


def before(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The first part of a pass, and what is to come behind it."""
    cache = reading(args, kwargs, names)
    if cache is None:
        return None
    return cut(cache, dict(zip(names, args, strict=False)) | kwargs)


@torch.compiler.disable(reason=BREAKS)  # type: ignore[untyped-decorator]
def cut(cache: EngineCache, given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    session, seen = cache.session, cache.seen
    start = session.ragged if isinstance(session.ragged, int) else seen  # else of a pass that broke off, or none
    session.ragged = session.parts = None
    made, mask = given.get(VECTORS) if given.get(IDS) is None else given[IDS], given.get(MASK)
    if made is None or not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    n = made.shape[1]
    if (n > 1 and not seen) or (n == 1 and session.generating):  # which adds ones to the mask
        return None
    real = mask[:, seen : seen + n].bool()
    if real.shape != made.shape[:2] or bool(real.all()):
        return None
    layers: list[Any] = [layer for layer in cache.layers if has_states(layer)]
    if any(layer.record_past for layer in layers):
        raise CacheError(RECORDS)
    aside = Aside(layers)
    aside.keep(~real[:, 0])
    changes = (real[:, 1:] != real[:, :-1]).any(0).nonzero()[:, 0]
    end = int(changes[0]) + 1 if len(changes) else n
    session.ragged = aside, parted(given, seen, end, n) if end < n else None, start
    session.parts = Parts(start, (~real[:, end:]).sum(1))
    if end == n:
        return None
    engines = cache.engines
    announced = session.prompt_end is not None and session.prompt_end > seen
    if not announced and engines and engines[0].prompt_tokens(n) == n:
        session.prompt_end = seen + n  # as one, whatever parts it comes in
    return (), parted(given, seen, 0, end)


def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, names: list[str]) -> Any:
    """A part has been read."""
    cache = reading(args, kwargs, names)
    return None if cache is None or cache.session.ragged is None else go_on(module, cache, output)


@torch.compiler.disable(reason=BREAKS)  # type: ignore[untyped-decorator]
def go_on(module: Any, cache: EngineCache, output: Any) -> Any:
    aside, rest, start = cache.session.ragged
    cache.session.ragged = cache.session.parts = None
    aside.put_back()
    if rest is None:
        return None
    cache.session.ragged = start
    return together(output, Context().run(partial(module, **rest)))
