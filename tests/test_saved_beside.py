"""Sessions of models some of whose layers keep caches of transformers': windows, and the states of linear attention."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import configs
from test_saved import go_on
from test_tampered import BAD, changed, places

import kvengine
from kvengine import saved
from kvengine.errors import CacheError, CorruptBitstream, IncompatibleCache, KVEngineError
from kvengine.hf.states import has_states
from kvengine.offload.container import pack, read_file

STATES = {
    "qwen3_next": "quest(budget=12, page=4) + kivi(bits=4, group=4)",
    "qwen3_5": "h2o(budget=12)",
    "lfm2": "snapkv(budget=12, window=4)",
    "falcon_h1": "h2o(budget=12)",
    "zamba2": "quest(budget=12, page=4) + kivi(bits=4, group=4)",
}
WINDOWS = {"gemma3": "snapkv(budget=12, window=4)", "gemma3n": "full", "mistral_window": "full"}
MORE = [(name, "full") for name in ("qwen3_next", "lfm2", "falcon_h1")]


def built(name: str, policy: str = "full") -> Any:
    if not configs.exists(name):
        pytest.skip(f"this transformers has no {name}")
    return kvengine.patch(configs.build(name), policy)


def begun(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
    cache = kvengine.EngineCache(model)
    with torch.inference_mode():
        model(ids, attention_mask=mask, cache=cache)
    return cache


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "policy"), [*STATES.items(), *WINDOWS.items(), *MORE])
def test_it_goes_on_bit_for_bit(name: str, policy: str, tmp_path: Path) -> None:
    """From a padded batch, by single tokens."""
    model, batch = built(name, policy), configs.padded_batch()
    cache = begun(model, batch["input_ids"], batch["attention_mask"])
    start = torch.tensor([[5], [6], [7]])
    go_on(model, cache, start, 3)
    saved.save(cache, tmp_path / "s.kv", model)
    back = saved.load(model, tmp_path / "s.kv")
    assert back.seen == cache.seen and torch.equal(back.stats().held, cache.stats().held)
    a, b = go_on(model, cache, start, 12), go_on(model, back, start, 12)
    assert a[0] == b[0] and torch.equal(a[1], b[1])


@pytest.mark.parametrize("name", STATES)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_states_of_another_kind_than_keys_are_exact(name: str, kind: torch.dtype, tmp_path: Path) -> None:
    """Recurrent states stay in single precision where the model is in half."""
    model = built(name).to(kind)
    cache = begun(model, configs.padded_batch()["input_ids"])
    saved.save(cache, tmp_path / "s.kv", model)
    back = saved.load(model, tmp_path / "s.kv")
    for mine, its in zip(*([x for x in c.layers if has_states(x)] for c in (cache, back)), strict=True):
        for group in ("conv_states", "recurrent_states"):
            for x, y in zip(getattr(mine, group).values(), getattr(its, group).values(), strict=True):
                assert (x is None) is (y is None)
                assert x is None or (x.dtype == y.dtype and torch.equal(x, y))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", STATES)
def test_generate_goes_on_from_a_file(name: str, tmp_path: Path) -> None:
    model, ids = built(name), configs.padded_batch()["input_ids"][:1]
    cache = kvengine.EngineCache(model)
    begun = model.generate(ids, max_new_tokens=10, do_sample=False, cache=cache)
    saved.save(cache, tmp_path / "s.kv", model)
    turn = torch.cat([begun, ids.flip(1)], 1)
    found = model.generate(turn, max_new_tokens=10, do_sample=False, cache=saved.load(model, tmp_path / "s.kv"))
    assert torch.equal(found, model.generate(turn, max_new_tokens=10, do_sample=False, cache=cache))


@pytest.mark.parametrize("name", STATES)
def test_an_empty_session_is_one(name: str, tmp_path: Path) -> None:
    model, ids = built(name), configs.padded_batch()["input_ids"]
    saved.save(kvengine.EngineCache(model), tmp_path / "s.kv", model)
    back = saved.load(model, tmp_path / "s.kv")
    with torch.no_grad():
        found = model(ids, cache=back).logits
        assert torch.equal(found, model(ids, cache=kvengine.EngineCache(model)).logits)


def test_a_text_shorter_than_a_window_is_one(tmp_path: Path) -> None:
    model, ids = built("mistral_window"), configs.padded_batch()["input_ids"]
    cache = begun(model, ids[:, :3])
    saved.save(cache, tmp_path / "s.kv", model)
    back = saved.load(model, tmp_path / "s.kv")
    with torch.no_grad():
        assert torch.equal(model(ids[:, 3:], cache=back).logits, model(ids[:, 3:], cache=cache).logits)


def test_what_was_recorded_goes_with_it(tmp_path: Path) -> None:
    """Of a convolution, the columns that may yet be gone back to."""
    model = built("lfm2")
    cache = kvengine.EngineCache(model)
    cache.activate_past_recording()
    with torch.inference_mode():
        model(configs.padded_batch()["input_ids"], cache=cache)
    saved.save(cache, tmp_path / "s.kv", model)
    back = saved.load(model, tmp_path / "s.kv")
    assert [layer.conv_states[0].shape[-1] for layer in back.others] == [20, 20]


def states(model: Any, tmp_path: Path) -> tuple[dict[str, Any], list[bytes]]:
    saved.save(begun(model, configs.padded_batch()["input_ids"]), tmp_path / "s.kv", model)
    held = read_file(tmp_path / "s.kv")
    return held.header, [held.section(i) for i in range(len(held.entries))]


def without(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda own: own["dict"].pop(name)


def put(name: str, to: Any, at: int | None = None) -> Callable[[dict[str, Any]], None]:
    def change(own: dict[str, Any]) -> None:
        if at is None:
            own["dict"][name] = to
        else:
            own["dict"][name]["numbered"][at] = to

    return change


CHANGES: list[tuple[str, Callable[[dict[str, Any]], Any], str]] = [
    ("qwen3_next", without("conv_states"), "other attributes.*another version of transformers"),
    ("qwen3_next", put("more", 1), "other attributes"),
    ("qwen3_next", put("conv_states", {"dict": {}}), "conv_states is not what a LinearAttentionLayer has"),
    ("qwen3_next", put("conv_states", None, 0), "a conv state is not what is said"),
    ("qwen3_next", put("recurrent_states", 3, 0), "a recurrent state is not what is said"),
    ("qwen3_next", put("is_recurrent_states_initialized", False, 0), "a recurrent state is not what is said"),
    ("qwen3_next", put("is_conv_states_initialized", 1, 0), "is_conv_states_initialized is not"),
    ("qwen3_next", put("conv_kernel_size", None, 0), "a convolution of None columns"),
    ("qwen3_next", put("conv_kernel_size", 7, 0), "a convolution of 7 columns has others"),
    ("qwen3_next", put("number_of_states", 2), "not the model's"),
    ("qwen3_next", put("record_past", 0), "record_past is not"),
    ("qwen3_next", put("dtype", 5), "dtype is not"),
    ("mistral_window", put("sliding_window", 9), "not the model's"),
    ("mistral_window", put("cumulative_length", 3), "that has seen 3 tokens holds 7"),
    ("mistral_window", put("cumulative_length", -1), "cumulative_length is not"),
    ("mistral_window", put("is_initialized", False), "differ in their tokens"),
    ("mistral_window", put("values", None), "differ in their tokens"),
    ("mistral_window", put("keys", {"tensor": 2}), "differ in their tokens"),
    ("mistral_window", put("_sliding_window_tensor", {"tensor": 1}), "_sliding_window_tensor is not"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "says"), CHANGES)
def test_what_does_not_fit_together_is_refused(
    name: str, change: Callable[[dict[str, Any]], Any], says: str, tmp_path: Path
) -> None:
    model = built(name)
    header, sections = states(model, tmp_path)
    change(header["layers"][0])
    (tmp_path / "s.kv").write_bytes(pack(header, sections))
    with pytest.raises((CorruptBitstream, IncompatibleCache), match=says):
        saved.load(model, tmp_path / "s.kv")


def test_layers_of_different_rows_are_refused(tmp_path: Path) -> None:
    model = built("qwen3_next")
    cache, other = (begun(model, configs.padded_batch()["input_ids"][:n]) for n in (3, 2))
    cache.layers[2] = other.layers[2]
    saved.save(cache, tmp_path / "s.kv", model)
    with pytest.raises(CorruptBitstream, match=r"layers have \[2, 3\] rows"):
        saved.load(model, tmp_path / "s.kv")


def test_damage_is_refused(tmp_path: Path) -> None:
    model, path = built("qwen3_next"), tmp_path / "s.kv"
    states(model, tmp_path)
    good = path.read_bytes()
    for at in range(0, len(good), max(1, len(good) // 40)):
        hurt = bytearray(good)
        hurt[at] ^= 4
        path.write_bytes(hurt)
        with pytest.raises((CorruptBitstream, IncompatibleCache)):
            saved.load(model, path)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ["falcon_h1", "gemma3", pytest.param("qwen3_next", marks=pytest.mark.slow)])
def test_whatever_is_changed_is_refused_or_does_no_harm(name: str, tmp_path: Path) -> None:
    """Sizes that only the model's weights could tell are torch's to refuse."""
    model = built(name)
    header, sections = states(model, tmp_path)
    dice, path, refused = random.Random(5), tmp_path / "s.kv", 0
    every = [place for place in places(header) if place[0] in ("layers", "tensors")]
    for _ in range(200):
        path.write_bytes(pack(changed(header, dice.choice(every), dice.choice(BAD)), sections))
        try:
            cache = saved.load(model, path)
        except KVEngineError:
            refused += 1
            continue
        try:
            with torch.inference_mode():
                model(torch.tensor([[3]] * 3), cache=cache)
        except (KVEngineError, RuntimeError):
            refused += 1
    assert refused > 130


def test_tokens_to_go_back_to_are_committed_first(tmp_path: Path) -> None:
    model = built("qwen3_next", "h2o(budget=12)")
    cache = begun(model, configs.padded_batch()["input_ids"])
    cache.activate_past_recording()
    with torch.inference_mode():
        model(torch.tensor([[3]] * 3), cache=cache)
    with pytest.raises(CacheError, match="call cache.commit"):
        saved.save(cache, tmp_path / "s.kv", model)
    cache.commit()
    saved.save(cache, tmp_path / "s.kv", model)
    assert saved.load(model, tmp_path / "s.kv").seen == 21
