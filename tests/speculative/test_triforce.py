"""End to end on small random models: the text is the target's, whatever drafts it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvengine
from kvengine.speculative.triforce import TriForce

MIDDLES = [
    "full",
    "quest(budget=24, page=4)",
    "oracle_topk(budget=24)",
    "streaming(sinks=4, recent=20)",
    "snapkv(budget=24, window=4)",
    "h2o(budget=24)",
    "kivi(bits=2)",
    "duo(sparsity=0.5)",
    "snapkv(budget=32, window=4) + kivi",
    "duo + quest(budget=24, page=4)",
    "quest(budget=24, page=4) + kivi",
]


def llama(seed: int = 0, layers: int = 2, vocab: int = 64, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
        pad_token_id=None, **options,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return llama()


@pytest.fixture(scope="module")
def small() -> LlamaForCausalLM:
    return llama(1, layers=1)


def prompt(length: int = 90, rows: int = 1, seed: int = 0, vocab: int = 64) -> torch.Tensor:
    half = torch.randint(2, vocab, (rows, length // 2), generator=torch.Generator().manual_seed(seed))
    return torch.cat([half, half], 1)


def plain(target: LlamaForCausalLM, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    kvengine.patch(target, "full")
    return target.generate(ids, **options)


@pytest.mark.parametrize("middle", MIDDLES)
@pytest.mark.parametrize("draft", ["lookup", None, "model", "recycling"])
def test_greedy_text_is_the_targets(target: Any, small: Any, middle: str, draft: Any) -> None:
    ids = prompt()
    decoder = TriForce(target, small if draft == "model" else draft, middle, gamma=(2, 4))
    assert decoder.generate(ids, max_new_tokens=40, do_sample=False).tolist() == plain(
        target, ids, max_new_tokens=40, do_sample=False
    ).tolist()
    assert decoder.report.emitted == 40
