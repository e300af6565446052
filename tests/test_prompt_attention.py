"""Who reads a prompt: our kernel where the model would run the library's causal one on a CPU, else the model's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families.configs import build, padded_batch
from support import llama, one, prompts
from torch import Tensor, nn
from transformers.masking_utils import causal_mask_function

import kvengine
from kvengine.hf.attention import Stock
from kvengine.hf.mask import LazyMask
from kvengine.kernels.causal_attention import causal_attention, quicker

HEAD = torch.zeros(1, 1, 1, 16)
pytestmark = pytest.mark.skipif(not quicker(HEAD, HEAD, HEAD), reason="no C compiler, or vectors of less than 256 bits")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of queries that our kernel got."""
    found: list[int] = []

    def listening(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found.append(q.shape[2])
        return causal_attention(q, *args, **kwargs)

    monkeypatch.setattr("kvengine.hf.attention.causal_attention", listening)
    return found


@pytest.mark.parametrize("text", ["full", "snapkv(budget=24, window=6)", "kivi(bits=4, group=8, residual=8)"])
def test_a_prompt_reads_as_in_the_unpatched_model(text: str, seen: list[int]) -> None:
    plain, ids = llama(), one()["input_ids"]
    with torch.no_grad():
        want = plain(ids).logits
        model = kvengine.patch(llama(), text)
        got = model(ids, cache=kvengine.EngineCache(model)).logits
    assert seen == [61, 61]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_chunks_of_a_prompt_too(seen: list[int]) -> None:
    model, ids = kvengine.patch(llama(), "full"), one()["input_ids"]
    with torch.no_grad():
        want = llama()(ids).logits
        cache = kvengine.EngineCache(model)
        cache.announce(61)
        got = [model(part, cache=cache).logits for part in ids.split([20, 40, 1], 1)]
    assert seen[:4] == [20, 20, 40, 40]
    torch.testing.assert_close(torch.cat(got, 1), want, rtol=1e-4, atol=1e-5)


def other(*options: Any) -> bool:
    return True


@pytest.mark.parametrize("way", ["padded", "eager", "training", "bfloat16"])
def test_the_model_reads_what_is_another_thing(way: str, seen: list[int]) -> None:
    model = llama(attn_implementation="eager" if way == "eager" else "sdpa")
    model = kvengine.patch(model.bfloat16() if way == "bfloat16" else model, "full")
    batch = prompts() if way == "padded" else one()
    with torch.set_grad_enabled(way == "training"):
        model(**batch, cache=kvengine.EngineCache(model))
    assert seen == []


@pytest.mark.parametrize(
    "change",
    [
        dict(mask_function=other), dict(allow_is_causal_skip=False), dict(attention_mask=torch.tensor([[0, 1, 1]])),
        dict(sliding_window=2), dict(is_causal=False), dict(softcap=3.0), dict(s_aux=HEAD), dict(dropout=0.1),
        dict(previous="eager"), dict(module=False), dict(position_bias=HEAD),
    ],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_only_plain_causal_attention_is_replaced(change: dict[str, Any]) -> None:
    def stock(mask_function: Callable[..., bool] = causal_mask_function, **options: Any) -> Stock:
        module = nn.Identity()
        if not options.pop("module", True):
            module.is_causal = False
        mask = dict(
            mask_function=mask_function, allow_is_causal_skip=True, attention_mask=None, q_offset=0, q_length=3, batch_size=1
        )  # fmt: skip
        mask |= {name: options.pop(name) for name in ("allow_is_causal_skip", "attention_mask") if name in options}
        previous, some = options.pop("previous", "sdpa"), {"scaling": None, "dropout": 0.0, **options}
        return Stock(module, x := torch.zeros(1, 1, 3, 16), LazyMask(mask), previous, some, (x, x))

    assert stock().causal and stock(attention_mask=torch.ones(1, 3)).causal
    assert not stock(**change).causal


@pytest.mark.parametrize("chunk", [13, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_capped_scores_and_sinks_are_read_without_all_scores(
    family: str, dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own attention would make them all: of a prompt of 32 768 tokens, 4 GiB for each head."""
    batch, asked = padded_batch(), []
    monkeypatch.setattr(Stock, "__call__", lambda *args: asked.append(args))
    model = build(family).to(dtype)
    with torch.no_grad():
        want = model(**batch).logits
        kvengine.patch(model, "full")
        cache = kvengine.EngineCache(model)
        cache.announce(20)
        got = [
            model(ids, attention_mask=batch["attention_mask"][:, :end], cache=cache).logits
            for ids, end in zip(batch["input_ids"].split(chunk, 1), (chunk, 20), strict=False)
        ]
    real = batch["attention_mask"].bool()
    bound = 1e-4 if dtype == torch.float32 else 0.15  # the model rounds its scores
    torch.testing.assert_close(torch.cat(got, 1)[real], want[real], rtol=bound, atol=bound)
    assert asked == []
