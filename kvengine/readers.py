"""Later layers that read what an earlier one holds, in models whose layers share keys and values.

Gemma 3n and the small Gemma 4 make keys and values in their first layers only, Mistral Large 4 latents in some. A later layer
brings queries, and reads what the last of those layers of its kind has cached. The layer that makes the keys is judged by its own
queries, and its later readers find what these queries found: the state *before* a verdict or a seal that the same tokens
brought about. So a prompt is exact in every layer, and tokens taken in one pass give what they give one by one.

A state is kept as it is for rolling back, by shallow copies, from the layer's own attention to its last reader's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.tokens import ordered

if TYPE_CHECKING:
    from kvengine.cache import LayerCache, Stock
    from kvengine.lane import Lane, Steps
    from kvengine.session import Call


def sources(config: Any) -> dict[int, int]:
    """The layers of a model that read an earlier one's keys and values, and which one each of them reads."""
    if getattr(config, "kv_source_layers", None) is not None:
        return by_rotation(config)
    shared = getattr(config, "num_kv_shared_layers", 0)
    if not shared:
        return {}
    kinds, first = config.layer_types, config.num_hidden_layers - shared
    last = {kind: i for i, kind in enumerate(kinds[:first])}
    return {i: last[kinds[i]] for i in range(first, len(kinds))}


def by_rotation(config: Any) -> dict[int, int]:
    """The same of Mistral Large 4, where they read what the last layer has left that is rotated, or not, as they are."""
    found, last = {}, {}
    for i, (mode, rotated) in enumerate(zip(config.kv_sharing_modes, map(bool, config.no_rope_layers), strict=False)):
        if mode == "store":
            last[rotated] = i
        elif mode is not None and rotated in last:  # else the model cannot run
            found[i] = last[rotated]
    return found


@runtime_checkable
class Moment(Protocol):
    """Some tokens of a pass, and what was held when their queries asked."""

    tokens: int

    def read(
        self, cache: LayerCache, q: Tensor, call: Call, stock: Stock | None
    ) -> Float[Tensor, "seq token q_head dim_v"]:
        """The answer to the queries of the last of these tokens."""
        ...


@dataclass
class Readers:
    """A layer's later readers.

    Attributes:
        count: how many there are.
        left: how many of them have still to read in this pass.
        moments: of this pass, in order. None of them: what the layer holds now is what its own queries read.
    """

    count: int = 0
    left: int = 0
    moments: list[Moment] = field(default_factory=list)

    def begin(self, lanes: Iterable[Lane]) -> None:
        """Another pass."""
        self.end(lanes)
        self.left = self.count

    def end(self, lanes: Iterable[Lane]) -> None:
        """Nobody will read what was held in this pass."""
        if self.moments:
            self.moments = []
            for lane in lanes:
                lane.share(bool(lane.marks))


def read(cache: LayerCache, q: Tensor, call: Call, stock: Stock | None) -> Float[Tensor, "seq token q_head dim_v"]:
    """The answer to a later layer's queries, which are those of the pass's last tokens (or of all)."""
    readers = cache.readers
    out: list[Tensor] = []
    end = q.shape[2]
    for moment in reversed(readers.moments or [Taken([[(end, part.lane)] for part in cache.parts])]):
        begin = max(0, end - moment.tokens)
        if begin < end:
            out.insert(0, moment.read(cache, q[:, :, begin:end], call.of(slice(begin, end)), stock))
        end = begin
    readers.left -= 1
    if not readers.left:
        readers.end(part.lane for part in cache.parts)
    return out[0] if len(out) == 1 else torch.cat(out, 1)


def still(cache: LayerCache) -> LayerCache:
    """The layer with what it holds now, whatever becomes of it in this pass."""
    twin = copy.copy(cache)
    twin.parts, twin.readers = [part.of(part.lane.still()) for part in cache.parts], Readers()
    return twin


class Prompt:
    """Tokens of a prompt.

    `dense`: keys and values of everything seen, where the model's own attention answered. `orders`: of each lane's tokens.
    """

    def __init__(
        self, cache: LayerCache, tokens: int, dense: tuple[Tensor, Tensor] | None, orders: list[Tensor | None]
    ) -> None:
        self.tokens, self.dense, self.orders = tokens, dense, orders
        self.then = still(cache) if dense is None else None

    def read(
        self, cache: LayerCache, q: Tensor, call: Call, stock: Stock | None
    ) -> Float[Tensor, "seq token q_head dim_v"]:
        if self.dense is not None and stock is not None:
            return stock(*self.dense)
        n = q.shape[2]
        if any(order is not None for order in self.orders):
            q = torch.nn.functional.pad(q, (0, 0, self.tokens - n, 0))
        out = []
        for (part, grouped, rows), order in zip((self.then or cache).each(q, call), self.orders, strict=True):
            found = part.lane.read(ordered(grouped, order), rows)
            out.append(ordered(found, order if order is None else order.argsort(1)))
        return cache.gather(q, out)[:, -n:]


class Taken:
    """Tokens taken as in decoding: each lane's steps, with the lane as it was at each."""

    def __init__(self, steps: list[Steps]) -> None:
        self.steps = steps
        self.tokens = sum(n for n, _ in steps[0])

    def read(
        self, cache: LayerCache, q: Tensor, call: Call, stock: Stock | None
    ) -> Float[Tensor, "seq token q_head dim_v"]:
        out = []
        for (_, grouped, rows), steps in zip(cache.each(q, call), self.steps, strict=True):
            at, found = grouped.shape[2] - self.tokens, []
            for n, lane in steps:
                if at + n > 0:
                    span = slice(max(0, at), at + n)
                    found.append(lane.attend(grouped[:, :, span], rows.of(span), mass=False)[0])
                at += n
            out.append(torch.cat(found, 2))
        return cache.gather(q, out)


class Nodes:
    """The nodes of a tree, which look and are not added."""

    def __init__(self, k: Tensor, v: Tensor, tree: Bool[Tensor, "node node"]) -> None:
        self.k, self.v, self.tree, self.tokens = k, v, tree, len(tree)

    def read(
        self, cache: LayerCache, q: Tensor, call: Call, stock: Stock | None
    ) -> Float[Tensor, "seq token q_head dim_v"]:
        sees = self.tree[-q.shape[2] :]
        return cache.gather(
            q,
            [
                part.lane.look(grouped, part.pick(self.k), part.pick(self.v), sees, rows)
                for part, grouped, rows in cache.each(q, call)
            ],
        )


class Resumed:
    """A prompt, beside which some sequences took one token as in decoding: which, and where in the pass it stands."""

    def __init__(
        self, taken: Taken, prompt: Moment, theirs: Bool[Tensor, "seq token"], here: Int[Tensor, "seq"]
    ) -> None:
        self.taken, self.prompt, self.theirs, self.here, self.tokens = taken, prompt, theirs, here, prompt.tokens

    def read(
        self, cache: LayerCache, q: Tensor, call: Call, stock: Stock | None
    ) -> Float[Tensor, "seq token q_head dim_v"]:
        n = q.shape[2]
        at = (self.here - (self.tokens - n)).clamp(min=0)[:, None, None, None]
        one = q.gather(2, at.expand(-1, q.shape[1], 1, q.shape[3]))
        theirs = self.theirs[:, self.tokens - n :, None, None]
        return torch.where(theirs, self.taken.read(cache, one, call, stock), self.prompt.read(cache, q, call, stock))
