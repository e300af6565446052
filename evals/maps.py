"""Which tokens a cache holds, and which of them the last query read: for pictures, and for looking a policy in the eye."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvengine.errors import CacheError
from kvengine.hf.cache import EngineCache
from kvengine.lane import Lane


def held(cache: EngineCache) -> Bool[Tensor, "layer seq head position"]:
    """Which positions each KV head still holds a key and value of.

    Raises CacheError if the cache has forgotten them: make it with `EngineCache(model, positions=True)`.
    """
    return _by_head(cache, lambda lane: _positions(lane, chosen=False))


def read(cache: EngineCache) -> Bool[Tensor, "layer seq head position"]:
    """Which positions the last query of each KV head attended to; all held ones where nothing selects. Raises as `held`."""
    return _by_head(cache, lambda lane: _positions(lane, chosen=True))


def _by_head(
    cache: EngineCache, positions: Callable[[Lane], Int[Tensor, "row token"]]
) -> Bool[Tensor, "layer seq head position"]:
    most = [max((getattr(layer, side) for layer in cache.engines), default=0) for side in ("sequences", "heads")]
    every = torch.zeros(len(cache.engines), *most, cache.seen, dtype=torch.bool)
    for found, layer in zip(every, cache.engines, strict=True):
        for part in layer.parts:
            at = positions(part.lane).cpu().long()
            marked = torch.zeros(len(at), cache.seen + 1, dtype=torch.bool)  # the last column takes empty slots
            marked.scatter_(1, torch.where(at < 0, cache.seen, at), True)
            rows = marked[:, :-1].unflatten(0, (layer.sequences, -1))
            found[:, slice(None) if part.index is None else part.index.cpu()] = rows
    return every


def _positions(lane: Lane, chosen: bool) -> Int[Tensor, "row token"]:
    """Positions in the tail and in the pages; only those that were read, if wanted. -1 where there is no token."""
    if not lane.tail.exact:
        raise CacheError(
            f"a cache under '{lane.stack}' does not remember where its tokens stood, since the policy needs only their "
            "order; make it with EngineCache(model, positions=True)"
        )
    if chosen:
        return lane.reach()
    tail = lane.tail.position[:, lane.tail.span]
    return tail if lane.pages is None else torch.cat([lane.pages.position, tail], 1)
