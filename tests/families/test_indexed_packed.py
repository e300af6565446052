"""GLM 5 Next names groups of tokens, beside linear attention: the text is the unpatched model's, wherever tokens are stored; and
padding that would shift its groups is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import support_random
import torch
import transformers
from families import configs
from families.configs import LINEAR, VOCABULARY, padded_batch
from families.sights import IMAGE, QWEN, noise, text, words
from families.test_indexed import CODED, DSA, OLD, STORED, WAYS, cache_of, generated, read_by_full_alone, rows_as_alone
from support_device import Device, pretended
from test_split_model import split
from torch import Tensor

import kvengine
from kvengine import EngineCache, saved
from kvengine.errors import CacheError, ModelError, UnsupportedPolicy
from kvengine.hf.names import CACHE, passed
from kvengine.speculative.triforce import TriForce

pytestmark = pytest.mark.skipif(
    OLD or not hasattr(transformers, "Glm5NextForConditionalGeneration"), reason="this transformers has no such model"
)
INDEXED = "indexed_attention"
POOL, TOP = 4, 8
KINDS: dict[str, dict[str, Any]] = {
    "alternating": {"layer_types": [LINEAR, INDEXED] * 2},
    "an index leads": {"layer_types": [INDEXED, LINEAR] * 2},
    "without what is behind": {"layer_types": [LINEAR, INDEXED] * 2, "index_kpool_always_select_tail": False},
    "names handed on": {
        "layer_types": [LINEAR, INDEXED, INDEXED, LINEAR],
        "indexer_types": ["full", "full", "shared", "full"],
    },
}
HANDED = "names handed on"
LINEAR_ONES = {"linear_head_dim": 8, "linear_num_heads": 4, "hc_mult": 2, "hc_sinkhorn_iters": 3}
BEHIND = "padding among a row's tokens shifts them"


def build(name: str = HANDED, **more: Any) -> Any:
    found = transformers.Glm5NextForConditionalGeneration
    options = DSA | LINEAR_ONES | KINDS[name] | {"num_hidden_layers": 4, "qk_rope_head_dim": 0, "index_kpool": POOL}
    options |= {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "index_topk": TOP} | more
    known = text(None, "head_dim", "tie_word_embeddings", **options)
    known.pop("first_k_dense_replace")
    marks = {
        "image_start_token_id": 117,
        "image_end_token_id": 118,
        "video_start_token_id": 119,
        "video_end_token_id": 120,
    }
    support_random.seed(0)
    vision = QWEN | {"depth": 1, "image_size": 16}
    config = found.config_class(text_config=known, vision_config=vision, image_token_id=IMAGE, **marks)
    model = found(config)
    with torch.no_grad():
        for part, weight in model.named_parameters():
            if not weight.any() or "compress_gate" in part:  # they begin as what tells no token from another
                weight.normal_(std=0.15)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return model.float().eval()


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        pytest.param(name, policy, marks=[] if (name, policy) == (HANDED, "host") else pytest.mark.slow)
        for name in KINDS
        for policy in STORED
    ],
)
def test_greedy_text_of_a_padded_batch(name: str, policy: str) -> None:
    model = build(name)
    want = generated(model)
    with kvengine.patched(model, policy):
        assert torch.equal(generated(model), want)
    assert torch.equal(generated(model), want)


def turns(model: Any) -> Tensor:
    """Two later ones, of one length in all rows, the last of a single token."""
    cache, batch = cache_of(model), padded_batch(41)
    out, more = generated(model, batch, 9, **{CACHE: cache}), words(33, 5).view(3, 11)
    for new in (more, more[:, :1]):
        ids = torch.cat([out, new], 1)
        mask = torch.ones_like(ids)
        mask[:, :41] = batch["attention_mask"]
        out = generated(model, {"input_ids": ids, "attention_mask": mask}, 9, **{CACHE: cache})
    return out


@torch.no_grad()
def passes(model: Any) -> Tensor:
    """Of several tokens, rows in another order, and a copy."""
    cache, out, rng = cache_of(model), [], torch.Generator().manual_seed(2)
    for n in (5, 4, 40, 5, 1, 6):
        ids = torch.randint(1, VOCABULARY, (2, n), generator=rng)
        out.append(model(ids, **passed(model, cache)).logits)
    cache.reorder_cache(torch.tensor([1, 0, 1]))
    twin = copy.deepcopy(cache)
    for one in (cache, twin, cache):
        out.append(model(torch.tensor([[5], [6], [7]]), **passed(model, one)).logits[:2])
    return torch.cat(out, 1)


@torch.no_grad()
def scored(model: Any) -> Tensor:
    """Padded on the right, and in a loop of one's own on the left; without a cache too."""
    ids, real = padded_batch(41)["input_ids"].clamp(min=1), torch.ones(3, 41, dtype=torch.long)
    real[1, 30:], real[2, :7] = 0, 0
    found = [model(ids, attention_mask=real, use_cache=cached).logits[real.bool()] for cached in (True, False)]
    return torch.cat(found)


@torch.no_grad()
def a_mask_of_four_dimensions(model: Any) -> Tensor:
    """The model looks at none."""
    mask = torch.ones(41, 41, dtype=torch.bool).tril()[None, None]
    mask[..., 30:, 3:9] = False
    found: Tensor = model(padded_batch(41)["input_ids"][:1], attention_mask=mask, use_cache=True).logits
    return found


MINE: dict[str, Callable[[Any], Tensor]] = {name: WAYS[name] for name in ("beams", "sampled", "in chunks")}
MINE |= {"turns": turns, "passes": passes, "scored": scored, "a mask of four dimensions": a_mask_of_four_dimensions}


@pytest.mark.slow
@pytest.mark.parametrize("policy", STORED)
@pytest.mark.parametrize("way", MINE)
def test_every_way_gives_the_unpatched_models(way: str, policy: str) -> None:
    model = build()
    want = MINE[way](model)
    with kvengine.patched(model, policy):
        torch.testing.assert_close(MINE[way](model), want, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("policy", STORED[:2])
def test_a_row_is_in_a_batch_what_it_is_alone(policy: str) -> None:
    rows_as_alone(build(), policy)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("policy", STORED[:2])
def test_rows_may_have_less_to_say_if_it_is_their_last(policy: str) -> None:
    """A later pass that is padded on the right."""
    model, ids = kvengine.patch(build(), policy), words(150, 4).view(3, 50)
    mask = torch.ones_like(ids)
    mask[1, 42:], mask[0, 45:], mask[2, :6] = 0, 0, 0
    cache = cache_of(model)
    model(ids[:, :30], attention_mask=mask[:, :30], **passed(model, cache))
    found = model(ids[:, 30:], attention_mask=mask, **passed(model, cache)).logits
    for row in range(3):
        real, alone = mask[row].bool(), cache_of(model)
        first = int(real[:30].sum())
        model(ids[row : row + 1, real][:, :first], **passed(model, alone))
        want = model(ids[row : row + 1, real][:, first:], **passed(model, alone)).logits[0]
        torch.testing.assert_close(found[row, real[30:]], want, rtol=1e-4, atol=1e-4)
    with pytest.raises(CacheError, match=BEHIND):
        model(ids[:, :1], attention_mask=torch.nn.functional.pad(mask, (0, 1), value=1), **passed(model, cache))


@pytest.mark.parametrize("policy", ["full", pytest.param("host", marks=pytest.mark.slow)])
def test_rows_that_ended_before_others_do_not_go_on_with_them(policy: str) -> None:
    """Whatever a mask says of what they were given; the others do, without them."""
    model, batch = build(), padded_batch(41)
    ends = {"eos_token_id": list(range(0, VOCABULARY, 9)), "pad_token_id": 0}
    want = generated(model, batch, 14, **ends)
    cache = EngineCache(kvengine.patch(model, policy))
    out = generated(model, batch, 14, **{CACHE: cache}, **ends)
    assert torch.equal(out, want) and out[:, -1].tolist().count(0) == 2
    ids = torch.cat([out, torch.full((3, 5), 7)], 1)
    real = torch.ones_like(ids)
    real[:, :41] = batch["attention_mask"]
    ended = real.masked_fill(torch.nn.functional.pad(out == 0, (0, 5)), 0)
    for mask in (real, ended):
        with pytest.raises(CacheError, match=BEHIND):
            generated(model, {"input_ids": ids, "attention_mask": mask}, 3, **{CACHE: cache})
    cache.reorder_cache(torch.tensor([2]))
    on = generated(model, {"input_ids": ids[2:], "attention_mask": real[2:]}, 3, **{CACHE: cache})
    alone = {"input_ids": ids[2:, real[2].bool()]}
    assert torch.equal(generated(model, alone, 3)[0, -3:], on[0, -3:])


@pytest.mark.slow
def test_words_between_turns_are_refused_before_anything_is_taken() -> None:
    model = kvengine.patch(build(), "host")
    cache = EngineCache(model)
    with pytest.raises(CacheError, match=BEHIND):
        WAYS["turns"](model)
    out = generated(model, padded_batch(41), 3, **{CACHE: cache})
    mask = torch.nn.functional.pad(padded_batch(41)["attention_mask"], (0, 8), value=1)
    late, hidden = mask.clone(), mask.clone()
    late[0, 45:47], hidden[0, 8:12] = 0, 0
    more = torch.cat([out, torch.full((3, 5), 7)], 1)
    for wrong in (late, hidden):
        with pytest.raises(CacheError, match=BEHIND):
            generated(model, {"input_ids": more, "attention_mask": wrong}, 3, **{CACHE: cache})
    for following in (False, True):
        fed = copy.deepcopy(cache)
        fed.follow_up(following)
        with pytest.raises(CacheError, match=BEHIND):
            generated(model, {"input_ids": more, "attention_mask": late}, 3, **{CACHE: fed}, prefill_chunk_size=1)
        assert fed.seen == 47
    with pytest.raises(ModelError, match="a dictionary by kinds of layers"):
        model(more, attention_mask={INDEXED: mask.bool(), LINEAR: mask.bool()}, **passed(model, cache))
    right = {"input_ids": more, "attention_mask": mask}
    with kvengine.patched(model, "full"):
        want = generated(model, right, 3)
    assert torch.equal(generated(model, right, 3, **{CACHE: cache}), want)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", [HANDED, "an index leads"])
def test_a_pass_that_broke_off_in_an_index_is_noticed(name: str) -> None:
    model = kvengine.patch(build(name), "host")
    cache, ids = EngineCache(model), padded_batch(41)["input_ids"][:1]
    model(ids, **passed(model, cache))
    index = [module for module in model.modules() if type(module).__name__.endswith("Indexer")][-1]
    hook = index.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids[:, :1], **passed(model, cache))
    hook.remove()
    with pytest.raises(CacheError, match="broke off"):
        model(ids[:, :1], **passed(model, cache))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", *CODED])
def test_each_decoded_token_reads_what_is_named(policy: str) -> None:
    """Two groups, and what is behind the last whole one."""
    model, batch = build(), padded_batch(60)
    cache = EngineCache(kvengine.patch(model, policy))
    generated(model, batch, 40, **{CACHE: cache})
    stats, held = cache.stats(), [99, 94, 68]
    assert stats.held[:, :, 0].tolist() == [held] * 2
    assert stats.attended[:, :, 0].tolist() == [[TOP + n % POOL for n in held]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["full", "kivi(bits=4, group=8, residual=8) + host"])
def test_a_session_is_saved_with_its_index(policy: str, tmp_path: Path) -> None:
    model = kvengine.patch(build(), policy)
    cache = EngineCache(model)
    out = generated(model, padded_batch(41), 9, **{CACHE: cache})
    saved.save(cache, tmp_path / "one.kv", model)
    again = saved.load(model, tmp_path / "one.kv")
    mask = torch.nn.functional.pad(padded_batch(41)["attention_mask"], (0, 12), value=1)
    more = {"input_ids": torch.cat([out, torch.full((3, 3), 7)], 1), "attention_mask": mask}
    want, got = (generated(model, more, 9, **{CACHE: one}) for one in (cache, again))
    assert torch.equal(got, want)


@pytest.mark.slow
def test_chains_of_drafts_are_lossless() -> None:
    """Of a model whose states are put back."""
    model, batch = build(), {"input_ids": padded_batch(41)["input_ids"][:1]}
    want = generated(model, batch, 24)
    decoder = TriForce(kvengine.patch(model, "full"), "lookup", None, gamma=(2, 4), stack="host")
    assert torch.equal(decoder.generate(batch["input_ids"], max_new_tokens=24, do_sample=False), want)


@pytest.mark.slow
def test_weights_that_are_not_known_are_the_models_own_to_read() -> None:
    read_by_full_alone(build(), range(9))


def test_what_chooses_tokens_and_recorded_steps_are_refused() -> None:
    model = build()
    with pytest.raises(UnsupportedPolicy, match="'quest' chooses what is read"):
        kvengine.patch(model, "quest(budget=12)")
    with pytest.raises(UnsupportedPolicy, match="decode without a recording"):
        kvengine.patch(model, "full", record=True)
    with pytest.raises(UnsupportedPolicy, match="drops or merges"):
        EngineCache(kvengine.patch(model, "full"), "snapkv(budget=12, window=4)")


@torch.no_grad()
def test_a_cache_of_another_model_is_refused() -> None:
    model, other = build(), kvengine.patch(configs.build("llama"))
    with pytest.raises(CacheError, match="made for another model"):
        kvengine.patch(model)(torch.full((1, 3), 5), **{CACHE: EngineCache(other)})


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
def test_on_two_devices(first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device: Device = pretended(monkeypatch)
    model = build("an index leads", mlp_layer_types=["dense"] * 4)  # experts are gathered otherwise on a GPU
    want = generated(model)
    with device, kvengine.patched(split(model, first), "host"):
        assert torch.equal(generated(model), want)


@pytest.mark.slow
@pytest.mark.parametrize("policy", STORED[:2])
def test_texts_with_images(policy: str) -> None:
    grid = torch.tensor([(1, 4, 4), (1, 4, 8)])
    seen = [words(5, 1), torch.full((4,), IMAGE), words(6, 2), torch.full((8,), IMAGE), words(3, 3)]
    batch = {"input_ids": torch.cat(seen)[None], "pixel_values": noise(48, 96, seed=1), "image_grid_thw": grid}
    batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE).long()
    model = build()
    want = generated(model, batch)
    assert not torch.equal(generated(model, batch | {"pixel_values": -batch["pixel_values"]}), want)
    with kvengine.patched(model, policy):
        assert torch.equal(generated(model, batch), want)
