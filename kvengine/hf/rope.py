"""A model's rotary embedding, found and then proved.

The frequencies are read from the model's rotary module. Whether the keys that reach the cache are really turned by
them (pairs interleaved or not, only some channels, not at all in some layers) differs from family to family, and is
not declared anywhere. So it is tried: a few tokens run through the model twice, at two places, and the cached keys of
one run must be those of the other, turned.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from kvengine.errors import ModelError, UnsupportedPolicy
from kvengine.hf.devices import first_device
from kvengine.hf.names import passed
from kvengine.hf.states import grows
from kvengine.policies import name_of
from kvengine.rope import Rope
from kvengine.stack import Stack

STATIC = {"default", "linear", "llama3", "yarn", "proportional"}  # kinds whose frequencies never change
LONG, DYNAMIC = "longrope", "dynamic"  # kinds whose frequencies follow the length of what is read
TOKENS, APART = 4, 7  # of the trial


def rope_for(stack: Stack, model: nn.Module, known: dict[str, Rope | None]) -> Rope | None:
    """The rotation, if some choice of the stack needs it. Once found, it is `known`.

    Raises:
        UnsupportedPolicy: it does, and the model's is not known.
        ModelError: it does, and the model has no weights yet.
    """
    needy = needs_rope(stack)
    if not needy:
        return None
    if "rope" not in known:
        found = rope_of(model)
        if found is None and any(weight.is_meta for weight in model.parameters()):
            raise ModelError(
                f"{name_of(needy[0])!r} turns keys or queries, and how {type(model).__name__} does is found by trying, but some "
                "of its weights are on the meta device and did not come. Load them, then call kvengine.patch(model)"
            )
        known["rope"] = found
    if (rope := known["rope"]) is None:
        raise UnsupportedPolicy(
            f"{name_of(needy[0])!r} turns keys or queries to other positions, but the layers of {type(model).__name__} "
            "do not all rotate them by fixed frequencies; use another method"
        )
    return rope


def needs_rope(stack: Stack) -> list[Any]:
    """The choices of a stack that turn keys or queries."""
    return [c for c in (stack.retention, stack.representation) if c.needs_rope]


def rope_of(model: nn.Module) -> Rope | None:
    """How the model's cached keys were rotated; None if not by one fixed rotation in all layers that cache keys.

    A factor that scales rotated keys (YaRN's) stays in them: turning changes directions alone. The position of a token
    is its index among the real tokens of its row.
    """
    frequencies = frequencies_of(model)
    if not frequencies:
        return None
    try:
        here, there = cached_keys(model, 0), cached_keys(model, APART)
    except (TypeError, ValueError, RuntimeError, NotImplementedError, AttributeError, IndexError):
        return None  # a model that cannot be tried like this is not known
    for frequency, interleaved in itertools.product(frequencies, (False, True)):
        rope = Rope(frequency.detach().float(), interleaved)
        if here and all(explains(rope, a, b) for a, b in zip(here, there, strict=True)):
            return rope
    return None


def frequencies_of(model: nn.Module) -> list[Tensor]:
    """Candidates: the static rotary frequencies of the text model."""
    text = cast(Any, model).config.get_text_config(decoder=True)
    found = []
    for module in model.modules():
        if getattr(module, "config", None) is not text or "Rotary" not in type(module).__name__:
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if name.endswith("inv_freq") and "original" not in name and kind(module, name) in STATIC:
                found.append(buffer)
    return found


def declared(text: Any) -> list[dict[str, Any]]:
    """The rotations of a text model's configuration: one for all layers, or one for each kind of these."""
    rope = getattr(text, "rope_parameters", None) or {}
    return [x for x in (rope, *rope.values()) if isinstance(x, dict)]


def turning_point(model: nn.Module, *kinds: str) -> int | None:
    """Tokens of the longest text that has the first of several rotations, if the model's is one of these kinds; else None.

    "longrope" has another for all longer texts, "dynamic" one for each length.
    """
    text = cast(Any, model).config.get_text_config(decoder=True)
    known = [x for x in declared(text) if x.get("rope_type") in kinds]
    # A dynamic one is reset by texts shorter than that.
    found = [
        x.get("original_max_position_embeddings") if x["rope_type"] == LONG else text.max_position_embeddings - 1
        for x in known
    ]
    return min((int(x) for x in found if x is not None), default=None)


def kind(module: nn.Module, name: str) -> str:
    """The kind of rotation of a buffer `inv_freq` or `<layer type>_inv_freq`; "sections" for images' positions."""
    layer_type = name.removesuffix("inv_freq").removesuffix("_")
    known: Any = getattr(module, "rope_type", "default")
    parameters: Any = getattr(module.config, "rope_parameters", None) or {}
    own = parameters.get(layer_type, parameters)
    # Where a configuration leaves the sections out, the module has them all the same, by default.
    if "mrope_section" in own or getattr(module, "mrope_section", None):
        return "sections"
    return str(known.get(layer_type) if isinstance(known, dict) else known)


@torch.no_grad()
def looks(model: nn.Module) -> bool:
    """Whether a pass has the host look at its positions, to rotate by them: tried where there are none to look at."""
    for module in model.modules():
        own = getattr(module, "rope_type", None)
        kinds = own if isinstance(own, dict) else {None: own}
        for layer_type in (name for name, found in kinds.items() if found in (LONG, DYNAMIC)):
            place = torch.zeros(1, 1, dtype=torch.long, device="meta")
            try:
                more = {} if layer_type is None else {"layer_type": layer_type}
                copy.deepcopy(module).to("meta")(torch.zeros(1, 1, 1, device="meta"), place, **more)
            except (RuntimeError, NotImplementedError, TypeError):
                return True
    return False


@torch.no_grad()
def cached_keys(model: nn.Module, start: int) -> list[Tensor]:
    """The keys that plain layers cache of a few tokens at position `start`, [head, token, dim] each, fp32.

    Every token is alone in its row: among others, sharp attention in half precision would tell two places apart.
    """
    device = first_device(model)
    text = cast(Any, model).config.get_text_config(decoder=True)
    cache = DynamicCache(config=text)
    ids = torch.arange(TOKENS, device=device)[:, None] % text.vocab_size
    at = torch.full((TOKENS, 1), start, device=device)
    training = model.training
    model.eval()
    try:
        model(input_ids=ids, position_ids=at, **passed(model, cache), use_cache=True, logits_to_keep=1)
    finally:
        model.train(training)
    plain: list[Any] = [layer for layer in cache.layers if grows(layer, text)]
    return [layer.keys[:, :, 0].transpose(0, 1).float() for layer in plain if layer.keys is not None]


def explains(rope: Rope, here: Tensor, there: Tensor) -> bool:
    """Whether turning the keys of one place gives those of the other, and leaving them does not."""
    if 2 * len(rope.frequency) > here.shape[-1]:
        return False
    by = torch.full(here.shape[:-1], APART, device=here.device)
    turned = (rope.turn(here, by) - there).norm()
    return bool(turned < 0.1 * there.norm()) and bool(turned < 0.5 * (here - there).norm())
