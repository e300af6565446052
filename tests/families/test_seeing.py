"""Models that see or hear, with images and sounds: one in the first row of a batch, two in the second."""

import copy
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from families.sights import SIGHTS, build, parameters, shown, told, words
from torch import Tensor
from transformers import DynamicCache
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

import kvengine
from kvengine import EngineCache, saved
from kvengine.errors import ModelError, UnsupportedPolicy
from kvengine.hf.brought import Brought
from kvengine.hf.names import CACHE
from kvengine.hf.replay import reader
from kvengine.offload import stores
from kvengine.prefix import Prefix
from kvengine.shifts import Shifts
from kvengine.speculative import TriForce

NEW = 6


@pytest.fixture(autouse=True)
def _llama4_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5.24 asks the text model's output for images, which it does not have."""
    monkeypatch.setattr(MoeCausalLMOutputWithPast, "image_outputs", None, raising=False)


def run(model: Any, inputs: dict[str, Tensor], count: int = NEW, **options: Any) -> Any:
    if "cache" in options:
        options[CACHE] = options.pop("cache")
    return model.generate(**inputs, max_new_tokens=count, do_sample=False, return_dict_in_generate=True, **options)


def new(found: Any, inputs: dict[str, Tensor]) -> Tensor:
    return found.sequences[:, inputs["input_ids"].shape[1] :]


def next_turn(name: str, found: Any, batch: dict[str, Tensor], model: Any = None) -> dict[str, Tensor]:
    """All so far and some words; given a model that is to see another image in each row, that too, as its encoder has it."""
    rows, sight = len(found.sequences), SIGHTS[name]
    ids, view = [found.sequences, torch.stack([words(4, 900 + row) for row in range(rows)])], {}
    if model is not None:
        views = [sight.see(1, 3) for _ in range(rows)]
        ids.insert(1, torch.full((rows, views[0][1][0]), sight.token))
        view = {key: torch.cat([one[key] for one, _ in views]) for key in views[0][0]}
        if sight.axes:  # positions are computed from all grids; pixels, when given, are of all of them too
            seen = model.model.get_image_features(**view, return_dict=True)
            first, second = view["image_grid_thw"]
            view = {
                "image_grid_thw": torch.stack([batch["image_grid_thw"][0], first, *batch["image_grid_thw"][1:], second])
            }
            view["mm_encoder_outputs"] = {"image": seen}
    so_far = torch.cat(ids, 1)
    more = torch.ones(rows, so_far.shape[1] - batch["input_ids"].shape[1], dtype=torch.long)
    return told(name, so_far, torch.cat([batch["attention_mask"], more], 1)) | view


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", parameters())
def test_text_is_the_unpatched_models(name: str) -> None:
    """Also where steps are recorded, and without what is seen it would be another."""
    model, (batch, _) = build(name), shown(name, (1, 2))
    want = run(model, batch).sequences
    other = {key: -x if x.is_floating_point() else x for key, x in batch.items()}
    assert not torch.equal(run(model, other).sequences, want)
    for policy in ("full", "quest(budget=500)"):
        found = run(kvengine.patch(model, policy), batch)
        assert type(found[CACHE]) is EngineCache and torch.equal(found.sequences, want)
    # Llama 4's layers of transformers' own grow by moving, and before 5.24 what Mllama brings to a step grows
    if name != "llama4" and (name != "mllama" or CACHE == "cache"):
        assert torch.equal(run(model, batch, custom_generate=kvengine.compile_decode(model)).sequences, want)
    assert torch.equal(run(kvengine.unpatch(model), batch).sequences, want)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", parameters())
def test_a_policy_holds_what_it_says_and_rows_are_as_they_are_alone(name: str) -> None:
    images = (
        (2, 2) if name == "mllama" else (1, 2)
    )  # there, what comes before an image looks at what others have more of
    model, (batch, alone) = kvengine.patch(build(name), "streaming(sinks=2, recent=10)"), shown(name, images)
    found = run(model, batch)
    assert (found[CACHE].stats().held == 12).all()
    for row, one in enumerate(alone):
        assert torch.equal(new(run(model, one), one)[0], new(found, batch)[row])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", parameters())
def test_what_cannot_be_right_is_refused(name: str) -> None:
    """Turning keys that stand on three axes, leaving out what images' tokens see, reading anew what is not known again."""
    model, (batch, _), sight = build(name), shown(name, (1, 2)), SIGHTS[name]
    want = model(**batch).logits[:, -1]
    for policy in ("expected_attention(budget=12)", "lowrank(rank=8)", "streaming(positions='in-cache')"):
        if sight.axes:
            with pytest.raises(UnsupportedPolicy, match="do not all rotate them by fixed frequencies"):
                kvengine.patch(model, policy)
    with torch.no_grad():
        for policy, right in (
            ("ashape(sinks=2, local=8)", not sight.whole),
            ("kvzip(budget=12, chunk=8, carry=2)", sight.again),
        ):
            cache = EngineCache(kvengine.patch(model, policy))
            if right:
                same = torch.allclose(model(**batch, cache=cache).logits[:, -1], want, rtol=1e-4, atol=1e-4)
                assert same == ("kvzip" in policy)
            else:
                with pytest.raises(UnsupportedPolicy, match="tokens see later ones|is not known again"):
                    model(**batch, cache=cache)


@torch.no_grad()
def test_what_is_read_anew_stands_on_all_axes() -> None:
    """Where an image's tokens do: by the first alone their keys would be others."""
    model, places = kvengine.patch(build("qwen2_5_vl"), "kvzip(budget=12, chunk=8, carry=2)"), []
    part, _ = reader(model, model.config.get_text_config(decoder=True))
    part.register_forward_pre_hook(lambda _, __, given: places.append(given["position_ids"]), with_kwargs=True)
    model(**shown("qwen2_5_vl", (1, 2))[0], use_cache=True)
    assert len(places) > 2 and all(x.ndim == 3 and x.shape[0] == len(places[0]) for x in places)
    assert bool((places[1][-1] != places[1][-3]).any())


def encodes(model: Any) -> bool:
    """Whether what encoders make of images may be given in their place, as older versions of transformers do not know it."""
    return "mm_encoder_outputs" in signature(type(model).forward).parameters


def talk(name: str, model: Any, cache: Any, batch: dict[str, Tensor]) -> list[Tensor]:
    """A second turn with words, and a third with another image in each row."""
    found, texts = run(model, batch, cache=cache), []
    for sees in (None, model) if encodes(model) or not SIGHTS[name].axes else (None,):
        found = run(model, next_turn(name, found, batch, sees), cache=cache)
        texts.append(found.sequences)
    return texts


def stock(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config(decoder=True))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", parameters())
def test_later_turns_are_the_unpatched_models(name: str) -> None:
    model, (batch, _) = build(name), shown(name, (1, 1))
    want = talk(name, model, stock(model), batch)
    kvengine.patch(model, "full" if SIGHTS[name].whole else "quest(budget=500)")
    assert all(map(torch.equal, talk(name, model, EngineCache(model), batch), want))


def test_images_beside_the_text_are_no_tokens() -> None:
    """Mllama's layers that attend to them keep theirs, whatever is taken back, and go where rows go."""
    model, (batch, (one, two)) = kvengine.patch(build("mllama"), "full"), shown("mllama", (1, 2))
    cache = run(model, one)[CACHE]
    cache.activate_past_recording()
    said = [model(input_ids=words(3, 8)[None], **{CACHE: cache}).logits for _ in range(2) if not cache.rollback(0)]
    cache.rollback(6)
    assert not torch.equal(said[0], said[1])
    assert torch.equal(model(input_ids=words(3, 8)[None], **{CACHE: cache}).logits, said[0])
    both = run(model, batch)[CACHE]
    both.reorder_cache(torch.tensor([1]))
    alone = run(model, two)[CACHE]
    seen = [layer.keys for cache in (both, alone) for layer in cache.others]
    torch.testing.assert_close(seen[0], seen[1])
    both.reset()
    assert torch.equal(run(model, two, cache=both).sequences, run(model, two).sequences)


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "internvl"])
def test_a_prompt_may_come_in_chunks(name: str) -> None:
    model, (batch, _) = build(name), shown(name, (1, 2))
    if not encodes(model):
        pytest.skip("this transformers reads no images in chunks")
    want = run(model, batch, prefill_chunk_size=7).sequences
    assert torch.equal(run(kvengine.patch(model, "quest(budget=500)"), batch, prefill_chunk_size=7).sequences, want)


def test_a_chunk_of_a_later_turn_is_told_of_which_kind_its_own_tokens_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the engine makes the chunks, as for transformers before 5.21, each was told those of the text's last tokens."""
    monkeypatch.setattr("kvengine.hf.generate.CHUNKS", (99, 0))
    model, said = kvengine.patch(build("qwen2_vl"), "full"), list[int]()
    found = run(model, {"input_ids": words(10, 3)[None]}, 3)
    text = torch.cat([found.sequences, words(9, 5)[None]], 1)
    kinds = torch.arange(text.shape[1])[None]

    def told_of(module: Any, args: Any, given: dict[str, Any]) -> None:
        said.extend(given["mm_token_type_ids"][0, -given["input_ids"].shape[1] :].tolist())

    model.register_forward_pre_hook(told_of, with_kwargs=True)
    run(model, {"input_ids": text, "mm_token_type_ids": kinds}, 1, cache=found[CACHE], prefill_chunk_size=4)
    assert said == list(range(12, 22))


AXES = [
    "qwen2_vl",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2_5_vl", "qwen3_vl", "glm4v", "qwen3_5")),
]


@pytest.mark.parametrize("name", AXES)
def test_each_cache_knows_where_its_text_goes_on(name: str, tmp_path: Path) -> None:
    """Behind its images; the model remembers that of the last text alone."""
    model, batch, other = build(name), shown(name, (1, 2))[0], shown(name, (3, 1), seed=5)[0]
    found = run(model, batch, cache=(cache := stock(model)))
    more = next_turn(name, found, batch)
    want = new(run(model, more, cache=cache), more)
    run(model, batch, cache=(cache := stock(model)))
    run(model, other)
    assert not torch.equal(new(run(model, more, cache=cache), more), want), "transformers has mended it"
    cache = run(kvengine.patch(model, "full"), batch)[CACHE]
    saved.save(cache, tmp_path / "talk.kv", model)
    second = copy.deepcopy(cache)
    second.reorder_cache(torch.tensor([1]))
    for each in (cache, saved.load(model, tmp_path / "talk.kv")):
        run(model, other)
        assert torch.equal(new(run(model, more, cache=each), more), want)
    one = {key: x[1:] for key, x in more.items()}
    assert torch.equal(new(run(model, one, cache=second), one)[0], want[1])
    # Before 5.24 transformers counts a row's images by the token that begins one, which these texts lack
    if CACHE == "cache":
        assert len(run(model, batch, num_beams=2)[CACHE].session.shifts.at(99)) == 4


@pytest.mark.parametrize("name", AXES)
def test_passes_without_positions_too(name: str) -> None:
    """A loop of one's own, to whose end another text is read between any two tokens."""
    model, one, other = build(name), shown(name, (1, 2))[1][0], shown(name, (2, 1), seed=5)[0]
    ids = words(12, seed=4)[None]

    @torch.no_grad()
    def loop(inputs: dict[str, Tensor], between: bool, **first: Any) -> Tensor:
        out, said = model(**inputs, use_cache=True, **first), []
        for _ in range(4):
            said.append(out.logits[:, -1:].argmax(-1))
            if between:
                model(**other, use_cache=True)
            out = model(input_ids=said[-1], **{CACHE: out[CACHE]}, use_cache=True)
        return torch.cat(said, 1)

    texts = [{"input_ids": ids}, one, {"inputs_embeds": model.get_input_embeddings()(ids)}]
    want = [loop(inputs, False) for inputs in texts[:2]]
    kvengine.patch(model, "full")
    for inputs, text in zip(texts, [*want, want[0]], strict=True):
        assert torch.equal(loop(inputs, True), text)
        assert torch.equal(loop(inputs, True, **{CACHE: EngineCache(model)}), text)


def test_threads_ask_one_model() -> None:
    model = kvengine.patch(build("qwen2_vl"), "full")
    texts = [shown("qwen2_vl", (1, 2))[0], shown("qwen2_vl", (3, 1), seed=5)[0]]
    more = [next_turn("qwen2_vl", run(model, text), text) for text in texts]
    want = [run(model, b, cache=run(model, a)[CACHE]).sequences for a, b in zip(texts, more, strict=True)]

    def ask(which: int) -> list[bool]:
        caches = [run(model, texts[which])[CACHE] for _ in range(2)]
        return [torch.equal(run(model, more[which], cache=cache).sequences, want[which]) for cache in caches]

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(ask, range(2))] == [[True, True]] * 2


def test_what_is_taken_back_takes_along_what_it_said() -> None:
    shifts, first, second = Shifts(), torch.tensor([[-3]]), torch.tensor([[-5]])
    shifts.add(0, first)
    shifts.add(20, second)
    assert shifts.at(0) is None and shifts.at(20) is first and shifts.at(21) is second
    shifts.add(9, first)
    assert shifts.said == [(0, first)]  # what came later was taken back, and nothing else is said


@pytest.mark.parametrize("name", ["qwen2_vl", "mllama", "qwen2_audio"])
def test_drafts_are_of_text_alone(name: str) -> None:
    """A prompt without images is, though the model could see, and whether or not it gives the last logits alone if asked to."""
    model, (batch, _), ids = build(name), shown(name, (1, 2)), words(40, seed=3).view(2, 20)
    want = run(model, {"input_ids": ids}).sequences
    decoder = TriForce(kvengine.patch(model, "full"), "lookup", None, gamma=(1, 3))
    run(model, batch)
    assert torch.equal(decoder.generate(ids, max_new_tokens=NEW, do_sample=False), want)
    with pytest.raises(ModelError, match="reads tokens and nothing else"):
        decoder.generate(**batch, max_new_tokens=NEW, do_sample=False)


@pytest.mark.parametrize("name", ["qwen2_vl", "internvl"])
def test_words_before_an_image_are_a_prefix(name: str, tmp_path: Path) -> None:
    model, (_, (one, _)), (other, _) = build(name), shown(name, (1, 2)), shown(name, (2, 1), seed=5)
    want = run(model, one).sequences
    reuse = Prefix(kvengine.patch(model, "full"), stores.Store(stores.Files(tmp_path, sync="none")), chunk=4)
    reuse.compute(one["input_ids"][:, :4], reuse.fetch(one["input_ids"][:, :4]))
    reuse.store.drain()
    run(model, other)
    cache = reuse.fetch(one["input_ids"])
    assert cache.seen == 4 and torch.equal(run(model, one, cache=cache).sequences, want)
    reuse.store.close()


@pytest.mark.parametrize("name", ["qwen2_vl", "gemma3"])
def test_words_are_read_in_parts_and_images_are_not(name: str) -> None:
    model, ids = build(name), words(20, 3).repeat(2, 1)
    given, options = told(name, ids, torch.ones_like(ids)), {"max_new_tokens": 5, "do_sample": False}
    want = model.generate(**given, **options)
    kvengine.patch(model, "quest(budget=500)", judge_every=7)
    assert torch.equal(model.generate(**given, **options), want)
    batch, _ = shown(name, [1, 1])
    with pytest.raises(ModelError, match="judge_every=7 has tokens read in parts, but not '.*without judge_every"):
        model.generate(**batch, **options)


def test_an_image_beside_a_row_that_has_less_to_say() -> None:
    """Its tokens see each other, also where padding before the other row's words has what that holds count as later."""
    model, ids = build("gemma3"), torch.stack([words(8, 1), words(8, 2)])
    view, (tokens,) = SIGHTS["gemma3"].see(1, 3)
    more = torch.cat([torch.full((tokens,), SIGHTS["gemma3"].token), words(3, 3)])
    less = torch.cat([torch.zeros(len(more) - 2, dtype=torch.long), words(2, 4)])

    def talk(cache: Any) -> Tensor:
        said = run(model, told("gemma3", ids, torch.ones_like(ids)), 3, cache=cache).sequences
        so_far = torch.cat([said, torch.stack([less, more])], 1)
        mask = torch.ones_like(so_far)
        mask[0, said.shape[1] - 1 : -2] = 0  # it had ended
        found = run(model, told("gemma3", so_far, mask) | view, cache=cache, output_logits=True)
        return torch.stack(found.logits)

    want = talk(stock(model))
    kvengine.patch(model, "snapkv(budget=500)")
    torch.testing.assert_close(talk(EngineCache(model)), want, rtol=1e-5, atol=1e-5)


def test_no_image_comes_beside_a_row_that_goes_on_with_one_token() -> None:
    """An image's tokens see each other, and beside such a row, under a policy that judges, the engine reads what comes."""
    model, ids = kvengine.patch(build("gemma3"), "snapkv(budget=500)"), torch.stack([words(8, 1), words(8, 2)])
    found, (view, (tokens,)) = run(model, told("gemma3", ids, torch.ones_like(ids)), 2), SIGHTS["gemma3"].see(1, 3)
    more = torch.cat([torch.full((tokens,), SIGHTS["gemma3"].token), words(2, 3)])
    so_far = torch.cat([found.sequences, torch.stack([torch.zeros_like(more), more])], 1)
    mask = torch.ones_like(so_far)
    mask[0, -len(more) :] = 0  # the last word of its answer is all that is new
    with pytest.raises(UnsupportedPolicy, match="tokens see later ones"):
        run(model, told("gemma3", so_far, mask) | view, cache=found[CACHE])


def test_a_first_draft_waits_for_a_replay_also_where_masks_are_made_ahead() -> None:
    """Gemma 3 makes those of its text part; that of the whole pass was given to each of its two parts."""
    model, (view, (tokens,)) = (
        kvengine.patch(build("gemma3"), "kvzip(budget=14, chunk=8, carry=2)"),
        SIGHTS["gemma3"].see(1, 3),
    )
    text = words(12, 3)
    ids = torch.cat([text, torch.full((tokens,), SIGHTS["gemma3"].token), text[:5]])[None]
    inputs = told("gemma3", ids, torch.ones_like(ids)) | view
    assert torch.equal(run(model, inputs, prompt_lookup_num_tokens=3).sequences, run(model, inputs).sequences)


def test_a_recorded_step_takes_no_images() -> None:
    brought, kinds = Brought(), torch.zeros(2, 1, dtype=torch.long)
    brought.hold({"input_ids": kinds, "mm_token_type_ids": kinds})
    brought.hold({"input_ids": kinds, "mm_token_type_ids": kinds + 1})
    assert [*brought.held] == ["mm_token_type_ids"] and (brought.held["mm_token_type_ids"] == 1).all()
    for more in (4, 5):  # of the whole text
        brought.hold({"input_ids": kinds, "mm_token_type_ids": torch.cat([kinds.expand(2, more), kinds + more], 1)})
        assert (brought.held["mm_token_type_ids"] == more).all()
    for more in ({"pixel_values": torch.zeros(1)}, {"mm_token_type_ids": kinds[:1]}, {"others": kinds}):
        with pytest.raises(ModelError, match=f"not '{[*more][0]}'; use model.generate"):
            brought.hold(more)
