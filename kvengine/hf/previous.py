"""The attention that a model had before the patch, called as if it still had it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from kvengine.errors import ModelError

ASK_NOTHING = ("eager", "sdpa", "flex_attention")
"""Attention that never looks up which one it is. Flash attention does, in the configuration, to load its kernel."""


class View:
    """Something under another value of one attribute; all else is the thing's own, its class included."""

    def __init__(self, thing: Any, name: str, value: Any) -> None:
        vars(self).update({"_thing": thing, name: value})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._thing, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._thing, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._thing)


def as_before(module: nn.Module, name: str, mask: Mapping[str, Any], window: int | None) -> Any:
    """The module, with a configuration that names the attention `name`; other threads see the model as it is.

    Args:
        mask: what would make the mask, its rule and lengths.
        window: the tokens that the attention is told each query sees, if there is such a limit.

    Raises:
        ModelError: flash attention would read chunks (Llama 4) as if each query saw everything, which transformers refuses
            where it makes the mask.
    """
    if name in ASK_NOTHING:
        return module
    local = mask.get("local_size")
    if "flash" in name and local is not None and window is None and mask["kv_length"] + mask["kv_offset"] > local:
        raise ModelError(
            f"flash attention ({name}) cannot keep to the chunks of {local} tokens in which {type(module).__name__} attends; "
            "load the model with attn_implementation='sdpa'"
        )
    return View(module, "config", View(module.config, "_attn_implementation", name))
