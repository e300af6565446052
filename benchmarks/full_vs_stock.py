"""The stack `full` against stock transformers: the same tokens, and the same time.

    python -P benchmarks/full_vs_stock.py [--rounds 5] [--threads 2] [--length 4096] [--out benchmarks/results/full_vs_stock.json]

Both run in one process, turn by turn, on the bundled model at 4096 tokens, on a random Llama of 100 M parameters at twice as
many, on these two in bfloat16, where both sides round and greedy text may part, and on two random layers each of other kinds at
4096: 32 heads that share latents as DeepSeek-V3's do, capped scores (Gemma 2), windows of 512 (Gemma 3), and sinks with
windows of 128 (gpt-oss). Prefill and decode are timed apart; the ratio is the median of the turns' ratios.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import kvengine
from kvengine.evals import bundled_model
from kvengine.hf.names import CACHE

STEPS = 32
OTHERS: list[tuple[str, tuple[Any, str, tuple[str, str]], dict[str, int]]] = [
    ("capped scores", (Gemma2Config, "eager", ("full", "full")), {}),
    ("one of two layers with a window", (Gemma3TextConfig, "sdpa", ("sliding", "full")), {"sliding_window": 512}),
    ("sinks, and a window", (GptOssConfig, "eager", ("sliding", "full")),
     {"sliding_window": 128, "num_local_experts": 2, "num_experts_per_tok": 1}),
]  # fmt: skip
"""Name; configuration, the attention that its models run by default, kinds of layers; what else it takes."""


def random_llama() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "vocab_size": 16384}
    heads = {"num_attention_heads": 12, "num_key_value_heads": 4, "max_position_embeddings": 16384}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads)).eval()


def random_latents() -> Any:
    """DeepSeek-V3's attention with a quarter of its heads, and next to nothing beside it."""
    torch.manual_seed(0)
    shape = {"hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32, "q_lora_rank": 512, "max_position_embeddings": 16384}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**shape, **heads, first_k_dense_replace=2)).eval()


def random_other(kind: Callable[..., Any], attention: str, types: tuple[str, str], **more: Any) -> Any:
    """Two layers of another architecture, 16 query and 4 KV heads of 128, and next to nothing beside them."""
    torch.manual_seed(0)
    shape = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 1024, "head_dim": 128}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 16384}
    config = kind(**shape, **heads, layer_types=[f"{name}_attention" for name in types], **more)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def run(model: Any, ids: torch.Tensor, cache: Any) -> tuple[float, float, list[int]]:
    """Seconds of the prompt, seconds per decoded token (median), and the tokens."""
    start = time.perf_counter()
    token = model(ids, **{CACHE: cache}, logits_to_keep=1).logits.argmax(-1)
    prefill, steps, tokens = time.perf_counter() - start, [], [int(token)]
    for _ in range(STEPS):
        start = time.perf_counter()
        token = model(token, **{CACHE: cache}).logits.argmax(-1)
        steps.append(time.perf_counter() - start)
        tokens.append(int(token))
    return prefill, statistics.median(steps), tokens


@torch.no_grad()
def compare(name: str, model: Any, length: int, rounds: int) -> dict[str, Any]:
    ids = torch.randint(10, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    found: dict[str, list[tuple[float, float]]] = {"stock": [], "full": []}
    texts = {}
    for turn in range(rounds + 1):
        caches: dict[str, Callable[[], Any]] = {
            "stock": lambda: DynamicCache(config=model.config),
            "full": lambda: kvengine.EngineCache(model),
        }
        for side, make in caches.items():
            if side == "full":
                kvengine.patch(model)
            prefill, decode, texts[side] = run(model, ids, make())
            kvengine.unpatch(model)
            if turn:  # the first warms up
                found[side].append((prefill, decode))
    median = {s: [statistics.median(x[i] for x in v) for i in (0, 1)] for s, v in found.items()}
    ratio = [[a[i] / b[i] for a, b in zip(found["full"], found["stock"], strict=True)] for i in (0, 1)]
    print(name, length, median, flush=True)
    return {
        "model": name,
        "context": length,
        "stock_prefill_s": median["stock"][0],
        "full_prefill_s": median["full"][0],
        "prefill_ratio": statistics.median(ratio[0]),
        "prefill_ratios": ratio[0],
        "stock_decode_ms": 1e3 * median["stock"][1],
        "full_decode_ms": 1e3 * median["full"][1],
        "decode_ratio": statistics.median(ratio[1]),
        "decode_ratios": ratio[1],
        "same_tokens": "yes" if texts["stock"] == texts["full"] else "NO",
    }


def main() -> None:
    sys.path.append(str(Path(__file__).parent))  # behind everything, for the file beside this one
    from where import processor

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--length", type=int, default=4096, help="tokens; the random Llama is given twice as many")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/full_vs_stock.json"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    bundled = AutoModelForCausalLM.from_pretrained(bundled_model(), dtype=torch.float32).eval()
    length, rounds = given.length, given.rounds
    rows = [
        compare("bundled", bundled, length, rounds),
        compare("random Llama, 100 M", random_llama(), 2 * length, rounds),
        compare("bundled, bfloat16", bundled.bfloat16(), length, rounds),
        compare("random Llama, bfloat16", random_llama().bfloat16(), 2 * length, rounds),
        compare("random, latents (MLA)", random_latents(), length, rounds),
        *(compare(f"random, {name}", random_other(*kind, **more), length, rounds) for name, kind, more in OTHERS),
    ]
    result = {
        "command": f"python -P benchmarks/full_vs_stock.py --rounds {given.rounds} --threads {given.threads}"
        + f" --length {length}" * (length != parser.get_default("length"))
        + f" --out benchmarks/results/{given.out.name}" * (given.out != parser.get_default("out")),
        "machine": f"{given.threads} CPU cores{processor()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}; ratios are medians over rounds, turn by turn",
        "columns": {
            "model": "model",
            "context": "context",
            "prefill, stock (s)": "stock_prefill_s:.2f",
            "full / stock": "prefill_ratio:.3f",
            "decode, stock (ms)": "stock_decode_ms:.1f",
            "full / stock ": "decode_ratio:.3f",
            "same tokens": "same_tokens",
        },
        "rows": rows,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
