"""Prompts that are read a second time (`kvengine.replay`): whatever else is done with the cache meanwhile and afterwards."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import configs, sights
from support import greedy, held, llama, one, prompts
from torch import Tensor

import kvengine
from kvengine import saved
from kvengine.errors import CacheError
from kvengine.hf.cache import EngineCache
from kvengine.hf.names import CACHE
from kvengine.policies.retention import Replay
from kvengine.policies.retention.kvzip import KVzip
from kvengine.text import Text, joined

POLICY = "kvzip(budget=12, chunk=16, carry=3)"
MIXES = [
    POLICY,
    "kvzip(budget=0.25, chunk=16) + kivi(group=8, residual=8)",
    "duo(sinks=2, recent=10) + kvzip(budget=0.4, chunk=16) + quest(budget=16, page=4) + host",
]


@pytest.fixture
def model() -> Any:
    return kvengine.patch(llama(), POLICY)


def kept(cache: EngineCache) -> list[list[list[list[int]]]]:
    return [held(layer) for layer in cache.engines]


@torch.no_grad()
def turns(model: Any, cache: EngineCache, parts: list[Tensor], one_by_one: tuple[int, ...] = ()) -> Tensor:
    """Feed parts of a text, some token by token; the logits."""
    out = []
    for i, part in enumerate(parts):
        for piece in part.split(1, 1) if i in one_by_one else [part]:
            out.append(model(piece, cache=cache).logits)
    return torch.cat(out, 1)


def parts(*lengths: int) -> list[Tensor]:
    return list(one(sum(lengths), seed=5)["input_ids"].split(list(lengths), 1))


@pytest.mark.parametrize("text", MIXES)
def test_conversations_are_the_same_in_chunks_in_batches_and_by_copies(text: str) -> None:
    """Three turns with answers between them."""
    model, talk = kvengine.patch(llama(), text), parts(61, 9, 40, 5, 30)
    cache = EngineCache(model)
    want = turns(model, cache, talk, (1, 3))
    chunked, twin = EngineCache(model), EngineCache(model)
    with torch.no_grad():
        for i, part in enumerate(talk):
            if i in (1, 3):
                turns(model, chunked, [part], (0,))
                continue
            chunked.announce(chunked.seen + part.shape[1])
            turns(model, chunked, list(part.split(13, 1)))
    assert kept(chunked) == kept(cache)
    turns(model, twin, talk[:2], (1,))
    other = copy.deepcopy(twin)
    turns(model, other, parts(33))
    torch.testing.assert_close(turns(model, twin, talk[2:], (1,)), want[:, 70:], rtol=1e-4, atol=1e-4)
    assert kept(twin) == kept(cache) != kept(other)


@torch.no_grad()
def test_rows_bring_turns_of_different_lengths_or_none(model: Any) -> None:
    """Each goes on as it does alone: one has a short first prompt, one no second turn, one a single token of it."""
    ids = one(4 * 90, seed=9)["input_ids"].view(4, 90)
    lengths = [(50, 30), (8, 30), (50, 0), (41, 1)]
    masks = [torch.arange(50) >= torch.tensor([50 - a for a, _ in lengths])[:, None]]
    masks.append(torch.arange(30) >= torch.tensor([30 - b for _, b in lengths])[:, None])
    last = torch.ones(4, 10, dtype=torch.bool)
    cache = EngineCache(model)
    for i in range(3):
        piece = slice((0, 50, 80)[i], (50, 80, 90)[i])
        mask = torch.cat([*masks, last][: i + 1], 1)
        places = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids[:, piece].shape[1] :]
        model(ids[:, piece], attention_mask=mask.long(), position_ids=places, cache=cache)
    for row in range(4):
        alone = EngineCache(model)
        for i, mask in enumerate([*masks, last]):
            mine = ids[row, (0, 50, 80)[i] : (50, 80, 90)[i]][mask[row]][None]
            if mine.shape[1]:
                model(mine, cache=alone)
        pad = 90 - alone.seen
        for a, b in zip(kept(cache), kept(alone), strict=True):
            assert [[p - pad for p in head] for head in a[row]] == b[0]


@torch.no_grad()
def test_what_was_taken_back_is_not_repeated(model: Any) -> None:
    a, b, talk = EngineCache(model), EngineCache(model), parts(61, 6, 30)
    turns(model, a, talk[:2], (1,))
    turns(model, b, talk[:1])
    b.activate_past_recording()
    turns(model, b, [*parts(9), talk[1][:, :2]], (0, 1))
    b.rollback(11)
    turns(model, b, [talk[1], *parts(4)], (0, 1))
    b.crop(-4)
    b.deactivate_past_recording()
    for cache in (a, b):
        turns(model, cache, talk[2:])
    assert kept(a) == kept(b)


@torch.no_grad()
def test_a_restored_session_repeats_what_was_not_yet(model: Any, tmp_path: Path) -> None:
    talk = parts(10, 7, 61, 5, 40)
    whole, cache = EngineCache(model), EngineCache(model)
    for i in range(0, 5, 2):
        turns(model, whole, talk[i : i + 2], (1,))
        turns(model, cache, talk[i : i + 2], (1,))
        saved.save(cache, tmp_path / "talk.kv", model)
        cache = saved.load(model, tmp_path / "talk.kv")
        assert kept(cache) == kept(whole)
    assert sum(len(h) for x in kept(whole) for h in x[0]) == 12 * 4


@torch.no_grad()
def test_a_session_whose_replay_broke_off_is_not_saved(model: Any, tmp_path: Path) -> None:
    """There is nothing to commit: the text has to be read anew."""
    cache, calls = EngineCache(model), []

    def interrupt(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt

    hook = model.model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(one()["input_ids"], cache=cache)
    hook.remove()
    with pytest.raises(CacheError, match="broke off.*cache.reset()"):
        saved.save(cache, tmp_path / "talk.kv", model)
    assert not (tmp_path / "talk.kv").exists()


@torch.no_grad()
def test_what_waits_to_be_repeated_is_counted(model: Any) -> None:
    cache = EngineCache(model)
    turns(model, cache, parts(40))
    assert "text" not in cache.stats().bytes["device"]  # repeated, and let go of
    turns(model, cache, parts(6), (0,))
    assert cache.stats().bytes["device"]["text"] == 6 * 2 * 8  # an id and a position each
    turns(model, cache, parts(9))
    assert "text" not in cache.stats().bytes["device"]


def test_chunks_may_come_in_the_same_memory(model: Any) -> None:
    cache, other, ids = EngineCache(model), EngineCache(model), one(64)["input_ids"]
    memory = torch.empty_like(ids[:, :16])
    cache.announce(64)
    for chunk in ids.split(16, 1):
        model(memory.copy_(chunk), cache=cache)
    model(ids, cache=other)
    assert kept(cache) == kept(other)


@torch.no_grad()
def test_rows_chosen_and_repeated_keep_their_text(model: Any) -> None:
    ids, more = one(3 * 10, seed=2)["input_ids"].view(3, 10), parts(40)[0].expand(6, -1)
    cache, alone = EngineCache(model), EngineCache(model)
    model(ids, cache=cache)  # within the budget: not repeated yet
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([5, 4, 3, 2, 1, 0]))
    model(more, cache=cache)
    model(ids[[2, 2, 1, 1, 0, 0]], cache=alone)
    model(more, cache=alone)
    assert kept(cache) == kept(alone)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["eager", "trace"])
def test_answers_of_recorded_steps_are_repeated_too(model: Any, how: Any) -> None:
    found = []
    for decoder in ({}, {"custom_generate": kvengine.compile_decode(model, how)}):
        cache, batch = EngineCache(model), prompts()
        out = model.generate(**batch, cache=cache, max_new_tokens=9, do_sample=False, **decoder)
        ids = torch.cat([out, parts(40)[0].expand(3, -1)], 1)
        mask = torch.cat([batch["attention_mask"], torch.ones(3, 49, dtype=torch.long)], 1)
        model.generate(ids, attention_mask=mask, cache=cache, max_new_tokens=1, do_sample=False)
        found.append(kept(cache))
    assert found[0] == found[1]


@torch.no_grad()
def test_what_came_without_ids_is_kept_before_all_else(model: Any) -> None:
    cache, given = EngineCache(model), EngineCache(model)
    prefix = kvengine.unpatch(llama())(parts(5)[0])[CACHE]
    cache.adopt(prefix)
    model(parts(61)[0], cache=cache)
    assert all({*range(5)} <= {*head} for layer in kept(cache) for head in layer[0])
    assert sum(len(head) for layer in kept(cache) for head in layer[0]) == 12 * 4 and not given.seen


def test_beams_samples_and_inference_mode(model: Any) -> None:
    batch = prompts()
    beams = greedy(model, batch, 12, num_beams=3)
    for row, mask in enumerate(batch["attention_mask"].bool()):
        ids = batch["input_ids"][row, mask][None]
        alone = greedy(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 12, num_beams=3)
        assert torch.equal(alone[0], beams[row])
    with torch.inference_mode():
        fast = greedy(model, batch, 12)
    assert torch.equal(fast, greedy(model, batch, 12))
    assert torch.equal(greedy(model, batch, 12, custom_generate=kvengine.compile_decode(model)), fast)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", [POLICY, "kvzip(budget=0.4, chunk=16) + kivi(group=8, residual=8)"])
def test_an_assistants_first_draft_waits_for_the_verdict(text: str) -> None:
    """It comes in the pass that ends the prompt; hidden states come together too."""
    model, assistant, batch = kvengine.patch(llama(), text), llama(seed=3), one()
    want = greedy(model, batch)
    assert torch.equal(greedy(model, batch, assistant_model=assistant), want)
    assert torch.equal(greedy(model, batch, assistant_model=kvengine.patch(assistant, POLICY)), want)
    batch["input_ids"][0, 30:50] = batch["input_ids"][0, 5:25]
    options = {"prompt_lookup_num_tokens": 4, "output_hidden_states": True, "return_dict_in_generate": True}
    found = model.generate(**batch, max_new_tokens=20, do_sample=False, **options)
    assert torch.equal(found.sequences[:, 61:], greedy(model, batch, 20))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["gemma3", "gemma3n", "gpt_oss", "qwen3_next", "lfm2", "deepseek_v3", "hrm_text"])
def test_layers_of_transformers_own_are_as_they_were(family: str) -> None:
    """Windows, recurrent states and convolutions take nothing of a replay; rows of a batch are as they are alone."""
    if not configs.exists(family):
        pytest.skip(f"this transformers has no {configs.FAMILIES[family].model}")
    batch, found = configs.padded_batch(), []
    for policy in ("full", "kvzip(budget=12, chunk=8, carry=2)"):
        model = kvengine.patch(configs.build(family), policy)
        cache = EngineCache(model)
        with torch.no_grad():
            logits = model(**batch, cache=cache).logits
        own = [
            x
            for layer in cache.others
            for y in vars(layer).values()
            for x in (y.values() if isinstance(y, dict) else [y])
        ]
        found.append([logits[batch["attention_mask"].bool()], *(x for x in own if isinstance(x, Tensor))])
    assert len(found[0]) == len(found[1]) and all(map(torch.equal, *found))
    together = model.generate(**batch, max_new_tokens=6, do_sample=False)[:, -6:]
    for row, mask in enumerate(batch["attention_mask"].bool()):
        ids = batch["input_ids"][row, mask][None]
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        assert torch.equal(alone[0, -6:], together[row])


@torch.no_grad()
def test_padding_that_is_still_in_a_window_is_not_read_again() -> None:
    """Of a row with less text than a window has tokens; this model hands its layers a mask for each kind of them."""
    model, (_, ids) = kvengine.patch(sights.build("gemma3"), "kvzip(budget=2, chunk=2, carry=1)"), parts(4, 24)
    found, ids = [], ids.clamp(3, 90).expand(2, -1)
    for start in (0, 20):
        cache, mask = EngineCache(model, positions=True), torch.ones(2, 24 - start, dtype=torch.long)
        mask[1, : 20 - start] = 0
        model(ids[:, start:], attention_mask=mask, cache=cache)
        found.append([[[p + start for p in head] for head in layer[1]] for layer in kept(cache)])
    assert found[0] == found[1]


@pytest.mark.parametrize("seen", [25, 61])
def test_another_batchs_pass_that_is_refused_leaves_no_trace(seen: int, model: Any) -> None:
    """In the midst of the prompt, and behind it, where nothing is left to repeat."""
    first, rest = one(75)["input_ids"].expand(2, -1).split([seen, 75 - seen], 1)
    want, cache = EngineCache(model), EngineCache(model)
    for each in (want, cache):
        each.announce(max(seen, 61))
        turns(model, each, [first])
    with pytest.raises(CacheError, match="holds 2 sequences"):
        turns(model, cache, [torch.ones(1, 2, dtype=torch.long)])
    for each in (want, cache):
        each.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(turns(model, cache, [rest]), turns(model, want, [rest])) and kept(cache) == kept(want)


def test_positions_go_on_behind_the_text_and_keep_their_distances() -> None:
    """Of three axes as behind images, and of four, whose first counts tokens."""
    how = Replay(chunk=4, carry=2, prompt=(7, 8), suffix=(9,), sinks=0)
    three = torch.tensor([[[0, 1, 2, 2, 2, 2, 4, 5]], [[0, 1, 2, 2, 3, 3, 4, 5]], [[0, 1, 2, 3, 2, 3, 4, 5]]])
    for place in (three, torch.cat([torch.arange(8)[None, None], three])):
        text = Text()
        text.add(0, torch.arange(10, 18)[None], place, None)
        first, second = text.plan(how, torch.tensor([True]), lambda ids: ids)
        assert first.made_of.tolist() == [[7, 8, 9, 10, 11, 12, 13]]
        assert second.made_of.tolist() == [[7, 8, 12, 13, 9, 14, 15, 16, 17]]
        rows = [[6, 7, 8, 9, 10, 11, 11], [6, 7, 8, 9, 10, 11, 11], [6, 7, 8, 9, 10, 11, 12]]
        assert first.position[-3:, 0].tolist() == rows
        rows = [[6, 7, 8, 8, 10, 11, 11, 13, 14], [6, 7, 8, 8, 10, 12, 12, 13, 14], [6, 7, 8, 9, 10, 11, 12, 13, 14]]
        assert second.position[-3:, 0].tolist() == rows
        assert len(place) == 3 or first.position[0].tolist() == [[8, 9, 10, 11, 12, 13, 14]]


def test_passes_with_and_without_an_axis_that_counts_tokens_are_one_text() -> None:
    """A model that sees finds three axes itself, is given four by `generate`, and one behind what it has read."""
    three, text = torch.tensor([[[0, 1, 1, 2]], [[0, 1, 2, 3]], [[0, 1, 1, 3]]]), Text()
    text.add(0, torch.arange(4)[None], three, None)
    text.add(4, torch.arange(4)[None], torch.cat([torch.arange(4)[None, None], three]) + 4, None)
    text.add(8, torch.arange(2)[None], torch.tensor([[[8, 9]]]), None)
    whole = joined(text.pieces, None).position
    assert whole[0].tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert whole[1:, 0, :8].tolist() == torch.cat([three, three + 4], 2)[:, 0].tolist() and (whole[:, 0, 8] == 8).all()


def test_a_text_forgets_what_is_behind_a_gap_and_joins_what_came_one_by_one() -> None:
    text = Text()
    text.add(0, torch.arange(10)[None], None, None)
    for i in range(10, 300):
        text.add(i, torch.tensor([[i]]), None, None)
    assert len(text.pieces) < 70 and sum(p.tokens for p in text.pieces) == 300
    text.add(150, torch.arange(150, 170)[None], None, None)
    made = torch.cat([p.made_of for p in text.pieces], 1)
    assert made.tolist() == [list(range(170))] and text.end == 170
    text.add(180, torch.arange(5)[None], None, None)
    assert [p.tokens for p in text.pieces] == [5]
    assert Text.of(text.state() or {}).pieces[0].made_of.tolist() == [[0, 1, 2, 3, 4]]
    text.done(torch.tensor([True]))
    text.add(183, torch.arange(5)[None], None, None)  # behind what was read, of which some was taken back
    assert [p.position.flatten().tolist() for p in text.pieces] == [[183, 184, 185, 186, 187]] and text.end == 188
    broken = text.state() or {}
    broken["pieces"][0]["position"] = torch.zeros(1, 1, 3)
    with pytest.raises(ValueError):
        Text.of(broken)


def never(ids: Tensor) -> Tensor:
    raise AssertionError("vectors are made of ids, where nothing came as vectors")


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0], [1, 1, 0]], ids=str)
@pytest.mark.parametrize("read", [None, 0, 1])
def test_a_batch_is_fed_as_its_rows_alone(order: list[int], read: int | None) -> None:
    """Rows of other lengths, padded before and between their turns, chosen anew, and one of them read by a replay between.
    What was no token at first stays none, and what was one may be hidden later."""
    how, text = Replay(chunk=4, carry=2, prompt=(97, 98), suffix=(99,), sinks=0), Text()
    mask = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 0, 0, 1], [1] * 10, [0, 1, 1, 1, 1, 1, 0, 1, 1, 1]])
    ids, first = torch.arange(10, 40).view(3, 10), mask.clone()
    first[1, 3] = mask[1, 4] = 0
    told = (2 * mask.cumsum(1)).masked_fill(mask == 0, 77)  # as behind images: further apart than one by one
    text.add(0, ids[:, :9], told[:, :9], first[:, :9])
    rows = [row[of].tolist() for row, of in zip(ids[:, :7], (mask & first)[:, :7] > 0, strict=True)]
    if read is not None:
        text.done(torch.tensor([row == read for row in range(3)]))
        rows[read] = []
    text.add(7, ids[:, 7:], told[:, 7:], mask[:, :9])  # two were taken back; a mask may end before the tokens
    rows = [[*row, *ids[i, 7:][mask[i, 7:] > 0].tolist()] for i, row in enumerate(rows)]
    text.rows(torch.tensor(order))
    due = torch.tensor([*[True] * (len(order) - 1), read != 0])
    chosen = [rows[i] if asked else [] for i, asked in zip(order, due, strict=True)]
    passes = list(text.plan(how, due, never))
    assert len(passes) == max(-(-len(row) // 4) for row in chosen)
    place = {int(i): int(at) for i, at in zip(ids.flatten(), told.flatten(), strict=True)}
    for i, fed in enumerate(passes):
        for j, row in enumerate(chosen):
            part, before = row[4 * i : 4 * i + 4], row[max(0, 4 * i - 2) : 4 * i]
            want = [97, 98, *before, 99, *part] if part else []
            assert fed.made_of[j, fed.again.valid[j]].tolist() == want
            assert fed.again.valid[j].tolist() == [k < len(want) for k in range(fed.made_of.shape[1])]
            numbers = fed.again.known[j], fed.again.start[j], fed.again.size[j]
            assert numbers == (len(row), min(4 * i, len(row)), len(part))
            after, at = max((place[x] for x in row), default=0) + 1, fed.position[0, j].tolist()
            moved = [after + 2 + place[x] - place[before[0]] for x in before]
            end = max([after + 1, *moved]) + 1
            late = [end + 1 + place[x] - place[part[0]] for x in part]
            assert at == [*([after, after + 1, *moved, end, *late] if part else []), *[0] * (len(at) - len(want))]
    text.repeat(2)
    for each, two in zip(passes, text.plan(how, due.repeat_interleave(2), never), strict=True):
        assert torch.equal(two.made_of, each.made_of.repeat_interleave(2, 0)) and torch.equal(
            two.position, each.position.repeat_interleave(2, 1)
        )


def test_single_tokens_by_vectors_between_those_by_ids_are_one_text() -> None:
    """Each in the same memory."""
    table, text, one, at = torch.randn(300, 3), Text(), torch.empty(1, 1, 3), torch.empty(1, 1, dtype=torch.long)
    for i in range(300):
        vector = i in (40, 41) or i > 200
        text.add(i, one.copy_(table[i]) if vector else torch.tensor([[i]]), at.fill_(2 * i), None)
    assert len(text.pieces) < 140
    how = Replay(chunk=300, carry=0, prompt=(5,), suffix=(6, 7), sinks=0)
    (fed,) = text.plan(how, torch.tensor([True]), lambda ids: table[ids])
    assert torch.equal(fed.made_of[0], table[[5, 6, 7, *range(300)]])
    assert fed.position.flatten().tolist() == [599, 600, 601, *range(602, 1202, 2)]


def test_a_policy_tells_how_it_replays() -> None:
    assert KVzip(chunk=5, carry=2, prompt=(1,)).replay == Replay(5, 2, (1,), (), 4)
