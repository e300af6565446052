"""Greedy text of a hundred prompts under every middle policy of the tree, against transformers alone.

    python -P -m pytest -m slow tests/speculative/test_greedy.py -s

`-s` shows, per middle, how many of its drafts stood: a middle whose drafts never stand would test nothing. The prompts
have 64 to 300 tokens; the oracle is a model that was never patched, one token at a time, in fp32.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
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
    """What transformers alone says."""
    model = llama()
    return [model.generate(ids(n), max_new_tokens=NEW, do_sample=False)[0].tolist() for n in range(COUNT)]


@lru_cache
def target() -> Any:
    return kvengine.patch(llama())


def check(middle: str | None, stack: str, expected: list[list[int]]) -> None:
    decoders = [TriForce(target(), draft, middle, gamma=(1, 3), stack=stack) for draft in ("lookup", None)]
    passes = stood = tested = 0
    for number, text in enumerate(expected):
        decoder = decoders[number % 2]
        assert decoder.generate(ids(number), max_new_tokens=NEW, do_sample=False)[0].tolist() == text, number
        top = decoder.report.tiers[0]
        passes, stood, tested = passes + top.passes, stood + sum(top.stood), tested + sum(top.tested)
    print(f"\n{middle}: {COUNT} of {COUNT} texts; {stood} of {tested} drafts stood, {passes} passes for {COUNT * NEW}")
    assert passes < COUNT * (NEW - 1) and stood


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


def test_greedy_text_of_some_prompts_under_every_policy() -> None:
    """The same in small: each middle sees one prompt."""
    for number, middle in enumerate(MIDDLES):
        decoder = TriForce(target(), ("lookup", None)[number % 2], middle, gamma=(2, 4))
        out = decoder.generate(ids(number % 8), max_new_tokens=NEW, do_sample=False)[0].tolist()
        assert out == short(number % 8), middle


@lru_cache
def short(number: int) -> list[int]:
    return llama().generate(ids(number), max_new_tokens=NEW, do_sample=False)[0].tolist()
