"""A whole model's decode step, recorded and replayed, against stock transformers with its best attention.

    python -P benchmarks/end_to_end.py --device cuda [--lengths 8192,131072] [--steps 64] [--out FILE.json]

A Llama with the shape of the 8-billion model and random weights in bfloat16. Every candidate reads the same random
prompt, then decodes; the time per token is the median of the steps, the device waited for at each, and beside it stands the mean,
in which the few steps count that seal a page, or note their launches anew. Stock transformers
runs with each attention there is, over its growing and its static cache, torch's with and without cuDNN's, which plans anew
for every length, and with `--compiled` compiled over its static cache, as its `generate` does; ratios are to the fastest.
`--shape tiny --device cpu` runs the same on any machine, to see that it runs. The file is written after each row; a candidate
that fails is named in it, and the others go on.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import platform
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import kvengine
from kvengine.evals.speed.measure import WARM, Step, plain, timed
from kvengine.hf.names import CACHE

SHAPES: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "vocab_size": 128256, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 512},
}  # fmt: skip
STACKS = [
    "full",
    "quest(budget=2048)",
    "kivi(bits=4)",
    "quest(budget=2048) + kivi(bits=4)",
    "duo(sparsity=0.5) + quest(budget=2048) + kivi(bits=4)",
    "snapkv(budget=2048)",
    "streaming(recent=2044)",
    "host + quest(budget=2048)",
    "shadowkv(budget=2048)",
]


def random_model(shape: str, device: str, longest: int) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=longest, dtype=torch.bfloat16)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    return model


def compiled(model: Any, cache: Any) -> Step:
    """As transformers' `generate` compiles it over a static cache."""
    run = torch.compile(model.forward, mode="reduce-overhead", dynamic=False)

    def step(token: Tensor, at: int) -> Tensor:
        logits: Tensor = run(token, position_ids=torch.full_like(token, at), **{CACHE: cache}).logits
        return logits

    return step


def stock(model: Any, ids: Tensor, steps: int, device: str, compiles: bool) -> Iterator[dict[str, Any]]:
    """Stock transformers, with every attention and cache there is; compiled, which takes minutes, if asked to."""
    attentions = ["sdpa", *(["flash_attention_2"] if importlib.util.find_spec("flash_attn") else [])]
    for attention in attentions:
        model.set_attn_implementation(attention)
        length, growing = ids.shape[1], DynamicCache(config=model.config)
        first = model(ids, **{CACHE: growing}, logits_to_keep=1).logits.argmax(-1)
        names = [attention, *(["sdpa without cuDNN"] if attention == "sdpa" and device == "cuda" else [])]
        yield from each(names, "growing", model, growing, first, ids, steps)
        # The static cache gets its prompt from the other: reading it would take a mask of prompt times room.
        static = StaticCache(model.config, length + (len(names) + compiles) * (WARM + steps))
        for i, layer in enumerate(growing.layers):
            static.update(layer.keys[:, :, :length], layer.values[:, :, :length], i)
            layer.keys = layer.values = None
        yield from each(names, "static", model, static, first, ids, steps)
        if compiles:
            ms = timed(compiled(model, static), first, length + len(names) * (WARM + steps), steps)
            yield row(f"stock, {attention}, static cache, compiled", "–", ids, ms)
    model.set_attn_implementation("sdpa")


def each(
    names: list[str], kind: str, model: Any, cache: Any, first: Tensor, ids: Tensor, steps: int
) -> Iterator[dict[str, Any]]:
    """One after the other on the same cache, the first as torch chooses, the second without cuDNN."""
    for i, name in enumerate(names):
        with cudnn(i == 0):
            ms = timed(plain(model, cache), first, ids.shape[1] + i * (WARM + steps), steps)
        yield row(f"stock, {name}, {kind} cache", "–", ids, ms)


@contextmanager
def cudnn(allowed: bool) -> Iterator[None]:
    """Whether torch's attention may be cuDNN's, for a while."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(before and allowed)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def ours(model: Any, ids: Tensor, text: str, steps: int, fuses: bool) -> Iterator[dict[str, Any]]:
    """Eager steps after a prompt, then, as the prompt takes longest, replayed ones on the same cache."""
    with kvengine.patched(model, text):
        cache = kvengine.EngineCache(model)
        cache.announce(ids.shape[1])
        first = model(ids, **{CACHE: cache}, logits_to_keep=1).logits.argmax(-1)
        ms = timed(plain(model, cache), first, ids.shape[1], steps)
        yield row(f"`{text}`", "eager", ids, ms) | held(cache)
        for how, fuse in (("replayed", False), ("replayed, fused", True))[: 1 + fuses]:
            decoder = kvengine.compile_decode(model, fuse=fuse).open(cache, WARM + steps)
            try:
                ms = timed(lambda t, at, step=decoder: step(t, torch.full_like(t, at)), first, cache.seen, steps)
            finally:
                decoder.close()
            yield row(f"`{text}`", how, ids, ms) | held(cache)


def held(cache: Any) -> dict[str, float]:
    stats = cache.stats()
    return {"held_MB": stats.bytes_held / 1e6, "read_MB": stats.read_per_token / 1e6}


def surviving(what: str, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What is measured until a candidate fails: a device is lent for minutes, so the others go on."""
    try:
        yield from rows
    except Exception as error:
        print(f"FAILED {what}: {type(error).__name__}: {error}", flush=True)
        yield {"what": what, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def row(what: str, how: str, ids: Tensor, ms: list[float]) -> dict[str, Any]:
    cuts = statistics.quantiles(ms, n=5, method="inclusive")
    print(f"{ids.shape[1]:7} {what:60} {how:9} {statistics.median(ms):9.2f} ms", flush=True)
    return {"what": what, "how": how, "context": ids.shape[1], "ms": statistics.median(ms),
            "mean": statistics.fmean(ms), "p20": cuts[0], "p80": cuts[3]}  # fmt: skip


@torch.no_grad()
def measure(model: Any, length: int, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    rng = torch.Generator().manual_seed(length)
    ids = torch.randint(10, model.config.vocab_size, (1, length), generator=rng).to(given.device)
    fuses = given.device == "cuda" if given.fuse is None else given.fuse
    yield from surviving("stock", stock(model, ids, given.steps, given.device, given.compiled))
    for text in given.stacks:
        yield from surviving(f"`{text}`", ours(model, ids, text, given.steps, fuses))


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--lengths", default="8192,131072", help="tokens")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--stacks", nargs="+", default=STACKS)
    parser.add_argument("--fuse", action=argparse.BooleanOptionalAction, help="fused steps, too; by default on a GPU")
    parser.add_argument("--compiled", action="store_true", help="stock transformers compiled, too")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/end_to_end.json"))
    given = parser.parse_args()
    lengths = [int(n) for n in given.lengths.split(",")]
    longest = max(lengths) + 3 * (WARM + given.steps)
    model, rows = random_model(given.shape, given.device, longest), []
    for length in lengths:
        for row in measure(model, length, given):
            rows.append(row)
            write(rows, given)
    if failed := [row["what"] for row in rows if "failed" in row]:
        sys.exit(f"{', '.join(failed)} failed; the rest is in {given.out}")


def write(rows: list[dict[str, Any]], given: argparse.Namespace) -> None:
    """After each row, so that a run that is cut off loses one."""
    chip = torch.cuda.get_device_name() if given.device == "cuda" else f"{torch.get_num_threads()} CPU core(s)"
    measured = [r for r in rows if "ms" in r]
    stock = [r for r in measured if r["how"] == "–"]
    best = {r["context"]: min(s["ms"] for s in stock if s["context"] == r["context"]) for r in stock}
    measured = [r | ({"speedup": best[r["context"]] / r["ms"]} if r["context"] in best else {}) for r in measured]
    columns = {
        "decoding": "what", "step": "how", "context": "context", "per token (ms)": "ms:.2f", "mean (ms)": "mean:.2f",
        "over the best stock": "speedup:.2f", "held (MB)": "held_MB:.1f", "read (MB)": "read_MB:.1f",
    }  # fmt: skip
    result = {
        "command": f"python -P benchmarks/end_to_end.py --device {given.device} --shape {given.shape} --lengths "
        f"{given.lengths} --steps {given.steps}",
        "machine": f"{chip}, torch {torch.__version__}, transformers {transformers.__version__}, Python "
        f"{platform.python_version()}; random weights, bfloat16, batch 1, medians",
        "columns": columns,
        "rows": measured,
        "failed": [r for r in rows if "failed" in r],
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
