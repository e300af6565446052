"""What a model's attention does between caching its keys and values and attending to them, tried out when it is patched.

Some modules change their keys or values after they were cached, read their mask to choose tokens by it, or attend by
themselves, and no configuration says so. So one module of each kind is handed a few tokens that mean nothing, up to where it
would attend.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from kvengine import latent
from kvengine.errors import ModelError
from kvengine.hf.attention import check_brought
from kvengine.hf.cache import NAME, Chosen, EngineCache
from kvengine.hf.cross import engine_layers
from kvengine.hf.devices import device_of, hooks
from kvengine.hf.mask import ATTENDS, UNPATCH
from kvengine.hf.names import CACHE, name_of_cache
from kvengine.hf.previous import View
from kvengine.hf.rope import frequencies_of
from kvengine.hf.shown import mask_of
from kvengine.stack import Channels, Stack

TRIAL = f"{NAME}-trial"
TOKENS = 3


class Reached(Exception):
    """The module attends: what it has done until then is known."""

    def __init__(self, channels: tuple[int, int, bool]) -> None:
        self.channels = channels


def check_modules(model: PreTrainedModel, text: Any, modules: list[nn.Module]) -> Channels:
    """Try one attention module of each kind whose layer the engine serves. The channels of what they bring, as far as known.

    What cannot be tried like this (other arguments, weights that are not there yet) is left to the first pass, which refuses
    for the same reasons.

    Raises:
        ModelError: it changes its keys or values after they were cached, looks at its mask, or attends by itself.
    """
    ours, found = engine_layers(text), set()
    kinds: dict[Any, nn.Module] = {}
    for module in modules:
        index: Any = getattr(module, "layer_idx", None)
        if not (isinstance(index, int) and index < len(ours) and ours[index]):
            continue
        if latent.is_latent(module):
            found.add(latent.channels(module))
        else:
            kinds.setdefault((type(module), *(x.shape for x in module.parameters())), module)
    AttentionInterface.register(TRIAL, reached)
    for module in kinds.values():
        if any(getattr(hook, "offload", False) for hook in hooks(module)):
            continue  # it would have to put its weights back, and is broken off before
        try:
            attempt(model, text, module)
        except Reached as end:
            found.add(end.channels)
        except ModelError as error:
            raise ModelError(f"{type(model).__name__}: {str(error).removesuffix(UNPATCH)}") from None
        except (TypeError, ValueError, RuntimeError, AttributeError, LookupError, StopIteration):
            continue
    return frozenset(found)


@torch.no_grad()
def attempt(model: PreTrainedModel, text: Any, module: nn.Module) -> None:
    """Run the module on tokens of noise, at places where nothing is rotated."""
    noise = torch.randn(1, TOKENS, text.hidden_size, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    x = noise.to(device_of(module), model.dtype)
    mask = {"batch_size": 1, "q_length": TOKENS, "kv_length": TOKENS, "q_offset": 0, "kv_offset": 0}
    taken = inspect.signature(type(module).forward).parameters
    if "attention_mask" in taken and "dict" in str(taken["attention_mask"].annotation):
        return  # masks by names that only the model knows (Zaya)
    given: dict[str, Any] = {
        "attention_mask": mask_of(
            {**mask, "mask_function": causal_mask_function, "device": x.device, "dtype": x.dtype, "config": text}
        )
    }
    if "shared_kv_states" in taken:  # where keys are left for later layers
        given["shared_kv_states"] = {}
    # Cosines for each channel, or one for all: some take half as many, or turn layers at different widths.
    widths = [*(2 * len(x) for x in frequencies_of(model)[:1]), 1] if "position_embeddings" in taken else [0]
    # Another thread may be generating with the model, which attends as it did.
    tried: Any = View(module, "config", View(text, "_attn_implementation", TRIAL))
    for width in widths:
        if width:
            given["position_embeddings"] = unrotated(x, width)
        given["kvengine"] = cache = EngineCache.under(Chosen(Stack()), text)
        try:
            type(module).forward(tried, x, **given, **{name_of_cache(taken, CACHE): cache})
        except RuntimeError:
            if width == widths[-1]:
                raise
        else:
            raise ModelError(ATTENDS.format(type(module).__name__))


def unrotated(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The cosines and sines [1, token, dim] that turn nothing."""
    one = x.new_ones(1, x.shape[1], dim)
    return one, torch.zeros_like(one)


def reached(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, *args: Any, **kwargs: Any) -> Any:
    """In the place of the attention function, of a view of the module."""
    cache: EngineCache = kwargs["kvengine"]
    layer: Any = cache.layers[module.layer_idx]  # type: ignore[index]
    check_brought(vars(module)["_thing"], layer, key, value)
    raise Reached((key.shape[3], value.shape[3], False))


__all__ = ["check_modules"]
