"""Where the tokens of a pass stand, said to it as `generate` says it: some models count otherwise, if they are not told."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvengine.hf.devices import first_device
from kvengine.hf.names import PLACES

KEPT = "rope_deltas"


def takes_places(model: Any) -> bool:
    """Whether a model's pass is told where its tokens stand; `generate` tells it, then."""
    return PLACES in inspect.signature(type(model).forward).parameters


def keeper(model: nn.Module, text: Any) -> Any:
    """The part that remembers for this text model where a text goes on behind its images; None in most models."""
    parts = (m for m in model.modules() if isinstance(m, PreTrainedModel) and KEPT in vars(m))
    return next((part for part in parts if part.config.get_text_config(decoder=True) is text), None)


def is_told(model: Any) -> bool:
    """Whether every pass is to say where its tokens stand: RoBERTa's kin count otherwise by themselves, and Bamba begins at 0 in
    each. Not to a model that remembers where its text goes on."""
    return takes_places(model) and keeper(model, model.config.get_text_config(decoder=True)) is None


def placed(model: Any, seen: int, n: int, rows: int = 1, told: bool | None = None) -> dict[str, Tensor]:
    """Where `n` tokens stand behind those that a cache has `seen`, none of them padding, as an argument of a model's pass.

    `told`: what `is_told` says of the model, which it takes half a millisecond to say.
    """
    if not (is_told(model) if told is None else told):
        return {}
    return {PLACES: torch.arange(seen, seen + n, device=first_device(model)).expand(rows, -1)}
