"""Which policies a kind of model can do."""

from __future__ import annotations

from typing import Any

from kvengine import latent
from kvengine.errors import PolicyError, UnsupportedPolicy
from kvengine.hf import indexed
from kvengine.hf.cross import engine_layers
from kvengine.hf.states import FORGETFUL
from kvengine.policies import name_of
from kvengine.stack import Channels, Stack


def check_stack(stack: Stack, text: Any, channels: Channels = frozenset()) -> None:
    """Refuse what this kind of model cannot do, whose layers' keys and values have so many channels."""
    if stack == Stack():
        return
    name = text.model_type
    indexed.check_stack(stack, text)
    if not any(layers := engine_layers(text)):
        raise UnsupportedPolicy(
            f"{name} has no layer with a plain, growing key-value cache (sliding windows and layers with a recurrent "
            f"state keep transformers' own), so there is nothing for '{stack}' to do. Use 'full'"
        )
    stack.check_layers(len(layers))
    stack.selection.check_depth(len(layers))
    again, known = stack.retention.replay, getattr(text, "vocab_size", None)
    if again is not None and name in FORGETFUL:
        raise UnsupportedPolicy(
            f"'{name_of(stack.retention)}' has a prompt read again behind itself, and a pass of {name} over several tokens "
            "behind others begins with empty states in transformers. Use a retention that reads a prompt once (snapkv)"
        )
    if again is not None and known is not None and max((*again.prompt, *again.suffix), default=0) >= known:
        raise PolicyError(
            f"'{stack}' feeds ids of another tokenizer: {name} knows {known}, from 0 on. Take prompt and suffix from the "
            "model's own tokenizer"
        )
    if latent.configured(text) and stack.routing != Stack().routing:
        raise UnsupportedPolicy(
            f"{name} caches latents that all its heads share (MLA), so '{name_of(stack.routing)}' has no heads to tell apart"
        )
    for dim, dim_v, nested in channels:
        stack.check_channels(dim, dim_v, nested)
