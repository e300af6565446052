"""Greedy text of a hundred prompts under every middle policy of the tree, against transformers alone.

    python -P -m pytest -m slow tests/speculative/test_greedy.py -s

`-s` shows, per middle, how many of its drafts stood: a middle whose drafts never stand would test nothing. The prompts
have 64 to 300 tokens; the oracle is a model that was never patched, one token at a time, in fp32.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from support import MIXED, SMALL
from support_spec import llama, prompt
from torch import Tensor

import kvengine
from kvengine.policies import catalogue
from kvengine.presets import PRESETS
from kvengine.speculative.triforce import TriForce

COUNT, NEW = 100, 12
MORE = [
    "duo(sparsity=0.5)",
    "duo + quest(budget=24, page=4)",
    "kivi(bits=2)",
    "quest(budget=24, page=4) + kivi",
    "quest(budget=500, page=4)",
    "shadowkv(budget=48, rank=8, chunk=4)",
    "snapkv(budget=32, window=4) + kivi",
    "zipcache",
]
MIDDLES = list(dict.fromkeys([*SMALL.values(), *MIXED, *MORE]))
SHARED = {"quantspec(bits=4, group=8, residual=8)": "quantspec(group=8, residual=8)"}  # the target reads more bits


def ids(number: int) -> Tensor:
    """64 to 300 tokens, an even number; half of each prompt repeats the other half."""
    return prompt(64 + number * 236 // (COUNT - 1) // 2 * 2, seed=number)


@lru_cache
def oracle() -> list[list[int]]:
    """What transformers alone says, prompt by prompt."""
    model = llama()
    return [model.generate(ids(n), max_new_tokens=NEW, do_sample=False)[0].tolist() for n in range(COUNT)]


@lru_cache
def target() -> Any:
    return kvengine.patch(llama())


def together(decoder: TriForce, numbers: range) -> list[list[int]]:
    """The texts of these prompts, decoded as one batch padded on the left."""
    prompts = [ids(number)[0] for number in numbers]
    most = max(map(len, prompts))
    batch = torch.stack([torch.nn.functional.pad(one, (most - len(one), 0)) for one in prompts])
    mask = torch.stack([(torch.arange(most) >= most - len(one)).long() for one in prompts])
    out = decoder.generate(batch, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)
    return [line[most - len(one) :].tolist() for line, one in zip(out, prompts, strict=True)]


def check(middle: str | None, stack: str, expected: list[list[int]]) -> None:
    """Batches of ten, the first batch alone prompt by prompt; look-up and no lower draft in turns."""
    decoders = [TriForce(target(), draft, middle, gamma=(1, 3), stack=stack) for draft in ("lookup", None)]
    passes = stood = tested = 0
    for part in [*(range(n, n + 1) for n in range(0, COUNT, 10)), *(range(n, n + 10) for n in range(0, COUNT, 10))]:
        decoder = decoders[part.start // 10 % 2]
        assert together(decoder, part) == expected[part.start : part.stop], part
        top = decoder.report.tiers[0]
        passes, stood, tested = passes + top.passes, stood + sum(top.stood), tested + sum(top.tested)
    print(f"\n{middle}: {COUNT} of {COUNT} texts; {stood} of {tested} drafts stood")
    assert stood


@pytest.mark.slow
@pytest.mark.parametrize("middle", [None, *MIDDLES], ids=str)
def test_greedy_text_of_a_hundred_prompts(middle: str | None) -> None:
    check(middle, "full", oracle())


@pytest.mark.slow
@pytest.mark.parametrize("middle", SHARED)
def test_greedy_text_under_the_targets_own_stack(middle: str) -> None:
    alone = TriForce(target(), None, None, stack=SHARED[middle])
    expected = [alone.generate(ids(n), max_new_tokens=NEW, do_sample=False)[0].tolist() for n in range(COUNT)]
    check(middle, SHARED[middle], expected)


def test_every_policy_is_among_the_middles() -> None:
    named = " ".join(MIDDLES)
    assert all(name in named for name in [*catalogue(), *PRESETS])
