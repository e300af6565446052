"""What layers of transformers' own hold at the end of a chunk, stored beside it: windows, and states.

    chunk 0 | chunk 1 | ... | chunk n        keys and values of the layers that keep every token
                             beside chunk n  windows, states of linear attention, state spaces and convolutions, after it

Tokens of a prompt can be taken up at the end of any chunk, states and windows only where somebody stopped to look. So a prompt
goes on from the last of its chunks that has something beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import torch

from kvengine.errors import CorruptBitstream, IncompatibleCache
from kvengine.hf.cache import EngineCache
from kvengine.hf.cross import engine_layers
from kvengine.hf.indexed import KIND
from kvengine.hf.layer import EngineLayer
from kvengine.hf.states import FORGETFUL, beyond_tokens, has_states, states_of
from kvengine.offload.cachegen import Identity
from kvengine.offload.cachegen.codec import check_identity
from kvengine.offload.container import pack, read_bytes
from kvengine.readers import sources
from kvengine.saved_beside import check_same_rows, restore
from kvengine.saved_state import Reader, Writer, garbled
from kvengine.sound import expect

FORMAT = 1


def strange(config: Any) -> list[str]:
    """The kinds of a model's layers, if what they hold cannot be stored (another layer's tokens, index keys, nowhere all), or a
    prompt cannot go on from it."""
    kinds, forgets = beyond_tokens(config), config.model_type in FORGETFUL
    return kinds if sources(config) or not any(engine_layers(config)) or KIND in kinds or forgets else []


def name(key: str) -> str:
    """The key of what is beside the chunk of this key."""
    return sha256(f"{key}/beside".encode()).hexdigest()


def held_beside(layer: Any) -> bool:
    return has_states(layer) or not isinstance(layer, EngineLayer)


def encode(cache: EngineCache, whose: Identity) -> bytes:
    """What a cache holds beside its tokens, after the last one that it has seen."""
    out = Writer()
    layers = [out.value(states_of(layer)) if held_beside(layer) else None for layer in cache.layers]
    header = {"kind": "beside", "format": FORMAT, "identity": whose.as_json(), "seen": cache.seen, "layers": layers}
    return pack({**header, "tensors": out.kinds}, out.sections)


def enter(data: bytearray, cache: EngineCache, whose: Identity, devices: Sequence[torch.device]) -> None:
    """Puts it into a cache that has the tokens that it lay beside, and nothing else.

    Raises:
        CorruptBitstream, IncompatibleCache: it cannot be read, or is of another model or place; the cache is then of no use.
    """
    held, seen = read_bytes(data), cache.engines[0].seen
    header = held.header
    if header.get("kind") != "beside" or header.get("format") != FORMAT or header.get("seen") != seen:
        raise IncompatibleCache(
            f"it holds {header.get('kind')!r} of {header.get('seen')!r} tokens, not what is beside {seen}"
        )
    with garbled("it"):
        check_identity(Identity(**header["identity"]), whose)
        source = Reader(held, header["tensors"])
        for layer, own, device in zip(cache.layers, header["layers"], devices, strict=True):
            if (own is not None) != held_beside(layer):
                raise CorruptBitstream("its layers are not the model's")
            if own is not None:
                source.device = device
                restore(layer, source.value(own))
                expect(getattr(layer, "cumulative_length", seen) == seen, "a window is that of another token")
        check_same_rows(cache)
