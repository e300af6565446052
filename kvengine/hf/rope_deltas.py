"""Models that remember themselves where a text goes on behind its images (`rope_deltas`): here each cache has its own.

They keep it beside their weights, of the text that they read last, whichever cache it went to: between transformers' caches, a
second text moves what follows in the first. Here the model is lent what the cache knows, and what it says is kept there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvengine.hf.cache import EngineCache
from kvengine.hf.layer import BREAKS
from kvengine.hf.names import IDS, PLACES, VECTORS, cache_among
from kvengine.hf.places import KEPT, keeper

BEFORE: ContextVar[Tensor | None] = ContextVar("before", default=None)
"""What the model remembered when its pass began."""
SAID: ContextVar[Tensor | None] = ContextVar("said", default=None)
"""What it has said of the text that `generate` is about to read, until that text's cache is there."""
LENDING = threading.Lock()
"""Held while `generate` asks a model where its text goes on, so that no other thread lends it another's meanwhile."""


def hook_shifts(model: PreTrainedModel, text: Any) -> list[Any]:
    """Hooks on that part; what undoes them."""
    if (part := keeper(model, text)) is None:
        return []
    return [
        part.register_forward_pre_hook(lend, with_kwargs=True),
        part.register_forward_hook(keep, with_kwargs=True),
    ]


def lend(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Before a pass to which no positions were given: the model counts them by what it remembers."""
    if kwargs.get(PLACES) is None:
        lent(module, cache_of((*kwargs.values(), *args)))


@torch.compiler.disable(reason=BREAKS)  # type: ignore[untyped-decorator]
def lent(module: Any, cache: EngineCache | None) -> None:
    if cache is not None and cache.seen:
        setattr(module, KEPT, cache.session.shifts.at(cache.seen))
    BEFORE.set(vars(module)[KEPT])


def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Behind it: what the model has said of the text goes to its cache, be it one that the pass has made."""
    if kwargs.get(PLACES) is not None:
        return
    made = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
    if (cache := cache_of((*kwargs.values(), *args, *made))) is not None:
        kept(module, cache, args[0] if args else kwargs.get(IDS), kwargs.get(VECTORS))


@torch.compiler.disable(reason=BREAKS)  # type: ignore[untyped-decorator]
def kept(module: Any, cache: EngineCache, ids: Tensor | None, vectors: Tensor | None) -> None:
    read, said = vectors if ids is None else ids, vars(module)[KEPT]
    if read is None or said is None:
        return
    begin = cache.seen - read.shape[1]
    # Of a text that begins with ids and has no images it says nothing, and what is there is another's.
    if begin > 0 or ids is None or said is not BEFORE.get():
        cache.session.shifts.add(begin, said)


def cache_of(given: Iterable[Any]) -> EngineCache | None:
    return next((x for x in given if isinstance(x, EngineCache)), None)


def positions(self: PreTrainedModel, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Any:
    """Stands in for `_prepare_position_ids_for_generation`."""
    stock: Any = type(self)._prepare_position_ids_for_generation  # type: ignore[attr-defined]
    part = keeper(self, self.config.get_text_config(decoder=True))
    if part is None:
        return stock(self, inputs_tensor, model_kwargs)
    cache = cache_among(model_kwargs)
    with LENDING:
        if isinstance(cache, EngineCache) and cache.seen:
            setattr(part, KEPT, fitted(cache.session.shifts.at(cache.seen), inputs_tensor))
        found = stock(self, inputs_tensor, model_kwargs)
        SAID.set(vars(part)[KEPT])
    return found


def fitted(shift: Tensor | None, made: Tensor) -> Tensor | None:
    """A row for each text that `generate` is given: of beams and samples, which it has not made yet, the first."""
    return None if shift is None else shift[:: max(1, len(shift) // len(made))].to(made.device)


def note(cache: EngineCache, options: Any) -> None:
    """The cache is there that `generate` reads its text into: it keeps what the model has said."""
    if (said := SAID.get()) is not None:
        SAID.set(None)
        times = max(options.num_beams, options.num_return_sequences)
        cache.session.shifts.add(cache.seen, said.repeat_interleave(times, 0))
