"""Models whose states begin anew in every pass of several tokens: Jamba's scan, in transformers, takes no state that is there.

So a prompt in one pass is right, and decoding behind it. A later turn, the chunks of a prompt or a draft to judge are not,
patched or not: they are read as if no state had been before them. Such passes are refused.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvengine.errors import CacheError
from kvengine.hf.cache import EngineCache
from kvengine.hf.layer import BREAKS
from kvengine.hf.names import cache_given
from kvengine.hf.replay import made_of, reader
from kvengine.hf.states import FORGETFUL


def hook_forgetful(model: PreTrainedModel, text: Any) -> list[Any]:
    """A hook on the part that reads; what undoes it."""
    if text.model_type not in FORGETFUL:
        return []
    part, names = reader(model, text)
    return [part.register_forward_pre_hook(partial(check, names=names), with_kwargs=True)]


@torch.compiler.disable(reason=BREAKS)  # type: ignore[untyped-decorator]
def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], names: list[str]) -> None:
    """Raises CacheError, before anything is taken, for several tokens behind others."""
    cache = cache_given(args, kwargs, names)
    made = made_of(dict(zip(names, args, strict=False)) | kwargs)
    if isinstance(cache, EngineCache) and made is not None and cache.seen and made.shape[1] > 1:
        raise CacheError(
            f"a pass of {cache.config.model_type} over several tokens behind others begins with empty states in transformers. "
            "Give a prompt in one pass (no prefill_chunk_size, no judge_every), and for a later turn the whole text with a new "
            "cache; or give tokens one at a time"
        )


__all__ = ["hook_forgetful"]
