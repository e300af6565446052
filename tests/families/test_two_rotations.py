"""Models with a rotation for short texts and one for long ones (Phi-3): where a text outgrows the first, all is read anew."""

import copy
import pickle
from typing import Any, cast

import pytest
import torch
import transformers
from families.configs import BASE
from support import llama, one
from torch import Tensor
from transformers import LogitsProcessor

import kvengine
from kvengine.errors import UnsupportedPolicy
from kvengine.hf.names import CACHE, cache_among
from kvengine.hf.outgrown import PREPARING
from kvengine.hf.rope import looks
from kvengine.speculative import TriForce

SHORT, END = 32, 126
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8,
    "original_max_position_embeddings": SHORT, "short_mscale": 1.0, "long_mscale": 1.0,
}  # fmt: skip


class Remembers(transformers.Phi3ForCausalLM):
    """In transformers 5.17 it drops its cache and forgets all but the newest token; in later releases it reads all anew."""

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        found = super().prepare_inputs_for_generation(*args, **kwargs)
        if kwargs.get(CACHE) is not None and cache_among(found) is None:
            found = super().prepare_inputs_for_generation(*args, **kwargs | {"next_sequence_length": None})
        return found


def build(kind: type = transformers.Phi3ForCausalLM) -> Any:
    options = {"sliding_window": None, "original_max_position_embeddings": SHORT, "rope_parameters": LONGROPE}
    torch.manual_seed(0)
    return kind(cast(Any, kind).config_class(**BASE | options)).eval()


def text(length: int) -> Tensor:
    """It says everything twice, so that drafts are found in it."""
    ids = torch.randint(2, 120, (1, (length + 1) // 2), generator=torch.Generator().manual_seed(0))
    return ids.repeat(1, 2)[:, :length]


def said(model: Any, ids: Tensor, **options: Any) -> Tensor:
    found: Tensor = model.generate(ids, max_new_tokens=16, do_sample=False, **options)
    return found


@pytest.mark.parametrize("length", [28, 50])
def test_a_cache_that_is_given_holds_the_text_under_its_own_policy(length: int) -> None:
    model = kvengine.patch(build(), "streaming(sinks=1, recent=6)")
    want = said(model, text(length))
    kvengine.patch(model, "full")
    assert not torch.equal(said(model, text(length)), want)
    cache = kvengine.EngineCache(model, "streaming(sinks=1, recent=6)")
    assert torch.equal(said(model, text(length), cache=cache), want)
    assert cache.seen == length + 15 and (cache.stats().held == 7).all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("length", [28, 50])
@pytest.mark.parametrize("way", ["look-up", "an assistant"])
@pytest.mark.parametrize("policy", ["full", "h2o(budget=500)", "quest(budget=500) + kivi(residual=500)"])
def test_drafts_are_taken_back(length: int, way: str, policy: str) -> None:
    model, assistant = build(), build()
    if way == "an assistant":
        kvengine.patch(assistant, policy)
    options = {"prompt_lookup_num_tokens": 4} if way == "look-up" else {"assistant_model": assistant}
    want = said(build(Remembers), text(length), **options)
    assert torch.equal(said(kvengine.patch(model, policy), text(length), **options), want)


@pytest.mark.parametrize("policy", ["snapkv(budget=12, window=4)", "kvzip(budget=12, chunk=8, carry=2)"])
def test_a_later_turn_is_judged_with_the_text_before_it(policy: str) -> None:
    """The first turn was short enough, and the second's prompt is not: as a prompt of that length."""
    model = kvengine.patch(build(), policy)
    cache = kvengine.EngineCache(model)
    model.generate(text(20), max_new_tokens=4, do_sample=False, cache=cache)
    assert torch.equal(said(model, text(60), cache=cache), said(model, text(60)))
    assert cache.seen == 75


def test_who_prepares_its_inputs_keeps_doing_so() -> None:
    model = build()
    before = set(vars(model))
    kvengine.patch(model, "streaming(sinks=1, recent=6)")
    want = said(model, text(50))
    vectors = model.get_input_embeddings()(text(50)).detach()
    assert torch.equal(model.generate(inputs_embeds=vectors, max_new_tokens=16, do_sample=False), want[:, 50:])
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(said(twin, text(50)), want)
    with pytest.raises(ValueError, match="not used by the model.*nonsense"):
        said(model, text(50), nonsense=1)
    kvengine.unpatch(model)
    assert set(vars(model)) == before and getattr(model, PREPARING).__func__ is getattr(type(model), PREPARING)


LOOKS = looks(build())


@pytest.mark.sampled(6)
@pytest.mark.skipif(LOOKS, reason="in this transformers the host looks at each token's position")
@pytest.mark.parametrize("how", ["eager", "trace"])
@pytest.mark.parametrize(
    "policy", ["full", "streaming(sinks=1, recent=6)", "quest(budget=12, page=4) + kivi(bits=4, group=4)"]
)
@pytest.mark.parametrize(
    "length", [pytest.param(20, marks=pytest.mark.slow), 28, pytest.param(50, marks=pytest.mark.slow)]
)
def test_recorded_steps_on_either_side_and_across(length: int, policy: str, how: Any) -> None:
    model = kvengine.patch(build(), policy)
    caches = [kvengine.EngineCache(model) for _ in range(2)]
    want = said(model, text(length), cache=caches[0])
    found = said(model, text(length), cache=caches[1], custom_generate=kvengine.compile_decode(model, how))
    assert torch.equal(found, want) and caches[0].seen == caches[1].seen
    assert torch.equal(caches[0].stats().held, caches[1].stats().held)
    turn = torch.cat([want, text(8)], 1)
    assert torch.equal(*(said(model, turn, cache=cache) for cache in caches))


@pytest.mark.skipif(LOOKS, reason="in this transformers the host looks at each token's position")
def test_recorded_steps_of_a_padded_batch_across() -> None:
    model = kvengine.patch(build(), "h2o(budget=12)")
    ids = torch.cat([text(28), text(28).flip(1)])
    mask = torch.ones_like(ids)
    mask[1, :9] = 0
    want = said(model, ids, attention_mask=mask)
    assert torch.equal(said(model, ids, attention_mask=mask, custom_generate=kvengine.compile_decode(model)), want)


def test_a_rotation_that_the_host_looks_up_is_not_recorded() -> None:
    options = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}}
    model = kvengine.patch(transformers.LlamaForCausalLM(transformers.LlamaConfig(**BASE | options)).eval())
    with pytest.raises(UnsupportedPolicy, match="longest position so far, which the host looks up"):
        kvengine.compile_decode(model)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", [transformers.Phi3ForCausalLM, transformers.LlamaForCausalLM])
@pytest.mark.parametrize(("middle", "stack"), [("kivi(residual=500)", "full"), (None, "snapkv(budget=12, window=4)")])
def test_drafts_end_where_a_text_outgrows_the_first(kind: type, middle: str | None, stack: str) -> None:
    """And who reads it anew reads it with every tier. Llama goes on with keys of both."""
    model = kvengine.patch(build(kind).double(), stack)
    want = said(model, text(23))
    decoder = TriForce(model, "lookup" if middle is None else None, middle, (2, 5), stack=stack)
    assert torch.equal(decoder.generate(text(23), max_new_tokens=16, do_sample=False), want)
    report, passes = decoder.report, decoder.report.tiers[0].passes
    assert (report.rows, report.prompt, report.emitted) == (1, 23, 16)
    assert passes + sum(report.tiers[0].stood) == 14 if kind is transformers.Phi3ForCausalLM else 15
    options = {"max_new_tokens": 16, "temperature": 2.0, "seed": 5, "coupled": True}
    plain = TriForce(model, None, None, stack=stack).generate(text(23), **options)
    assert torch.equal(decoder.generate(text(23), **options), plain)


@pytest.mark.parametrize("kind", [transformers.Phi3ForCausalLM, transformers.LlamaForCausalLM])
def test_so_do_those_of_a_middle_whose_rounds_give_several_tokens(kind: type) -> None:
    model, small = kvengine.patch(build(kind).double()), build(kind).double()
    for length, gamma in ((25, (6, 2)), (26, (5, 1)), (27, (4, 5))):
        ids = torch.randint(2, 120, (1, length), generator=torch.Generator().manual_seed(length - 24))
        decoder = TriForce(model, small, "kivi(residual=500)", gamma, draft_stack="full")
        out = decoder.generate(ids, max_new_tokens=16, do_sample=False)
        assert torch.equal(out, said(model, ids)) and sum(decoder.report.tiers[0].stood) > 5


class Ends(LogitsProcessor):
    """The second row's text, after its second token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, END] = -torch.inf
        if input_ids.shape[1] == 29:
            scores[1, END] = torch.inf
        return scores


@pytest.mark.sampled(5)
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(
    "policy", ["streaming(sinks=1, recent=6)", "h2o(budget=12)", "kvzip(budget=12, chunk=8, carry=2)"]
)
def test_a_row_that_had_ended_is_given_no_padding_then(policy: str, masked: bool) -> None:
    model = kvengine.patch(build(), policy)
    ids, cache, twin = torch.cat([text(28), text(30)[:, 2:]]), kvengine.EngineCache(model), kvengine.EngineCache(model)
    options = {"attention_mask": torch.ones_like(ids)} if masked else {}
    options |= {"eos_token_id": END, "pad_token_id": 0, "logits_processor": [Ends()], "cache": cache}
    out = model.generate(ids, max_new_tokens=16, do_sample=False, **options)
    assert out[1].tolist().index(END) == 29
    mask, turn = torch.ones(2, 47, dtype=torch.long), torch.tensor([[5, 6, 7], [8, 9, 10]])
    mask[1, 30:44] = 0
    ids = torch.cat([out, turn], 1)
    logits = []
    for each, begin in ((twin, 0), (cache, 43)):
        ends = [SHORT + 1, *range(SHORT + 2, 44)] if each is twin else []
        for end in [*ends, 47]:
            at = (mask[:, :end].cumsum(1) - 1)[:, begin:]
            with torch.no_grad():
                found = model(ids[:, begin:end], attention_mask=mask[:, :end], position_ids=at, **{CACHE: each})
            begin = end
        logits.append(found.logits[:, -3:])
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_questions_that_follow_up_go_on_doing_so() -> None:
    """What is read anew is a prompt, the first question with it; the second question is not."""
    model = kvengine.patch(build(), "snapkv(budget=12, window=4)")
    cache = kvengine.EngineCache(model)
    model.generate(text(20), max_new_tokens=2, do_sample=False, cache=cache)
    cache.follow_up()
    for length, held in ((40, 13), (60, 33)):
        model.generate(text(length), max_new_tokens=2, do_sample=False, cache=cache)
        assert (cache.stats().held == held).all()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", [transformers.Phi3ForCausalLM, transformers.LlamaForCausalLM])
@pytest.mark.parametrize("policy", ["full", "h2o(budget=12)"])
def test_what_is_read_in_chunks_is_rotated_as_in_one(kind: type, policy: str) -> None:
    """The first chunk would be short, and the text is not; nor is that of a second turn."""
    model = kvengine.patch(build(kind), policy)
    assert torch.equal(said(model, text(60), prefill_chunk_size=7), said(model, text(60)))
    for first in (20, SHORT - 3):  # which ends where the first rotation does
        out = []
        for size in (None, 7):
            cache = kvengine.EngineCache(model)
            model.generate(text(first), max_new_tokens=4, do_sample=False, cache=cache, prefill_chunk_size=size)
            assert cache.seen == first + 3
            out.append(said(model, text(60), cache=cache, prefill_chunk_size=size))
            assert cache.seen == 75
        assert torch.equal(*out)


def test_nothing_is_drafted_where_each_length_has_a_rotation() -> None:
    """A pass over a draft would turn its first tokens, and those that stand, as its last."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    model, small = (llama(rope_parameters=rope, max_position_embeddings=SHORT).double() for _ in range(2))
    kvengine.patch(model)
    for draft, gamma, ids in (
        (None, (2, 5), one(26)["input_ids"]),
        (small, (6, 2), text(20)),
        (small, (4, 5), text(23)),
    ):
        decoder, found = TriForce(model, draft, "quest(budget=500)", gamma, draft_stack="full"), []
        for way in (model, decoder):
            with torch.no_grad():
                model(text(4))  # the rotation of a long text stays until a short one comes
            found.append(way.generate(ids, max_new_tokens=40, do_sample=False))
        assert torch.equal(*found)
        assert sum(decoder.report.tiers[0].stood) >= 3
