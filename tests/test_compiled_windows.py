"""A recorded step on models with sliding windows, and where layers read an earlier one's keys and values."""

from itertools import product
from typing import Any

import pytest
import torch
from families import configs
from support_device import Device, there
from torch import Tensor

import kvengine
from kvengine.errors import CacheError, UnsupportedPolicy
from kvengine.hf.compiled import CompiledDecode
from kvengine.hf.steps import Steps

FAMILIES = ("gpt_oss", "gemma2", "gemma3", "gemma3n", "gemma4", "mistral_window")
STACKS = [
    "full", "snapkv(budget=12, window=4)", "quest(budget=12, page=4)", "kivi(bits=4, group=8, residual=8)",
    "streaming(sinks=2, recent=8, decode=False)", "h2o(budget=12)", "rkv(budget=12, buffer=4, window=3)",
]  # fmt: skip


def cases() -> list[Any]:
    """Some of them, so that each family and each stack is among them; the others are slow, together."""
    every = [(f, s, how) for f, s in product(FAMILIES, STACKS) if can(f, s) for how in ("trace", "eager")]
    return [pytest.param(*some, marks=[] if i % 14 == 0 else [pytest.mark.slow]) for i, some in enumerate(every)]


def can(family: str, stack: str) -> bool:
    if family == "mistral_window":
        return stack == "full"
    return "shared" not in configs.FAMILIES[family].caches or "h2o" not in stack


def built(name: str, text: str = "full") -> Any:
    if not configs.exists(name):
        pytest.skip(f"this transformers has no {configs.FAMILIES[name].model}")
    return kvengine.patch(configs.build(name), text)


def say(model: Any, count: int, **options: Any) -> Tensor:
    return model.generate(**options, max_new_tokens=count, do_sample=False)  # type: ignore[no-any-return]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "text", "how"), cases())
def test_the_text_is_that_of_eager_decoding_and_the_next_turns_too(name: str, text: str, how: Any) -> None:
    model, batch = built(name, text), configs.padded_batch()
    eager, held = kvengine.EngineCache(model), kvengine.EngineCache(model)
    want = say(model, 24, **batch, cache=eager)
    decoder = kvengine.compile_decode(model, how)
    assert torch.equal(say(model, 24, **batch, cache=held, custom_generate=decoder), want)
    for mine, its in zip(held.others, eager.others, strict=True):
        assert type(mine) is type(its)
        if getattr(its, "sliding_window", None):
            assert mine.cumulative_length == its.cumulative_length and mine.keys.shape == its.keys.shape
    more = {
        "input_ids": torch.cat([want, want[:, 3:9]], 1),
        "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (0, 30), value=1),
    }
    again = [say(model, 8, **more, cache=cache) for cache in (eager, held)]
    assert torch.equal(*again)


def test_padding_that_is_still_in_a_window_is_not_read() -> None:
    """Of a row with fewer tokens than the window."""
    model, batch = built("gemma2"), {"input_ids": configs.padded_batch(20)["input_ids"][:2].clamp(min=1)}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, :16] = 0
    want = say(model, 6, **batch)
    assert torch.equal(say(model, 6, **batch, custom_generate=kvengine.compile_decode(model)), want)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("length", [3, 6, 7, 8, 9, 16, 17])
def test_a_prompt_of_any_length_beside_the_window(length: int) -> None:
    """The window is of 8 tokens."""
    model = built("gemma3")
    ids = configs.padded_batch()["input_ids"][:1, :length]
    for count in (2, 12):
        assert torch.equal(say(model, count, input_ids=ids, custom_generate=kvengine.compile_decode(model)), say(
            model, count, input_ids=ids
        ))  # fmt: skip


def test_softcaps_count_in_windows_too() -> None:
    model, ids = built("gemma2"), configs.padded_batch()["input_ids"][:1]
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = 0.02
    assert torch.equal(say(model, 12, input_ids=ids, custom_generate=kvengine.compile_decode(model)), say(
        model, 12, input_ids=ids
    ))  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["gpt_oss", "gemma3", "gemma3n", "gemma4"])
def test_what_a_graph_would_record_moves_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvengine.kernels.dispatch._best", lambda inputs, native: "reference")
    model, batch, run, found = built(name, "quest(budget=12, page=4)"), configs.padded_batch(), Steps.run, []
    if name == "gpt_oss":
        model.set_experts_implementation("eager")
    want, device = say(model, 6, **batch), Device(monkeypatch)

    def watched(self: Steps) -> Tensor:
        device.moved.clear()
        logits: Tensor = run(self)
        found.append({where: n for where, n in device.moved.items() if "kvengine" in str(where)})
        return logits

    monkeypatch.setattr(Steps, "run", watched)
    with device:
        kvengine.patch(there(kvengine.unpatch(model)), "quest(budget=12, page=4)")
        decoder = CompiledDecode(model, "eager")
        got = say(model, 6, **{name: there(x) for name, x in batch.items()}, custom_generate=decoder)
        assert got.tolist() == want.tolist()
    assert len(found) == 5 and not any(found)


def test_padding_has_to_be_told_of() -> None:
    model, batch = built("gemma3"), configs.padded_batch()
    cache, place = kvengine.EngineCache(model), lambda mask: (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(**batch, position_ids=place(batch["attention_mask"]), cache=cache, use_cache=True)
    decoder = kvengine.compile_decode(model)
    with pytest.raises(CacheError, match="give attention_mask"):
        decoder.open(cache, 4)
    for short in (batch["attention_mask"][:, -8:], batch["attention_mask"][:1]):
        with pytest.raises(
            CacheError, match=r"attention_mask is \[\d+, \d+\], expected \[3, \d+\]: which of the tokens"
        ):
            decoder.open(cache, 4, short)
    steps = decoder.open(cache, 4, batch["attention_mask"])
    logits = steps(torch.full((3, 1), 5), batch["attention_mask"].sum(1, keepdim=True))
    steps.close()
    longer = {name: torch.cat([x, torch.full((3, 1), 5 if name == "input_ids" else 1)], 1) for name, x in batch.items()}
    with torch.no_grad():
        want = kvengine.unpatch(model)(**longer, position_ids=place(longer["attention_mask"])).logits
    torch.testing.assert_close(logits[:, -1], want[:, -1], rtol=1e-4, atol=1e-4)


def test_what_cannot_be_held_is_refused_with_the_reason() -> None:
    for name, text, why in (
        ("llama4", "full", "attention in chunks"),
        ("gemma3n", "h2o(budget=12)", "later layers of the model"),
    ):
        model = built(name, text)
        with pytest.raises(UnsupportedPolicy, match=why):
            kvengine.compile_decode(model)  # before a prompt is read
        with pytest.raises(UnsupportedPolicy, match=why):  # as where the policy has changed since
            say(model, 3, **configs.padded_batch(), custom_generate=CompiledDecode(model, "eager"))
