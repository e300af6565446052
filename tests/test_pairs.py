"""Every pair of policies of different axes runs, alone and in a padded batch, or is refused with a reason."""

from itertools import combinations

import pytest
import torch
from support import SMALL, every, greedy, llama, methods, prompts

import kvengine
from kvengine.errors import UnsupportedPolicy
from kvengine.policies import catalogue
from kvengine.stack import Stack

NULLS = {"uniform", "exact", "full", "dense", "all", "device"}
AXES = catalogue()
PAIRS = [(a, b) for a, b in combinations(methods(), 2) if AXES[a] != AXES[b] and not {a, b} & NULLS]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return llama()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("pair", every(3, PAIRS[::-1]), ids=" + ".join)  # of which some are of any two axes
def test_a_pair_runs_or_is_refused(model: torch.nn.Module, pair: tuple[str, str]) -> None:
    a, b = pair
    text = f"{SMALL[a]} + {SMALL[b]}"
    try:
        Stack.parse(text)
    except UnsupportedPolicy as reason:
        assert f"'{a}'" in str(reason) or f"'{b}'" in str(reason)
        return
    with kvengine.patched(model, text):
        cache = kvengine.EngineCache(model)
        assert greedy(model, prompts(), 6, cache=cache).shape == (3, 6)
        stats = cache.stats()
        assert (stats.attended <= stats.held).all() and int(stats.held.min()) > 0
