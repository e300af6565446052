"""Models with such an index, and something beside it: images and positions on three axes (HY-V4-VL), layers that read the latents
of another (Mistral Large 4)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import support_random
import torch
import transformers
from families.configs import padded_batch
from families.sights import IMAGE, PIXTRAL, VIEW, noise, text, words
from families.test_indexed import (
    CODED,
    DSA,
    STORED,
    WAYS,
    cache_of,
    generated,
    read_by_full_alone,
    rows_as_alone,
    rows_may_be_others_once_all_is_taken_back,
)
from support_device import Device, pretended
from test_split_model import split
from torch import Tensor

import kvengine
from kvengine import EngineCache, saved
from kvengine.errors import CacheError, CorruptBitstream, UnsupportedPolicy
from kvengine.hf.names import CACHE
from kvengine.readers import sources
from kvengine.speculative.triforce import TriForce

AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
TURNED = {"num_hidden_layers": 6, "no_rope_layers": [1, 0] * 3}
READING = TURNED | {"kv_source_layers": [0, 1, 0, 1, 0, 1]}
LEFT = {"num_hidden_layers": 5, "no_rope_layers": [1] * 5, "kv_source_layers": [0, 0, 2, 2, 0]}
HANDED = {"num_hidden_layers": 4, "no_rope_layers": [1, 0] * 2, "kv_source_layers": [0, 1, 0, 1]}
HANDED = HANDED | {"indexer_types": ["full", "shared", "full", "shared"]}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "hy_v4_vl": ("HYV4VLForConditionalGeneration", AXES),
    "mistral_large4": ("MistralLarge4ForConditionalGeneration", TURNED),
    "mistral_large4, latents shared": ("MistralLarge4ForConditionalGeneration", READING),
    "mistral_large4, what was left last": ("MistralLarge4ForConditionalGeneration", LEFT),
    "mistral_large4, names too": ("MistralLarge4ForConditionalGeneration", HANDED),
}
VISION = {
    "HYV4VLForConditionalGeneration": VIEW | {"patch_size": 4, "max_image_size": 16, "out_hidden_size": 64},
    "MistralLarge4ForConditionalGeneration": PIXTRAL,
}
UNKNOWN = {
    "HYV4VLForConditionalGeneration": ("head_dim",),
    "MistralLarge4ForConditionalGeneration": ("head_dim", "q_lora_rank", "tie_word_embeddings"),
}
NAMES = [name for name, (kind, _) in KINDS.items() if hasattr(transformers, kind)]
READS = "mistral_large4, names too"
QUICK = [("hy_v4_vl", "full"), (READS, "host")]
pytestmark = pytest.mark.skipif(not NAMES, reason="this transformers has no such model")


def build(name: str = READS, **more: Any) -> Any:
    kind, options = KINDS[name]
    found = getattr(transformers, kind)
    known = {key: x for key, x in text(None, **DSA | options | more).items() if key not in UNKNOWN[kind]}
    vision = {key: x for key, x in VISION[kind].items() if key != "image_size" or "model_type" in VISION[kind]}
    support_random.seed(0)
    model = found(found.config_class(text_config=known, vision_config=vision, image_token_id=IMAGE, video_token_id=119))
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if "softmax_scaling" in part:  # they begin as what changes nothing
                weight.normal_(float("bias" in part), 0.2)
            elif not weight.any():
                weight.normal_(std=0.15)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.float().eval()


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=[] if (name, policy) in QUICK else pytest.mark.slow)
        for name in NAMES
        for policy in STORED
    ],
)
def test_greedy_text_of_a_padded_batch(name: str, policy: str) -> None:
    model = build(name)
    want = generated(model)
    with kvengine.patched(model, policy):
        assert torch.equal(generated(model), want)
    assert torch.equal(generated(model), want)


@pytest.mark.skipif(READS not in NAMES, reason="this transformers has no Mistral Large 4")
def test_rows_may_be_others_once_all_is_taken_back() -> None:
    rows_may_be_others_once_all_is_taken_back(build())


@pytest.mark.slow
@pytest.mark.parametrize("policy", STORED)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", [name for name in NAMES if name in ("hy_v4_vl", READS)])
def test_every_way_gives_the_unpatched_models(name: str, way: str, policy: str) -> None:
    model = build(name)
    want = WAYS[way](model)
    with kvengine.patched(model, policy):
        torch.testing.assert_close(WAYS[way](model), want, rtol=1e-4, atol=1e-4)


def test_a_layer_reads_what_the_last_one_of_its_kind_has_left() -> None:
    """Which may be another than its configuration says."""
    for options, want in ((READING, {2: 0, 3: 1, 4: 0, 5: 1}), (HANDED, {2: 0, 3: 1}), (LEFT, {1: 0, 3: 2, 4: 2})):
        found = transformers.MistralLarge4TextConfig(**{"num_attention_heads": 4, "num_key_value_heads": 4} | options)
        assert sources(found) == want


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", *CODED])
def test_each_decoded_token_reads_what_is_named(policy: str) -> None:
    """Two of the layers have latents, and two an index."""
    model, batch = build(), padded_batch(60)
    cache = EngineCache(kvengine.patch(model, policy))
    generated(model, batch, 40, **{CACHE: cache})
    stats, index = cache.stats(), 2 * 3 * 99 * 16 * 4
    assert (stats.attended == 8).all() and stats.held[:, :, 0].tolist() == [[99, 94, 68]] * 2
    assert index <= stats.bytes["device"]["stock"] <= 2 * index
    exact = 3 * 99 * (24 + 16) * 4
    assert (stats.bytes_held < exact + stats.bytes["device"]["stock"]) == (policy != "full")
    if policy == "full":  # each index once, the latents by two layers
        assert index < stats.read_per_token <= index + 2 * exact // 99 * 8 * 1.1


@pytest.mark.slow
@pytest.mark.parametrize("policy", STORED[:2])
def test_a_row_is_in_a_batch_what_it_is_alone(policy: str) -> None:
    rows_as_alone(build(), policy)


@pytest.mark.slow
@pytest.mark.parametrize("wrapped", [[0], [2], [0, 1, 2, 3]])
def test_weights_that_are_not_known_are_their_layers_own_to_read(wrapped: list[int]) -> None:
    """Those of the layer that has the latents, of one that reads them, and of all."""
    read_by_full_alone(build(), wrapped)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "kivi(bits=4, group=8, residual=8) + host"])
def test_a_session_is_saved_with_the_index_of_every_layer(policy: str, tmp_path: Path) -> None:
    model = kvengine.patch(build(), policy)
    cache = EngineCache(model)
    out = generated(model, padded_batch(41), 9, **{CACHE: cache})
    saved.save(cache, tmp_path / "one.kv", model)
    again = saved.load(model, tmp_path / "one.kv")
    mask = torch.cat([padded_batch(41)["attention_mask"], torch.ones(3, 12, dtype=torch.long)], 1)
    more = {"input_ids": torch.cat([out, torch.full((3, 3), 7)], 1), "attention_mask": mask}
    want, got = (generated(model, more, 9, **{CACHE: one}) for one in (cache, again))
    assert torch.equal(got, want)
    cache.layers[2].index_keys = cache.layers[2].index_keys[:, :20]
    saved.save(cache, tmp_path / "two.kv", model)
    with pytest.raises(CorruptBitstream, match="index keys are not those of 3 rows of 61 tokens"):
        saved.load(model, tmp_path / "two.kv")
    with pytest.raises(CacheError, match="no index keys of the 61 tokens"):
        generated(model, {"input_ids": torch.full((3, 62), 7)}, 2, **{CACHE: cache})
    cache.reset()
    assert torch.equal(generated(model, padded_batch(41), 9, **{CACHE: cache}), out)


@pytest.mark.slow
def test_chains_of_drafts_are_lossless() -> None:
    model, batch = build(), {"input_ids": padded_batch(41)["input_ids"][:1]}
    want = generated(model, batch, 24)
    decoder = TriForce(kvengine.patch(model, "full"), "lookup", None, gamma=(2, 4), stack="host")
    assert torch.equal(decoder.generate(batch["input_ids"], max_new_tokens=24, do_sample=False), want)


def test_steps_are_not_recorded_where_latents_are_read_again() -> None:
    model = build()
    with pytest.raises(UnsupportedPolicy, match="decode without a recording"):
        kvengine.patch(model, "full", record=True)
    with pytest.raises(UnsupportedPolicy, match="'snapkv' drops or merges"):
        kvengine.patch(model, "snapkv(budget=12, window=4)")


@pytest.mark.slow
@pytest.mark.parametrize("policy", STORED[:2])
@pytest.mark.parametrize("first", [False, True])
def test_on_two_devices(policy: str, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads lies on another device than what it reads."""
    device: Device = pretended(monkeypatch)
    model = build(mlp_layer_types=["dense"] * 4)  # experts are gathered otherwise on a GPU
    want = generated(model)
    with device, kvengine.patched(split(model, first), policy):
        assert torch.equal(generated(model), want)


def seen(images: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """A text with images, each line of which ends with a token of its own."""
    grid = torch.tensor([(1, 4, 4), (1, 4, 8), (1, 8, 4)])[(torch.arange(images) + seed) % 3]
    parts = [words(5, seed)]
    for i, (_, high, wide) in enumerate(grid.tolist()):
        parts += [torch.full((high // 2 * (wide // 2 + 1),), IMAGE), words(6, seed + 10 * i)]
    ids = torch.cat(parts)[None]
    view = {"pixel_values": noise(int(grid.prod(-1).sum()), 48, seed=seed), "image_grid_thw": grid}
    return ids, {"input_ids": ids, "mm_token_type_ids": (ids == IMAGE).long(), **view}


@pytest.mark.slow
@pytest.mark.skipif("hy_v4_vl" not in NAMES, reason="this transformers has no HY-V4-VL")
@pytest.mark.parametrize("policy", STORED)
def test_texts_with_images_and_their_later_turns(policy: str) -> None:
    """To a later turn of which another text is read between: each cache knows where its text goes on."""
    model, (ids, batch), (_, other) = build("hy_v4_vl"), seen(2, 1), seen(3, 2)
    changed = generated(model, batch | {"pixel_values": -batch["pixel_values"]}, 12)

    def talk(between: Callable[[], Any]) -> list[Tensor]:
        cache = cache_of(model)
        first = generated(model, batch, 12, **{CACHE: cache})
        between()
        more = torch.cat([first, words(7, 5)[None]], 1)
        kinds = torch.nn.functional.pad(batch["mm_token_type_ids"], (0, more.shape[1] - ids.shape[1]))
        return [first, generated(model, {"input_ids": more, "mm_token_type_ids": kinds}, 12, **{CACHE: cache})]

    want = talk(lambda: None)
    assert not torch.equal(want[0], changed)
    with kvengine.patched(model, policy):
        assert all(map(torch.equal, talk(lambda: generated(model, other, 3)), want))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "host", CODED[0]])
def test_recorded_steps_speak_the_same_text_behind_images(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And past the end of their room. Without the token of padding, all of whose scores are equal."""
    monkeypatch.setattr("kvengine.hf.compiled.ROOM", 7)
    model, (_, batch) = kvengine.patch(build("hy_v4_vl"), policy), seen(2, 1)
    want = generated(model, batch, 16, suppress_tokens=[0])
    for step in (None, "trace"):
        decoder = kvengine.compile_decode(model, step)
        assert torch.equal(generated(model, batch, 16, suppress_tokens=[0], custom_generate=decoder), want)


@torch.no_grad()
@pytest.mark.parametrize("policy", ["full", "host"])
def test_drafts_may_come_with_the_end_of_a_prompt(policy: str) -> None:
    """Each of a pass's queries reads what it names itself, in the layers that read another's latents too."""
    model, ids = build(), words(46, 3)[None]
    want = model(ids).logits
    cache = EngineCache(kvengine.patch(model, policy))
    cache.activate_past_recording()
    cache.announce(41)
    torch.testing.assert_close(model(ids, **{CACHE: cache}).logits, want, rtol=1e-4, atol=1e-4)
