"""What a process holds under a policy, and what memory of a cache's own is worth on a CPU.

    python -P benchmarks/memory.py [--length 4096] [--part 512] [--dtype bfloat16] [--rounds 30] [--threads 2]
                                   [--only processes|parts|pages] [--results benchmarks/results]

Each policy reads a prompt and decodes a few tokens in a process of its own, with a random model; what the process holds is
what the system says (resident set). Some read it in three ways too: in one pass, in chunks, and in parts that are judged one
by one (`judge_every`). Then the decode kernel reads the same keys and values from torch's memory and from the cache's own, in
turns: one copy of them over and over, of which the processor's caches may hold a part, and more copies than they hold.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import transformers

import kvengine
from kvengine import memory
from kvengine.hf.names import CACHE
from kvengine.kernels.attention import attention

POLICIES = ["stock", "full", "snapkv(budget=512)", "streaming(recent=508)", "kivi(bits=4)", "kivi(bits=2)",
            "quest(budget=512)", "duo(sparsity=0.5) + quest(budget=512) + kivi(bits=4)"]  # fmt: skip
READERS = ["stock", "kivi(bits=4)", "snapkv(budget=512)", "snapkv(budget=512) + kivi(bits=4)"]
WAYS = {"pass": "in one pass", "chunks": "in chunks", "parts": "in parts, each judged"}
SHAPE = dict(vocab_size=1000, hidden_size=512, intermediate_size=1536, num_hidden_layers=28, num_attention_heads=16,
             num_key_value_heads=8, head_dim=128, max_position_embeddings=1 << 17)  # fmt: skip
HEADS, GROUP, DIM = 8, 4, 128
COLD = 1 << 30  # bytes of keys and values, more than any last-level cache holds


def resident(name: str = "VmRSS") -> int:
    """Bytes of this process in memory; `VmHWM`: at most. (`ru_maxrss` begins with those of the process that started it.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def one(policy: str, length: int, dtype: torch.dtype, way: str = "pass", part: int = 0) -> dict[str, float]:
    """What this process holds more after a prompt and eight tokens than before, and at most, in MB."""
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE)).to(dtype).eval()
    if policy != "stock":
        kvengine.patch(model, policy, judge_every=part if way == "parts" else None)
    chunk = part if way == "chunks" else None
    ids = torch.randint(0, 1000, (1, length))

    def generate(tokens: torch.Tensor, new: int) -> object:
        cache = transformers.DynamicCache(config=model.config) if policy == "stock" else kvengine.EngineCache(model)
        model.generate(
            tokens, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, prefill_chunk_size=chunk,
            **{CACHE: cache},
        )  # fmt: skip
        return cache

    generate(ids[:, :256], 4)
    memory.trim()
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # what was held at most begins anew: making the model took more
    cache = generate(ids, 8)
    after, most = resident(), resident("VmHWM")
    held = (
        sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
        if isinstance(cache, transformers.DynamicCache)
        else cache.stats().bytes_held  # type: ignore[attr-defined]
    )
    return {"held": held / 1e6, "process": (after - before) / 1e6, "most": (most - before) / 1e6}


def pages(length: int, dtype: torch.dtype, rounds: int, copies: int) -> dict[str, object]:
    """One decoded token over keys and values in either memory, taking turns through so many copies."""
    q, times = torch.randn(HEADS, GROUP, 1, DIM, dtype=dtype), {"heap": [0.0] * rounds, "own": [0.0] * rounds}
    drawn = [[torch.randn(HEADS, length, DIM, dtype=dtype) for _ in range(2)] for _ in range(copies)]
    own = [[memory.empty(x.shape, dtype, x.device).copy_(x) for x in pair] for pair in drawn]
    for i in range(-copies, rounds):  # the first time through is not counted
        for name, pairs in (("heap", drawn), ("own", own)):
            k, v = pairs[i % copies]
            began = time.perf_counter()
            attention(q, k, v, None, DIM**-0.5)
            if i >= 0:
                times[name][i] = (time.perf_counter() - began) * 1e3
    ratios = [a / b for a, b in zip(times["heap"], times["own"], strict=True)]
    found = {name: statistics.median(x) for name, x in times.items()}
    low, _, high = statistics.quantiles(ratios, n=4)
    where = "many copies" if copies > 1 else "one copy"
    return {"where": where, "length": length, "dtype": str(dtype).removeprefix("torch."), **found,
            "ratio": statistics.median(ratios), "ratio_low": low, "ratio_high": high}  # fmt: skip


def main() -> None:
    sys.path.append(str(Path(__file__).parent))  # behind everything, for the file beside this one
    from where import processor

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--part", type=int, default=512, help="tokens of a chunk, and of a part")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16", help="of the models")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["processes", "parts", "pages"])
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--policy", help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, default="pass", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if given.policy:
        print(json.dumps(one(given.policy, given.length, getattr(torch, given.dtype), given.way, given.part)))
        return
    names = ("length", "part", "dtype", "rounds", "threads", "only")
    settings = " ".join(f"--{name} {value}" for name in names if (value := getattr(given, name)) is not None)
    shared = {
        "command": f"python -P benchmarks/memory.py {settings}",
        "machine": f"{given.threads} CPU cores{processor()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}",
    }
    columns = {"held by the cache (MB)": "held:.0f", "held more by the process (MB)": "process:.0f",
               "at most (MB)": "most:.0f"}  # fmt: skip
    if given.only in (None, "processes"):
        found = [process(given, policy, "pass") for policy in POLICIES]
        write(given.results / "memory.json", {**shared, "columns": {"policy": "policy", **columns}, "rows": found})
    if given.only in (None, "parts"):
        ways = [(policy, way) for policy in READERS for way in WAYS if policy != "stock" or way != "parts"]
        found = [{**process(given, policy, way), "way": WAYS[way]} for policy, way in ways]
        columns = {"policy": "policy", "the prompt is read": "way", **columns}
        write(given.results / "memory_parts.json", {**shared, "columns": columns, "rows": found})
    if given.only in (None, "pages"):
        write_pages(given, shared)


def process(given: argparse.Namespace, policy: str, way: str) -> dict[str, object]:
    """`one`, in a process of its own."""
    options = {name: getattr(given, name) for name in ("length", "threads", "part", "dtype")}
    words = [word for name, x in {**options, "policy": policy, "way": way}.items() for word in (f"--{name}", str(x))]
    run = subprocess.run([sys.executable, "-P", __file__, *words], capture_output=True, text=True, check=True)
    found = {"policy": f"`{policy}`", **json.loads(run.stdout.splitlines()[-1])}
    print({"way": way, **found}, flush=True)
    return found


def write_pages(given: argparse.Namespace, shared: dict[str, str]) -> None:
    found = [
        pages(n, dtype, given.rounds, copies)
        for n in (4096, 32768)
        for dtype in (torch.float32, torch.bfloat16)
        for copies in (1, -(-COLD // (2 * HEADS * n * DIM * dtype.itemsize)))
    ]
    columns = {"tokens": "length", "read from": "where", "dtype": "dtype", "torch's memory (ms)": "heap:.2f",
               "the cache's own (ms)": "own:.2f",
               "ratio": "ratio:.2f", "lower quartile": "ratio_low:.2f", "upper quartile": "ratio_high:.2f"}  # fmt: skip
    write(given.results / "memory_pages.json", {**shared, "columns": columns, "rows": found})


def write(file: Path, result: dict[str, object]) -> None:
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {file}")


if __name__ == "__main__":
    main()
