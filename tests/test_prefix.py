"""A prompt whose beginning comes from a store gives the text of a cold run; a store that fails costs only time."""

from __future__ import annotations

import os
import threading
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families.configs import build
from support import llama
from torch import nn
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, RobertaConfig, RobertaForCausalLM

import kvengine
from kvengine import saved
from kvengine.cache import LayerCache
from kvengine.errors import CacheError, IncompatibleCache, ModelError, StoreError
from kvengine.fingerprint import identity
from kvengine.offload import stores
from kvengine.policies.retention import Retention
from kvengine.policies.retention.h2o import H2O
from kvengine.policies.routing import Routing
from kvengine.prefix import Prefix
from kvengine.stack import Stack


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 128, (1, length), generator=torch.Generator().manual_seed(seed))


def text(model: Any, ids: torch.Tensor, cache: Any) -> list[int]:
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False,
                         cache=cache)  # fmt: skip
    return out[0, ids.shape[1] :].tolist()


@pytest.fixture
def model() -> Any:
    with kvengine.patched(llama(), "full") as model:
        yield model


def stored(model: Any, folder: Path, ids: torch.Tensor, **options: Any) -> tuple[Prefix, list[int]]:
    """A store with the prompt's chunks, and the text of the cold run."""
    reuse = Prefix(model, stores.Store(stores.Files(folder, sync="none")), chunk=16, **options)
    cache = reuse.fetch(ids)
    assert cache.seen == 0
    cold = text(model, ids, cache)
    assert reuse.keep(ids, cache) == ids.shape[1] // 16
    reuse.store.drain()
    assert all(done.ok == (True,) for done in reuse.store.poll())
    return reuse, cold


def test_weights_are_read_once_however_many_prompts_come(model: Any, tmp_path: Path) -> None:
    reuse, _ = stored(model, tmp_path, prompt(40))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvengine.prefix.identity", lambda *_: pytest.fail("the weights are those that were read"))
        assert reuse.fetch(prompt(40)).seen == 32
    reuse.store.close()


def test_what_was_read_goes_as_it_is_taken(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long text's keys and values would be there twice: in chunks, and in the cache."""
    reuse, _ = stored(model, tmp_path, prompt(100))
    chunks, there, decoded, store = list[Any](), list[list[int]](), Prefix.decoded, LayerCache.store

    def decoding(self: Prefix, data: bytearray) -> Any:
        found = decoded(self, data)
        chunks.append([weakref.ref(k) for k, _ in found.layers])
        return found

    def storing(self: LayerCache, *given: Any) -> None:
        there.append([sum(k() is not None for k in chunk) for chunk in chunks])
        store(self, *given)

    monkeypatch.setattr(Prefix, "decoded", decoding)
    monkeypatch.setattr(LayerCache, "store", storing)
    assert reuse.fetch(prompt(100)).seen == 96
    layers = len(chunks[0])
    assert layers > 1 and there == [[layers - i] * 6 for i in range(layers)]
    reuse.store.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "stack",
    [
        "full",
        "kivi(bits=4, group=16)",
        "quest(budget=64)",
        "streaming(sinks=2, recent=14)",
        "kvzip(budget=24, chunk=16)",
        "snapkv(budget=24, window=1)",
        "turboquant(bits=2, residual=8) + host",
    ],
)
def test_a_warm_run_gives_the_text_of_a_cold_one(model: Any, tmp_path: Path, stack: str) -> None:
    ids = prompt(100)
    reuse, _ = stored(model, tmp_path, ids)
    longer = torch.cat([ids[:, :70], prompt(30, 1)], 1)
    for asked, hits in ((ids, 96), (longer, 64), (ids[:, :96], 80), (ids[:, :97], 96), (prompt(50, 2), 0)):
        warm = reuse.fetch(asked, stack)
        assert warm.seen == hits
        assert text(model, asked, warm) == text(model, asked, kvengine.EngineCache(model, stack))
    reuse.store.close()


def test_of_a_prompt_that_is_read_in_parts_the_first_alone_is_reused(model: Any, tmp_path: Path) -> None:
    """The others are read beside what a policy has left; and a cache is to hold no more exactly than a part."""
    ids = prompt(100)
    reuse, _ = stored(model, tmp_path, ids)
    with kvengine.patched(model, "snapkv(budget=24, window=4)", judge_every=40):
        for asked, hits in ((ids, 16), (ids[:, :81], 0), (ids[:, :40], 32)):
            warm = reuse.fetch(asked)
            assert warm.seen == hits
            assert text(model, asked, warm) == text(model, asked, kvengine.EngineCache(model))
        with pytest.raises(CacheError, match="judge_every=40 .* 96 tokens were to be read"):
            reuse.compute(ids, kvengine.EngineCache(model))
        for total, seen in ((80, 32), (99, 16)):  # also of a prompt of whole chunks
            asked = prompt(total, total)
            warm = reuse.fetch(asked)
            assert reuse.compute(asked, warm) == seen // 16 and warm.seen == seen and warm.session.prompt_end == total
        assert reuse.fetch(ids, "full").seen == 96 and reuse.compute(prompt(40, 1), kvengine.EngineCache(model)) == 2
        assert reuse.compute(prompt(10, 1), kvengine.EngineCache(model)) == 0  # not a whole chunk
    reuse.store.close()


@pytest.mark.parametrize("policy", ["snapkv(budget=8, window=4)", "h2o(budget=8)"])
def test_parts_end_where_they_do_without_a_store(model: Any, tmp_path: Path, policy: str) -> None:
    """What was computed beyond the first part was judged with the second, and more was held exactly than a part."""
    with kvengine.patched(model, policy, judge_every=40):
        reuse = Prefix(model, stores.Store(stores.Files(tmp_path, sync="none")), chunk=16)
        for total, computed in ((100, 16), (60, 16), (38, 32)):
            ids = prompt(total, total)
            cache = reuse.fetch(ids)
            assert cache.seen == 0 and reuse.compute(ids[:, : min(48, total - 1)], cache) == computed // 16
            assert cache.seen == computed
            assert text(model, ids, cache) == text(model, ids, kvengine.EngineCache(model))
        reuse.store.close()


def roberta() -> Any:
    torch.manual_seed(0)
    return RobertaForCausalLM(RobertaConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=128, initializer_range=0.15, is_decoder=True, pad_token_id=0, eos_token_id=None,
    )).eval()  # fmt: skip


@pytest.mark.parametrize("made", [roberta, lambda: build("bamba")], ids=["roberta", "bamba"])
def test_chunks_are_rotated_as_generate_says(made: Any, tmp_path: Path) -> None:
    """RoBERTa counts otherwise by itself, and Bamba from 0 in each pass: keys of other places were stored, for all to find."""
    ids, options = prompt(60), {"max_new_tokens": 4, "do_sample": False, "output_logits": True}
    with kvengine.patched(made()) as model:
        run = partial(model.generate, ids, **options, return_dict_in_generate=True)
        cold = torch.cat(run().logits)
        reuse = Prefix(model, stores.Store(stores.Files(tmp_path, sync="none")), chunk=16)
        for document, found in ((16, 0), (48, 16), (48, 48)):
            cache = reuse.fetch(ids)
            assert cache.seen == found
            reuse.compute(ids[:, :document], cache)
            reuse.store.drain()
            torch.testing.assert_close(torch.cat(run(cache=cache).logits), cold, rtol=1e-3, atol=1e-3)
        reuse.store.close()


def test_keys_that_autocast_has_made_are_not_stored(tmp_path: Path) -> None:
    """A run without it would find them under the same name, and go on from other keys than its own."""
    gpt = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_embd=32, n_layer=1, n_head=2)).eval()
    reuse = [Prefix(kvengine.patch(x), stores.Store(stores.Files(tmp_path)), chunk=16) for x in (gpt, llama())]
    for one in reuse:  # Llama's keys stay wide, as they are turned by numbers that are
        cache = kvengine.EngineCache(one.model)
        with torch.autocast("cpu", torch.bfloat16):
            one.model.generate(prompt(40), max_new_tokens=1, cache=cache)
        with pytest.raises(CacheError, match="autocast"):
            one.keep(prompt(40), cache)
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(CacheError, match="autocast"):
            one.compute(prompt(40), new := kvengine.EngineCache(one.model))
        assert new.seen == 0  # it is said before the prompt is read
        assert one.fetch(prompt(40)).seen == 0 and one.compute(prompt(40), kvengine.EngineCache(one.model)) == 2
        one.store.close()


def test_a_question_on_a_reused_part_of_a_prompt_is_refused(model: Any, tmp_path: Path) -> None:
    """The policy would never act on it, nor find it where it seeks what it has sealed."""
    ids = prompt(100)
    reuse, _ = stored(model, tmp_path, ids)
    for stack in ("kivi(bits=4, group=16)", "keydiff(budget=24)"):
        warm = reuse.fetch(ids, stack)
        with pytest.raises(CacheError, match="read in part only"):
            warm.follow_up()
        warm.follow_up(False)
        assert text(model, ids, warm) == text(model, ids, kvengine.EngineCache(model, stack))
    reuse.store.close()


@pytest.mark.parametrize("form", ["a list", "a row", "numbers", "no row"])
def test_ids_of_another_form_are_told(model: Any, tmp_path: Path, form: str) -> None:
    """Of a row without its batch nothing was ever found, without a word, and a list ended in an AttributeError."""
    ids = prompt(100)
    reuse, _ = stored(model, tmp_path, ids)
    asked: Any = {"a list": ids.tolist(), "a row": ids[0], "numbers": ids.float(), "no row": ids[:0]}[form]
    for refused in (lambda: reuse.fetch(asked), lambda: reuse.keep(asked, reuse.fetch(ids))):
        with pytest.raises(CacheError, match=r"whole numbers \[1, token\].*; got (list|torch\.)"):
            refused()
    reuse.store.close()


def test_only_what_is_new_is_stored(model: Any, tmp_path: Path) -> None:
    ids = prompt(100)
    reuse, _ = stored(model, tmp_path, ids)
    longer = torch.cat([ids, prompt(40, 1)], 1)
    cache = reuse.fetch(longer)
    text(model, longer, cache)
    assert reuse.keep(longer, cache) == 140 // 16 - 6
    reuse.store.drain()
    assert reuse.fetch(longer).seen == 128
    reuse.store.close()


def test_another_model_or_tenant_finds_nothing(model: Any, tmp_path: Path) -> None:
    ids = prompt(100)
    reuse, _ = stored(model, tmp_path, ids, salt="a")
    assert reuse.fetch(ids).seen == 96
    for other in (Prefix(model, reuse.store, chunk=16, salt="b"), Prefix(model, reuse.store, chunk=16, level="high")):
        assert other.fetch(ids).seen == 0
    with kvengine.patched(llama(seed=5), "full") as stranger:
        assert Prefix(stranger, reuse.store, chunk=16, salt="a").fetch(ids).seen == 0
    reuse.store.close()


def begun(model: Any, ids: torch.Tensor, way: str) -> kvengine.EngineCache:
    """A cache in which a prompt's tokens are not those that its ids name."""
    cache = kvengine.EngineCache(model)
    if way == "prefix":  # as PEFT tunes them
        tuned = DynamicCache(config=model.config)
        for layer in range(model.config.num_hidden_layers):
            tuned.update(torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16), layer)
        cache.adopt(tuned)
        text(model, ids, cache)
        return cache
    vectors = model.get_input_embeddings()(ids).detach() + 1
    if way == "vectors":
        model.generate(inputs_embeds=vectors, max_new_tokens=4, do_sample=False, cache=cache)
    else:
        with torch.no_grad():
            model(inputs_embeds=vectors, cache=cache)
    return cache


@pytest.mark.parametrize("way", ["prefix", "vectors", "a pass of vectors"])
def test_what_ids_do_not_name_is_not_stored(model: Any, tmp_path: Path, way: str) -> None:
    """Another prompt of the same ids has other keys."""
    ids = prompt(100)
    reuse = Prefix(model, stores.Store(stores.Files(tmp_path / "store", sync="none")), chunk=16)
    cache = begun(model, ids, way)
    saved.save(cache, tmp_path / "session", model)
    for one in (cache, saved.load(model, tmp_path / "session")):
        with pytest.raises(CacheError, match="no ids.*of ids alone"):
            reuse.keep(ids, one)
    cache.reset()
    text(model, ids, cache)
    assert reuse.keep(ids, cache) == 6
    reuse.store.close()


class Tuned(torch.nn.Module):
    """A layer with adapters, as PEFT makes them: what it computes depends on which are in use, and its weights do not."""

    disable_adapters = False

    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base, self.active_adapters, self.scaling = base, ["a"], {"a": 1.0, "b": 1.0}
        self.deltas = torch.nn.ParameterDict({name: torch.randn_like(base.weight) for name in self.scaling})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x)
        for name in () if self.disable_adapters else self.active_adapters:
            out = out + self.scaling[name] * (x @ self.deltas[name].T)
        return out


def test_chunks_are_those_of_the_adapter_in_use(tmp_path: Path) -> None:
    model, ids = llama(), prompt(100)
    layer = model.model.layers[0].self_attn.k_proj = Tuned(model.model.layers[0].self_attn.k_proj)
    reuse, cold = stored(kvengine.patch(model), tmp_path, ids)
    for name, value in (("active_adapters", ["b"]), ("disable_adapters", True), ("scaling", {"a": 2.0, "b": 1.0})):
        before = getattr(layer, name)
        setattr(layer, name, value)
        cache = reuse.fetch(ids)
        assert cache.seen == 0 and text(model, ids, cache) != cold
        setattr(layer, name, before)
    cache = reuse.fetch(ids)
    assert cache.seen == 96 and text(model, ids, cache) == cold
    reuse.store.close()


def test_chunks_of_a_model_that_has_learned_since_are_not_its(tmp_path: Path) -> None:
    model, ids = llama(), prompt(100)
    reuse, _ = stored(kvengine.patch(model), tmp_path, ids)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight *= 1.5
    cache = reuse.fetch(ids)
    assert cache.seen == 0
    text(model, ids, cache)
    assert reuse.keep(ids, cache) == 6
    reuse.store.close()


def test_chunks_of_a_model_whose_weight_was_replaced_are_not_its(tmp_path: Path) -> None:
    """Python gives the new one the place, and with it the id, of the one that was deleted before."""
    model, ids = llama(), prompt(100)
    layer = kvengine.patch(model).model.layers[0].self_attn.k_proj
    layer.weight = nn.Parameter(layer.weight.data.clone())  # as loaded: never written into
    reuse, _ = stored(model, tmp_path, ids)
    for i in range(2, 9):
        other, known = layer.weight.data * i, reuse.whose.model
        del layer.weight
        layer.weight = nn.Parameter(other)
        assert reuse.fetch(ids).seen == 0 and reuse.whose.model != known
    reuse.store.close()


def test_damage_shortens_the_chain_and_generation_goes_on(model: Any, tmp_path: Path) -> None:
    ids = prompt(100)
    reuse, cold = stored(model, tmp_path, ids)
    keys = stores.chain(ids[0].tolist(), reuse.start, 16)
    path = reuse.store.backend.path(keys[3])  # type: ignore[attr-defined]
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    cache = reuse.fetch(ids)
    assert cache.seen == 48 and text(model, ids, cache) == cold and reuse.store.counts["corrupt"] == 1
    reuse.keep(ids, cache)
    reuse.store.drain()
    assert reuse.fetch(ids).seen == 96
    reuse.store.close()


def test_a_chunk_of_another_length_is_none_of_ours(model: Any, tmp_path: Path) -> None:
    """A header may ask for any memory; what a prompt's chunk takes is known before."""
    ids = prompt(100)
    reuse, cold = stored(model, tmp_path / "16", ids)
    other = Prefix(model, reuse.store, chunk=32)
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(ids, cache=cache)
    other.keep(ids, cache)
    reuse.store.drain()
    mine, longer = (stores.chain(ids[0].tolist(), one.start, one.chunk)[1] for one in (reuse, other))
    buffer = bytearray(reuse.store.leading([longer], 5)[0])
    assert all(reuse.store.wait(reuse.store.submit_get([longer], [buffer]), 5).ok)  # type: ignore[union-attr]
    reuse.store.backend.delete(mine)
    reuse.store.backend.put(mine, [buffer])
    cache = reuse.fetch(ids)
    assert cache.seen == 16 and text(model, ids, cache) == cold
    reuse.store.close()


def small(model: Any, folder: Path, chunks: int) -> Prefix:
    """A store with room for so many chunks, which it is given, and gives, one after the other."""
    reuse, _ = stored(model, folder / "whole", prompt(100))
    size = max(entry.size for entry in reuse.store.entries())
    reuse.store.close()
    backend = stores.Files(folder / "small", cap=chunks * size, sync="none")
    return Prefix(model, stores.Store(backend, threads=1), chunk=16)


def put(model: Any, reuse: Prefix, ids: torch.Tensor) -> None:
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(ids, cache=cache)
    reuse.keep(ids, cache)
    reuse.store.drain()


def test_a_store_too_small_for_a_prompt_keeps_its_beginning(model: Any, tmp_path: Path) -> None:
    """What was used longest ago goes first, and a chunk without those before it serves nobody."""
    reuse, ids = small(model, tmp_path, 4), prompt(100)
    put(model, reuse, ids)
    assert reuse.fetch(ids).seen == 16 * len(reuse.store.entries()) == 64
    reuse.store.close()


def test_more_than_may_wait_for_a_store_is_given_to_it_from_its_beginning_on(model: Any, tmp_path: Path) -> None:
    reuse, ids = small(model, tmp_path, 99), prompt(100)
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(ids, cache=cache)
    per_token = sum(x.nbytes for layer in cache.engines for x in layer.contents()) // 100
    reuse.store.pending = 5 * 16 * per_token
    awake, real = threading.Event(), reuse.store.backend.put
    reuse.store.backend.put = lambda *a: awake.wait(10) and real(*a)  # type: ignore[method-assign]
    sent = reuse.keep(ids, cache)
    awake.set()
    reuse.store.drain()
    # None that nobody would find.
    assert reuse.store.counts["dropped"] == 1 and reuse.fetch(ids).seen == 16 * sent >= 32
    reuse.store.close()


def test_what_makes_room_for_another_prompt_is_the_end_of_one_that_was_read(model: Any, tmp_path: Path) -> None:
    reuse, ids = small(model, tmp_path, 7), prompt(100)
    put(model, reuse, ids)
    for entry in reuse.store.entries():
        os.utime(reuse.store.backend.path(entry.key), (1.0, 1.0))  # type: ignore[attr-defined]
    assert reuse.fetch(ids).seen == 96
    put(model, reuse, prompt(64, 3))
    assert reuse.fetch(ids).seen == 48 and reuse.fetch(prompt(64, 3)).seen == 48
    reuse.store.close()


def test_a_store_that_is_down_or_slow_means_computing(model: Any, tmp_path: Path) -> None:
    ids = prompt(100)
    reuse, cold = stored(model, tmp_path, ids)
    real = reuse.store.backend.read

    def down(*_: Any) -> int:
        raise ConnectionError("gone")

    reuse.store.backend.read = down  # type: ignore[method-assign]
    cache = reuse.fetch(ids)
    assert cache.seen == 0 and text(model, ids, cache) == cold and reuse.store.counts["failed"] >= 1
    reuse.store.drain()
    reuse.store.backend.read = lambda *a: __import__("time").sleep(0.5) or real(*a)  # type: ignore[method-assign]
    reuse.store._closed_until, reuse.timeout = 0.0, 0.05
    assert reuse.fetch(ids).seen == 0
    reuse.store.drain()
    reuse.store.close()


class Learning(Routing):
    """One head of a layer keeps what all queries of the prompt have looked at."""

    def lanes(self, layer: int, layers: int, heads: int) -> list[tuple[tuple[int, ...], Retention | None]]:
        return [((0,), H2O(budget=24)), (tuple(range(1, heads)), None)]


def test_what_cannot_be_reused_or_stored(model: Any, tmp_path: Path) -> None:
    ids = prompt(100)
    reuse, _ = stored(model, tmp_path, ids)
    # By the attention of all queries, or of some anywhere; or later layers' keys follow from what was skipped.
    for judging in ("h2o(budget=24)", "zipcache(block=16)", "ashape(sinks=2, local=8)"):
        assert reuse.fetch(ids, judging).seen == 0
    assert reuse.fetch(ids, Stack(routing=Learning())).seen == 0
    assert reuse.fetch(ids.expand(2, -1)).seen == 0  # chunks are of one sequence
    cache = kvengine.EngineCache(model, "snapkv(budget=24, window=6)")
    text(model, ids, cache)
    with pytest.raises(CacheError, match="holds whole"):
        reuse.keep(ids, cache)
    reuse.store.close()


def test_keys_of_another_model_are_not_stored_as_this_ones(model: Any, tmp_path: Path) -> None:
    reuse, other = Prefix(model, stores.Store(stores.Files(tmp_path, sync="none")), chunk=16), llama(seed=1)
    with kvengine.patched(other, "full"):
        cache = kvengine.EngineCache(other)
        text(other, prompt(40), cache)
        with pytest.raises(CacheError, match="another model"):
            reuse.keep(prompt(40), cache)
    assert reuse.fetch(prompt(40)).seen == 0
    reuse.store.close()


@pytest.mark.parametrize(
    ("option", "error", "says"),
    [
        ({"timeout": 0}, StoreError, "positive number of seconds"),
        ({"timeout": None}, StoreError, "positive number of seconds"),
        ({"ttl": 0}, StoreError, "ttl=0.* positive number of seconds, or None for ever"),
        ({"salt": None}, ValueError, "salt is text"),
        ({"level": None}, IncompatibleCache, "no cache level is called 'None'"),
    ],
    ids=str,
)
def test_options_of_another_kind_are_told_at_once(
    model: Any, tmp_path: Path, option: dict[str, Any], error: type[Exception], says: str
) -> None:
    store = stores.Store(stores.Files(tmp_path, sync="none"))
    with pytest.raises(error, match=says):
        Prefix(model, store, **option)
    with pytest.raises(ModelError, match="not of a Linear"):
        Prefix(torch.nn.Linear(2, 2), store)
    store.close()


def test_a_tokenizer_without_a_backend_is_known_by_its_words(model: Any) -> None:
    words = ({"a": 0, "b": 1}, {"b": 1, "a": 0}, {"a": 1, "b": 0})
    same, again, other = (identity(model, SimpleNamespace(get_vocab=lambda x=x: x)).tokenizer for x in words)
    assert same == again != other


def test_keys_that_a_plain_reading_would_not_make_are_not_stored(model: Any, tmp_path: Path) -> None:
    """They would be found by the next prompt of the same tokens, whatever its stack and mask."""
    ids = prompt(100)
    reuse = Prefix(model, stores.Store(stores.Files(tmp_path, sync="none")), chunk=16)
    skipped = kvengine.EngineCache(model, "ashape(sinks=2, local=8)")
    text(model, ids, skipped)
    with pytest.raises(CacheError, match="skipped"):
        reuse.keep(ids, skipped)
    for rows, stack in ((ids, "xattention(block=8)"), (ids.expand(2, -1), "full")):
        cache = kvengine.EngineCache(model, stack)
        with pytest.raises(CacheError, match="holds whole"):
            reuse.compute(rows, cache)
        assert not cache.seen  # a part that was read for nothing would have its own pairs chosen
    for hidden in (slice(0, 5), slice(40, 45)):
        mask, padded = torch.ones_like(ids), kvengine.EngineCache(model, "full")
        mask[:, hidden] = 0
        model(input_ids=ids, attention_mask=mask, cache=padded)
        with pytest.raises(CacheError, match="without padding"):
            reuse.keep(ids, padded)
    reuse.store.close()


def test_what_autocast_rounds_is_neither_stored_nor_found(model: Any, tmp_path: Path) -> None:
    """Of keys in one precision and values in another the codec said that they "do not belong together"."""
    ids = prompt(40)
    reuse, _ = stored(model, tmp_path, prompt(40, seed=1))
    under = torch.autocast("cpu", torch.bfloat16)
    with under:
        cache = kvengine.EngineCache(model)
        text(model, ids, cache)
        for use in (lambda: reuse.fetch(ids), lambda: reuse.compute(ids, cache), lambda: reuse.keep(ids, cache)):
            with pytest.raises(CacheError, match=r"autocast.*model\.to\(\)"):
                use()
    with pytest.raises(CacheError, match="autocast"):
        reuse.keep(ids, cache)
    assert reuse.fetch(ids).seen == 0 and not reuse.store.counts["failed"]
    reuse.store.close()


def test_a_level_that_does_not_exist_is_said_at_once(model: Any, tmp_path: Path) -> None:
    with pytest.raises(IncompatibleCache, match="Did you mean 'high'"):
        Prefix(model, stores.Store(stores.Files(tmp_path, sync="none")), level="hihg")


def test_a_lossy_prefix_is_close(model: Any, tmp_path: Path) -> None:
    ids = prompt(100)
    reuse, _ = stored(model, tmp_path, ids, level="near")
    outs = []
    for cache in (reuse.fetch(ids), kvengine.EngineCache(model)):
        with torch.inference_mode():
            outs.append(model(input_ids=ids[:, cache.seen :], cache=cache, use_cache=True).logits[0, -1])
    assert 0 < (outs[0] - outs[1]).abs().max() < 0.3 * outs[1].abs().max()
    reuse.store.close()


@pytest.mark.parametrize(
    "stack",
    ["snapkv(budget=40, window=30)", "expected_attention(budget=24)", "adakv(budget=24, base='expected_attention')"],
)
def test_queries_that_a_policy_judges_by_are_computed(model: Any, tmp_path: Path, stack: str) -> None:
    ids = prompt(100)
    reuse, _ = stored(model, tmp_path, ids)
    warm = reuse.fetch(ids, stack)
    assert warm.seen == (64 if "window" in stack else 0)
    outs = []
    for cache in (warm, kvengine.EngineCache(model, stack)):  # `fetch` has announced the prompt
        with torch.inference_mode():
            model(input_ids=ids[:, cache.seen :], cache=cache)
            outs.append(model(input_ids=ids[:, :1], cache=cache).logits)
    torch.testing.assert_close(*outs)
    reuse.store.close()


def test_a_cache_that_has_read_nothing_is_refused(model: Any, tmp_path: Path) -> None:
    """Of a prompt without tokens too."""
    reuse = Prefix(model, stores.Store(stores.Files(tmp_path, sync="none")), chunk=16)
    for length in (0, 20):
        with pytest.raises(CacheError, match="only a prompt that the cache holds whole"):
            reuse.keep(prompt(length), kvengine.EngineCache(model))
    reuse.store.close()


@pytest.mark.parametrize("more", ["", " + kivi(bits=4, group=16)", " + snapkv(budget=24, window=6)"])
def test_heads_that_follow_two_rules_are_stored_together(model: Any, tmp_path: Path, more: str) -> None:
    """In their places, while the prompt is read: then every head has all of it. The chunks are those of a full cache."""
    stack, document = f"duo(sinks=2, recent=10){more}", prompt(100)
    reuse = Prefix(model, stores.Store(stores.Files(tmp_path, sync="none")), chunk=16)
    cache = reuse.fetch(document, stack)
    assert reuse.compute(document, cache) == 6
    reuse.store.drain()
    ids = torch.cat([document, prompt(20, 1)], 1)
    cold = text(model, ids, kvengine.EngineCache(model, stack))
    assert text(model, ids, cache) == cold
    warm = reuse.fetch(ids, stack)
    assert warm.seen == 96 and text(model, ids, warm) == cold
    whole = kvengine.EngineCache(model, "full")
    with torch.inference_mode():
        model(input_ids=document[:, :96], cache=whole)
    for found, want in zip(reuse.fetch(ids, "full").engines, whole.engines, strict=True):
        torch.testing.assert_close(found.contents(), want.contents(), rtol=0, atol=1e-5)
    with pytest.raises(CacheError, match="only a prompt that the cache holds whole"):
        reuse.keep(document, cache)  # judged since
    reuse.store.close()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stack", ["full", "host", "snapkv(budget=24, window=6)"])
def test_chunks_of_latents_serve_every_stack(tmp_path: Path, stack: str) -> None:
    """Under a policy their first channels are held a second time, as values."""
    ids = torch.randint(2, 128, (1, 100), generator=torch.Generator().manual_seed(1))
    with kvengine.patched(build("deepseek_v3"), "full") as model:
        for source, target in (("full", stack), ("snapkv(budget=500)", "full")):
            reuse = Prefix(model, stores.Store(stores.Files(tmp_path / source, sync="none")), chunk=16)
            cache = kvengine.EngineCache(model, source)
            text(model, ids, cache)
            reuse.keep(ids, cache)
            reuse.store.drain()
            warm = reuse.fetch(ids, target)
            assert warm.seen == (80 if "window" in target else 96)
            assert text(model, ids, warm) == text(model, ids, kvengine.EngineCache(model, target))
            reuse.store.close()


def test_a_model_whose_keys_cannot_be_stored_is_refused(tmp_path: Path) -> None:
    with kvengine.patched(llama().double(), "full") as wide, pytest.raises(ModelError, match="has torch.float64"):
        Prefix(wide, stores.Store(stores.Files(tmp_path, sync="none")))


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_where_rotations_follow_the_length_chunks_are_of_texts_as_long(kind: str, tmp_path: Path) -> None:
    """Up to 64 tokens the rotation is that of short texts."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}
    model = kvengine.patch(llama(rope_parameters=rope, max_position_embeddings=64 if kind == "dynamic" else 256))
    reuse = Prefix(model, stores.Store(stores.Files(tmp_path, sync="none")), chunk=16)

    def hits(ids: torch.Tensor) -> int:
        with torch.no_grad():
            cold, warm = kvengine.EngineCache(model), reuse.fetch(ids)
            want, seen = model(ids, cache=cold).logits[:, -1], warm.seen
            torch.testing.assert_close(model(ids[:, seen:], cache=warm).logits[:, -1], want, rtol=1e-4, atol=1e-4)
            reuse.keep(ids, cold)
            reuse.store.drain()
        return seen

    ids = prompt(100)
    known = [hits(ids[:, :length]) for length in (90, 50, 60, 95, 100)]
    assert known == ([0, 0, 48, 80, 80] if kind == "longrope" else [0, 0, 48, 0, 0])
    assert len(reuse.keys(ids)) == (6 if kind == "longrope" else 0)
    cache = reuse.fetch(ids[:, :60])
    text(model, ids[:, :60], cache)
    with pytest.raises(CacheError, match="60 tokens and was continued to 79, and from 6[45] on"):
        reuse.keep(ids[:, :60], cache)
    reuse.store.close()
