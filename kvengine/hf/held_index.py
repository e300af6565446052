"""The index keys of a cache held still, so that a decode step can be recorded (`kvengine.hf.compiled`, `kvengine.hf.indexed`).

    index keys    of each layer have room for every token to come; a token's are written at its number, which lies on the device
    mask          of all that room, for the model's indexer: the tokens so far without padding, as the engine knows it

So the model scores the whole room, and names as many tokens at every step. Where it may read fewer than it names, some of these
are padding or yet to come: no slot holds one, and none is read (`kvengine.named`). Of tokens with equal scores it may
name others than it would if it scored fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from kvengine.errors import CacheError
from kvengine.hf.indexed import IndexedLayer
from kvengine.hf.mask import LazyMask
from kvengine.session import HELD

FAMILIES = frozenset(("deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4", "hy_v4_vl_text", "dots3_note_text"))
"""Model types whose indexer scores all index keys that it is handed, under the mask of its attention, and names the best."""


class HeldIndex:
    """The index of all layers that have one.

    Args:
        layers: which have read their prompt, and are held still.
        more: tokens that will come.
        now: the number of the next token; whoever drives the layers moves it on.

    Raises CacheError if there are no index keys of earlier tokens.
    """

    def __init__(self, layers: Sequence[IndexedLayer], more: int, now: Int[Tensor, "1"]) -> None:
        self.layers, self.now, room = layers, now, layers[0].cache.seen + more
        self.keys = [layer.with_room(room)[:, :room] for layer in layers]
        self.there = there(layers[0], room)
        for layer in layers:
            layer.held = self

    def mask(self) -> LazyMask:
        """Of a step: what is there with its token, of all that room."""
        self.there.index_fill_(1, self.now, True)
        (rows, room), seen = self.there.shape, self.layers[0].cache.seen
        sizes = {"batch_size": rows, "q_length": 1, "kv_length": room, "q_offset": seen, "kv_offset": 0}
        rule = {"mask_function": causal_mask_function, "allow_is_causal_skip": False, "device": self.there.device}
        found = LazyMask(sizes | rule)
        found.made["sdpa"] = self.there[:, None, None]
        return found

    def take(self, layer: IndexedLayer, new: Float[Tensor, "seq 1 dim"]) -> Float[Tensor, "seq room dim"]:
        """Put the new token's index key in its place; all the room."""
        if not layer.session.stepping:
            raise CacheError(HELD)
        held = self.keys[self.layers.index(layer)]
        held.index_copy_(1, self.now, new.to(held.dtype))
        return held

    def advance(self) -> None:
        """After a step: nothing of it is the host's to count."""

    def state(self) -> list[Tensor]:
        return [self.there, *self.keys]

    def lasting(self) -> list[Tensor]:
        """Of these, what a step taken twice would change twice: nothing, it writes to the same place."""
        return []

    def release(self) -> None:
        """Let the layers go on as they would have without: index keys lie where they always do."""
        for layer in self.layers:
            layer.held = None


def there(layer: IndexedLayer, room: int) -> Bool[Tensor, "seq room"]:
    """Which numbers have a token that is no padding: no policy drops any here, so these are held, by each head."""
    lane = layer.cache.parts[0].lane
    position = lane.position[:: lane.heads].long()
    found = torch.zeros(len(position), room + 1, dtype=torch.bool, device=position.device)
    found.scatter_(1, position.masked_fill(position < 0, room), True)
    return found[:, :room].contiguous()


def held_index(layers: Sequence[Any], more: int, now: Int[Tensor, "1"]) -> list[HeldIndex]:
    """Of a cache's layers, those with an index held still; nothing where none has."""
    found = [x for x in layers if isinstance(x, IndexedLayer) and x.index_keys is not None]
    return [HeldIndex(found, more, now)] if found else []
