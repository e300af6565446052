"""The mask of a model that chooses what it reads by a mask of its own: Qwen 4's sparse attention (QSA).

    block       of a query: so many tokens, one after the other, of those that it may see
    score       I_b  =  sum over index heads j of  relu(q_j . k_b),    k_b: of the mean of the block's raw index keys
    read        by the query: the tokens of the best blocks, `indexer_budget` of them, and those behind the last whole block

The model computes this, by its mask, which says what a query may see, and lays what it has chosen over it: `mask & chosen`. Here
that stays the rule of a mask, which knows what was chosen, and by that names the tokens to be read (`kvengine.named`). Raw
index keys and their positions are in the cache (`kvengine.hf.indexed`).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvengine.hf.layer import BREAKS
from kvengine.hf.mask import LazyMask, MaskUsed

FAMILIES = frozenset(("qwen4_exp_text",))
"""Model types that choose so, one set of tokens for all heads."""


class ShownMask(LazyMask):
    """A mask that is made where the model looks at it, and what was chosen of it, if it was.

    base: the mask before it was chosen of, which all layers share.
    """

    base: ShownMask | None = None
    chosen: Bool[Tensor, "seq 1 token all"] | None = None

    def __and__(self, chosen: Tensor) -> ShownMask:
        mine = copy.copy(self)
        mine.base, mine.chosen = self, chosen
        return mine

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> Any:
        raise refused()  # by a call that a compiler does not look into: it asks here about `&` too, and would not ask `__and__`

    def __getitem__(self, index: Any) -> Any:
        return self.make("sdpa")[index]

    @property
    def dtype(self) -> torch.dtype:
        return torch.bool

    @property
    def device(self) -> torch.device:
        found: Any = self.kwargs["device"]
        return found  # type: ignore[no-any-return]

    def on(self, device: torch.device) -> LazyMask:
        if self.base is None or self.chosen is None:
            return super().on(device)
        there: Any = self if self.device == device else self.base.on(device)
        return there if there is self else there & self.chosen.to(device)  # type: ignore[no-any-return]

    def make(self, implementation: str) -> Any:
        if self.base is None or self.chosen is None:
            return super().make(implementation)
        made = self.base.make(implementation)
        if made.dtype == torch.bool:
            return made & self.chosen
        return made.masked_fill(~self.chosen, torch.finfo(made.dtype).min)

    @property
    def named(self) -> Int[Tensor, "seq token most"] | None:
        """The tokens that each query reads, by their numbers in the text, -1 behind them. None: all that it may see."""
        if self.chosen is None:
            return None
        config: Any = self.kwargs["config"]
        chosen, most = self.chosen[:, 0], config.indexer_budget + config.indexer_compress_ratio - 1
        found, at = chosen.to(torch.int8).topk(min(most, chosen.shape[-1]), -1)
        return at.masked_fill(found == 0, -1)


refused: Any = torch.compiler.disable(MaskUsed, recursive=False, reason=BREAKS)


def mask_of(rule: dict[str, Any]) -> LazyMask:
    """The mask that these arguments would make, for a model of the configuration among them."""
    shown = getattr(rule.get("config"), "model_type", None) in FAMILIES
    return ShownMask(rule | {"allow_is_causal_skip": False}) if shown else LazyMask(rule)  # as the model asks itself
