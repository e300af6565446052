"""What every policy costs and saves in one layer: its prompt work, decode time, bytes held and read, by context length.

    python -P benchmarks/policies.py [--lengths 2048,8192,32768] [--threads 2] [--out benchmarks/results/decode.json]

One layer of a model of 8 query and 2 KV heads of 64, in float32, fed with random tokens through the engine's own layer
cache. Prompt work is what the policy adds to the prompt's attention, as a share of that attention's time (torch's
fused causal attention on the same tensors), both medians of three. A later prompt of 512 tokens is timed whole, attention
and policy, and set against torch's fused attention of its queries over everything. Candidates take turns step by step, so
that a busy machine slows all alike.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from kvengine.cache import LayerCache
from kvengine.kernels import dispatch
from kvengine.policies import catalogue
from kvengine.replay import rerun, tell
from kvengine.rope import Rope
from kvengine.session import Call
from kvengine.stack import Stack
from kvengine.stats import measure

HEADS, GROUP, DIM, BUDGET, STEPS, WARM = 2, 4, 64, 1024, 24, 4
LATER, TURNS = 512, 3

TIERS = {"disk", "remote"}  # benchmarks/prefix.py measures these
PREFILL = {"ashape", "xattention", "vertical_slash", "flexprefill"}  # and benchmarks/prefill.py these
NOTHING = {"uniform", "exact", "dense", "all", "device"}
STACKS = [
    "full",
    f"streaming(recent={BUDGET - 4})",
    f"h2o(budget={BUDGET})",
    f"ann(budget={BUDGET})",
    f"tova(budget={BUDGET})",
    f"snapkv(budget={BUDGET})",
    f"pyramidkv(budget={BUDGET})",
    f"adakv(budget={BUDGET})",
    f"chunkkv(budget={BUDGET})",
    f"keydiff(budget={BUDGET})",
    f"expected_attention(budget={BUDGET})",
    f"d2o(budget={BUDGET})",
    f"kvzip(budget={BUDGET})",
    f"rkv(budget={BUDGET})",
    f"elastic(budget={BUDGET})",
    "kivi(bits=4)",
    "kivi(bits=2)",
    "turboquant",
    "turboquant(values=2)",
    "zipcache",
    "quantspec",
    "lowrank(rank=32)",
    f"quest(budget={BUDGET})",
    f"tidal(budget={BUDGET})",
    f"landmarks(budget={BUDGET})",
    f"retrieval(budget={BUDGET})",
    f"oracle_topk(budget={BUDGET})",
    "duo(sparsity=0.5)",
    "host",
    f"host + quest(budget={BUDGET})",
    f"duo(sparsity=0.5) + quest(budget={BUDGET}) + kivi(bits=4)",
]


def missing() -> set[str]:
    """Methods that no stack above names."""
    named = {word for text in STACKS for word in text.replace("(", " ").split()}
    return set(catalogue()) - named - NOTHING - PREFILL - TIERS


def draw(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shape = ((HEADS * GROUP, tokens), (HEADS, tokens), (HEADS, tokens))
    return tuple(torch.randn(1, h, n, DIM, generator=g) for h, n in shape)  # type: ignore[return-value]


def start(text: str, length: int, qkv: tuple[torch.Tensor, ...], nothing: torch.Tensor) -> tuple[LayerCache, float]:
    """A cache that has read the prompt, and the seconds its policy worked on it."""
    cache = LayerCache(Stack.parse(text), 0, 1)
    cache.session.rope = Rope(10000.0 ** -(torch.arange(DIM // 2) * 2 / DIM))
    prompt = [x[:, :, :length] for x in qkv]
    begin = time.perf_counter()
    tell(cache, 0, length)
    cache.forward(*prompt, Call(DIM**-0.5), None, lambda k, v: nothing)  # type: ignore[call-arg]
    rerun([cache], [qkv], Call(DIM**-0.5))
    return cache, time.perf_counter() - begin


def attention_time(qkv: tuple[torch.Tensor, ...], length: int) -> float:
    q, k, v = (x[:, :, :length] for x in qkv)
    begin = time.perf_counter()
    F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return time.perf_counter() - begin


def later_prompts(caches: dict[str, LayerCache], qkv: tuple[torch.Tensor, ...], seen: int) -> dict[str, float]:
    """The time of a further prompt of `LATER` tokens, over that of its attention to everything; the median of turns."""
    ratios: dict[str, list[float]] = {text: [] for text in caches}
    for end in range(seen + LATER, qkv[0].shape[2] + 1, LATER):
        q, k, v = qkv[0][:, :, end - LATER : end], *(x[:, :, :end] for x in qkv[1:])
        sees = torch.ones(LATER, end, dtype=torch.bool).tril(end - LATER)
        begin = time.perf_counter()
        F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True)
        base = time.perf_counter() - begin
        for text, cache in caches.items():
            begin = time.perf_counter()
            tell(cache, end - LATER, end)
            cache.forward(q, *(x[:, :, end - LATER :] for x in (k, v)), Call(DIM**-0.5))
            rerun([cache], [qkv], Call(DIM**-0.5))
            ratios[text].append((time.perf_counter() - begin) / base)
    return {text: statistics.median(found) for text, found in ratios.items()}


@torch.no_grad()
def at(length: int) -> list[dict[str, Any]]:
    qkv = draw(length + STEPS + WARM + LATER * TURNS)
    nothing = torch.zeros(1, length, HEADS * GROUP, DIM)
    base = statistics.median([attention_time(qkv, length) for _ in range(TURNS)])
    caches, prompt = {}, {}
    for text in STACKS:
        found = []
        for _ in range(TURNS):
            caches[text], seconds = start(text, length, qkv, nothing)
            found.append(seconds)
        prompt[text] = statistics.median(found)
        print(f"{length} {text}: prompt work {prompt[text]:.2f} s of {base:.2f}", flush=True)
    times: dict[str, list[float]] = {text: [] for text in STACKS}
    for step in range(STEPS + WARM):
        token = [x[:, :, length + step : length + step + 1].contiguous() for x in qkv]  # as it comes from a model
        for text, cache in caches.items():
            begin = time.perf_counter()
            cache.forward(*token, Call(DIM**-0.5))
            if step >= WARM:
                times[text].append(time.perf_counter() - begin)
    stats = {text: measure([cache]) for text, cache in caches.items()}
    later = later_prompts(caches, qkv, length + STEPS + WARM)
    full = statistics.median(times["full"])
    rows = []
    for text in STACKS:
        decode = statistics.median(times[text])
        rows.append(
            {
                "policy": f"`{text}`",
                "spelled": Stack.parse(text).spelled(),
                "context": length,
                "prompt_work": prompt[text] / base,
                "decode_ms": 1e3 * decode,
                "decode_p20_ms": 1e3 * sorted(times[text])[len(times[text]) // 5],
                "decode_p80_ms": 1e3 * sorted(times[text])[len(times[text]) * 4 // 5],
                "speed": full / decode,
                "later": later[text],
                "held_MB": stats[text].bytes_held / 1e6,
                "read_MB": stats[text].read_per_token / 1e6,
            }
        )
    whole = rows[0]["read_MB"]
    return [row | {"ideal": whole / row["read_MB"]} for row in rows]


def main() -> None:
    sys.path.append(str(Path(__file__).parent))  # behind everything, for the file beside this one
    from where import processor

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="2048,8192,32768")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/decode.json"))
    given = parser.parse_args()
    if gone := missing():
        raise SystemExit(f"no stack measures {sorted(gone)}; add one to STACKS")
    torch.set_num_threads(given.threads)
    dispatch.info()  # compiles the C kernels
    rows = [row for length in given.lengths.split(",") for row in at(int(length))]
    result = {
        "command": f"python -P benchmarks/policies.py --lengths {given.lengths} --threads {given.threads}",
        "machine": f"{given.threads} CPU cores{processor()}, torch {torch.__version__}, Python {platform.python_version()}; "
        f"one layer of {HEADS * GROUP} query and {HEADS} KV heads of {DIM}, float32, medians of {STEPS}",
        "columns": {
            "policy": "policy",
            "context": "context",
            "prompt work / attention": "prompt_work:.2f",
            "decode (ms)": "decode_ms:.2f",
            "speed-up over full": "speed:.1f",
            "ideal by bytes read": "ideal:.1f",
            f"prompt of {LATER} / attention": "later:.2f",
            "held (MB)": "held_MB:.2f",
            "read (MB)": "read_MB:.2f",
        },
        "rows": rows,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
