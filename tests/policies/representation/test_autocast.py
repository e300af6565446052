"""Under autocast the model's attention rounds; what a cache keeps of its keys and values must not be rounded with it."""

import pytest
import torch
from support import SMALL, Bare, greedy, patched, prompts

CODES = ["dense", "kivi", "quantspec", "lowrank", "zipcache"]


@pytest.mark.parametrize("name", CODES)
def test_generation_under_autocast(name: str) -> None:
    model = patched(SMALL[name])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert greedy(model, prompts(), 30).shape == (3, 30)


@pytest.mark.parametrize("name", ["dense", "kivi", "quantspec", "lowrank"])  # zipcache chooses by rounded attention
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
