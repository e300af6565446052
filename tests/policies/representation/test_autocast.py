"""Under autocast the model's attention rounds; what a cache keeps of its keys and values must not be rounded with it."""

from typing import Any

import pytest
import torch
from support import SMALL, Bare, greedy, patched, prompts
from torch import Tensor

from kvengine.hf.names import CACHE

CODES = ["dense", "kivi", "quantspec", "lowrank", "turboquant", "zipcache"]


@pytest.mark.parametrize("name", CODES)
def test_generation_under_autocast(name: str) -> None:
    model = patched(SMALL[name])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert greedy(model, prompts(), 30).shape == (3, 30)


@pytest.mark.parametrize(
    "name", ["dense", "kivi", "quantspec", "lowrank", "turboquant"]
)  # zipcache chooses by rounded attention
def test_what_is_stored_is_what_is_stored_without(name: str) -> None:
    found = []
    for enabled in (True, False):
        bare = Bare(SMALL[name])
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            bare.feed(61)
            for _ in range(40):
                bare.feed(1)
        found.append(bare.cache.parts[0].lane.everything()[:3])
    for here, there in zip(*found, strict=True):
        assert torch.equal(here, there)


def talk(model: Any, rounding: tuple[bool, ...]) -> Tensor:
    """Logits of turns in one cache, each in autocast or not."""
    cache, found = None, []
    for turn, enabled in enumerate(rounding):
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            for i in range(4):
                ids = prompts(1, 6 if turn else 40)["input_ids"] if not i else torch.full((1, 1), 5 + i)
                out = model(ids, cache=cache)
                cache = out[CACHE]
                found.append(out.logits[:, -1].float())
    return torch.stack(found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("name", ["full", "streaming", "h2o", "tova", "snapkv", "d2o", "elastic", "kivi", "quest"])
def test_a_conversation_goes_on_in_and_outside_of_autocast(name: str, begins: bool) -> None:
    """Values are rounded in it, keys are not, since their rotation is float32: a cache holds the one kind that it began with."""
    model = patched(SMALL[name])
    found = talk(model, (begins, not begins, begins))
    assert bool(found.isfinite().all())
    if name in ("full", "streaming"):  # what they hold does not follow from what is rounded
        assert float((found - talk(model, (False,) * 3)).abs().max()) < 0.2 * float(found.std())
