"""Which of a layer's KV heads a lane serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvengine.errors import CacheError
from kvengine.lane import Lane
from kvengine.session import Call


@dataclass(frozen=True)
class Heads:
    """A lane, and which KV heads it serves (None: all)."""

    lane: Lane
    index: Int[Tensor, "head"] | None
    run: slice | None = None
    """The same, where these heads follow each other: a view then, not a copy."""

    def of(self, lane: Lane) -> Heads:
        """The same heads of another lane."""
        return Heads(lane, self.index, self.run)

    def pick(self, x: Float[Tensor, "seq head *rest"]) -> Float[Tensor, "row *rest"]:
        return (x if self.index is None else x[:, self.run or self.index]).flatten(0, 1)


def quick(
    parts: list[Heads],
    q: Float[Tensor, "seq q_head 1 dim"],
    k: Float[Tensor, "seq head 1 dim"],
    v: Float[Tensor, "seq head 1 dim_v"],
    scale: float,
) -> Float[Tensor, "seq 1 q_head dim_v"] | None:
    """`Lane.quick` of all lanes, in each of which heads follow each other; None, with nothing done, where they do not.

    A single lane that cannot gives None too. Of several, one that cannot goes the general way (`Lane.take`), and the others do
    not: what they have added is not added again.
    """
    if len(parts) == 1 and parts[0].index is None:
        return parts[0].lane.quick(q, k, v, scale)
    found, group = [], q.shape[1] // k.shape[1]
    if any(part.run is None for part in parts):
        return None
    for part in parts:
        run = part.run or slice(None)
        asked = q[:, run.start * group : run.stop * group]
        one = part.lane.quick(asked, k[:, run], v[:, run], scale)
        if one is None:
            rows = part.lane.take(
                asked.unflatten(1, (-1, group)).flatten(0, 1), part.pick(k), part.pick(v), None, Call(scale)
            )
            one = rows.reshape(len(q), -1, 1, v.shape[-1]).transpose(1, 2)
        found.append((run.start, one))
    return torch.cat([x for _, x in sorted(found, key=lambda one: one[0])], 2)


def in_head_order(
    parts: list[Heads], outs: list[Float[Tensor, "_ *rest"]], sequences: int, heads: int
) -> Float[Tensor, "seq head *rest"]:
    """What the lanes have for their heads, those in their places."""
    if len(parts) == 1:
        return outs[0].unflatten(0, (sequences, -1))
    apart = [out.unflatten(0, (sequences, -1)) for out in outs]
    found = [(part.run.start, x) for part, x in zip(parts, apart, strict=True) if part.run is not None]
    if len(found) == len(parts):  # each lane's heads follow each other: one launch on a GPU
        return torch.cat([x for _, x in sorted(found, key=lambda one: one[0])], 1)
    whole = apart[0].new_empty(sequences, heads, *apart[0].shape[2:])
    for part, x in zip(parts, apart, strict=True):
        whole[:, part.run or part.index] = x
    return whole


def check_layer_back(cache: Any, n: int) -> None:
    """Refuse, before any lane of a layer's cache has changed, to take back the last `n` tokens if one of them cannot."""
    cache.check_free()
    for part in cache.parts if n < cache.seen else ():  # from nothing, all begin anew
        part.lane.check_back(n)


def check_settled(cache: Any) -> None:
    """Refuse, before any lane of a layer's cache has changed, to reorder rows while one of them has a draft to take back."""
    cache.check_free()
    for part in cache.parts:
        part.lane.check_settled()


def several(held: int, came: int) -> str:
    """What to do where each of the sequences `held` seems to come several times."""
    times, rest = divmod(came, max(1, held))
    if times < 2 or rest:
        return ""
    return (
        f". To go on with each of them {times} times (num_beams, num_return_sequences), call "
        f"cache.batch_repeat_interleave({times}) first"
    )


def check_batch(cache: Any, k: Float[Tensor, "seq head token dim"]) -> None:
    """Refuse, for a layer's cache, tokens of other sequences or heads than it holds, of another dtype or on another device."""
    if (k.shape[0], k.shape[1]) != (cache.sequences, cache.heads):
        raise CacheError(
            f"this cache holds {cache.sequences} sequences of {cache.heads} KV heads, but the layer brought "
            f"{k.shape[0]} of {k.shape[1]}; use one cache for one batch of one model"
            f"{several(cache.sequences, k.shape[0]) if k.shape[1] == cache.heads else ''}"
        )
    if (k.dtype, k.device) != ((held := cache.parts[0].lane.tail.k).dtype, held.device):
        raise CacheError(
            f"this cache holds {held.dtype} on {held.device}, but the layer brought {k.dtype} on {k.device}; make a new "
            "cache after model.to(), and stay in autocast or out of it"
        )
