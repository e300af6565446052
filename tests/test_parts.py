"""Prompts that are read in parts, each judged before the next (`judge_every` of `kvengine.patch`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families.configs import build
from families.test_two_rotations import build as two_rotations
from support import SMALL, every, greedy, llama, one, patched, prompts
from torch import Tensor

import kvengine
from kvengine.errors import ModelError, PolicyError, UnsupportedPolicy
from kvengine.evals.engine import opened
from kvengine.hf.names import CACHE
from kvengine.hf.parts import ends
from kvengine.speculative import TriForce

SIZE = 16
POLICIES = [text for name, text in SMALL.items() if name != "lowrank"]
MIXED = [
    "snapkv(budget=24, window=6) + kivi(group=8, residual=8)",
    "duo(sinks=2, recent=10) + quest(budget=24, page=4)",
]


def told(model: Any, batch: dict[str, Tensor], **options: Any) -> tuple[Tensor, Any]:
    """The logits of each new token, [token, row, vocabulary], and the cache."""
    out = model.generate(
        **batch, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True, **options
    )
    return torch.stack(out.logits), out[CACHE]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", every(3, POLICIES, 1) + MIXED)
def test_a_part_is_a_turn(text: str) -> None:
    """The oracle: passes in a loop of one's own, each of which is a prompt by itself."""
    batch = prompts()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    position = (mask.cumsum(1) - 1).clamp(min=0)
    model, begin = patched(text), 0
    want = kvengine.EngineCache(model)
    for end in (13, 29, 45, 61):
        with torch.no_grad():
            out = model(
                ids[:, begin:end], attention_mask=mask[:, :end], position_ids=position[:, begin:end], cache=want
            )
        begin = end
    held = want.stats().held
    got, _ = told(kvengine.patch(model, text, judge_every=SIZE), batch)
    torch.testing.assert_close(got[0], out.logits[:, -1], rtol=1e-4, atol=1e-4)
    cache = kvengine.EngineCache(model)
    model.generate(**batch, max_new_tokens=1, do_sample=False, cache=cache)
    assert torch.equal(cache.stats().held, held)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", every(4, POLICIES, 2) + MIXED)
def test_a_row_alone_is_the_row_in_a_batch(text: str) -> None:
    """Parts are counted from the end, so padding before a row moves none of them."""
    model, batch = kvengine.patch(llama(), text, judge_every=SIZE), prompts()
    got, _ = told(model, batch)
    for row, length in enumerate(batch["attention_mask"].sum(1).tolist()):
        alone, _ = told(model, {name: x[row : row + 1, -length:] for name, x in batch.items()})
        torch.testing.assert_close(alone[:, 0], got[:, row], rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "text", ["full", "quest(budget=500)", "kivi(residual=500)", "snapkv(budget=500)", "h2o(budget=500)"]
)
@pytest.mark.parametrize("size", [2, 7, 60, 61, 100])
def test_what_keeps_everything_does_not_notice(text: str, size: int) -> None:
    want, _ = told(patched(text), prompts())
    got, _ = told(kvengine.patch(llama(), text, judge_every=size), prompts())
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("text", "kept"), [("snapkv(budget=24, window=6)", 24), ("kivi(group=8, residual=8)", 8 + 31)])
def test_no_more_is_left_as_it_came_than_was_kept(text: str, kept: int) -> None:
    """After every pass. While one runs, its own tokens are there too: a part."""
    model, found = kvengine.patch(llama(), text, judge_every=SIZE), list[tuple[int, int]]()

    def look(module: Any, args: Any, kwargs: Any, out: Any) -> None:
        lanes = [part.lane for layer in out[CACHE].engines for part in layer.parts]
        found.append((lanes[0].seen, max(len(lane.tail) for lane in lanes)))

    hook = model.register_forward_hook(look, with_kwargs=True)
    greedy(model, one(125), 1)
    hook.remove()
    assert [seen for seen, _ in found] == [13, 29, 45, 61, 77, 93, 109, 125]
    assert all(tokens <= kept for _, tokens in found)


@pytest.mark.parametrize("chunk", [5, 16, 40])
def test_chunks_within_a_part_change_nothing(chunk: int) -> None:
    model = kvengine.patch(llama(), "snapkv(budget=24, window=6)", judge_every=20)
    want, _ = told(model, prompts())
    got, _ = told(model, prompts(), prefill_chunk_size=chunk)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_later_turn_is_read_in_parts_too_and_a_short_one_in_one() -> None:
    model, passes = kvengine.patch(llama(), "h2o(budget=24)", judge_every=SIZE), list[int]()
    hook = model.register_forward_pre_hook(lambda m, a, kw: passes.append(kw["input_ids"].shape[1]), with_kwargs=True)
    cache, text = kvengine.EngineCache(model), one(20)["input_ids"]
    for more, want in ((0, [4, 16]), (40, [9, 16, 16]), (9, [10])):  # the last token of an answer was not fed before
        text = torch.cat([text, one(more, seed=more)["input_ids"]], 1) if more else text
        passes.clear()
        text = model.generate(text, max_new_tokens=2, do_sample=False, cache=cache)
        assert passes == [*want, 1]
    hook.remove()


def test_what_follows_up_is_not_judged_at_all() -> None:
    model = kvengine.patch(llama(), "snapkv(budget=24, window=6)", judge_every=SIZE)
    cache, ids = kvengine.EngineCache(model), one(81)["input_ids"]
    model.generate(ids[:, :40], max_new_tokens=1, cache=cache)
    cache.follow_up()
    model.generate(ids, max_new_tokens=1, cache=cache)
    assert int(cache.stats().held.max()) == 24 + 41


def test_recorded_steps_follow_parts() -> None:
    text = "snapkv(budget=24, window=6) + kivi(group=8, residual=8)"
    want = greedy(kvengine.patch(llama(), text, judge_every=SIZE), prompts())
    assert torch.equal(greedy(kvengine.patch(llama(), text, record="eager", judge_every=SIZE), prompts()), want)


def test_it_lasts_as_long_as_the_patch() -> None:
    model, batch, text = llama(), one(), "streaming(sinks=2, recent=14)"
    whole, parts = greedy(kvengine.patch(model, text), batch), greedy(kvengine.patch(model, text, judge_every=8), batch)
    assert not torch.equal(whole, parts)
    with kvengine.patched(model, text):
        assert torch.equal(greedy(model, batch), whole)
    assert torch.equal(greedy(model, batch), parts)
    assert torch.equal(greedy(kvengine.patch(model, text), batch), whole)
    with kvengine.patched(kvengine.unpatch(model), text, judge_every=8):
        assert torch.equal(greedy(model, batch), parts)


def test_beams_are_read_in_parts() -> None:
    model, options = llama(), {"max_new_tokens": 6, "num_beams": 3, "do_sample": False}
    want = model.generate(**prompts(), **options)
    assert torch.equal(
        kvengine.patch(model, "quest(budget=500)", judge_every=SIZE).generate(**prompts(), **options), want
    )


@pytest.mark.parametrize("size", [0, 1, -4, True, 2.0, "8192"])
def test_a_part_is_a_number_of_tokens(size: Any) -> None:
    model = llama()
    with pytest.raises(PolicyError, match="judge_every is a number of tokens, 2 or more"):
        kvengine.patch(model, "h2o(budget=24)", judge_every=size)
    assert not hasattr(model, "_kvengine")


def test_what_parts_cannot_be_read_of_says_so() -> None:
    model, text = llama(), "snapkv(budget=24, window=6)"
    with pytest.raises(UnsupportedPolicy, match="'lowrank' is found over a prompt's first pages"):
        kvengine.patch(model, "lowrank(rank=8)", judge_every=SIZE)
    kvengine.patch(model, text, judge_every=SIZE)
    with pytest.raises(UnsupportedPolicy, match="leave judge_every out"):
        model.generate(**one(), cache=kvengine.EngineCache(model, "lowrank(rank=8)"), max_new_tokens=2)
    with pytest.raises(ModelError, match="judge_every=16 has tokens read in parts, but not 'inputs_embeds'"):
        vectors = model.get_input_embeddings()(one()["input_ids"]).detach()
        model.generate(inputs_embeds=vectors, attention_mask=one()["attention_mask"], max_new_tokens=2)
    with pytest.raises(ModelError, match="the whole text in one pass for assisted decoding, and judge_every=16"):
        model.generate(**one(), max_new_tokens=2, prompt_lookup_num_tokens=2)
    with pytest.raises(ModelError, match="speculative decoding reads a prompt in one pass"):
        model.generate(one()["input_ids"], custom_generate=TriForce(model, gamma=(2, 2)), max_new_tokens=2)
    model.generate(**one(9), max_new_tokens=2, prompt_lookup_num_tokens=2)  # one part


def test_the_evaluation_reads_as_generate_does() -> None:
    model, ids = llama(), one()["input_ids"]
    want, _ = told(kvengine.patch(model, "h2o(budget=24)", judge_every=SIZE), {"input_ids": ids})
    with opened(model, "h2o(budget=24)", SIZE) as engine:
        session = engine.session()
        torch.testing.assert_close(session.read(ids[0].tolist()), want[0])
        assert session.branch().judge_every == SIZE  # type: ignore[attr-defined]
        assert engine.session().read(ids[0].tolist(), every=True).shape == (61, 128)


@pytest.mark.parametrize("family", ["gemma3", "falcon_h1", "qwen3_next", "gpt_oss", "gemma3n"])
def test_beside_windows_states_and_shared_keys(family: str) -> None:
    batch, model = prompts(2, 41), build(family)
    batch["input_ids"] = batch["input_ids"] % model.config.vocab_size
    want, _ = told(model, batch)
    got, _ = told(kvengine.patch(model, "full", judge_every=9), batch)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    got, _ = told(kvengine.patch(model, "quest(budget=500)", judge_every=9), batch)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def test_a_text_that_outgrows_the_shorter_of_two_rotations_is_refused() -> None:
    model = kvengine.patch(two_rotations(), "streaming(sinks=1, recent=6)", judge_every=8)
    model.generate(one(30)["input_ids"] % 120, max_new_tokens=1)
    with pytest.raises(ModelError, match="turns keys of texts beyond .* leave judge_every out"):
        model.generate(one(50)["input_ids"] % 120, max_new_tokens=1)


@pytest.mark.parametrize("family", every(2, ["qwen3_next", "falcon_h1"]))
def test_a_part_of_one_token_is_padding_to_some_rows(family: str) -> None:
    """Their states took it for a token: 33 tokens in parts of 16 begin with a part of one."""
    model, batch = build(family), prompts(2, 33)
    batch["input_ids"] += 5 * (1 - batch["attention_mask"])  # the padding token's own vector is zero in a new model
    options = {"max_new_tokens": 2, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    alone = {name: x[1:, batch["attention_mask"][1].bool()] for name, x in batch.items()}
    for size, chunk in ((16, {}), (None, {"prefill_chunk_size": 1})):
        with kvengine.patched(model, "kivi(residual=500)", judge_every=size):
            found, want = model.generate(**batch, **options, **chunk), model.generate(**alone, **options)
        torch.testing.assert_close(found.logits[0][1], want.logits[0][0], rtol=1e-3, atol=1e-3)


def test_ends() -> None:
    for seen, total, size in [(0, 1, 4), (0, 4, 4), (0, 5, 4), (3, 12, 2), (7, 8, 3)]:
        found = ends(seen, total, size)
        sizes = [b - a for a, b in zip([seen, *found], found, strict=False)]
        assert found[-1] == total and all(n == size for n in sizes[1:]) and 0 < sizes[0] <= size
