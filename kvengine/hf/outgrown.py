"""Models with a rotation for short texts and one for long ones, where `generate` has a text outgrow the first."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel

from kvengine.hf.cache import EngineCache
from kvengine.hf.ended import behind
from kvengine.hf.names import CACHE, cache_among
from kvengine.hf.rope import LONG, turning_point

PREPARING = "prepare_inputs_for_generation"
LASTING = ("options", "lent", "heeded", "following", "ended", "ends", "paused")  # of a session, while `generate` runs


def in_chunks(self: PreTrainedModel, generation_config: Any, cache: Any, total: int | None) -> Any:
    """The settings to read a text of `total` tokens with: where it outgrows the shorter of two rotations, the first chunk does.

    A pass is rotated by its own last position, so that smaller chunks would leave keys of both. What was read before is read
    anew, as in one pass, by models that do so.
    """
    size, turn = generation_config.prefill_chunk_size, turning_point(self, LONG)
    if size is None or total is None or turn is None or not isinstance(cache, EngineCache):
        return generation_config
    if not cache.seen <= turn < total:
        return generation_config
    if getattr(type(self), PREPARING) is not getattr(GenerationMixin, PREPARING):
        begin_again(cache)
    other = copy.copy(generation_config)
    other.prefill_chunk_size = max(size, turn + 1)
    return other


def prepare_inputs(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Stands in for a `prepare_inputs_for_generation` of a model's own.

    Some drop the cache where the text outgrows the shorter of two rotations (Phi-3), and read it from its first token on:
    into the same cache, emptied, whose policy and statistics somebody may have asked for.
    """
    stock: Any = type(self).prepare_inputs_for_generation  # type: ignore[attr-defined]
    found, cache = stock(self, *args, **kwargs), kwargs.get(CACHE)
    if isinstance(cache, EngineCache) and cache_among(found) is None:
        if kwargs.get("next_sequence_length") is not None:  # 5.17 goes on with the newest token alone
            found = stock(self, *args, **kwargs | {"next_sequence_length": None})
        begin_again(cache)
        found[CACHE] = cache
        if (ends := cache.session.ends) is not None:
            ids, running = args[0] if args else kwargs["input_ids"], kwargs.get("attention_mask")
            mask = behind(ends, ids.shape[1], torch.ones_like(ids) if running is None else running)
            # Later passes' masks are made of the running one, and say the same of these tokens then.
            found["attention_mask"] = mask if running is None else running.copy_(mask)
    return found


def begin_again(cache: EngineCache) -> None:
    """Empty a cache, to which the running `generate` gives its text once more, and what it drafts behind."""
    session = cache.session
    if not cache.seen:
        return
    options = None if session.options is None else session.options()
    text = cache.seen + 1 - bool(getattr(options, "is_assistant", False))  # as `EngineCache.announce` has it
    end, recording = max(session.prompt_end or 0, text), session.recording
    kept = {name: getattr(session, name) for name in LASTING}
    cache.reset()
    if recording:
        cache.activate_past_recording()
    vars(session).update(kept, prompt_end=end, turn=0)
