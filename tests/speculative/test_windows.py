"""Speculation on models some of whose layers have a sliding window, or read another layer's keys and values."""

from itertools import product
from typing import Any

import pytest
import torch
from families import configs

import kvengine
from kvengine.errors import ModelError, UnsupportedPolicy
from kvengine.speculative import TriForce
from kvengine.speculative.echo import Echo
from kvengine.speculative.law import Text
from kvengine.speculative.session import Session
from kvengine.speculative.view import SLACK

FAMILIES = ("gemma2", "gemma3", "gemma3n", "gemma4", "gpt_oss", "llama4", "cohere2")
MIDDLES = [
    None, "quest(budget=24, page=4)", "streaming(sinks=2, recent=20)", "h2o(budget=24)", "snapkv(budget=24, window=4)",
    "kivi(bits=2, group=8, residual=8)", "snapkv(budget=32, window=4) + kivi(bits=4, group=8, residual=8)",
]  # fmt: skip
STACKS = ["full", "snapkv(budget=16, window=4)", "quantspec(group=8, residual=8)"]
LENGTH = 40


def combinations() -> list[Any]:
    """All; most of them are slow, together."""
    found = list(product(FAMILIES, MIDDLES, STACKS))
    return [pytest.param(*some, marks=[] if i % 30 == 0 else [pytest.mark.slow]) for i, some in enumerate(found)]


def prompt() -> torch.Tensor:
    """Longer than the windows, which are of 8 tokens, and with something to look up."""
    return configs.padded_batch()["input_ids"][:1].repeat(1, 2)


def built(name: str, seed: int = 0) -> torch.nn.Module:
    if not configs.exists(name):
        pytest.skip(f"this transformers has no {configs.FAMILIES[name].model}")
    return configs.build(name, seed)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "middle", "stack"), combinations())
def test_the_text_is_the_models_own(name: str, middle: str | None, stack: str) -> None:
    model, ids = kvengine.patch(built(name), stack), prompt()
    want = model.generate(ids, max_new_tokens=LENGTH, do_sample=False)
    draft = "lookup" if middle is None else built(name, seed=3)
    decoder = TriForce(model, draft, middle, (2, 3), stack=stack, draft_stack="streaming(sinks=2, recent=20)")
    assert torch.equal(decoder.generate(ids, max_new_tokens=LENGTH, do_sample=False), want)


ALL = ["quest(budget=400, page=4)", "snapkv(budget=400)", "quantspec(group=8, residual=8)"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "middle"), list(product(FAMILIES, ALL))[::8])
def test_a_middle_that_reads_all_is_always_right(name: str, middle: str) -> None:
    """So what its windows hold is what the target's hold, whatever was drafted and taken back."""
    model = kvengine.patch(built(name))
    stack = middle if middle.startswith("quantspec") else "full"
    decoder = TriForce(model, built(name, seed=3), middle, (2, 3), stack=stack)
    decoder.generate(prompt(), max_new_tokens=LENGTH, do_sample=False)
    target = decoder.report.tiers[0]
    few = sum(target.tested) // 4 if middle.startswith("quantspec") else 0  # which drafts on half of the bits
    assert sum(target.tested) > 20 and sum(target.tested) - sum(target.stood) <= few


@pytest.mark.sampled(3)
@pytest.mark.parametrize("late", [SLACK, SLACK + 1, SLACK + 2])
@torch.no_grad()
def test_a_draft_left_alone_for_long_has_windows_up_to_date(late: int) -> None:
    """It takes what came meanwhile when it is asked, or when there is no room for more: windows as well as all else."""
    model, text = kvengine.patch(built("gemma3")), Text(prompt()[0].tolist())
    whole = Session(model, kvengine.EngineCache(model, "full"))
    mine = Echo(model, kvengine.EngineCache(model, "full"), whole=whole)
    whole.prefill(text.tokens)
    mine.prefill(text.tokens)
    text.tokens.append(3)
    for number in range(late):
        whole.feed(text.since(whole.settled, ()))
        text.tokens.append(4 + number)
        whole.settle(text)
        mine.settle(text)
    torch.testing.assert_close(mine.feed(text.tokens[-1:]), whole.feed(text.tokens[-1:]), rtol=1e-4, atol=1e-4)


def test_windows_alone_are_drafted_for_too() -> None:
    model = kvengine.patch(built("mistral_window"))
    want = model.generate(prompt(), max_new_tokens=LENGTH, do_sample=False)
    decoder = TriForce(model, "lookup", None, (2, 3))
    assert torch.equal(decoder.generate(prompt(), max_new_tokens=LENGTH, do_sample=False), want)


@pytest.mark.parametrize("name", ["gemma3", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_rows_of_a_batch_and_sampled_text_are_as_without_drafts(name: str) -> None:
    model = kvengine.patch(built(name))
    ids = prompt().repeat(2, 1)
    ids[1] = ids[1].roll(3)
    plain = TriForce(model, None, None)
    for middle in ("quest(budget=24, page=4)", "h2o(budget=24)"):
        drafted = TriForce(model, "lookup", middle, (2, 3))
        options = {"max_new_tokens": LENGTH, "temperature": 0.9, "seed": 5, "coupled": True}
        assert torch.equal(drafted.generate(ids, **options), plain.generate(ids, **options))


def test_what_cannot_be_taken_back_is_refused_with_the_reason() -> None:
    for name, options in (
        ("gemma3", {"draft": "recycling"}),
        ("gemma3", {"draft": built("gemma3", 3), "widths": (2, 2)}),
        ("llama", {"draft": built("gemma3", 3), "widths": (2, 2)}),
    ):
        with pytest.raises(ModelError, match="drafts trees"):
            TriForce(built(name), middle=None, **options)
    with pytest.raises(UnsupportedPolicy, match="nothing for 'quest"):
        TriForce(built("mistral_window"), "lookup", "quest(budget=24, page=4)")
    with pytest.raises(UnsupportedPolicy, match="later layers"):
        TriForce(built("gemma3n"), "lookup", "quest(budget=24, page=4)", in_place=True)
