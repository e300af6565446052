"""Models that name the tokens they read by an index of their own (DeepSeek sparse attention): the text is the unpatched model's,
wherever tokens are stored; and policies that would choose tokens where the model does are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import pytest
import support_random
import torch
import transformers
from families.configs import BASE, LATENTS, VOCABULARY, padded_batch
from torch import Tensor
from transformers import DynamicCache

import kvengine
from kvengine import EngineCache, saved
from kvengine.errors import CacheError, CorruptBitstream, ModelError, UnsupportedPolicy
from kvengine.hf.names import CACHE, passed
from kvengine.offload.stores import Files
from kvengine.offload.stores.store import Store
from kvengine.prefix import Prefix
from kvengine.speculative.triforce import TriForce

# With few index heads many scores are zero, and which of equals is named depends on how many tokens are read at once.
DSA = {**LATENTS, "num_key_value_heads": 4, "index_n_heads": 8, "index_head_dim": 16, "index_topk": 8}
SHARED = {"indexer_types": ["full", "shared", "full"]}
WINDOWS = {"layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"], "sliding_window": 8}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v32": ("DeepseekV32ForCausalLM", {}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", {}),
    "glm_moe_dsa, names handed on": ("GlmMoeDsaForCausalLM", SHARED),
    "axk2": ("AXK2ForCausalLM", {}),
    "hy_v4": ("HYV4ForCausalLM", {}),
    "dots3_note": ("Dots3NoteForCausalLM", WINDOWS),
}
OLD = transformers.__version__.startswith("5.17.")  # it caches what is made of latents
NAMES = [name for name, (kind, _) in FAMILIES.items() if hasattr(transformers, kind) and not OLD]
STORED = ["full", "host", "disk(device=2048, host=2048)"]
CODED = ["kivi(bits=4, group=8, residual=8)", "turboquant(residual=8) + host"]
pytestmark = pytest.mark.skipif(not NAMES, reason="this transformers has no such model")


def build(name: str = "deepseek_v32", **options: Any) -> Any:
    kind, more = FAMILIES[name]
    found = getattr(transformers, kind)
    support_random.seed(0)
    known = {key: value for key, value in BASE.items() if key != "head_dim"}
    return found(found.config_class(**known | DSA | more | options)).float().eval()


def generated(model: Any, batch: dict[str, Tensor] | None = None, count: int = 16, **options: Any) -> Tensor:
    batch = padded_batch(41) if batch is None else batch
    out: Tensor = model.generate(**batch, max_new_tokens=count, **{"do_sample": False} | options)
    return out


@pytest.mark.sampled(6)
@pytest.mark.parametrize("text", STORED)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_of_a_padded_batch(name: str, text: str) -> None:
    model = build(name)
    want = generated(model)
    with kvengine.patched(model, text):
        assert torch.equal(generated(model), want)
    assert torch.equal(generated(model), want)


def sampled(model: Any) -> Tensor:
    support_random.seed(3)
    return generated(model, do_sample=True, num_return_sequences=2)


def cache_of(model: Any) -> Any:
    patched = model.config.get_text_config()._attn_implementation == "kvengine"
    return EngineCache(model) if patched else DynamicCache(config=model.config)


def turns(model: Any) -> Tensor:
    """A second one, of another length in each row; one ended early in the first."""
    cache, batch = cache_of(model), padded_batch(41)
    out = generated(model, batch, 9, **{CACHE: cache}, eos_token_id=list(range(0, VOCABULARY, 9)), pad_token_id=0)
    more = torch.randint(1, VOCABULARY, (len(out), 11), generator=torch.Generator().manual_seed(5))
    said = out[:, 41:]
    ended = ((said % 9 == 0).cumsum(1) > 0).roll(1, 1)  # what comes behind an end is padding
    ended[:, 0] = False
    new = torch.cat([~ended, torch.ones_like(more, dtype=torch.bool)], 1).long()
    new[0, -11:-6] = 0
    mask = torch.cat([batch["attention_mask"], new], 1)
    return generated(model, {"input_ids": torch.cat([out, more], 1), "attention_mask": mask}, 9, **{CACHE: cache})


@torch.no_grad()
def passes(model: Any) -> Tensor:
    """Of several tokens, taken back in part; at first fewer than are named. And rows in another order, and a copy."""
    cache, out = cache_of(model), []
    rng = torch.Generator().manual_seed(2)
    if isinstance(cache, EngineCache):
        cache.activate_past_recording()
    for rows, n, back in [(2, 5, 0), (2, 4, 2), (2, 40, 0), (2, 5, 3), (2, 1, 0), (2, 6, 6)]:
        ids = torch.randint(1, VOCABULARY, (rows, n), generator=rng)
        out.append(model(ids, **passed(model, cache)).logits)
        if back:
            cache.crop(-back)
    if isinstance(cache, EngineCache):
        cache.deactivate_past_recording()
    cache.reorder_cache(torch.tensor([1, 0, 1]))
    twin = copy.deepcopy(cache)
    for one in (cache, twin, cache):
        out.append(model(torch.tensor([[5], [6], [7]]), **passed(model, one)).logits[:2])
    return torch.cat(out, 1)


@torch.no_grad()
def in_inference_mode(model: Any) -> Tensor:
    """And outside of it."""
    cache, ids = cache_of(model), padded_batch(41)["input_ids"][:1]
    with torch.inference_mode():
        model(ids, **passed(model, cache))
    return torch.cat([model(torch.tensor([[n]]), **passed(model, cache)).logits for n in (3, 4, 5)], 1)


@torch.no_grad()
def without_a_cache(model: Any) -> Tensor:
    found: Tensor = model(**padded_batch(41), use_cache=False).logits
    return found


WAYS: dict[str, Callable[[Any], Tensor]] = {
    "beams": lambda model: generated(model, num_beams=3),
    "sampled": sampled,
    "in chunks": lambda model: generated(model, prefill_chunk_size=16),
    "assisted": lambda model: generated(
        model, {"input_ids": padded_batch(41)["input_ids"][:1]}, prompt_lookup_num_tokens=4
    ),
    "turns": turns,
    "passes": passes,
    "inference mode": in_inference_mode,
    "without a cache": without_a_cache,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("text", STORED)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_gives_the_unpatched_models(way: str, text: str) -> None:
    model = build()
    want = WAYS[way](model)
    with kvengine.patched(model, text):
        torch.testing.assert_close(WAYS[way](model), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", [STORED[0], CODED[1]])
def test_the_models_own_attention_may_be_another(text: str) -> None:
    models = [build(), build(attn_implementation="eager")]
    first, second = (generated(kvengine.patch(model, text)) for model in models)
    assert torch.equal(first, second)


def rows_as_alone(model: Any, policy: str) -> None:
    batch = padded_batch(60)
    with kvengine.patched(model, policy):
        out = generated(model, batch)
        for row in range(3):
            mine = {name: x[row : row + 1, batch["attention_mask"][row].bool()] for name, x in batch.items()}
            assert torch.equal(generated(model, mine)[0, -16:], out[row, -16:])


@pytest.mark.parametrize("text", STORED[1:])
def test_a_row_is_in_a_batch_what_it_is_alone(text: str) -> None:
    rows_as_alone(build(), text)


@pytest.mark.parametrize("text", ["full", "host", *CODED])
def test_each_decoded_token_reads_what_is_named(text: str) -> None:
    """And codes hold less."""
    model, batch = build(), padded_batch(60)
    cache = EngineCache(kvengine.patch(model, text))
    generated(model, batch, 40, **{CACHE: cache})
    stats, index = cache.stats(), 3 * 3 * 99 * 16 * 4
    assert (stats.attended == 8).all() and stats.held[0, :, 0].tolist() == [99, 94, 68]
    assert index <= stats.bytes["device"]["stock"] <= 2 * index
    exact = 3 * 3 * 99 * 24 * 4
    assert (stats.bytes_held < exact + stats.bytes["device"]["stock"]) == (text in CODED)
    if text not in CODED:
        most = 8 if text == "full" else 8 + 16  # where the tail is short it is read under a mask
        assert index < stats.read_per_token <= index + exact // 99 * most * 1.1  # positions too


@torch.no_grad()
def test_a_mask_given_as_a_tensor_is_read_by_the_models_own_attention() -> None:
    model, ids = build(), padded_batch(41)["input_ids"][:1]
    mask = torch.ones(41, 41, dtype=torch.bool).tril()[None, None]
    mask[..., 30:, 3:9] = False

    def logits() -> Tensor:
        cache = cache_of(model)
        found = [model(ids, attention_mask=mask, **passed(model, cache)).logits]
        return torch.cat([*found, *(model(torch.tensor([[n]]), **passed(model, cache)).logits for n in (3, 4))], 1)

    want = logits()
    with kvengine.patched(model, "full"):
        torch.testing.assert_close(logits(), want, rtol=1e-4, atol=1e-4)
    with kvengine.patched(model, "host"), pytest.raises(UnsupportedPolicy, match="a mask given as a tensor"):
        logits()


@torch.no_grad()
def test_another_batch_is_refused_before_anything_is_kept() -> None:
    model = kvengine.patch(build(), "host")
    cache = EngineCache(model)
    model(torch.full((2, 9), 5), **passed(model, cache))
    with pytest.raises(CacheError, match="this cache holds 2 sequences"):
        model(torch.full((3, 1), 5), **passed(model, cache))
    cache.reset()
    model(torch.full((3, 9), 5), **passed(model, cache))
    cache.layers[1].index_keys = None
    with pytest.raises(CacheError, match="no index keys of the 9 tokens"):
        model(torch.full((3, 1), 5), **passed(model, cache))


def rows_may_be_others_once_all_is_taken_back(model: Any) -> None:
    """Index keys of no token were there still, of as many rows as there had been: an IndexError, and a broken cache."""
    ids, cache = torch.arange(3, 30).view(3, 9), EngineCache(kvengine.patch(model))
    with torch.no_grad():
        model(ids[:2], **passed(model, cache))
        cache.rollback(9)
        cache.reorder_cache(torch.tensor([0, 1, 1]))
        found, want = (model(ids, **passed(model, x)).logits for x in (cache, EngineCache(model)))
    assert torch.equal(found, want)


def test_rows_may_be_others_once_all_is_taken_back() -> None:
    rows_may_be_others_once_all_is_taken_back(build())


def read_by_full_alone(model: Any, wrapped: Container[int]) -> None:
    """With weights in these layers that the engine does not know, as an adapter's, say, 'full' reads all, under the model's
    mask."""
    want = generated(model)
    for module in model.modules():
        if hasattr(module, "kv_b_proj") and module.layer_idx in wrapped:
            own = module.kv_b_proj
            module.kv_b_proj = torch.nn.Sequential(own)
    with kvengine.patched(model, "full"):
        assert torch.equal(generated(model), want)
    with kvengine.patched(model, "host"), pytest.raises(UnsupportedPolicy, match="only 'full' works here"):
        generated(model)


def test_weights_that_are_not_known_are_the_models_own_to_read() -> None:
    read_by_full_alone(build(), range(9))


@pytest.mark.parametrize("text", ["full", "kivi(bits=4, group=8, residual=8) + host"])
def test_a_session_is_saved_with_its_index(text: str, tmp_path: Path) -> None:
    model = build()
    with kvengine.patched(model, text):
        cache = EngineCache(model)
        out = generated(model, padded_batch(41), 9, **{CACHE: cache})
        saved.save(cache, tmp_path / "one.kv", model)
        again = saved.load(model, tmp_path / "one.kv")
        mask = torch.cat([padded_batch(41)["attention_mask"], torch.ones(3, 12, dtype=torch.long)], 1)
        more = {"input_ids": torch.cat([out, torch.full((3, 3), 7)], 1), "attention_mask": mask}
        want, got = (generated(model, more, 9, **{CACHE: one}) for one in (cache, again))
        assert torch.equal(got, want)
        again = EngineCache(model)
        generated(model, padded_batch(41), 9, **{CACHE: again})
        again.layers[0].index_keys = again.layers[0].index_keys[:, :20]
        saved.save(again, tmp_path / "two.kv", model)
        with pytest.raises(CorruptBitstream, match="index keys are not those of 3 rows of 49 tokens"):
            saved.load(model, tmp_path / "two.kv")


def test_chains_of_drafts_are_lossless() -> None:
    model, batch = build(), {"input_ids": padded_batch(41)["input_ids"][:1]}
    want = generated(model, batch, 24)
    for stack in ("full", "host"):
        decoder = TriForce(kvengine.patch(model, "full"), "lookup", None, gamma=(2, 4), stack=stack)
        assert torch.equal(decoder.generate(batch["input_ids"], max_new_tokens=24, do_sample=False), want)
    with pytest.raises(ModelError, match="or an index of its own, which know no branches"):
        TriForce(model, "recycling", None)
    with pytest.raises(UnsupportedPolicy, match="'quest' chooses what is read"):
        TriForce(model, "lookup", "quest(budget=24, page=4)")


def test_prefixes_are_not_stored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = kvengine.patch(build(), "full")
    store = Store(Files(tmp_path / "kv"))
    assert not Prefix(model, store).whole and "index keys" in caplog.text
    store.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("snapkv(budget=12, window=4)", "'snapkv' drops or merges tokens"),
        ("quest(budget=12)", "'quest' chooses what is read"),
        ("duo", "'duo' tells heads apart"),
        ("ashape", "'ashape' leaves out a part"),
        ("zipcache", "'zipcache' judges"),
        ("lowrank(rank=8)", "'lowrank' judges"),
    ],
)
def test_what_chooses_tokens_is_refused(text: str, said: str) -> None:
    model = build()
    with pytest.raises(UnsupportedPolicy, match=said):
        kvengine.patch(model, text)
    kvengine.patch(model, "full")
    with pytest.raises(UnsupportedPolicy, match=said):
        EngineCache(model, text)
