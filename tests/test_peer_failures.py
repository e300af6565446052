"""Nine ways in which other cache-compression libraries fail without a word, each right here."""

import pytest
import torch
from support import greedy, held, llama, one, patched, prompts

import kvengine

EVICTING = [
    "streaming(sinks=2, recent=22)",
    "snapkv(budget=24, window=6)",
    "h2o(budget=24)",
    "adakv(budget=24, window=6)",
]


@pytest.mark.parametrize("text", EVICTING)
def test_1_a_padded_row_of_a_batch_gets_the_text_it_gets_alone(text: str) -> None:
    """Elsewhere: padding is scored, kept as a sink, or counted into the budget."""
    model, batch = patched(text), prompts()
    together = greedy(model, batch)
    ids = batch["input_ids"][2, batch["attention_mask"][2].bool()][None]
    assert torch.equal(greedy(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})[0], together[2])


@pytest.mark.parametrize("text", EVICTING)
def test_2_every_chunk_of_a_prompt_is_compressed(text: str) -> None:
    """Elsewhere: of 256 + 256 tokens at one half, 384 stay, because only the first chunk is judged."""
    model, batch = patched(text), one(512)
    caches = [kvengine.EngineCache(model, positions=True) for _ in range(2)]
    whole = greedy(model, batch, 1, cache=caches[0])
    assert torch.equal(greedy(model, batch, 1, prefill_chunk_size=256, cache=caches[1]), whole)
    assert [held(c) for c in caches[0].engines] == [held(c) for c in caches[1].engines]
    assert float(caches[1].stats().held.float().mean()) == 24


@pytest.mark.parametrize("text", EVICTING)
def test_3_two_live_sessions_take_turns(text: str) -> None:
    """Elsewhere: what was evicted is remembered on the model, so the second session's mask is used for the first."""
    model = patched(text)
    alone = greedy(model, one(seed=1), 2)[0].tolist()
    a, b = kvengine.EngineCache(model), kvengine.EngineCache(model)
    with torch.no_grad():
        first = model(one(seed=1)["input_ids"], cache=a).logits[:, -1:].argmax(-1)
        model(one(90, seed=2)["input_ids"], cache=b)
        second = model(first, cache=a).logits.argmax(-1)
    assert [int(first), int(second)] == alone


def test_4_budgets_by_head_free_the_bytes_of_their_heads() -> None:
    """Elsewhere: AdaKV at one quarter masks three quarters, and holds all of the bytes."""
    sizes = []
    for text in ("full", "adakv(budget=0.25, window=8)"):
        model = patched(text, head_dim=32)
        cache = kvengine.EngineCache(model)
        with torch.no_grad():
            model(one(512)["input_ids"], cache=cache)
        sizes.append(cache.stats().bytes_held)
    assert sizes[1] < 0.4 * sizes[0]


@pytest.mark.parametrize("text", EVICTING)
def test_5_prompt_lookup_after_eviction_gives_the_greedy_text(text: str) -> None:
    """Elsewhere: drafts enter the eviction, and rolling back removes the wrong rows."""
    model, batch = patched(text), one()
    batch["input_ids"][0, 30:50] = batch["input_ids"][0, 5:25]
    assert torch.equal(greedy(model, batch, prompt_lookup_num_tokens=5), greedy(model, batch))


@pytest.mark.parametrize("text", EVICTING)
def test_6_a_static_cache_is_refused_not_cut(text: str) -> None:
    """Elsewhere: a preallocated cache is silently cut, its empty slots counted as keys."""
    with pytest.raises(kvengine.errors.ModelError, match="brings its own cache"):
        greedy(patched(text), one(), cache_implementation="static")


@pytest.mark.parametrize("text", ["pyramidkv(budget=24, window=6)", *EVICTING])
def test_7_a_question_of_many_tokens_after_budgets_that_differ_by_layer(text: str) -> None:
    """Elsewhere: one mask for all layers, which crashes once layers hold different numbers of tokens."""
    model = patched(text)
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(one()["input_ids"], cache=cache)
        cache.follow_up()
        together = model(one(9, seed=4)["input_ids"], cache=cache).logits
    assert together.isfinite().all() and cache.seen == 70


@pytest.mark.parametrize("text", EVICTING)
@pytest.mark.parametrize("length", [1, 4, 6, 7, 23, 24, 25])
def test_8_prompts_shorter_than_the_window_or_the_budget(text: str, length: int) -> None:
    """Elsewhere: an assertion fails, or the cache is emptied."""
    want = greedy(llama(), one(length), 1)
    assert torch.equal(greedy(patched(text), one(length), 1), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("text", EVICTING)
def test_9_half_precision_gives_numbers(text: str, dtype: torch.dtype) -> None:
    """Elsewhere: evicted keys are replaced by ones whose product overflows float16, and the text is all one token."""
    model = kvengine.patch(llama().to(dtype), text)
    with torch.no_grad():
        cache = kvengine.EngineCache(model)
        out = model(one(200)["input_ids"], cache=cache).logits
        for _ in range(8):
            out = model(out[:, -1:].argmax(-1), cache=cache).logits
            assert out.isfinite().all()
