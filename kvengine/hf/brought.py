"""What `generate` brings to a decode step beside tokens and positions: of what kind the token is, or what images a prompt had.

A recording reads memory that stays where it is. So all of it is held, and what comes with the next step is copied there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvengine.errors import ModelError

KNOWN = ("input_ids", "position_ids", "attention_mask", "cache_position")
"""What a step has by itself. New tokens are never padding, so the mask says nothing about them."""
KINDS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
"""Of each token. Before transformers 5.24, some come for the whole text."""

READ = ("output_hidden_states", "output_attentions")
"""What else may be asked of a step."""


class Brought:
    """held: the tensors that a step reads."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}
        self.last: dict[str, Tensor] | None = None

    def hold(self, inputs: Mapping[str, Any]) -> None:
        """Take what comes with a step.

        Raises:
            ModelError: it brings numbers that are no counts or kinds (vectors, images, sounds), or others than the first did; or
                the model's own loop reads more of a step than logits.
        """
        if asked := next((name for name in READ if inputs.get(name)), None):
            raise ModelError(
                f"a recorded step yields logits only, and {asked} is asked of it; use model.generate without it"
            )
        found = {name: x for name, x in inputs.items() if isinstance(x, Tensor) and name not in KNOWN}
        tokens = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0
        found |= {name: found[name][..., -tokens:] for name in KINDS if name in found}
        if self.last is None:
            self.held = {name: x.clone() for name, x in found.items()}
        for name, x in found.items():
            if x.is_floating_point() or name not in self.held or self.held[name].shape != x.shape:
                raise ModelError(
                    f"a recorded step takes tokens, positions and kinds of tokens, not {name!r}; use model.generate without it"
                )
            if self.last is not None and x is not self.last.get(name):
                self.held[name].copy_(x)
        self.last = found
