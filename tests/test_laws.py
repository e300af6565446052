"""Laws that hold for every method in the tree, alone and in some combinations."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import MIXED, SMALL, WIDE, Bare, every, greedy, held, in_turn, llama, methods, one, patched, prompts

import kvengine
from kvengine.policies import catalogue, load
from kvengine.stack import Stack

STACKS = [*SMALL.values(), *MIXED]  # of the laws that take long, each has some of them, and other ones


def lossless(text: str) -> bool:
    return Stack.parse(text).representation.lossless


def test_every_method_has_its_row() -> None:
    assert set(SMALL) == set(WIDE) == set(methods())


@pytest.mark.parametrize("name", methods())
def test_every_file_is_one_method_with_values_for_all_options(name: str) -> None:
    axis, cls = load(name)
    assert cls() == cls() and hash(cls()) == hash(cls()) and axis == catalogue()[name]
    assert Stack(**{axis: cls()}) == Stack.parse(name)


@pytest.mark.parametrize("text", [SMALL[n] for n in methods() if catalogue()[n] == "representation"])
def test_the_names_of_a_representations_fields_are_known_before_there_is_a_page(text: str) -> None:
    one = Bare(text + " + host")
    one.feed(60)
    pages = one.cache.parts[0].lane.pages
    found = {name for fields in pages.pool.nbytes().values() for name in fields} if pages is not None else None
    assert found == set(one.cache.stack.representation.names)


NULL = ("full", "uniform", "exact", "dense", "all")  # these must change nothing, nor may where pages live


@cache
def stock(length: int = 0, count: int = 24) -> torch.Tensor:
    return greedy(llama(), one(length) if length else prompts(), count)


@cache
def logits(text: str) -> torch.Tensor:
    """Of 24 tokens decoded one by one after a padded batch of prompts, the same whatever the model says."""
    model, batch = patched(text), prompts()
    cache = kvengine.EngineCache(model)
    mask, out = batch["attention_mask"], []
    with torch.no_grad():
        model(**batch, cache=cache)
        for token in one(24, seed=5)["input_ids"][0]:
            mask = torch.cat([mask, mask[:, -1:]], 1)
            found = model(token.expand(len(mask), 1), attention_mask=mask, cache=cache)
            out.append(found.logits)
    return torch.cat(out, 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [n for n in methods() if n not in NULL and catalogue()[n] != "placement"])
def test_the_small_stacks_act(name: str) -> None:
    """The control of the laws here: a stack that reads and keeps everything exactly obeys them all."""
    assert float((logits(SMALL[name]) - logits("full")).abs().max()) > 1e-3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", methods())
def test_where_a_budget_exceeds_the_text_nothing_changes(name: str) -> None:
    want, model = stock(), patched(WIDE[name])
    assert torch.equal(greedy(model, prompts()), want)
    assert torch.equal(greedy(model, prompts(), prefill_chunk_size=17), want)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", every(3, STACKS))
def test_chunks_of_a_prompt_do_not_matter(text: str) -> None:
    model, prefill = patched(text), Stack.parse(text).prefill
    if prefill.anew:
        pytest.skip("each chunk of a prompt is judged by its own last queries")
    chooses = prefill.chooses
    batch = one() if chooses else prompts()  # where a method chooses blocks, chunks have to end with blocks
    whole = greedy(model, batch, 12)
    for size in (16, 48 if chooses else 60):
        assert torch.equal(greedy(model, batch, 12, prefill_chunk_size=size), whole)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", every(3, STACKS, 1))
def test_a_row_alone_is_as_in_a_batch(text: str) -> None:
    model, batch = patched(text), prompts()
    together = greedy(model, batch)
    for row, mask in enumerate(batch["attention_mask"].bool()):
        ids = batch["input_ids"][row, mask][None]
        alone = greedy(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})
        assert torch.equal(alone[0], together[row])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", every(3, STACKS, 2))
def test_prompt_lookup_gives_the_greedy_text(text: str) -> None:
    model, batch = patched(text), one()
    batch["input_ids"][0, 30:50] = batch["input_ids"][0, 5:25]  # something to look up
    assert torch.equal(greedy(model, batch, prompt_lookup_num_tokens=4), greedy(model, batch))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", every(3, STACKS, 2))
def test_two_sessions_do_not_meet(text: str) -> None:
    model, a, b = patched(text), one(seed=1), one(seed=2)
    want = [greedy(model, x) for x in (a, b)]
    caches, tokens = [kvengine.EngineCache(model) for _ in range(2)], [[], []]
    feed = [a["input_ids"], b["input_ids"]]
    with torch.no_grad():
        for _ in range(24):
            for i in range(2):
                feed[i] = model(feed[i], cache=caches[i]).logits[:, -1:].argmax(-1)
                tokens[i].append(int(feed[i]))
    assert tokens == [w[0].tolist() for w in want]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("text", "draft"), in_turn(STACKS, [(5, 2), (20, 13), (1, 0), (5, 0), (9, 9)]))
def test_a_draft_rolled_back_leaves_no_trace(text: str, draft: tuple[int, int]) -> None:
    """Append n, commit k is the same as append those k, bit for bit."""
    a, b, (drafted, kept) = Bare(text), Bare(text), draft
    for x in (a, b):
        x.feed(61)
        for _ in range(7):
            x.feed(1)
    a.cache.session.recording = True
    drafts = a.feed(drafted)
    a.back(drafted - kept)
    a.cache.commit()
    for i in range(kept):
        torch.testing.assert_close(b.feed(1)[:, 0], drafts[:, i], rtol=1e-5, atol=1e-6)
    assert held(a.cache) == held(b.cache)
    a.cache.session.recording = False
    for _ in range(30):
        torch.testing.assert_close(a.feed(1), b.feed(1), rtol=0, atol=0)
    assert held(a.cache) == held(b.cache)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("text", "dtype"), in_turn(STACKS, [torch.float16, torch.bfloat16]))
def test_outputs_are_finite_in_half_precision(text: str, dtype: torch.dtype) -> None:
    model = kvengine.patch(llama().to(dtype), text)
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        out = model(one()["input_ids"], cache=cache).logits
        for _ in range(4):
            out = model(out[:, -1:].argmax(-1), cache=cache).logits
            assert out.isfinite().all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", STACKS)
def test_a_fresh_turn_works_and_a_follow_up_is_decoding(text: str) -> None:
    """A second question may be read as a prompt, or, after `follow_up`, token by token: then chunks do not matter."""
    a, b = Bare(text), Bare(text)
    for x in (a, b):
        x.feed(61)
        x.cache.session.following = True
    together = a.feed(25)
    single = torch.cat([b.feed(1) for _ in range(25)], 1)
    torch.testing.assert_close(together, single, rtol=1e-5, atol=1e-6)
    assert held(a.cache) == held(b.cache)
    c = Bare(text)
    assert c.feed(61).isfinite().all() and c.feed(25).isfinite().all() and c.feed(1).isfinite().all()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("text", "length"), in_turn(STACKS, [1, 7, 2, 3]))
def test_prompts_shorter_than_every_window(text: str, length: int) -> None:
    model, batch = patched(text), one(length)
    want = stock(length, 4)
    found = greedy(model, batch, count=4)
    assert found.shape == want.shape
    if Stack.parse(text).selection.reads is None and lossless(text):
        assert torch.equal(found, want)


@settings(max_examples=60)
@given(st.lists(st.sampled_from(methods()), max_size=6, unique_by=lambda n: catalogue()[n]))
def test_text_round_trips(names: list[str]) -> None:
    try:
        stack = Stack.parse(" + ".join(SMALL[n] for n in names) or "full")
    except kvengine.errors.UnsupportedPolicy:
        return
    assert Stack.parse(str(stack)) == stack and Stack.parse(stack.spelled()) == stack
