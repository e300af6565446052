"""Models with a rotation for short texts and one for long ones (longrope), where a text outgrows the first.

A pass is rotated as a whole, by its last position. A draft over that place would have the tokens before it rotated as those
behind, so it ends there. Some models (Phi-3) then have `generate` read the text anew; in others, keys of both lie in one cache.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from kvengine.hf.cache import EngineCache
from kvengine.hf.devices import first_device
from kvengine.hf.names import cache_among, passed
from kvengine.hf.outgrown import PREPARING
from kvengine.speculative.law import Text


def reads_anew(model: Any, text: Text, cache: EngineCache) -> bool:
    """Whether `generate` would go on with this text in another cache than this one."""
    ids = torch.tensor([text.tokens], device=first_device(model))
    given = passed(model, cache) | {"attention_mask": torch.ones_like(ids), "use_cache": True}
    prepare = getattr(cast(Any, type(model)), PREPARING)  # the model's own: the patched one empties the cache
    return cache_among(prepare(model, ids, next_sequence_length=1, **given)) is None
