"""A saved session goes on exactly as the one it was saved from, whatever the policy."""

from __future__ import annotations

import copy
import errno
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from families import configs
from support import SMALL, every, greedy, llama, patched, prompts
from transformers import DynamicCache

import kvengine
from kvengine import saved, saved_state
from kvengine.errors import CacheError, CorruptBitstream, IncompatibleCache, ModelError
from kvengine.offload import cachegen
from kvengine.offload.stores.filesystem import replace_file
from kvengine.pages import Pages

MIXED = [
    "snapkv(budget=24, window=6) + kivi(bits=4, group=16)", "duo(sinks=2, recent=10) + quest(budget=32, page=8)",
    "h2o(budget=24) + host", "quest(budget=32, page=8) + kivi(bits=4, group=16) + host",
    "quest(budget=24, page=4) + host(resident=40)",
]  # fmt: skip


def go_on(model: Any, cache: Any, start: torch.Tensor, count: int) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens of each row, fed one by one, and the last logits."""
    token, out = start, []
    for _ in range(count):
        with torch.inference_mode():
            logits = model(input_ids=token, cache=cache, use_cache=True).logits[:, -1]
        token = logits.argmax(-1, keepdim=True)
        out.append(token)
    return torch.cat(out, 1).tolist(), logits


def stacks() -> list[str]:
    return list(dict.fromkeys([*SMALL.values(), *MIXED]))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stack", every(2, stacks()))
def test_a_restored_session_continues_bit_for_bit(stack: str, tmp_path: Path) -> None:
    model = llama()
    try:
        with kvengine.patched(model, stack):
            ids = prompts(1)["input_ids"]
            cache = kvengine.EngineCache(model, stack)
            with torch.inference_mode():
                first = model(input_ids=ids, cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
            _, _ = go_on(model, cache, first, 5)
            saved.save(cache, tmp_path / "s.kv", model, extra={"note": 1})
            back = saved.load(model, tmp_path / "s.kv")
            assert back.seen == cache.seen and str(back.stack) == str(cache.stack)
            a, b = go_on(model, cache, first, 20), go_on(model, back, first, 20)
            assert a[0] == b[0] and torch.equal(a[1], b[1])
            assert torch.equal(back.stats().held, cache.stats().held)
            assert back.stats().computed == cache.stats().computed
            assert saved.extra(tmp_path / "s.kv") == {"note": 1}
    except kvengine.stack.UnsupportedPolicy as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("stack", ["full", SMALL["duo"], SMALL["h2o"]])
def test_a_session_of_autocast_is_restored_for_it(stack: str, tmp_path: Path) -> None:
    """There values have another dtype than rotated keys; the file was written, and called damaged where it was read."""
    model, batch = patched(stack), {"input_ids": prompts(1)["input_ids"]}
    cache = kvengine.EngineCache(model)
    with torch.autocast("cpu", torch.bfloat16):
        batch["input_ids"] = torch.cat([batch["input_ids"], greedy(model, batch, 6, cache=cache)], 1)
        saved.save(cache, tmp_path / "s.kv", model)
        assert torch.equal(
            greedy(model, batch, 6, cache=saved.load(model, tmp_path / "s.kv")), greedy(model, batch, 6, cache=cache)
        )


@pytest.mark.sampled(6)
@pytest.mark.parametrize("stack", every(2, stacks()))
def test_a_session_that_outgrew_its_budget_while_decoding_is_restored(stack: str, tmp_path: Path) -> None:
    model = llama()
    with kvengine.patched(model, stack):
        cache = kvengine.EngineCache(model, stack)
        with torch.inference_mode():
            model(input_ids=torch.tensor([[9, 4, 7]]), cache=cache, use_cache=True)
        start = torch.tensor([[5]])
        go_on(model, cache, start, 40)
        saved.save(cache, tmp_path / "s.kv", model)
        back = saved.load(model, tmp_path / "s.kv")
        a, b = go_on(model, cache, start, 10), go_on(model, back, start, 10)
    assert a[0] == b[0] and torch.equal(a[1], b[1])


def test_a_session_that_drafts_were_taken_back_from_is_restored(tmp_path: Path) -> None:
    """A first pass under prompt look-up brings prompt and draft together; latents under `full` are counted as one."""
    model = kvengine.patch(configs.build("deepseek_v3"))
    cache, ids = kvengine.EngineCache(model), configs.padded_batch()["input_ids"][:1].repeat(1, 2)
    model.generate(ids, max_new_tokens=6, do_sample=False, cache=cache, prompt_lookup_num_tokens=6)
    cache.commit()
    saved.save(cache, tmp_path / "turn.kv", model)
    again = saved.load(model, tmp_path / "turn.kv")
    assert again.seen == cache.seen and str(again.stats()) == str(cache.stats())


def test_a_padded_batch_and_beams_are_restored(tmp_path: Path) -> None:
    model, stack = llama(), "snapkv(budget=24, window=6) + quest(budget=32, page=8)"
    with kvengine.patched(model, stack):
        cache = kvengine.EngineCache(model, stack)
        batch = prompts(3)
        with torch.inference_mode():
            model(**batch, cache=cache, use_cache=True)
        cache.reorder_cache(torch.tensor([2, 0, 1]))
        saved.save(cache, tmp_path / "s.kv", model)
        back, more = saved.load(model, tmp_path / "s.kv"), torch.tensor([[5], [6], [7]])
        mask = torch.cat([batch["attention_mask"][[2, 0, 1]], torch.ones(3, 1, dtype=torch.long)], 1)
        with torch.inference_mode():
            outs = [model(input_ids=more, attention_mask=mask, cache=c, use_cache=True).logits
                    for c in (cache, back)]  # fmt: skip
        assert torch.equal(*outs)


def test_the_row_without_pages_of_a_batch_is_restored(tmp_path: Path) -> None:
    """Once the rows with pages have been left out, no page is in use, and none may be asked for."""
    model, batch = llama(), prompts(3, 40)
    with kvengine.patched(model, "kivi(group=8, residual=8)"):
        cache = kvengine.EngineCache(model)
        with torch.inference_mode():
            model(**batch, cache=cache)
        lane = cache.engines[0].parts[0].lane
        assert lane.pages is not None and lane.pages.filled.tolist()[-2:] == [0, 0] and lane.pages.columns
        cache.batch_select_indices(torch.tensor([2]))
        assert not lane.pages.columns and len(lane.lengths) == 1
        saved.save(cache, tmp_path / "s.kv", model)
        back = saved.load(model, tmp_path / "s.kv")
        a, b = (go_on(model, each, torch.tensor([[5]]), 30) for each in (cache, back))
        assert a[0] == b[0] and torch.equal(a[1], b[1])


def test_generate_goes_on_from_a_file(tmp_path: Path) -> None:
    model = llama()
    with kvengine.patched(model, "snapkv(budget=24, window=6)"):
        ids = prompts(1)
        whole = greedy(model, ids, 30, cache=kvengine.EngineCache(model))
        cache = kvengine.EngineCache(model)
        begun = model.generate(**ids, max_new_tokens=10, do_sample=False, cache=cache)
        saved.save(cache, tmp_path / "s.kv", model)
        back = saved.load(model, tmp_path / "s.kv")
        mask = torch.ones_like(begun)
        rest = model.generate(input_ids=begun, attention_mask=mask, max_new_tokens=20, do_sample=False,
                              cache=back)  # fmt: skip
        assert torch.equal(rest[:, ids["input_ids"].shape[1] :], whole)


def test_damage_and_strangers_are_refused(tmp_path: Path) -> None:
    model, path = llama(), tmp_path / "s.kv"
    with kvengine.patched(model, "full"):
        cache = kvengine.EngineCache(model)
        with torch.inference_mode():
            model(**prompts(1), cache=cache, use_cache=True)
        size = saved.save(cache, path, model)
        good = path.read_bytes()
        assert size == len(good) and [p.name for p in tmp_path.iterdir()] == ["s.kv"]
        for at in range(0, size, max(1, size // 40)):
            hurt = bytearray(good)
            hurt[at] ^= 4
            path.write_bytes(hurt)
            with pytest.raises((CorruptBitstream, IncompatibleCache), match="s.kv"):
                saved.load(model, path)
        path.write_bytes(good[: size // 2])
        with pytest.raises(CorruptBitstream, match="s.kv: .* torn or truncated"):
            saved.load(model, path)
        path.write_bytes(good)
        other = llama(seed=3)
        with kvengine.patched(other, "full"), pytest.raises(IncompatibleCache, match="s.kv: stored for model"):
            saved.load(other, path)
        cache = kvengine.EngineCache(model, "h2o(budget=24)")
        cache.activate_past_recording()
        with torch.inference_mode():
            model(**prompts(1), cache=cache, use_cache=True)
            model(input_ids=torch.tensor([[3]]), cache=cache, use_cache=True)
        with pytest.raises(CacheError, match="commit"):
            saved.save(cache, path, model)
        assert path.read_bytes() == good


def test_a_session_is_smaller_than_its_tensors(tmp_path: Path) -> None:
    model = llama().bfloat16()
    with kvengine.patched(model, "full"):
        cache = kvengine.EngineCache(model)
        with torch.inference_mode():
            model(input_ids=torch.randint(1, 128, (1, 700)), cache=cache, use_cache=True)
        size = saved.save(cache, tmp_path / "s.kv", model)
        held = sum(part.lane.tail.held()[0].nbytes * 2 for layer in cache.engines for part in layer.parts)
        assert size < 0.85 * held


def test_a_file_is_written_from_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One buffer of all of them would take as much memory again, of a long text as much as the cache."""
    model = patched("full")
    cache = kvengine.EngineCache(model)
    model(torch.arange(60)[None], cache=cache)
    most, replace = list[int](), saved.replace_file
    monkeypatch.setattr(
        saved, "replace_file", lambda path, *data: (most.extend(map(len, data)), replace(path, *data))[1]
    )
    size = saved.save(cache, tmp_path / "a.kv", model)
    assert size == sum(most) == (tmp_path / "a.kv").stat().st_size and max(most) < size / 2


def test_what_was_asked_of_pages_is_not_in_the_file(tmp_path: Path) -> None:
    """Nor do sessions that were saved before lack it: what is made anew has no place in them."""
    model = patched("quest(budget=24, page=4)")
    cache = kvengine.EngineCache(model)
    with torch.inference_mode():
        first = model(**prompts(1), cache=cache, use_cache=True).logits[:, -1:].argmax(-1)
    go_on(model, cache, first, 2)
    asked = [part.lane.pages for layer in cache.engines for part in layer.parts]
    size = saved.save(cache, tmp_path / "s.kv", model)
    for pages in asked:
        assert pages is not None and pages.alive.any() and pages.summary
    assert saved.save(copy.deepcopy(cache), tmp_path / "s.kv", model) == size
    for pages in asked:
        assert pages is not None and set(vars(pages)) - saved_state.OUTSIDE[Pages] == {
            "columns", "filled", "even", "clean", "coarse", "cut", "_table", "_position", "_score", "_alive", "_summary",
        }  # fmt: skip
    held = saved.load(model, tmp_path / "s.kv").stats().bytes_held
    assert size < 1.3 * held


def test_the_fingerprint_sees_a_changed_weight() -> None:
    model = llama()
    before = saved.identity(model)
    assert saved.identity(copy.deepcopy(model)) == before
    with torch.no_grad():
        model.lm_head.weight += 0.01
    assert saved.identity(model) != before


def test_the_fingerprint_sees_what_is_stored_and_no_parameter() -> None:
    """As the weights of layers that GPTQ or AWQ have quantised, and the corrections of DeepSeek's routers."""
    marks = set()
    for number in (1, 2):
        model = llama()
        layer = model.model.layers[0].self_attn.k_proj
        layer.register_buffer("codes", torch.full((4, 4), number, dtype=torch.int32))
        layer.register_buffer("table", torch.randn(3), persistent=False)  # is made anew with every model
        marks.add(saved.identity(model).model)
        torch.nn.init.normal_(layer.table)
        marks.add(saved.identity(model).model)
    assert len(marks) == 2


def test_the_fingerprint_is_of_what_keys_depend_on() -> None:
    model = llama()
    before = saved.identity(model)
    model.config.pad_token_id, model.config.eos_token_id, model.config.use_cache = 7, [1, 2], False
    assert saved.identity(model) == before


def test_the_fingerprint_is_that_of_a_copy_elsewhere(tmp_path: Path) -> None:
    """Another machine has the model in another folder; a session saved here goes on there."""
    from transformers import AutoModelForCausalLM

    llama().save_pretrained(tmp_path / "here")
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    here, there = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("here", "there"))
    there.config.transformers_version = "5.99.0"
    assert saved.identity(here) == saved.identity(there)
    there.config.rms_norm_eps *= 2
    assert saved.identity(here) != saved.identity(there)


def test_the_fingerprint_of_a_tokenizer_is_not_changed_by_its_use() -> None:
    from transformers import AutoTokenizer

    from kvengine.evals import bundled_model

    model, tokenizer = llama(), AutoTokenizer.from_pretrained(bundled_model())
    before = saved.identity(model, tokenizer)
    tokenizer(["The sky", "The grass is green"], padding=True, truncation=True, max_length=3)
    assert saved.identity(model, tokenizer) == before != saved.identity(model)


def test_layers_that_are_transformers_own_are_restored(tmp_path: Path) -> None:
    """Sliding windows and recurrent states beside the engine's layers."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    shape = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16,
             "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8}  # fmt: skip
    model = Gemma2ForCausalLM(Gemma2Config(**shape, initializer_range=0.15)).eval()
    with kvengine.patched(model, "snapkv(budget=24, window=6)"):
        cache = kvengine.EngineCache(model)
        with torch.inference_mode():
            model(**prompts(1), cache=cache, use_cache=True)
        assert len(cache.engines) < len(cache.layers)
        saved.save(cache, tmp_path / "s.kv", model)
        back = saved.load(model, tmp_path / "s.kv")
        a, b = (go_on(model, c, torch.tensor([[7]]), 20) for c in (cache, back))
        assert a[0] == b[0] and torch.equal(a[1], b[1])


def test_only_a_models_own_engine_cache_is_saved(tmp_path: Path) -> None:
    """The file would name a model whose keys and values it does not hold."""
    model, other = patched("full"), patched("full", seed=1)
    with pytest.raises(CacheError, match="made for another model"):
        saved.save(kvengine.EngineCache(other), tmp_path / "s.kv", model)
    with pytest.raises(CacheError, match="not from a DynamicCache"):
        saved.save(DynamicCache(), tmp_path / "s.kv", model)
    assert not list(tmp_path.iterdir())


def holds_itself() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["self"] = [found]
    return found


@pytest.mark.parametrize(("extra", "says"), [
    ({"ids": torch.ones(2)}, r"extra\['ids'\] is a Tensor; only plain JSON"),
    ({"a": [1, {"b": b"x"}]}, r"extra\['a'\]\[1\]\['b'\] is a bytes"),
    ({"a": {1: 2}}, r"extra\['a'\] has the key 1, a int; keys of JSON are text"),  # it would come back as "1"
    ({"a": float("nan")}, r"extra\['a'\] is nan"),
    ({"a": {1, 2}}, "is a set"),
    ({"a": 10**5000}, "cannot be kept as JSON"),
    (holds_itself(), "holds itself"),
    (["turns"], "extra is a list; give a dict"),
])  # fmt: skip
def test_what_is_not_plain_json_is_refused_before_anything_is_written(extra: Any, says: str, tmp_path: Path) -> None:
    model, path = llama(), tmp_path / "s.kv"
    with kvengine.patched(model, "full"):
        cache = kvengine.EngineCache(model)
        with torch.inference_mode():
            model(**prompts(1), cache=cache, use_cache=True)
        saved.save(cache, path, model, extra={"turns": (1, 2.5, None, True, "é\ud800")})
        before = path.read_bytes()
        assert saved.extra(path) == {"turns": [1, 2.5, None, True, "é\ud800"]}
        with pytest.raises(CacheError, match=says):
            saved.save(cache, path, model, extra=extra)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["s.kv"]
    with pytest.raises(CacheError, match=says):
        cachegen.encode(cachegen.KV([], extra=extra))


def test_two_threads_save_to_one_file(tmp_path: Path) -> None:
    """Each writes the whole of its own; the file is one of the two."""
    path, contents = tmp_path / "s.kv", [bytes([n]) * (1 << 20) for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            list(pool.map(lambda data: replace_file(path, data), contents))
            assert path.read_bytes() in contents
    assert [p.name for p in tmp_path.iterdir()] == ["s.kv"]


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_what_another_thread_changes_meanwhile_is_not_saved(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that was there stays: parts of two states would be refused when they are loaded."""
    model, path, write = configs.build(name), tmp_path / "s.kv", saved_state.Writer.whole_layer
    with kvengine.patched(model, "full"), torch.no_grad():
        cache = kvengine.EngineCache(model)
        model(torch.randint(1, 128, (1, 20)), cache=cache)
        saved.save(cache, path, model, extra={"turn": 1})

        def meanwhile(writer: Any, layer: Any) -> dict[str, Any]:
            found = write(writer, layer)
            if layer.cache is cache.engines[0]:
                with torch.no_grad():
                    model(torch.ones(1, 1, dtype=torch.long), cache=cache)
            return found

        monkeypatch.setattr(saved_state.Writer, "whole_layer", meanwhile)
        with pytest.raises(CacheError, match="another thread ran the model"):
            saved.save(cache, path, model, extra={"turn": 2})
    assert saved.extra(path) == {"turn": 1}


def test_a_folder_is_told_by_its_name_and_a_module_is_no_model(tmp_path: Path) -> None:
    model = patched("full")
    with pytest.raises(IsADirectoryError, match=tmp_path.name):
        saved.load(model, tmp_path)
    with pytest.raises(ModelError, match="not to a Linear"):
        saved.save(kvengine.EngineCache(model), tmp_path / "s.kv", torch.nn.Linear(2, 2))


def test_a_session_that_does_not_fit_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = llama(), tmp_path / "s.kv"
    with kvengine.patched(model, "full"):
        cache = kvengine.EngineCache(model)
        saved.save(cache, path, model, extra={"turn": 1})
        for call in ("fsync", "replace"):
            with monkeypatch.context() as patch:
                patch.setattr(os, call, full_disk)
                with pytest.raises(OSError, match="No space left"):
                    saved.save(cache, path, model, extra={"turn": 2})
            assert saved.extra(path) == {"turn": 1} and [p.name for p in tmp_path.iterdir()] == ["s.kv"]


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
