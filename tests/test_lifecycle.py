"""What happens to a cache between passes: copied, interrupted, reordered, taken back on a model with windows."""

import copy
import gc
import threading
import time
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from families.configs import build
from support import SMALL, Bare, every, greedy, in_turn, llama, one, patched, prompts
from torch import Tensor

import kvengine
from kvengine import Stack, saved
from kvengine.cache import LayerCache
from kvengine.errors import CacheError, ModelError
from kvengine.policies.representation.kivi import Kivi
from kvengine.policies.retention import Seen
from kvengine.policies.retention.full import Full
from kvengine.policies.retention.streaming import Streaming
from kvengine.replay import judge_together
from kvengine.rope import Rope
from kvengine.session import Call, Session

STACKS = [SMALL[name] for name in ("full", "h2o", "snapkv", "kivi", "quest", "tidal", "ann", "lowrank", "disk")]
DUO = "duo(sinks=2, recent=10) + quest(budget=24, page=4)"
SELECTIONS = [SMALL[name] for name in ("quest", "tidal", "ann", "landmarks", "retrieval", "oracle_topk")]


@torch.no_grad()
def step(model: Any, cache: kvengine.EngineCache, ids: Tensor) -> Tensor:
    out: Tensor = model(ids, cache=cache).logits
    return out


def started(model: Any, ids: Tensor) -> kvengine.EngineCache:
    cache = kvengine.EngineCache(model)
    step(model, cache, ids)
    return cache


class Remembering(Streaming):
    """Streaming heads that want the scores of their last verdict."""

    remembers = True


class Choosing(Streaming):
    """Streaming heads by a rule of their own."""

    def keep(self, seen: Seen) -> Tensor:
        return super().keep(seen)


class Counting(Streaming):
    """Streaming heads that want to know what attention tokens receive."""

    wants_mass = True


class Noting(Full):
    remembers = True


KIVI = "kivi(group=8, residual=8)"
WAYS: dict[str, list[str | Stack]] = {
    "plain": [
        "full", "snapkv(budget=24, window=6)", "expected_attention(budget=24)", "ashape(sinks=2, local=12)",
        "streaming(sinks=2, recent=14, decode=False)", "h2o(budget=24, decode=False)", "tova(budget=24, decode=False)",
    ],
    "rolls": ["streaming(sinks=2, recent=14)", Stack(retention=Remembering(2, 14))],
    "pays": ["h2o(budget=24)", "tova(budget=24)", "d2o(budget=24)", "elastic(budget=24, offset=-8)"],
    "reads": [
        KIVI, "quest(budget=24, page=4)", "host", "adakv(budget=24, window=6)", "zipcache(block=16)",
        f"streaming(sinks=2, recent=14, decode=False) + {KIVI}", f"h2o(budget=24, decode=False) + {KIVI}",
        f"expected_attention(budget=24) + {KIVI}",
    ],
    "reads thins": [f"streaming(sinks=2, recent=14) + {KIVI}", "streaming(sinks=2, recent=14) + host"],
    "": [
        "rkv(budget=24, buffer=7, window=4)", "lowrank(rank=8)", f"h2o(budget=24) + {KIVI}", f"tova(budget=24) + {KIVI}",
        "elastic(budget=24, offset=-8) + quest(budget=16, page=4)", "streaming(sinks=2, recent=14, positions='in-cache')",
        "streaming(sinks=2, recent=14, positions='in-cache', decode=False)", Stack(retention=Noting()),
        f"streaming(sinks=2, recent=14, positions='in-cache', decode=False) + {KIVI}", Stack(retention=Choosing(2, 14)),
        *(Stack(retention=kind(2, 14), representation=Kivi(group=8, residual=8)) for kind in (Remembering, Choosing, Counting)),
    ],
}  # fmt: skip
"""What becomes of a decoded token, where that is simple: it is added; it takes the place of the one that leaves the newest, or of
one by a rule; pages are read too, and who leaves the newest may be dropped from them. Else it is none of these."""


@pytest.mark.parametrize("way", WAYS)
def test_how_a_decoded_token_is_taken(way: str) -> None:
    for stack in WAYS[way]:
        cache = LayerCache(Stack.of(stack), 0, 1, Session(rope=Rope(torch.ones(4))))
        x = torch.ones(1, 2, 30, 8)
        cache.forward(x, x, x, Call(1.0))
        lane = cache.parts[0].lane
        assert " ".join(name for name in ("plain", "rolls", "pays", "reads", "thins") if getattr(lane, name)) == way, (
            stack
        )


@pytest.mark.parametrize("text", STACKS)
def test_a_copy_goes_on_by_itself(text: str) -> None:
    """The documented way to ask many questions on one prompt: copy the cache that has read it."""
    model, context, a, b = patched(text), one()["input_ids"], one(9, seed=2)["input_ids"], one(9, seed=3)["input_ids"]
    cache = started(model, context)
    twin = copy.deepcopy(cache)
    for question, mine in ((a, twin), (b, cache)):
        want = started(model, context)
        for token in question.split(1, 1):
            torch.testing.assert_close(step(model, mine, token), step(model, want, token), rtol=0, atol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", ["quest(budget=24, page=4)", "kivi(group=8, residual=8)", "h2o(budget=40) + host"])
def test_a_copy_keeps_the_pages_that_it_seals(text: str) -> None:
    """Pages that only the copy names must not be given out again."""
    model, context, more = patched(text), one()["input_ids"], one(90, seed=2)["input_ids"]
    first = started(model, context)
    twin, want = copy.deepcopy(first), started(model, context)
    for token in more.split(1, 1):
        torch.testing.assert_close(step(model, twin, token), step(model, want, token), rtol=0, atol=0)
    assert first.seen == 61


@pytest.mark.parametrize("text", STACKS)
def test_a_copy_that_starts_anew_leaves_the_first_alone(text: str) -> None:
    model, context = patched(text), one()["input_ids"]
    cache, want = started(model, context), started(model, context)
    twin = copy.deepcopy(cache)
    twin.reset()
    other = one(30, seed=5)["input_ids"]
    torch.testing.assert_close(step(model, twin, other), step(model, kvengine.EngineCache(model), other))
    assert (twin.seen, cache.seen) == (30, 61)
    token = other[:, :1]
    torch.testing.assert_close(step(model, cache, token), step(model, want, token), rtol=0, atol=0)


@pytest.mark.parametrize("text", SELECTIONS)
def test_statistics_follow_reordered_rows(text: str) -> None:
    """Beams are chosen, repeated and dropped after the last query; what it read belongs to the rows that are left."""
    model, batch = patched(text), prompts()
    cache = kvengine.EngineCache(model)
    greedy(model, batch, cache=cache)
    before = cache.stats().attended
    for chosen in ([2, 0, 1], [1], [0, 0, 0, 0]):
        cache.batch_select_indices(torch.tensor(chosen))
        before = before[:, chosen]
        assert torch.equal(cache.stats().attended, before)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", [SMALL[name] for name in ("full", "h2o", "kivi", "quest", "disk", "remote")])
@pytest.mark.parametrize("recording", [False, True])
def test_what_a_dropped_cache_held_is_free(text: str, recording: bool) -> None:
    """States to go back to are views of the keys of a pass: they must not hold the cache, nor it its threads."""
    model, ids, before = patched(text), one(200)["input_ids"], threading.active_count()
    cache = kvengine.EngineCache(model)
    if recording:
        cache.activate_past_recording()
    step(model, cache, ids)
    step(model, cache, ids[:, :5])
    lanes = [weakref.ref(part.lane) for layer in cache.engines for part in layer.parts]
    del cache
    gc.collect()
    assert [lane() for lane in lanes] == [None] * len(lanes) != []
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before


@pytest.mark.parametrize("text", [SMALL["kvzip"], "d2o(budget=24, shares='measured')"])
def test_layers_that_wait_for_each_other_do_not_hold_a_prompts_queries(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all layers, these would be more than the keys and values that the policy is to drop."""
    found: list[Tensor] = []

    def judge(session: Session) -> None:
        found.extend(seen.queries for _, seen, _ in session.waiting)
        judge_together(session)

    monkeypatch.setattr("kvengine.cache.judge_together", judge)
    model = patched(text)
    step(model, kvengine.EngineCache(model), one(200)["input_ids"])
    assert [x.untyped_storage().nbytes() for x in found] == [x.nbytes for x in found] != []


def test_a_part_of_a_prompt_leaves_the_queries_that_are_asked_and_no_others() -> None:
    model = patched(SMALL["snapkv"])
    cache = kvengine.EngineCache(model)
    cache.announce(200)
    step(model, cache, one(200)["input_ids"][:, :150])
    found = [part.lane.window for layer in cache.engines for part in layer.parts]
    window = 6 * 4 * 16 * 4  # tokens, heads, channels, bytes
    assert {x.untyped_storage().nbytes() for x in found} == {x.nbytes for x in found} == {window}


def test_what_was_known_of_units_goes_where_they_are_others() -> None:
    """Rows that change places have summaries of their own, and longer texts longer ones: the old ones wait for nobody."""
    bare = Bare("quest(budget=24, page=4)", tokens=900)
    bare.feed(200), bare.feed(1)
    pages = bare.cache.parts[0].lane.pages
    assert pages is not None
    for change in (lambda: bare.cache.rows(torch.tensor([0])), lambda: bare.feed(400)):
        assert pages.summary  # as the next token asks
        old = [weakref.ref(x) for x in (pages._alive, *pages._summary.values())]
        change()
        assert [x() for x in old] == [None] * 3


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("text", "first"), in_turn([*STACKS, SMALL["host"], DUO], [True, False]))
def test_a_cache_goes_on_outside_of_inference_mode(text: str, first: bool) -> None:
    """What was written there must not be changed elsewhere; whoever calls `generate` need not know of each other's mode."""
    model, ids, more = patched(text), one()["input_ids"], one(40, seed=5)["input_ids"]
    cache, want = kvengine.EngineCache(model), kvengine.EngineCache(model)
    pieces = [ids, *more[:, :9].split(1, 1), more[:, 9:16], *more[:, 16:].split(1, 1)]
    for i, piece in enumerate(pieces):
        with torch.inference_mode((i < 10) is first or i % 7 == 0):
            found = step(model, cache, piece)
        torch.testing.assert_close(found, step(model, want, piece), rtol=0, atol=0)
        if i == 20:
            for each in (cache, want):
                each.activate_past_recording()
        if i == 23:
            cache.rollback(2)
            want.rollback(2)
    cache.commit()
    assert cache.seen == want.seen and torch.equal(cache.stats().held, want.stats().held)


@pytest.mark.parametrize("text", ["quest(budget=24, page=4)", "kivi(group=8, residual=8)"])
def test_what_has_gradients_does_not_leave_inference_mode_and_the_error_says_so(text: str) -> None:
    model, ids = patched(text), one()["input_ids"]
    cache = kvengine.EngineCache(model)
    model(ids, cache=cache)
    with torch.inference_mode():
        model(ids[:, :1], cache=cache)
    for _ in range(2):
        with pytest.raises(CacheError, match=r"pass with gradients.*inference mode.*cache\.reset\(\)"):
            step(model, cache, ids[:, :1])
    cache.reset()
    torch.testing.assert_close(step(model, cache, ids), step(model, kvengine.EngineCache(model), ids))


@pytest.mark.parametrize("way", ["loaded", "copied", "reordered"])
def test_what_else_makes_tensors_in_inference_mode(way: str, tmp_path: Path) -> None:
    model, more = patched("quest(budget=24, page=4)"), one(20, seed=5)["input_ids"]
    cache, want = started(model, one()["input_ids"]), started(model, one()["input_ids"])
    with torch.inference_mode():
        if way == "loaded":
            saved.save(cache, tmp_path / "s.kv", model)
            cache = saved.load(model, tmp_path / "s.kv")
        elif way == "copied":
            cache = copy.deepcopy(cache)
        else:
            cache.reorder_cache(torch.tensor([0]))
    for token in more.split(1, 1):
        torch.testing.assert_close(step(model, cache, token), step(model, want, token), rtol=0, atol=0)


def test_tokens_indexed_outside_of_no_grad() -> None:
    model, ids = patched("ann(budget=24)"), one()["input_ids"]
    cache, want = kvengine.EngineCache(model), started(model, ids)
    model(ids, cache=cache)
    for token in ids[:, :9].split(1, 1):
        found = model(token, cache=cache).logits
        torch.testing.assert_close(found.detach(), step(model, want, token), rtol=1e-4, atol=1e-4)


class Stop(Exception):
    pass


def broken(model: Any, cache: kvengine.EngineCache, ids: Tensor, module: Any, before: bool) -> None:
    """A pass that stops before or after a module has run."""

    def stop(*_: Any) -> None:
        raise Stop

    hook = module.register_forward_pre_hook(stop) if before else module.register_forward_hook(stop)
    with pytest.raises(Stop):
        step(model, cache, ids)
    hook.remove()


@pytest.mark.parametrize("text", ["full", "h2o(budget=24)", "quest(budget=24, page=4)", "d2o(budget=24)"])
@pytest.mark.parametrize("prompt", [True, False])
def test_a_pass_that_broke_off_between_layers_is_noticed(text: str, prompt: bool) -> None:
    """Control-C, or no memory left: the first layer holds a token more than the second. Nobody may go on with that."""
    model, ids = patched(text), one()["input_ids"]
    cache = kvengine.EngineCache(model) if prompt else started(model, ids)
    some = ids if prompt else ids[:, :1]
    broken(model, cache, some, model.model.layers[0].mlp, before=True)
    for _ in range(2):
        with pytest.raises(CacheError, match="broke off.*cache.reset"):
            step(model, cache, some)
    with pytest.raises(CacheError, match="broke off"):
        greedy(model, one(200), 2, cache=cache)
    cache.reset()
    torch.testing.assert_close(step(model, cache, ids), step(model, kvengine.EngineCache(model), ids), rtol=0, atol=0)


@pytest.mark.parametrize("family", ["gemma3", "mistral_window", "deepseek_v3"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_a_pass_that_broke_off_behind_any_kind_of_layer_is_noticed(family: str, tokens: int, tmp_path: Path) -> None:
    """One of transformers' own, with a window, and one of latents under `full`, whose tokens the engine only stores."""
    model, ids = kvengine.patch(build(family)), one(40)["input_ids"]
    cache = started(model, ids)
    saved.save(cache, tmp_path / "before.kv", model)
    broken(model, cache, ids[:, :tokens], model.model.layers[1], before=True)
    with pytest.raises(CacheError, match="broke off.*cache.reset"):
        step(model, cache, ids[:, :tokens])
    with pytest.raises(CacheError, match="broke off"):
        saved.save(cache, tmp_path / "before.kv", model)
    want = step(model, started(model, ids), ids[:, :tokens])
    for whole in (saved.load(model, tmp_path / "before.kv"), cache):
        if whole is cache:
            cache.reset()
            step(model, cache, ids)
        torch.testing.assert_close(step(model, whole, ids[:, :tokens]), want, rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [1, 4])
def test_latents_of_another_batch_are_refused_before_any_are_taken(tokens: int) -> None:
    """Of one row they would have gone to all rows, if there were several."""
    model, ids = kvengine.patch(build("deepseek_v3")), prompts()["input_ids"]
    cache, want = started(model, ids), started(model, ids)
    with pytest.raises(CacheError, match="holds 3 sequences"):
        step(model, cache, ids[:1, :tokens])
    torch.testing.assert_close(step(model, cache, ids[:, :1]), step(model, want, ids[:, :1]), rtol=0, atol=0)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("family", ["gemma3", "qwen3_next", "falcon_h1"])
def test_another_batch_is_refused_before_a_window_or_a_state_has_taken_it(family: str, tokens: int) -> None:
    """It ended in torch's error about sizes, and what the cache held could not be gone on with."""
    model, ids = kvengine.patch(build(family)), prompts()["input_ids"]
    cache, want = started(model, ids), started(model, ids)
    for rows, says in (
        (ids[:1], "holds 3 sequences, but the model was given 1"),
        (torch.cat([ids, ids]), "repeat_interleave.2."),
    ):
        with pytest.raises(CacheError, match=says):
            step(model, cache, rows[:, :tokens])
    torch.testing.assert_close(step(model, cache, ids[:, :1]), step(model, want, ids[:, :1]), rtol=0, atol=0)


def test_a_layer_that_broke_off_within_itself_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = patched("h2o(budget=24, average=True)", num_hidden_layers=1), one()["input_ids"]
    cache = started(model, ids)
    lane = cache.engines[0].parts[0].lane
    monkeypatch.setattr(lane, "seal", lambda: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop):
        step(model, cache, ids[:, :1])
    monkeypatch.undo()
    with pytest.raises(CacheError, match="broke off"):
        step(model, cache, ids[:, :1])


def test_a_pass_that_broke_off_before_anything_was_taken_may_be_tried_again() -> None:
    model, ids = patched("h2o(budget=24)"), one()["input_ids"]
    cache, want = started(model, ids), started(model, ids)
    attention = model.model.layers[0].self_attn
    broken(model, cache, ids[:, :1], attention.q_proj, before=True)
    update, cache.layers[0].update = cache.layers[0].update, lambda *a, **k: (update(*a, **k), 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, cache, ids[:, :1])
    cache.layers[0].update = update
    torch.testing.assert_close(step(model, cache, ids[:, :1]), step(model, want, ids[:, :1]), rtol=0, atol=0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_rolling_back_takes_the_windowed_layers_along(family: str) -> None:
    """Drafts are taken back twice before anything is settled; the layers with windows must follow."""
    model = kvengine.patch(build(family), "h2o(budget=12)")
    ids = torch.randint(2, 128, (1, 40), generator=torch.Generator().manual_seed(1))
    cache, want = started(model, ids[:, :20]), started(model, ids[:, :20])
    cache.activate_past_recording()
    for n in (3, 5, 2):
        step(model, cache, ids[:, :n])
    cache.rollback(4)
    cache.rollback(6)
    cache.commit()
    for token in ids[:, 20:].split(1, 1):
        torch.testing.assert_close(step(model, cache, token), step(model, want, token), rtol=1e-4, atol=1e-4)
        cache.commit()
    assert max(layer.keys.shape[2] for layer in cache.others) == 7  # nor do they grow while recording


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_a_session_from_a_file_goes_on_where_the_first_layer_has_a_window(family: str, tmp_path: Path) -> None:
    model = kvengine.patch(build(family), "h2o(budget=12)")
    ids = torch.randint(2, 128, (1, 20), generator=torch.Generator().manual_seed(1))
    cache = started(model, ids)
    saved.save(cache, tmp_path / "session.kv", model)
    found = saved.load(model, tmp_path / "session.kv")
    torch.testing.assert_close(step(model, found, ids[:, :1]), step(model, cache, ids[:, :1]), rtol=0, atol=0)


def test_a_window_that_cannot_go_back_says_so_and_nothing_has_changed() -> None:
    model = kvengine.patch(build("gemma3"), "full")
    ids = torch.randint(2, 128, (1, 20), generator=torch.Generator().manual_seed(1))
    cache, want = started(model, ids), started(model, ids)
    with pytest.raises(CacheError, match="window of 8 has given up.*activate_past_recording"):
        cache.rollback(3)
    torch.testing.assert_close(step(model, cache, ids[:, :1]), step(model, want, ids[:, :1]), rtol=0, atol=0)


@pytest.mark.parametrize("length", [9, 60, 61])
def test_a_turn_without_the_text_before_it_is_refused(length: int) -> None:
    """Given only the new question, `generate` would feed nothing, or the same tokens again behind themselves."""
    model = patched("snapkv(budget=24, window=6)")
    cache = started(model, one()["input_ids"])
    with pytest.raises(CacheError, match=rf"given {length} tokens, but this cache has seen 61; give the whole text"):
        greedy(model, one(length), 2, cache=cache)


@pytest.mark.parametrize("text", ["full", "snapkv(budget=24, window=6)", "keydiff(budget=24)"])
def test_what_is_only_added_is_taken_back_without_having_been_remembered(text: str) -> None:
    """But not what was judged, and padding is remembered."""
    cache, want = Bare(text), Bare(text)
    for bare in (cache, want):
        bare.feed(61)
        bare.cache.session.following = True
    cache.cache.session.recording, lane = True, cache.cache.parts[0].lane
    for n in (1, 4):
        cache.feed(n)
    assert not lane.marks
    cache.back(4)
    cache.feed(3, torch.tensor([[False, True, True]]))
    assert len(lane.marks) == 1
    cache.feed(2)
    cache.back(1)  # of what came behind padding
    cache.back(2)  # into the middle of what came with it
    cache.back(2)  # and to before it
    cache.back(1)
    assert lane.seen == 61
    for n in (1, 7, 2):
        torch.testing.assert_close(cache.feed(n), want.feed(n), rtol=0, atol=0)
    cache.cache.commit()
    if text != "full":
        with pytest.raises(CacheError, match="cannot go back from 71 to 60"):
            cache.back(11)
    cache.back(10)
    want.back(10)
    torch.testing.assert_close(cache.feed(5), want.feed(5), rtol=0, atol=0)
    assert lane.lengths == want.cache.parts[0].lane.lengths


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", ["snapkv(budget=24, window=6)", "h2o(budget=24)", "quest(budget=24, page=4)"])
@pytest.mark.parametrize("way", ["recording", "looking up"])
def test_a_turn_of_a_cache_that_records_is_read_as_a_prompt_all_the_same(text: str, way: str) -> None:
    """Recording is for what is drafted."""
    model, out = patched(text).double(), []
    for recording in (False, True):
        cache, ids = kvengine.EngineCache(model), one()["input_ids"]
        if recording and way == "recording":
            cache.activate_past_recording()
        options = {"prompt_lookup_num_tokens": 3} if recording and way == "looking up" else {}
        for seed in (3, 4):
            new = greedy(model, {"input_ids": ids}, 10, cache=cache, **options)
            ids, options = torch.cat([ids, new, one(20, seed)["input_ids"]], 1), {}
        out.append((ids, greedy(model, {"input_ids": ids}, 10, cache=cache)))
    assert torch.equal(out[0][0], out[1][0]) and torch.equal(out[0][1], out[1][1])


@pytest.mark.parametrize("way", ["looking up", "looking up, then recording", "recording"])
def test_what_an_assisted_turn_began_to_record_the_next_turn_does_not(way: str) -> None:
    """States would pile up with every token, and keep the cache from being saved or reordered."""
    model, ids = patched("h2o(budget=24)"), one()["input_ids"]
    cache, own = kvengine.EngineCache(model), "recording" in way
    if way == "recording":
        cache.activate_past_recording()
    new = greedy(model, {"input_ids": ids}, 10, cache=cache, prompt_lookup_num_tokens=3)
    if way == "looking up, then recording":
        cache.activate_past_recording()
    ids = torch.cat([ids, new, one(20, 3)["input_ids"]], 1)
    new = greedy(model, {"input_ids": ids}, 10, cache=cache)
    lane = cache.engines[0].parts[0].lane
    assert cache.session.recording == own and len(lane.marks) == (9 if own else 0)
    if own:
        with pytest.raises(CacheError, match="draft is pending"):
            cache.reorder_cache(torch.tensor([0, 0]))
        cache.correct(model, new[:, :9])
    else:
        cache.reorder_cache(torch.tensor([0, 0]))


@pytest.mark.parametrize("options", [{"prompt_lookup_num_tokens": 3}, {"assistant_model": llama(seed=1)}])
def test_a_text_that_would_be_read_twice_is_refused(options: dict[str, Any]) -> None:
    """As stock: assisted decoding begins with the whole text, whatever the cache holds of it."""
    model = patched("full")
    cache = started(model, one()["input_ids"])
    more = torch.cat([one()["input_ids"], one(9, seed=2)["input_ids"]], 1)
    with pytest.raises(ModelError, match="seen 61 tokens of it and would hold them twice"):
        greedy(model, {"input_ids": more}, 2, cache=cache, **options)
    greedy(model, {"input_ids": more}, 2, cache=cache)
    assert cache.seen == 71


@pytest.mark.parametrize("text", ["full", "snapkv(budget=40, window=8)", "quest(budget=32, page=8)"])
@pytest.mark.parametrize("count", [-1, 1000])
def test_only_tokens_that_were_seen_are_taken_back(text: str, count: int) -> None:
    model, ids = patched(text), one()["input_ids"]
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(ids, cache=cache)
        with pytest.raises(CacheError, match=f"cannot take back {count} tokens"):
            cache.rollback(count)
    assert cache.seen == ids.shape[1]


PARTLY = [
    SMALL[name] for name in ("full", "h2o", "snapkv", "expected_attention", "keydiff", "kivi", "xattention", "zipcache")
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", [*PARTLY, "snapkv(budget=0.3, window=6)", "kvzip(budget=0.3, chunk=16)"])
def test_a_part_of_a_prompt_taken_back_leaves_no_trace_or_is_refused(text: str) -> None:
    """All of what came of the turn always can; some of it unless what its queries look at was noted."""
    model, ids, other = patched(text), one(90)["input_ids"], one(90, seed=2)["input_ids"]
    found, listens = [], text.startswith(("h2o", "snapkv", "expected_attention", "zipcache"))
    for detour in (False, True):
        cache = kvengine.EngineCache(model)
        cache.announce(60)
        if detour:
            step(model, cache, other[:, :25])
            cache.crop(-25)
        step(model, cache, ids[:, :30])
        if detour:
            step(model, cache, other[:, :10])
            with pytest.raises(CacheError, match=r"40 to 30.*cache\.reset") if listens else nullcontext():
                cache.crop(-10)
            if listens:
                cache.crop(-40)
                step(model, cache, ids[:, :30])
        step(model, cache, ids[:, 30:60])
        found.append(torch.cat([step(model, cache, i) for i in ids[:, 60:].split(1, 1)], 1))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    "text, gone",
    [
        ("keydiff(budget=1.0)", 25),
        ("snapkv(budget=50, window=16)", 20),
        ("h2o(budget=50, decode=False)", 20),
        ("expected_attention(budget=50)", 20),
    ],
)
def test_a_part_of_a_later_prompt_taken_back_leaves_no_trace(text: str, gone: int) -> None:
    """All that came of it, and the answer before it in part: the prompts before are as long as they were."""
    found = []
    for detour in (False, True):
        fed, out = Bare(text), list[torch.Tensor]()
        fed.feed(40)
        for _ in range(10 if detour else 30 - gone):
            fed.feed(1)
        if detour:
            fed.cache.session.prompt_end = 80
            fed.feed(20)
            fed.back(gone)
            fed.cache.session.prompt_end = None
        assert not fed.cache.parts[0].lane.reading
        out += [fed.feed(n) for n in (1, 1, 10, 1, 1)]
        found.append(torch.cat(out, 1))
    torch.testing.assert_close(*found)


def test_a_prompt_whose_queries_left_scores_is_not_taken_back() -> None:
    """Though the budget holds all of it still. Where none are kept, it is."""
    for text, refused in (("h2o(budget=60)", True), ("tova(budget=60)", False)):
        cache = started(model := patched(text), one(30)["input_ids"])
        step(model, cache, one(10, seed=2)["input_ids"])
        with pytest.raises(CacheError, match="40 to 30.*has noted") if refused else nullcontext():
            cache.crop(-10)


@pytest.mark.parametrize("text", ["ashape(sinks=2, local=12)", "kvzip(budget=24, chunk=16)"])
@torch.no_grad()
def test_rows_of_which_nothing_is_left_begin_anew(text: str) -> None:
    model, batch, found = patched(text), prompts(), []
    late = (torch.arange(20) >= torch.tensor([[0], [5], [12]])).long()
    for detour in (False, True):
        cache = kvengine.EngineCache(model)
        cache.announce(61)
        if detour:
            model(batch["input_ids"].flip(1)[:, :20], attention_mask=late, cache=cache)
            cache.crop(-20)
        found.append(greedy(model, batch, 9, cache=cache))
    assert torch.equal(*found)


@pytest.mark.parametrize("text", every(3, SMALL.values()))
@torch.no_grad()
def test_all_that_was_seen_is_taken_back_under_every_policy(text: str) -> None:
    """What a policy has dropped or sealed was of a text of which nothing stays."""
    model, batch, found = patched(text), one(), []
    for detour in (False, True):
        cache = kvengine.EngineCache(model)
        if detour:
            step(model, cache, prompts(2, seed=5)["input_ids"])
            step(model, cache, prompts(2, 1)["input_ids"])
            cache.rollback(62)
        found.append(greedy(model, batch, 9, cache=cache))
    assert torch.equal(*found)


@pytest.mark.parametrize("text", ["duo", f"{SMALL['snapkv']} + duo", f"{SMALL['pyramidkv']} + duo"])
def test_what_some_heads_cannot_take_back_no_head_takes_back(text: str) -> None:
    """Heads that only add tokens could go back; those beside them, which dropped some since, cannot."""
    model, ids = patched(text), prompts(2)["input_ids"]
    cache, want = started(model, ids), started(model, ids)
    for i in range(20):
        for each in (cache, want):
            step(model, each, ids[:, i : i + 1])
    with pytest.raises(CacheError, match="cannot go back from 81 to 78"):
        cache.rollback(3)
    torch.testing.assert_close(step(model, cache, ids[:, :1]), step(model, want, ids[:, :1]), rtol=0, atol=0)


@pytest.mark.parametrize("way", ["reorder_cache", "batch_select_indices", "batch_repeat_interleave"])
def test_rows_of_a_cache_with_a_draft_in_some_heads_stay_where_they_are(way: str) -> None:
    model, ids = patched("duo"), prompts(2)["input_ids"]
    cache, want = started(model, ids), started(model, ids)
    for each in (cache, want):
        each.activate_past_recording()
        step(model, each, ids[:, :1])
    with pytest.raises(CacheError, match="while a draft is pending"):
        getattr(cache, way)(2 if way == "batch_repeat_interleave" else torch.tensor([1, 0]))
    torch.testing.assert_close(step(model, cache, ids[:, :1]), step(model, want, ids[:, :1]), rtol=0, atol=0)


@pytest.mark.parametrize("text", ["full", "duo", "h2o(budget=24) + host"])
@pytest.mark.parametrize("way", ["rollback", "reorder_cache", "batch_repeat_interleave"])
def test_a_change_that_broke_off_between_two_passes_is_noticed(
    text: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer has gone back, or has other rows, and the second has not: the text would go on from neither."""
    model, ids = patched(text), prompts(2)["input_ids"]
    cache = started(model, ids)
    if way == "rollback":
        cache.activate_past_recording()
        step(model, cache, ids[:, :1])
    lane = cache.engines[1].parts[0].lane
    monkeypatch.setattr(lane, "rollback" if way == "rollback" else "rows", lambda _: (_ for _ in ()).throw(Stop))
    with pytest.raises(Stop):
        getattr(cache, way)(torch.tensor([1, 0]) if way == "reorder_cache" else 1)
    monkeypatch.undo()
    if way != "rollback":  # what comes next, and ends, mends nothing
        cache.reorder_cache(torch.arange(2))
    with pytest.raises(CacheError, match="broke off.*cache.reset"):
        step(model, cache, ids[:, :1])
    cache.reset()
    torch.testing.assert_close(step(model, cache, ids), step(model, kvengine.EngineCache(model), ids), rtol=0, atol=0)
