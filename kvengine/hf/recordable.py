"""What makes a model's decode step one that cannot be recorded: the host would have to look at each, or count for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from kvengine import latent
from kvengine.errors import UnsupportedPolicy
from kvengine.hf import held_index
from kvengine.hf.cache import EngineCache
from kvengine.hf.cross import CrossLayer
from kvengine.hf.devices import offloaded
from kvengine.hf.held_window import can_hold, empty
from kvengine.hf.indexed import IndexedLayer
from kvengine.hf.layer import EngineLayer
from kvengine.hf.names import PLACES
from kvengine.hf.replay import reader
from kvengine.hf.rope import looks
from kvengine.hf.states import in_place

if TYPE_CHECKING:
    from kvengine.hf.steps import Steps


def check_model(model: PreTrainedModel, cache: EngineCache) -> None:
    """Refuse what makes the host look at each step."""
    text = model.config.get_text_config(decoder=True)
    if looks(model):
        raise UnsupportedPolicy(
            f"{text.model_type} computes its rotation from the longest position so far, which the host looks up at each step in "
            f"transformers {transformers.__version__}; decode without a recording"
        )
    if any(isinstance(x, IndexedLayer) for x in cache.layers) and text.model_type not in held_index.FAMILIES:
        raise UnsupportedPolicy(
            f"{text.model_type} names what it reads by an index of its own that a recorded step does not know; decode without a "
            "recording"
        )
    still = (
        isinstance(x, EngineLayer | CrossLayer) or can_hold(text, x) or in_place(x) or empty(x) for x in cache.layers
    )
    if not all(still):
        raise UnsupportedPolicy(
            f"{text.model_type} has layers whose cache is transformers' own (attention in chunks, a window beside states), and "
            "these grow by moving; decode without a recording"
        )
    if not all(latent.known(module) for _, module in latent.plainly_held(model, cache.stack, cache.engines)):
        raise UnsupportedPolicy(latent.UNKNOWN)
    if len({x.device for x in model.parameters()}) > 1 or offloaded(model):
        raise UnsupportedPolicy(
            "the model lies on several devices, or its weights come when they are needed, and a recording is of one device; "
            "decode without it"
        )


def knows_places(model: Any) -> bool:
    """Whether its layers go by the places that a pass is told. Decoders of BART's kin count for themselves, one token behind the
    other from what the cache has seen, and pass over what they are told."""
    return PLACES in reader(model, model.config.get_text_config(decoder=True))[1]


def check_places(steps: Steps) -> None:
    """Refuse a model that finds by itself where its tokens stand, otherwise than by how many the cache has seen, or in numbers of
    the host's, which a recording would keep as they are (BART's kin, Kosmos-2). For one that `generate` tells nothing; it is
    tried before its first step, with that step's token.

    Raises:
        UnsupportedPolicy: what it says of the token does not follow the position that it is given, or is not what it says when
            it is given none.
    """
    place: Any = steps.position
    own, told, later = (said(steps, x) for x in (None, place, place + 1))
    if torch.equal(told, later) or (own - told).norm() > 0.01 * told.norm():
        raise UnsupportedPolicy(
            f"{type(steps.model).__name__} counts by itself where its tokens stand, which a recorded step would not do again; "
            "decode without a recording"
        )


def said(steps: Steps, place: Tensor | None) -> Tensor:
    """The logits of the next step if the token stood there; nothing of it stays. None: where the model has it."""
    held, changed = steps.position, steps.changed()
    before, steps.position = [x.clone() for x in changed], place
    try:
        return steps.run().float().clone()
    finally:
        steps.position = held
        for x, old in zip(changed, before, strict=True):
            x.copy_(old)
        steps.cache.session.torn = False
