"""Where the parts of a model compute, if it lies on several devices, or its weights elsewhere than where they are used."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

HOOK = "_hf_hook"  # accelerate's, which brings a module's inputs, and weights that are offloaded, to where it computes


def hooks(module: nn.Module) -> list[object]:
    """accelerate's hooks on this module alone."""
    hook = getattr(module, HOOK, None)
    return [] if hook is None else [hook, *getattr(hook, "hooks", ())]


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes, as a hook of accelerate's says, or else its weights."""
    for part in module.modules():
        for hook in hooks(part):
            at: torch.device | str | int | None = getattr(hook, "execution_device", None)
            if at is not None:
                return torch.device(at)
    found = next(module.parameters()).device
    return torch.device("cpu") if found.type == "meta" else found  # brought by somebody else when they are needed


def weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A model's parameters with their numbers, wherever these are kept while they are not used; tied ones by each of their names,
    as whatever brings them when they are needed unties them."""
    for name, weight in model.named_parameters(remove_duplicate=False):
        if weight.is_meta:
            place, _, own = name.rpartition(".")
            kept = [getattr(hook, "weights_map", None) or {} for hook in hooks(model.get_submodule(place))]
            weight = next((held[own] for held in kept if own in held), weight)
        yield from made_of(name, weight)


def inside(model: nn.Module) -> nn.Module:
    """The model of transformers in one that wraps it (PEFT) and adds no weights beside it, as tuned prompts are."""
    found = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), model)
    return found if len([*model.parameters()]) == len([*found.parameters()]) else model


def wraps(model: Any) -> str:
    """What to give instead of a model that wraps one of transformers', as the end of a sentence; nothing if it does not."""
    parts = model.modules() if isinstance(model, nn.Module) else ()
    name = next((type(part).__name__ for part in parts if isinstance(part, PreTrainedModel)), None)
    how = ": model.get_base_model()" if hasattr(model, "get_base_model") else ""
    return "" if name is None else f"the {name} inside it{how}"


def made_of(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of a weight that holds several (quantised by torchao, quanto), which may know little but to multiply."""
    if not hasattr(weight, "__tensor_flatten__") or hasattr(weight, "device_mesh"):  # the latter's is a part of a whole
        yield name, weight
        return
    for inner in weight.__tensor_flatten__()[0]:
        yield from made_of(f"{name}.{inner}", getattr(weight, inner))


def kept_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that are stored with a model and are no parameters, as those of some quantised layers; none that is elsewhere."""
    for place, module in model.named_modules():
        for name, held in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set and not held.is_meta:
                yield f"{place}.{name}", held


def first_device(model: nn.Module) -> torch.device:
    """Where a model takes its tokens."""
    return device_of(cast(Any, model).get_input_embeddings())


def layer_devices(model: nn.Module, layers: int) -> list[torch.device]:
    """Where each of a cache's layers is: where the module of its number attends, or else the model's first device."""
    text = cast(Any, model).config.get_text_config(decoder=True)
    found: dict[int, torch.device] = {
        m.layer_idx: device_of(m)  # type: ignore[misc]
        for m in model.modules()
        if getattr(m, "config", None) is text and isinstance(getattr(m, "layer_idx", None), int)
    }
    return [found.get(i) or first_device(model) for i in range(layers)]


def offloaded(model: nn.Module) -> bool:
    """Whether some weights come to where they are used only when they are."""
    return any(getattr(hook, "offload", False) for part in model.modules() for hook in hooks(part))


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected meanwhile: it may hold memory that a GPU cannot give back now."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()
