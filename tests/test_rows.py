"""Which rows of a batch a cache keeps: those that are there, or it says so and has changed nothing."""

from typing import Any

import pytest
import torch
from families.configs import build
from support import Bare, greedy, held, one, patched, prompts

import kvengine
from kvengine.errors import CacheError, ModelError

POLICIES = [
    "full",
    "snapkv(budget=24, window=6)",
    "duo(sinks=2, recent=10) + quest(budget=24, page=4) + kivi(group=8, residual=8)",
]


def read(model: Any, ids: torch.Tensor) -> kvengine.EngineCache:
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(ids, cache=cache)
    return cache


def step(model: Any, cache: kvengine.EngineCache, rows: int = 3) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(prompts()["input_ids"][:rows, -1:], cache=cache).logits
    return found


WRONG = {
    "beyond": torch.tensor([0, 5]),
    "before": torch.tensor([-4]),
    "none": torch.tensor([], dtype=torch.long),
    "no row of a mask": torch.tensor([False, False, False]),
    "a mask of others": torch.tensor([True, False]),
}


@pytest.mark.parametrize("text", [*POLICIES, "windows"])
@pytest.mark.parametrize("which", WRONG)
def test_rows_that_are_not_there_are_refused_and_nothing_has_changed(text: str, which: str) -> None:
    model = kvengine.patch(build("mistral_window")) if text == "windows" else patched(text)
    ids = prompts()["input_ids"]
    cache, want = read(model, ids), read(model, ids)
    with pytest.raises(CacheError, match="holds 3 sequences.*from 0 to 2"):
        cache.batch_select_indices(WRONG[which])
    with pytest.raises(CacheError, match="repeats=0 would leave no row"):
        cache.batch_repeat_interleave(0)
    torch.testing.assert_close(step(model, cache), step(model, want), rtol=0, atol=0)


@pytest.mark.parametrize("text", [*POLICIES, "mistral_window", "lfm2"])
def test_rows_may_be_a_list_and_counted_from_the_end_and_repeated(text: str) -> None:
    """Also where layers beside the engine's, with windows or states, take row numbers from 0 on alone."""
    model, ids = patched(text) if text in POLICIES else kvengine.patch(build(text)), prompts()["input_ids"]
    ids = ids % model.config.vocab_size
    found = []
    for rows, times in (([2, 0], 1), (torch.tensor([-1, -3]), 1), (torch.tensor([2, 0]), 1), ([2, 2], 1), ([2], 2)):
        cache = read(model, ids)
        cache.batch_select_indices(rows)
        cache.batch_repeat_interleave(times)
        found.append(step(model, cache, 2))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2]) and torch.equal(found[3], found[4])


@pytest.mark.parametrize("text", POLICIES)
def test_several_texts_from_one_prompt_in_a_cache(text: str) -> None:
    """As beams and returned sequences are told to have it."""
    model, ids, options = patched(text), one()["input_ids"], {"num_beams": 3, "num_return_sequences": 3}
    ids = torch.cat([ids, ids[:, :5]], 1)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    with pytest.raises(CacheError, match=r"call cache.batch_repeat_interleave\(3\) first"):
        greedy(model, batch, 6, cache=read(model, ids[:, :61]), **options)
    cache, alike = read(model, ids[:, :61]), read(model, ids[:, :61].expand(3, -1))
    cache.batch_repeat_interleave(3)
    assert torch.equal(greedy(model, batch, 6, cache=cache, **options), greedy(model, batch, 6, cache=alike, **options))


@pytest.mark.parametrize("given", [False, True])
def test_a_model_is_exported_without_its_cache_or_it_says_why(given: bool) -> None:
    """Where a compiler breaks its graph an exporter goes on, and ran in circles."""

    class Logits(torch.nn.Module):
        def __init__(self, model: Any, **options: Any) -> None:
            super().__init__()
            self.model, self.options = model, options

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.model(ids, **self.options).logits
            return found

    model, ids = patched(POLICIES[1]), one(12)["input_ids"]
    cache = {"cache": kvengine.EngineCache(model)} if given else {}
    with torch.no_grad():
        with pytest.raises(ModelError, match=r"cannot be exported.*with a cache.*use_cache=False, .*or"):
            torch.export.export(Logits(model, **cache), (ids,), strict=False)
        program = torch.export.export(Logits(model, use_cache=False), (ids,), strict=False)
        torch.testing.assert_close(program.module()(ids), model(ids).logits)


@pytest.mark.filterwarnings("ignore")  # the tracer looks at everything that is deprecated
def test_a_model_is_traced_without_its_cache_or_it_says_why() -> None:
    """What kernels gave was kept as a constant: the logits of any other text were wrong."""
    model, ids = patched("full").requires_grad_(False), one(12)["input_ids"]
    with torch.no_grad():
        with pytest.raises(ModelError, match="cannot be exported, traced"):
            torch.jit.trace(lambda x: model(x).logits, ids)
        traced = torch.jit.trace(lambda x: model(x, use_cache=False).logits, ids)
        torch.testing.assert_close(traced(ids.flip(1)), model(ids.flip(1)).logits)


@pytest.mark.parametrize("text", ["full", "snapkv(budget=24, window=6)", "kivi(bits=4, group=8, residual=8)"])
def test_half_of_what_came_together_with_padding_is_taken_back(text: str) -> None:
    """What stays of it is read as if the rest had never come: padding is no token."""
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[1, :3] = False
    whole, part = (Bare(text, rows=2) for _ in range(2))
    for fed in (whole, part):
        fed.feed(30)
        fed.cache.session.following = fed.cache.session.recording = True
    whole.feed(6, valid)
    whole.back(2)
    part.feed(4, valid[:, :4])
    for name in ("judged", "firm", "first", "begin"):
        mine, other = (torch.as_tensor(getattr(fed.cache.parts[0].lane, name)) for fed in (whole, part))
        assert torch.equal(mine, other), name
    torch.testing.assert_close(whole.feed(1), part.feed(1), rtol=1e-4, atol=1e-5)
    assert held(whole.cache) == held(part.cache)


PAGED = ["quest(budget=24, page=4)", "kivi(bits=4, group=8, residual=8)"]


@pytest.mark.parametrize("text", PAGED)
def test_what_was_sealed_of_rows_of_different_lengths_is_taken_back(text: str) -> None:
    """A row seals some of its tail while another does not, and what is remembered of the tail has the tokens still."""
    valid = torch.ones(2, 30, dtype=torch.bool)
    valid[1, :3] = False
    whole, part = (Bare(text, rows=2) for _ in range(2))
    for fed in (whole, part):
        fed.feed(30, valid)
        fed.cache.session.following = fed.cache.session.recording = True
    for _ in range(9):
        whole.feed(1)
    whole.back(9)
    assert held(whole.cache) == held(part.cache)
    for _ in range(12):
        torch.testing.assert_close(whole.feed(1), part.feed(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", PAGED)
def test_rows_shorter_than_a_tail_are_as_alone(text: str) -> None:
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[1, :4] = False
    both = Bare(text, rows=2)
    found = [both.feed(9, valid), *(both.feed(1) for _ in range(40))]
    for row, padding in ((0, 0), (1, 4)):
        alone = Bare(text)
        alone.q, alone.k, alone.v = (x[row : row + 1, :, padding:] for x in (both.q, both.k, both.v))
        want = [alone.feed(9 - padding), *(alone.feed(1) for _ in range(40))]
        torch.testing.assert_close(torch.cat(found, 1)[row, padding:], torch.cat(want, 1)[0], rtol=1e-4, atol=1e-5)
