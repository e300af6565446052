"""Padding among the tokens of a later pass, where layers keep states: of a row that ended before others, or has less to say.

A state knows no mask. Behind other tokens, padding shifts a convolution's columns and lets a recurrent state fade, even where a
model feeds zeros for it. So a pass is read in parts, in each of which a row has padding alone or none, and after each the
states of the rows with padding are what they were. Before a row's first token there is nothing to shift or fade, unless it comes
by itself: of single tokens transformers takes none for padding.

What a part knows of the others is `Session.parts`. A row that has one token while others have more goes on decoding, as it
would alone. So these tokens are taken first, in a pass of one token that is not counted, and are padding in the parts.
"""

from __future__ import annotations

from contextvars import Context
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel

from kvengine.errors import CacheError
from kvengine.hf.cache import EngineCache
from kvengine.hf.layer import BREAKS, EngineLayer
from kvengine.hf.names import IDS, MASK, PLACES, VECTORS, cache_given, put_off, taken_up
from kvengine.hf.replay import COUNTED, KNOWN, around_reader, followed, made_of, made_of_tensors, parted
from kvengine.hf.states import Aside, has_states, in_place, keeps_states
from kvengine.resuming import singles
from kvengine.session import BROKEN, Parts

RECORDS = (
    "some rows have padding among these tokens, and a convolution that records its columns cannot leave it out for them alone. "
    "Call cache.deactivate_past_recording(), or give each row by itself"
)


class Onward(NamedTuple):
    """What later parts of a pass are told."""

    start: int  # tokens seen before the pass
    single: Bool[Tensor, "seq"] | None  # `Session.parts.single`


class Part(NamedTuple):
    """What is to be done behind a part of a pass."""

    aside: Aside
    rest: dict[str, Any] | None  # what comes then
    onward: Onward
    at: Int[Tensor, "seq"] | None  # if the part was of single tokens, where they are among the others


def hook_ragged(model: PreTrainedModel, text: Any) -> list[Any]:
    """Hooks on the part that reads, if the model has states; what undoes them. They come before those of replays."""
    if not keeps_states(text):
        return []
    return around_reader(model, text, before, after)


def reading(args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> EngineCache | None:
    """The cache of a pass that is no replay's."""
    cache = cache_given(args, kwargs, names)
    return cache if isinstance(cache, EngineCache) and cache.session.again is None else None


def before(
    module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The first part of a pass, and what is to come behind it."""
    cache = reading(args, kwargs, names)
    if cache is None:
        return None
    return cut(cache, dict(zip(names, args, strict=False)) | kwargs, names)


@torch.compiler.disable(reason=BREAKS)  # type: ignore[untyped-decorator]
def cut(cache: EngineCache, given: dict[str, Any], names: list[str]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    session, seen, was = cache.session, cache.seen, cache.session.ragged
    if type(was) is Part and was.onward.single is not None:  # it broke off, and no layer has counted its first token
        raise CacheError(BROKEN)
    onward = was if type(was) is Onward else Onward(seen, None)
    session.ragged = session.parts = None
    made, mask = made_of(given), given.get(MASK)
    if made is None or not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    n, begins = made.shape[1], was is not onward
    announced = session.prompt_end is not None and session.prompt_end > seen
    decoded = n == 1 and begins and session.generating and not announced
    if (n > 1 and not seen) or decoded:  # to whose mask `generate` adds ones
        return None
    real = mask[:, seen : seen + n].bool()
    if real.shape != made.shape[:2] or (begins and bool(real.all())):
        return None
    layers: list[Any] = [layer for layer in cache.layers if has_states(layer)]
    if any(layer.record_past for layer in layers):
        raise CacheError(RECORDS)
    aside, engines = Aside(layers, cache.config), cache.engines
    if begins and (single := alone(cache, given, real)) is not None:
        if session.led == seen:
            raise CacheError(BROKEN)
        session.led = seen  # what is taken now counts with the others' first part: if that breaks off, it is noticed
        at = (real & single[:, None]).to(torch.int8).argmax(1)
        aside.keep(~single)
        session.prompt_end = seen + n
        session.ragged = Part(aside, put_off(given), Onward(seen, single), at)
        session.parts = Parts(seen, at.new_zeros(len(at)), single, at)
        return (), singly(given, seen, single, at, names)
    real = real if onward.single is None else real & ~onward.single[:, None]
    aside.keep(~real[:, 0])
    changes = (real[:, 1:] != real[:, :-1]).any(0).nonzero()[:, 0]
    end = int(changes[0]) + 1 if len(changes) else n
    rest = put_off(parted(given, seen, end, n)) if end < n else None
    session.ragged = Part(aside, rest, onward, None)
    session.parts = Parts(onward.start, (~real[:, end:]).sum(1), onward.single)
    if end == n:
        return None
    if not announced and engines and engines[0].prompt_tokens(n) == n:
        session.prompt_end = seen + n  # as one, whatever parts it comes in
    return (), parted(given, seen, 0, end)


def alone(cache: EngineCache, given: dict[str, Any], real: Bool[Tensor, "seq token"]) -> Bool[Tensor, "seq"] | None:
    """The sequences that go on with a single token where others have more, if some do and a policy makes something of it.

    None too where more comes with the tokens than is known, or layers of transformers' own would keep what comes for the others.
    """
    n, engines = real.shape[1], cache.engines
    known = all(name in KNOWN or not made_of_tensors(x) for name, x in given.items())
    taken = all(isinstance(layer, EngineLayer) or in_place(layer) for layer in cache.layers)
    if n == 1 or not (known and taken) or any(engine.prompt_tokens(n) < n for engine in engines):
        return None
    found = (singles(engine, real.to(engine.parts[0].lane.first.device)) for engine in engines if engine.parts)
    return next((rows.to(real.device) for rows in found if rows is not None), None)


def singly(
    given: dict[str, Any], seen: int, single: Bool[Tensor, "seq"], at: Int[Tensor, "seq"], names: list[str]
) -> dict[str, Any]:
    """A pass over one token of each sequence, which is padding but for these."""
    out, rows = dict(given), torch.arange(len(at), device=at.device)
    for name in (IDS, VECTORS):
        if given.get(name) is not None:
            out[name] = given[name][rows, at][:, None]
    if (places := given.get(PLACES)) is not None:
        places = places.expand(*places.shape[:-2], len(at), -1) if places.ndim > 1 else places.expand(len(at), -1)
        out[PLACES] = places[..., rows, at][..., None]
    elif PLACES in names:
        out[PLACES] = seen + at[:, None]
    if given.get(COUNTED) is not None:
        out[COUNTED] = given[COUNTED][:1]
    out[MASK] = torch.cat([given[MASK][:, :seen], single[:, None].to(given[MASK].dtype)], 1)
    return out


def after(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, names: list[str]) -> Any:
    """A part has been read."""
    cache = reading(args, kwargs, names)
    return None if cache is None or cache.session.ragged is None else go_on(module, cache, output)


@torch.compiler.disable(reason=BREAKS)  # type: ignore[untyped-decorator]
def go_on(module: Any, cache: EngineCache, output: Any) -> Any:
    aside, rest, onward, at = cache.session.ragged
    cache.session.ragged = cache.session.parts = None
    aside.put_back()
    if rest is None:
        return None
    cache.session.ragged = onward
    rest = taken_up(rest)
    if at is None:
        return followed(module, output, rest)
    return among(Context().run(partial(module, **rest)), output, onward.single.nonzero()[:, 0], at)


def among(every: Any, one: Any, rows: Int[Tensor, "chosen"], at: Int[Tensor, "seq"]) -> Any:
    """What a model says of a pass's tokens, with what it said of these rows' tokens `at`."""
    if isinstance(every, Tensor) and isinstance(one, Tensor):
        if every.ndim == 2:  # of the tokens of all rows
            return among(every.unflatten(0, (len(at), -1)), one[:, None], rows, at).flatten(0, 1)
        if one.shape[:2] != (len(at), 1):
            return every
        here = rows.to(every.device)
        return every.index_put((here, at[rows].to(every.device)), one[here.to(one.device), 0].to(every.device))
    if isinstance(every, dict):
        for name in list(every):
            every[name] = among(every[name], one[name], rows, at)
        return every
    if isinstance(every, tuple):
        return tuple(among(a, b, rows, at) for a, b in zip(every, one, strict=True))
    return every
