"""Layers that read an earlier one's latents by an index of their own (Mistral Large 4): they keep index keys, and no tokens.

transformers keeps them in a layer of its cache whose keys and values stay empty. Here the layer whose latents are read tells how
many tokens there are, and what was kept of those that were taken back is written over by their numbers, as in `IndexedLayer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from kvengine.errors import ModelError
from kvengine.hf import indexed


class SharedIndex(CacheLayerMixin):
    """The index keys of a layer, whose tokens are those of the layer that it reads, its `source`."""

    is_croppable, is_sliding, is_compileable = True, False, False

    def __init__(self, source: indexed.IndexedLayer) -> None:
        super().__init__()
        self.source = source
        self.reset()

    def reset(self) -> None:
        self.index_keys: Float[Tensor, "seq room dim"] | None = None

    def update_indexer(self, indexer_key_states: Float[Tensor, "seq token dim"]) -> Float[Tensor, "seq all dim"]:
        """Keep the index keys of the tokens that the source has just taken; all so far.

        Raises CacheError if there are none of earlier tokens.
        """
        new, end = indexer_key_states, self.source.cache.seen
        seen = end - new.shape[1]
        if not seen:
            self.index_keys = new.new_empty(len(new), 0, new.shape[2])
        held = self.index_keys if self.index_keys is not None and len(self.index_keys) == len(new) else None
        self.index_keys = held = indexed.roomy(held, seen, end, self.source.session.prompt_end)
        held[:, seen:end] = new
        return held[:, :end]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise ModelError(
            "a layer brings keys and values that reads those of an earlier one; call kvengine.unpatch(model)"
        )

    def get_seq_length(self) -> int:
        return self.source.get_seq_length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.source.get_mask_sizes(query_length)

    def get_max_length(self) -> int:
        return -1

    def offload(self) -> None: ...

    def prefetch(self) -> None: ...

    def crop(self, tokens_to_remove: int) -> None: ...

    @property
    def cache(self) -> Any:
        """What the source holds, whose rows and tokens are these."""
        return self.source.cache

    @property
    def indexed(self) -> Float[Tensor, "seq token dim"] | None:
        """The index keys of what was seen."""
        return None if self.index_keys is None else self.index_keys[:, : self.source.cache.seen]

    def batch_select_indices(self, indices: Int[Tensor, "chosen"]) -> None:
        if not self.source.cache.seen:
            self.index_keys = None
        if self.index_keys is not None:
            self.index_keys = self.index_keys[indices.to(self.index_keys.device)]

    def reorder_cache(self, beam_idx: Int[Tensor, "chosen"]) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.index_keys is not None:
            self.index_keys = self.index_keys.repeat_interleave(repeats, 0)


def share(layers: list[Any], sources: Mapping[int, int]) -> None:
    """Put layers of index keys alone in the place of those of transformers' whose tokens an earlier layer has (5.17 has none)."""
    for i, source in sources.items():
        if i < len(layers) and indexed.has_index(layers[i]):
            layers[i] = SharedIndex(layers[source])


__all__ = ["SharedIndex", "share"]
