"""Tokens that a later mask says are none: rows of a batch that had ended while others were generated, as chats do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from families.configs import build
from support import SMALL, WIDE, Bare, every, greedy, held, llama, one, patched, prompts
from torch import Tensor
from transformers import DynamicCache

import kvengine
from kvengine.errors import CacheError, ModelError
from kvengine.hf.names import CACHE
from kvengine.offload.stores import Files, Store
from kvengine.prefix import Prefix

ENDED = slice(64, 73)  # of row 0: what was generated for it after its end


def turns() -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor]]:
    """A prompt, what was generated, and the next turn with a mask that hides what one row got after its end."""
    first, answer = prompts(), torch.randint(1, 128, (3, 12), generator=torch.Generator().manual_seed(4))
    more = torch.randint(1, 128, (3, 7), generator=torch.Generator().manual_seed(5))
    mask = torch.cat([first["attention_mask"], torch.ones(3, 19, dtype=torch.long)], 1)
    mask[0, ENDED] = 0
    ids = torch.cat([first["input_ids"], answer, more], 1)
    return first, answer, {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def talked(model: Any, cache: Any) -> Any:
    """The cache after the prompt and the answer, token by token."""
    first, answer, _ = turns()
    mask = first["attention_mask"]
    at = (mask.cumsum(1) - 1).clamp(min=0)
    model(**first, position_ids=at, **{CACHE: cache})
    for i in range(12):
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        at = mask.cumsum(1)[:, -1:] - 1
        model(answer[:, i : i + 1], attention_mask=mask, position_ids=at, **{CACHE: cache})
    return cache


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", every(3, WIDE))
def test_hidden_tokens_are_not_read(name: str) -> None:
    second, stock = turns()[2], llama()
    want = greedy(stock, second, **{CACHE: talked(stock, DynamicCache())})
    seen = second | {"attention_mask": second["attention_mask"].index_fill(1, torch.arange(61, 80), 1)}
    assert not torch.equal(greedy(stock, seen, **{CACHE: talked(stock, DynamicCache())}), want)
    model = patched(WIDE[name])
    assert torch.equal(greedy(model, second, **{CACHE: talked(model, kvengine.EngineCache(model))}), want)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", every(3, WIDE))
def test_hidden_tokens_are_not_read_by_a_turn_of_one_token(name: str) -> None:
    """Which for the rest resumes decoding."""
    second, stock, model = {key: x[:, :74] for key, x in turns()[2].items()}, llama(), patched(WIDE[name])
    want = greedy(stock, second, **{CACHE: talked(stock, DynamicCache())})
    assert torch.equal(greedy(model, second, **{CACHE: talked(model, kvengine.EngineCache(model))}), want)


@pytest.mark.parametrize(("name", "row"), [("full", 0), ("full", 1), ("quest", 0), ("quest", 1), ("kivi", 1)])
@torch.no_grad()
def test_the_one_token_that_a_row_had_in_a_turn_stands_where_the_mask_has_it(name: str, row: int) -> None:
    """Behind the turn's padding: it, or what another row has there, can be hidden."""
    first, more = prompts(), torch.randint(1, 128, (3, 8), generator=torch.Generator().manual_seed(6))
    mask = torch.cat([first["attention_mask"], torch.ones(3, 8, dtype=torch.long)], 1)
    mask[0, 61:65] = 0
    found, patched_model = [], patched(WIDE[name])
    for model, cache, hide in (
        (llama(), DynamicCache(), True),
        (llama(), DynamicCache(), False),
        (patched_model, kvengine.EngineCache(patched_model), True),
    ):
        for end, new in ((61, first["input_ids"]), (66, more[:, :5]), (69, more[:, 5:])):
            seen = mask[:, :end].clone()
            seen[row, 65:66] = int(end < 69 or not hide)
            at = (seen.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
            out = model(new, attention_mask=seen, position_ids=at, **{CACHE: cache}).logits[:, -1]
        found.append(out)
    torch.testing.assert_close(found[2], found[0], atol=2e-2 if name == "kivi" else 1e-4, rtol=0)
    assert not torch.allclose(found[0][row], found[1][row], atol=2e-2)


@torch.no_grad()
def steps(model: Any, cache: Any, hide: bool = True) -> Tensor:
    """Greedy tokens of a loop of one's own, in the midst of which the mask hides some of what was said."""
    batch, found = prompts(), []
    mask, more = batch["attention_mask"], batch["input_ids"]
    for i in range(12):
        if i == 6 and hide:
            mask[:, 40:50], mask[1:, 64] = 0, 0  # of the prompt, and of what came since
        at = torch.arange(mask.shape[1])[None, -more.shape[1] :].expand(len(more), -1)
        more = model(more, attention_mask=mask, position_ids=at, **{CACHE: cache}).logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(more)], 1)
        found.append(more)
    return torch.cat(found, 1)


@pytest.mark.parametrize("name", ["full", "h2o", "snapkv", "duo", "kivi", "zipcache", "lowrank", "quest", "host"])
def test_a_mask_that_hides_more_is_followed_at_each_token(name: str) -> None:
    want, seen = (steps(llama(), DynamicCache(), hide) for hide in (True, False))
    model = patched(WIDE[name])
    assert torch.equal(want[:, :6], seen[:, :6]) and not torch.equal(want, seen)
    assert torch.equal(steps(model, kvengine.EngineCache(model)), want)


@torch.no_grad()
def test_a_mask_that_is_changed_in_its_place_is_followed() -> None:
    """The last pass was told the same bytes, in the same memory."""
    found = []
    for model, make in ((llama(), lambda model: DynamicCache()), (patched("full"), kvengine.EngineCache)):
        ids, mask, cache = one()["input_ids"], torch.ones(1, 70, dtype=torch.bool), make(model)
        for i in range(8):
            if i == 4:
                mask[:, 30:62] = False
            at = torch.arange(61 + i)[None, -ids.shape[1] :]
            ids = model(
                ids, attention_mask=mask[:, : 61 + i], position_ids=at, **{CACHE: cache}
            ).logits[:, -1:].argmax(-1)  # fmt: skip
            found.append(int(ids))
    assert found[:8] == found[8:]


@pytest.mark.parametrize("name", ["full", "quest", "kivi"])
def test_hidden_tokens_are_not_read_by_chunks_of_one_token(name: str) -> None:
    second, model = turns()[2], patched(WIDE[name])
    found = [
        greedy(model, second, cache=talked(model, kvengine.EngineCache(model)), prefill_chunk_size=size)
        for size in (None, 1)
    ]
    assert torch.equal(*found)


@pytest.mark.parametrize("name", every(2, SMALL))
def test_hidden_tokens_are_not_held(name: str) -> None:
    model = patched(SMALL[name])
    cache = talked(model, kvengine.EngineCache(model))
    greedy(model, turns()[2], 5, cache=cache)
    for layer in cache.engines:
        for part in layer.parts:
            lane, heads = part.lane, layer.heads if part.index is None else len(part.index)
            position = lane.everything()[2][:heads]
            assert not ((position >= ENDED.start) & (position < ENDED.stop)).any()


@pytest.mark.parametrize("text", ["full", "streaming(sinks=2, recent=30)", "streaming(sinks=2, recent=30) + host"])
def test_the_first_token_can_be_hidden_like_any_other(text: str) -> None:
    bare = Bare(text, heads=1)
    for n in (40, *[1] * 10):
        bare.feed(n)
    before, hidden = held(bare.cache)[0][0], torch.zeros(1, 50, dtype=torch.bool)
    assert {0, 1, 30, 49} <= set(before)
    hidden[0, [0, 30]] = True
    bare.cache.hide(hidden)
    assert held(bare.cache)[0][0] == [p for p in before if p not in (0, 30)]


@pytest.mark.parametrize("text", ["full", "kivi(group=8, residual=8)", "quest(budget=24, page=4)", "h2o(budget=24)"])
def test_rows_that_hide_nothing_are_as_before(text: str) -> None:
    second, model = turns()[2], patched(text)
    whole = second | {"attention_mask": torch.cat([second["attention_mask"][:, :61], torch.ones(3, 19).long()], 1)}
    found = [greedy(model, batch, cache=talked(model, kvengine.EngineCache(model))) for batch in (second, whole)]
    assert torch.equal(found[0][1:], found[1][1:]) and not torch.equal(found[0][0], found[1][0])


def test_what_is_not_known_any_more_is_refused() -> None:
    """A verdict kept the order of a prompt's tokens, not their places."""
    model = patched("snapkv(budget=24, window=6)")
    cache, more = kvengine.EngineCache(model), torch.cat([one()["input_ids"], one(5, seed=2)["input_ids"]], 1)
    with torch.no_grad():
        model(**one(), cache=cache)
        mask = torch.ones_like(more)
        mask[:, 10:20] = 0
        with pytest.raises(CacheError, match="hides tokens that this cache has seen.*cache.reset"):
            model(more[:, 61:], attention_mask=mask, cache=cache)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("family", ["gemma3", "qwen3_next", "falcon_h1"])
@torch.no_grad()
def test_what_is_not_known_any_more_is_refused_before_a_window_or_a_state_has_taken_it(
    family: str, tokens: int
) -> None:
    """Else the cache could not be gone on with, which the error says it can."""
    model, ids = kvengine.patch(build(family), "snapkv(budget=24, window=6)"), prompts()["input_ids"]
    cache, want = kvengine.EngineCache(model), kvengine.EngineCache(model)
    mask = torch.ones(3, 61 + tokens, dtype=torch.long)
    for x in (cache, want):
        model(ids, cache=x)
    for wrong, says in ((mask.clone().index_fill_(1, torch.arange(10, 20), 0), "hides"), (mask[:, :-1] * 0, "columns")):
        with pytest.raises((CacheError, ModelError), match=says):
            model(ids[:, :tokens], attention_mask=wrong, cache=cache)
    given = {"attention_mask": mask}
    found = [model(ids[:, :tokens], cache=x, **more).logits for x, more in ((cache, given), (want, {}))]
    assert torch.equal(*found)


def test_of_what_came_after_a_verdict_the_places_are_known() -> None:
    """The lane's own arithmetic over what is left, for the token that comes next."""
    bare = Bare("snapkv(budget=24, window=6)", heads=1)
    bare.cache.session.positions = False  # nobody asks for other positions of what stays
    bare.feed(60)
    lane = bare.cache.parts[0].lane
    for _ in range(3):
        bare.feed(1)
    k, v, *_ = (x[0].clone() for x in lane.everything())
    hidden = torch.zeros(1, 63, dtype=torch.bool)
    hidden[0, 61] = True
    assert not lane.tail.exact and len(k) == 27
    lane.hide(lane.gone(hidden))
    found = bare.feed(1)[0, 0]  # [q_head, dim]
    left = torch.arange(27) != 25
    keys, values = torch.cat([k[left], bare.k[0, 0, 63:64]]), torch.cat([v[left], bare.v[0, 0, 63:64]])
    want = (bare.q[0, :, 63] @ keys.T * bare.call.scale).softmax(-1) @ values
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    assert int(bare.cache.parts[0].lane.tail.count().sum()) == 27


def test_tokens_that_have_moved_over_padding_are_not_taken_for_others() -> None:
    model, cache = patched("h2o(budget=24)"), None
    ids = torch.randint(1, 128, (2, 50), generator=torch.Generator().manual_seed(3))
    mask = torch.ones(2, 50, dtype=torch.long)
    mask[0, 30:35] = 0  # the second turn's rows are of different lengths
    with torch.no_grad():
        cache = kvengine.EngineCache(model)
        for a, b in ((0, 30), (30, 40), (40, 44)):
            model(ids[:, a:b], attention_mask=mask[:, :b], cache=cache)
        mask[0, 42] = 0
        with pytest.raises(CacheError, match="hides tokens that this cache has seen"):
            model(ids[:, 44:], attention_mask=mask, cache=cache)


@torch.no_grad()
def test_a_prompt_of_which_some_was_hidden_is_not_stored(tmp_path: Path) -> None:
    """Another prompt of the same ids would be read without it."""
    model, ids, mask = patched("full"), one()["input_ids"], torch.ones(1, 62, dtype=torch.long)
    cache, reuse = kvengine.EngineCache(model), Prefix(model, Store(Files(tmp_path, sync="none")), chunk=16)
    model(ids, cache=cache)
    mask[0, 10] = 0
    model(ids[:, :1], attention_mask=mask, cache=cache)
    with pytest.raises(CacheError, match="hidden by an attention_mask"):
        reuse.keep(ids, cache)
    reuse.store.close()


@torch.no_grad()
def test_a_mask_of_a_turn_alone_is_refused_if_it_has_padding() -> None:
    first, _, second = turns()
    model = patched("quest(budget=500)")
    for ids, mask in (
        (second["input_ids"][:, -7:], first["attention_mask"][:, :7]),
        (second["input_ids"], first["attention_mask"]),
    ):
        cache = kvengine.EngineCache(model)
        if ids.shape[1] == 7:
            model(**first, **{CACHE: cache})
        with pytest.raises(ModelError, match=r"attention_mask has \d+ columns, but .* there are \d+ tokens"):
            model(ids, attention_mask=mask, **{CACHE: cache})
    said = []
    for columns in (7, first["input_ids"].shape[1] + 7):  # without padding it says the same, however short
        model(**first, **{CACHE: (cache := kvengine.EngineCache(model))})
        said.append(model(second["input_ids"][:, -7:], attention_mask=torch.ones(3, columns), **{CACHE: cache}).logits)
    assert torch.equal(*said)


@pytest.mark.parametrize("text", ["h2o(budget=40)", "snapkv(budget=50, window=6) + quest(budget=24, page=4)"])
def test_padding_that_a_row_has_moved_over_hides_none_of_its_tokens(text: str) -> None:
    """A mask that hides no more than padding, whose places in it are now those of tokens."""
    bare, valid = Bare(text, rows=2), torch.ones(2, 40, dtype=torch.bool)
    valid[0, 30:35] = False
    bare.feed(30)
    bare.feed(10, valid[:, 30:])
    before = held(bare.cache)
    assert any(30 <= p < 35 for head in before[0] for p in head)
    bare.cache.hide(~valid)
    assert held(bare.cache) == before


@pytest.mark.parametrize("text", ["full", "kivi(group=8, residual=8)", "quest(budget=24, page=4)"])
def test_where_nothing_depends_on_places_tokens_keep_those_of_the_mask(text: str) -> None:
    """So that a later mask can hide any of them."""
    bare, valid = Bare(text, rows=2), torch.ones(2, 40, dtype=torch.bool)
    valid[0, :3], valid[0, 10:20], valid[1, 33:] = False, False, False
    for chunk in valid.split(25, 1):
        bare.cache.session.prompt_end = 40
        bare.feed(chunk.shape[1], chunk)
    assert held(bare.cache) == [[row.nonzero()[:, 0].tolist()] * 2 for row in valid]
    hidden = ~valid
    hidden[:, 5] = True
    bare.cache.hide(hidden)
    assert held(bare.cache) == [[row.nonzero()[:, 0].tolist()] * 2 for row in ~hidden]
