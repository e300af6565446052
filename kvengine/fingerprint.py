"""Whose keys and values something stored is: fingerprints of a model and of its tokenizer; and what cannot be stored."""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from hashlib import sha256
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.utils.weak import WeakIdRef

from kvengine.errors import CacheError
from kvengine.hf.devices import first_device, inside, kept_buffers, weights
from kvengine.offload.cachegen import Identity

SAMPLES = 64  # numbers of each weight that go into a model's fingerprint
NEUTRAL = {
    "_name_or_path", "transformers_version",  # where a model came from and by what, not which it is
    "use_cache", "output_attentions", "output_hidden_states", "return_dict",  # what a pass gives back
    "pad_token_id", "bos_token_id", "eos_token_id",  # where a text ends; scripts set them after loading
}  # fmt: skip
"""Of a configuration, what no key or value depends on."""


def identity(model: nn.Module, tokenizer: Any = None) -> Identity:
    """Fingerprints of a model (configuration, evenly spaced numbers of every weight, adapters in use) and of its tokenizer.

    They are the same wherever the model lies, so that another machine knows it again, and by whichever name it is wrapped.
    """
    model = inside(model)
    config = json.loads(model.config.to_json_string(use_diff=False), object_hook=_lasting)  # type: ignore[operator, union-attr]
    mark = sha256(json.dumps(config, sort_keys=True).encode())
    for name, weight in (*weights(model), *kept_buffers(model)):
        flat = weight.detach().flatten()
        some = flat[:: max(1, len(flat) // SAMPLES)].float().cpu().contiguous().numpy().tobytes()
        mark.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode() + some)
    if used := [(name, *settings[:3]) for name, *settings in adapters(model)]:
        mark.update(repr(used).encode())
    text = "" if tokenizer is None else _tokenizer_text(tokenizer)
    return Identity(model=mark.hexdigest(), tokenizer=sha256(text.encode()).hexdigest() if text else "")


def adapters(model: nn.Module) -> list[tuple[str, str, bool, str, str]]:
    """Of each layer that PEFT gave adapters: its name, which are in use, whether none is, their strengths, and which are merged.

    Their weights are the model's, in use or not.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(active := getattr(module, "active_adapters", None), list):  # of a whole model it is a method
            off, scaling = getattr(module, "disable_adapters", False) is True, getattr(module, "scaling", {})
            found.append((name, repr(active), off, repr(scaling), repr(getattr(module, "merged_adapters", []))))
    return found


def state(model: nn.Module) -> Hashable:
    """What differs when `identity` may: cheap, as no weight is read. A change through `weight.data` is not seen."""

    def version(x: Tensor) -> tuple[Any, Any, int]:
        # accelerate puts another in its place after each use; the id of a tensor that is gone may be given to the next
        which = None if x.is_meta else WeakIdRef(x)
        return which, x.dtype, 0 if x.is_inference() else x._version

    held = (*model.parameters(), *(buffer for _, buffer in kept_buffers(model)))
    return tuple(map(version, held)), tuple(adapters(model))


def _lasting(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in NEUTRAL}


def _tokenizer_text(tokenizer: Any) -> str:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is None:
        words = repr(sorted(tokenizer.get_vocab().items()))
    else:  # the last call's padding and truncation stay with it
        words = json.dumps({**json.loads(fast.to_str()), "padding": None, "truncation": None}, sort_keys=True)
    return f"{words}{getattr(tokenizer, 'chat_template', None)}"


def check_maker(cache: Any, model: nn.Module, what: str) -> None:
    """Refuse an engine cache that was not made for this model: `what` would name this one as it is stored."""
    if cache.config is not model.config.get_text_config(decoder=True):  # type: ignore[operator, union-attr]
        raise CacheError(f"this cache was made for another model; {what} this one would be taken for its own")


def check_precision(model: nn.Module, layers: Sequence[tuple[Tensor, Tensor]] = ()) -> None:
    """Raises CacheError under autocast, or for keys and values that were made there: what a run without would find in a store."""
    own, told = {x.dtype for x in model.parameters()}, torch.is_autocast_enabled(first_device(model).type)
    if told or any(k.dtype != v.dtype or k.dtype not in own for k, v in layers):
        raise CacheError(
            "under torch.autocast a model makes other keys and values, which no chunk's name tells. Leave it, and load the model "
            "in the precision that it is to run in (from_pretrained(..., dtype=torch.bfloat16)), or call model.to()"
        )


def check_whole(ids: Int[Tensor, "seq token"], cache: Any, tokens: int | None = None) -> None:
    """Raises CacheError unless a cache will hold the prompt of one sequence whole; or, if given, its first `tokens` by now."""
    lanes = [part.lane for layer in cache.engines for part in layer.parts]
    held = tokens is None or (cache.seen >= max(1, tokens) and all(lane.whole for lane in lanes))
    if not (held and len(ids) == 1 and cache.engines and cache.stack.reads_prompts_exactly):
        raise CacheError(
            f"only a prompt that the cache holds whole can be stored; '{cache.stack}' has dropped, sealed, skipped or not "
            "yet seen some of it. Store it from a cache of the stack 'full'"
        )
