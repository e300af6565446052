"""Models loaded with flash attention, which wants a GPU: here its functions are stood in for, with the real ones' arguments."""

from typing import Any

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash
from families.configs import build
from support import SMALL, greedy, llama, one, prompts
from torch import Tensor

import kvengine
from kvengine import EngineCache
from kvengine.errors import ModelError

FLASH = "flash_attention_2"
calls: list[str] = []


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: tuple[int, int]) -> Tensor:
    """Of one sequence [token, head, dim]; the last query sees the last key."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    n, m = len(q), len(k)
    at, of = torch.arange(m - n, m)[:, None], torch.arange(m)
    seen = torch.ones(n, m, dtype=torch.bool)
    seen = seen & (of <= at) if causal else seen
    seen = seen & (of >= at - window[0]) if window[0] >= 0 else seen
    parts = [x.transpose(0, 1) for x in (q, k, v)]
    return torch.nn.functional.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale).transpose(0, 1)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), deterministic: bool = False,
) -> Tensor:  # fmt: skip
    calls.append("rows")
    rows = zip(q, k, v, strict=True)
    return torch.stack([attend(*row, softmax_scale, causal, window_size) for row in rows])


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), deterministic: bool = False,
) -> Tensor:  # fmt: skip
    calls.append("ragged")
    runs = [x.diff().tolist() for x in (cu_seqlens_q, cu_seqlens_k)]
    rows = zip(q.split(runs[0]), k.split(runs[1]), v.split(runs[1]), strict=True)
    return torch.cat([attend(*row, softmax_scale, causal, window_size) for row in rows])


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the package were there, for the implementation of that name alone."""

    def load(implementation: str | None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        assert implementation in (None, FLASH), f"no kernel is called {implementation!r}"
        return flash_attn_func, flash_attn_varlen_func, None, flash._pad_input, flash._unpad_input

    monkeypatch.setattr(flash, "_lazy_imports", load)
    for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_pad_fn", "_unpad_fn"):
        monkeypatch.setattr(flash, name, None)
    calls.clear()


def flashing(model: Any) -> Any:
    model.config._attn_implementation_internal = FLASH
    return model


@pytest.mark.parametrize("batch", [prompts(), one()], ids=["padded", "one"])
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 13}, {"num_beams": 2}, {"use_cache": False}], ids=str)
def test_text_is_that_of_flash_attention(batch: dict[str, Tensor], options: dict[str, Any]) -> None:
    model = flashing(llama())
    want = greedy(model, batch, 12, **options)
    assert torch.equal(want, greedy(llama(), batch, 12, **options)) and calls
    calls.clear()
    assert torch.equal(greedy(kvengine.patch(model, "full"), batch, 12, **options), want)
    assert calls, "the prompt is read by the model's own attention"
    assert model.config._attn_implementation == "kvengine"
    assert kvengine.unpatch(model).config._attn_implementation == FLASH


@pytest.mark.parametrize("name", ["h2o", "snapkv", "kivi", "quest", "streaming", "duo", "host"])
def test_policies_give_what_they_give_over_another_attention(name: str) -> None:
    batch = prompts()
    found = []
    for model in (llama(), flashing(llama())):
        cache = EngineCache(kvengine.patch(model, SMALL[name]))
        new = greedy(model, batch, 9, cache=cache)
        asked = {
            "input_ids": torch.cat([batch["input_ids"], new, batch["input_ids"][:, -9:]], 1),
            "attention_mask": torch.nn.functional.pad(batch["attention_mask"], (0, new.shape[1] + 9), value=1),
        }
        found.append((new, greedy(model, asked, 9, cache=cache)))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("family", ["gemma3", "mistral", "deepseek_v3", "qwen3"])
def test_families(family: str) -> None:
    model, batch = flashing(build(family)), prompts()
    want = greedy(model, batch, 12)
    assert torch.equal(greedy(kvengine.patch(model, "full"), batch, 12), want)


def test_chunks_are_refused_as_transformers_does() -> None:
    model, short = flashing(build("llama4")), one(4)
    want = greedy(model, short, 3)
    for text in ("full", SMALL["h2o"]):
        kvengine.patch(model, text)
        assert torch.equal(greedy(model, short, 3), want)
        with pytest.raises(ModelError, match="flash attention.*chunks of 8 tokens.*attn_implementation='sdpa'"):
            greedy(model, one(), 3)


def test_training_is_that_of_flash_attention() -> None:
    found = []
    for model in (flashing(llama()), kvengine.patch(flashing(llama()), SMALL["h2o"])):
        model.train()(**prompts(), labels=prompts()["input_ids"]).loss.backward()
        found.append(model.model.layers[0].self_attn.q_proj.weight.grad)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
