"""Prompts that begin alike on models with windows or states: what is stored beside a chunk, and what becomes of it."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import configs
from transformers import DynamicCache

import kvengine
from kvengine import prefix_beside
from kvengine.errors import CacheError, CorruptBitstream, IncompatibleCache
from kvengine.hf.layer import EngineLayer
from kvengine.hf.states import has_states, held_states
from kvengine.offload import stores
from kvengine.offload.container import pack, read_bytes
from kvengine.prefix import Prefix

FAMILIES = ("qwen3_next", "lfm2", "falcon_h1", "zaya", "gemma3", "gpt_oss", "llama4", "dots3_note")
"""States, convolutions, states beside tokens and beside windows, windows, with sinks, attention in chunks, latents."""
STACKS = ["full", "snapkv(budget=16, window=1)", "kivi(bits=4, group=8, residual=8)", "quest(budget=16, page=4)"]
CHUNK = 8


def ids(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(2, 128, (1, tokens), generator=torch.Generator().manual_seed(seed))


def built(name: str) -> Any:
    if not configs.exists(name):
        pytest.skip(f"this transformers has no {name}")
    return kvengine.patch(configs.build(name))


def store(folder: Path) -> stores.Store:
    return stores.Store(stores.Files(folder, sync="none"))


def text(model: Any, prompt: torch.Tensor, cache: Any) -> list[int]:
    mask = torch.ones_like(prompt)
    out = model.generate(input_ids=prompt, attention_mask=mask, max_new_tokens=12, do_sample=False, cache=cache)
    return list(out[0, prompt.shape[1] :].tolist())


def computed(model: Any, folder: Path, document: torch.Tensor, **options: Any) -> Prefix:
    reuse = Prefix(model, store(folder), chunk=CHUNK, **options)
    assert reuse.compute(document, reuse.fetch(document)) == document.shape[1] // CHUNK
    reuse.store.drain()
    return reuse


def combinations() -> list[Any]:
    found = [(name, stack) for name in FAMILIES for stack in STACKS]
    return [pytest.param(*some, marks=[] if i % 3 == 0 else [pytest.mark.slow]) for i, some in enumerate(found)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "stack"), combinations())
def test_questions_on_a_document_begin_behind_it(name: str, stack: str, tmp_path: Path) -> None:
    model, document = built(name), ids(37)
    first, second = (torch.cat([document, ids(tokens, seed)], 1) for tokens, seed in ((9, 1), (5, 2)))
    reuse = Prefix(model, store(tmp_path), chunk=CHUNK)
    cache = reuse.fetch(first, stack)
    assert reuse.compute(document, cache) == 4 and cache.seen == 32
    assert text(model, first, cache) == text(model, first, kvengine.EngineCache(model, stack))
    reuse.store.drain()
    warm = reuse.fetch(second, stack)
    assert warm.seen == 32
    assert text(model, second, warm) == text(model, second, kvengine.EngineCache(model, stack))
    reuse.store.close()


@pytest.mark.parametrize("name", ["qwen3_next", "gemma3"])
def test_what_was_restored_is_what_was_held(name: str, tmp_path: Path) -> None:
    model, document = built(name), ids(37)
    cold = kvengine.EngineCache(model)
    with torch.no_grad():
        model(document[:, :32], cache=cold)
    reuse = computed(model, tmp_path, document)
    warm = reuse.fetch(document)
    for mine, its in zip(warm.layers, cold.layers, strict=True):
        assert type(mine) is type(its)
        if has_states(mine):
            assert all(map(torch.equal, held_states(mine), held_states(its))) and held_states(mine)
            assert mine.has_previous_state == its.has_previous_state
        if getattr(mine, "sliding_window", None):
            assert torch.equal(mine.keys, its.keys) and mine.cumulative_length == its.cumulative_length == 32
    reuse.store.close()


def test_a_prompt_goes_on_from_the_last_place_where_somebody_stopped(tmp_path: Path) -> None:
    model, document = built("qwen3_next"), ids(64)
    reuse = computed(model, tmp_path, document[:, :20])
    for end, found in ((40, 16), (64, 40)):
        cache = reuse.fetch(document)
        assert cache.seen == found and reuse.compute(document[:, : end + 3], cache) == (end - found) // CHUNK
        reuse.store.drain()
    parted = torch.cat([document[:, :30], ids(20, 1)], 1)
    assert [reuse.fetch(x).seen for x in (document, parted, document[:, :16], document[:, :17])] == [40, 16, 0, 16]
    assert reuse.compute(document[:, :40], reuse.fetch(document)) == 0  # and nothing is read
    reuse.store.close()


def test_behind_the_chunks_nothing_is_stored_and_that_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, document = built("gemma3"), ids(37)
    reuse = Prefix(model, store(tmp_path), chunk=CHUNK)
    cache = reuse.fetch(document)
    text(model, document, cache)
    with caplog.at_level(logging.WARNING):
        assert reuse.keep(document, cache) == 0
    assert "compute(ids, cache)" in caplog.text and not reuse.store.entries()
    short = kvengine.EngineCache(model)
    assert reuse.compute(document[:, : CHUNK - 1], short) == 0 and short.seen == 0
    reuse.store.close()


def test_what_remembers_is_not_stored(tmp_path: Path) -> None:
    model, document = built("lfm2"), ids(16)
    reuse, cache = Prefix(model, store(tmp_path), chunk=CHUNK), kvengine.EngineCache(model)
    cache.activate_past_recording()
    with pytest.raises(CacheError, match="deactivate_past_recording"):
        reuse.compute(document, cache)
    reuse.store.close()


def test_all_that_was_stored_of_a_prompt_has_a_name(tmp_path: Path) -> None:
    document = ids(37)
    reuse = computed(built("qwen3_next"), tmp_path, document)
    assert len(reuse.keys(document)) == 4 and len(reuse.store.entries()) == 5
    assert sum(reuse.store.delete(reuse.keys(document, beside=True))) == 5 and not reuse.store.entries()
    plain = computed(built("llama"), tmp_path / "plain", document)
    assert plain.keys(document) == plain.keys(document, beside=True) and len(plain.store.entries()) == 4
    assert plain.fetch(document).seen == 32
    for each in (reuse, plain):
        each.store.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("what", ["a byte", "the end", "nothing", "another place", "another model", "a chunk"])
def test_what_cannot_be_read_is_computed_again(what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, document = built("qwen3_next"), ids(37)
    reuse = computed(model, tmp_path, document)
    *chunks, last = reuse.keys(document)
    key = prefix_beside.name(last)
    size = reuse.store.leading([key])[0]
    data = bytearray(size)
    assert reuse.store.wait(reuse.store.submit_get([key], [data]), 5.0) is not None
    if what == "a byte":
        data[size // 2] ^= 1
    elif what in ("the end", "nothing"):
        data = data[: size // 2 if what == "the end" else 0]
    elif what == "another place":
        cache = kvengine.EngineCache(model)
        with torch.no_grad():
            model(document[:, :24], cache=cache)
        data = bytearray(prefix_beside.encode(cache, reuse.whose))
    elif what == "another model":
        other = kvengine.patch(configs.build("qwen3_next", seed=1))
        data = bytearray(
            prefix_beside.encode(
                computed(other, tmp_path / "other", document).fetch(document), Prefix(other, reuse.store).whose
            )
        )
    if what == "a chunk":
        reuse.store.delete(chunks[:1])
    else:
        reuse.store.wait(reuse.store.submit_put([key], [bytes(data)]), 5.0)
    cache = reuse.fetch(document)
    assert cache.seen == 0 and text(model, document, cache) == text(model, document, kvengine.EngineCache(model))
    reuse.store.close()


CHANGES: list[tuple[Callable[[dict[str, Any]], Any], int, int, str]] = [
    (lambda held: held.update(kind="session"), 1, 16, "holds 'session' of 16 tokens"),
    (lambda held: held.update(format=2), 1, 16, "not what is beside 16"),
    (lambda held: held.pop("identity"), 1, 16, "lacks or garbles"),
    (lambda held: held["layers"].pop(), 1, 16, "lacks or garbles"),
    (lambda held: held["layers"].__setitem__(0, None), 1, 16, "layers are not the model's"),
    (lambda held: held.update(seen=16), 1, 17, "a window is that of another token"),
    (lambda held: None, 2, 16, r"layers have \[1, 2\] rows"),
]


@pytest.mark.parametrize(("change", "rows", "tokens", "says"), CHANGES)
@torch.no_grad()
def test_what_does_not_fit_beside_the_chunks_is_refused(
    change: Callable[[dict[str, Any]], Any], rows: int, tokens: int, says: str, tmp_path: Path
) -> None:
    model = built("gemma3")
    whose, caches = Prefix(model, store(tmp_path)).whose, [kvengine.EngineCache(model) for _ in range(2)]
    model(ids(16), cache=caches[0])
    model(ids(tokens).expand(rows, -1), cache=caches[1])
    fresh = DynamicCache(config=model.config).layers
    pairs = zip(caches[0].layers, fresh, strict=True)
    caches[0].layers = [mine if isinstance(mine, EngineLayer) else new for mine, new in pairs]
    held = read_bytes(prefix_beside.encode(caches[1], whose))
    change(held.header)
    data = pack(held.header, [held.section(i) for i in range(len(held.entries))])
    with pytest.raises((CorruptBitstream, IncompatibleCache), match=says):
        prefix_beside.enter(bytearray(data), caches[0], whose, [model.device] * len(fresh))


@pytest.mark.parametrize("name", ["gemma3n", "mistral_window", "jamba"])
def test_of_models_with_shared_keys_or_windows_alone_nothing_is_stored(name: str, tmp_path: Path) -> None:
    """Nor where states begin anew in each pass: there the rest of a prompt could not be read behind its beginning."""
    model, document = built(name), ids(37)
    reuse = Prefix(model, store(tmp_path), chunk=CHUNK)
    cache = reuse.fetch(document)
    assert reuse.compute(document[:, :30], cache) == 0
    said = [model.generate(document, max_new_tokens=2, do_sample=False, cache=its) for its in (cache, None)]
    assert torch.equal(*said)
    assert not reuse.keys(document, beside=True)[37 // CHUNK :] and not reuse.store.entries()
    reuse.store.close()


def test_a_slow_store_is_not_asked_for_longer_than_it_may_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, document = built("qwen3_next"), ids(64)
    reuse = computed(model, tmp_path, document)
    reuse.store.delete(reuse.keys(document, beside=True)[-1:])  # so that every chunk has to be asked for
    leading, asked = reuse.store.leading, list[float | None]()

    def slow(keys: list[str], timeout: float | None = None) -> list[int]:
        asked.extend([timeout] if keys else [])
        return leading(keys, timeout)

    monkeypatch.setattr("kvengine.prefix.time", SimpleNamespace(monotonic=lambda: 4.0 * len(asked)))
    monkeypatch.setattr(reuse.store, "leading", slow)
    assert reuse.fetch(document).seen == 0 and asked == [10.0, 6.0, 2.0]
    reuse.store.close()
