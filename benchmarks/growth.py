"""How time and bytes per decoded token grow with the context, for every policy, beside what the bytes alone would take.

    python -P benchmarks/growth.py [--lengths 2048,8192,32768,65536] [--threads 1] [--cpu-time] [--out FILE.json]

One layer of 32 query and 8 KV heads of 128 in bfloat16, as in a model of 8 billion weights, through the engine's own
layer cache; the prompt's own attention is left out, so filling 65536 tokens takes seconds. The model beside each time is
bytes read (as the cache counts them) over the bandwidth of a sum over 256 MiB in the same run, and nothing else: what a
line lies above it is computing and overhead. Policies that want the attention every prompt token received compute it in
quadratic time, and are filled up to 8192 tokens only. Also draws growth.png beside the result.
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

from kvengine.cache import LayerCache
from kvengine.replay import rerun, tell
from kvengine.rope import Rope
from kvengine.session import Call
from kvengine.stack import Stack
from kvengine.stats import measure

HEADS, GROUP, DIM, BUDGET, STEPS, WARM = 8, 4, 128, 1024, 15, 3
LONGEST = 8192
"""Longest prompt for the slow ones."""

STACKS = [
    "full",
    f"streaming(recent={BUDGET - 4})",
    f"h2o(budget={BUDGET})",
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
    "lowrank(rank=160)",
    f"quest(budget={BUDGET})",
    f"tidal(budget={BUDGET})",
    f"landmarks(budget={BUDGET})",
    f"retrieval(budget={BUDGET})",
    f"ann(budget={BUDGET})",
    f"oracle_topk(budget={BUDGET})",
    "duo(sparsity=0.5)",
    "host",
    f"host + quest(budget={BUDGET})",
    f"quest(budget={BUDGET}) + kivi(bits=4)",
    f"lowrank(rank=160) + landmarks(budget={BUDGET}) + host",
    f"duo(sparsity=0.5) + quest(budget={BUDGET}) + kivi(bits=4)",
]
SLOW = ("h2o", "d2o", "elastic")


def drawn(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of a sequence; its queries repeat after 512, as few policies look at more than the last ones."""
    rng = torch.Generator().manual_seed(0)
    some = torch.randn(1, HEADS * GROUP, 512, DIM, generator=rng).bfloat16()
    k, v = (torch.randn(1, HEADS, tokens, DIM, generator=rng).bfloat16() for _ in range(2))
    return some.repeat(1, 1, -(-tokens // 512), 1)[:, :, :tokens], k, v


def bandwidth(clock: Callable[[], float]) -> float:
    """Bytes per second that a sum over 256 MiB reads."""
    source, taken = torch.ones(64 << 20), []
    for _ in range(7):
        begin = clock()
        source.sum()
        taken.append(clock() - begin)
    return source.nbytes / statistics.median(taken)


@torch.inference_mode()
def one(
    text: str, length: int, qkv: tuple[torch.Tensor, ...], speed: float, clock: Callable[[], float]
) -> dict[str, Any]:
    """Fill a cache, decode, and count."""
    cache = LayerCache(Stack.parse(text), 0, 1)
    cache.session.rope = Rope(10000.0 ** -(torch.arange(DIM // 2) * 2 / DIM))
    nothing = torch.zeros(1, 1, 1, DIM, dtype=torch.bfloat16).expand(1, length, HEADS * GROUP, DIM)
    tell(cache, 0, length)
    cache.forward(*(x[:, :, :length] for x in qkv), Call(DIM**-0.5), None, lambda k, v: nothing)  # type: ignore[call-arg]
    rerun([cache], [qkv], Call(DIM**-0.5))
    times = []
    for step in range(WARM + STEPS):
        s = slice(length + step, length + step + 1)
        begin = clock()
        cache.forward(*(x[:, :, s] for x in qkv), Call(DIM**-0.5))
        times.append(1e3 * (clock() - begin))
    stats, cuts = measure([cache]), statistics.quantiles(times[WARM:], n=5)
    return {
        "policy": f"`{text}`", "spelled": Stack.parse(text).spelled(), "context": length,
        "ms": statistics.median(times[WARM:]), "p20_ms": cuts[0], "p80_ms": cuts[3],
        "model_ms": 1e3 * stats.read_per_token / speed,
        "read_MB": stats.read_per_token / 1e6, "held_MB": stats.bytes_held / 1e6,
    }  # fmt: skip


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Bytes and time against context."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 5.5), layout="constrained")
    for number, name in enumerate(dict.fromkeys(row["policy"] for row in rows)):
        line = [row for row in rows if row["policy"] == name]
        at, style = [row["context"] for row in line], {"color": plt.colormaps["tab20"](number % 20)}
        left.plot(at, [row["read_MB"] for row in line], marker="o", **style, label=name.strip("`"))
        right.plot(at, [row["ms"] for row in line], marker="o", **style)
        right.plot(at, [row["model_ms"] for row in line], linestyle=":", **style)
    left.set(title="read per token and layer (MB)", xlabel="context", xscale="log", yscale="log")
    right.set(title="time (ms); dotted: bytes over bandwidth", xlabel="context", xscale="log", yscale="log")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(file, dpi=80)


def main() -> None:
    """Measure, print, write, draw."""
    sys.path.append(str(Path(__file__).parent))  # behind everything, for the file beside this one
    from where import processor

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="2048,8192,32768,65536")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="processor time, for one thread on a busy machine")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/growth.json"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    clock = time.process_time if given.cpu_time else time.perf_counter
    speed, rows = bandwidth(clock), []
    for length in map(int, given.lengths.split(",")):
        qkv = drawn(length + WARM + STEPS)
        for text in STACKS:
            if length > LONGEST and text.startswith(SLOW):
                continue
            rows.append(row := one(text, length, qkv, speed, clock))
            print(f"{length:6} {text:60} {row['ms']:8.2f} ms, by bytes {row['model_ms']:7.2f}", flush=True)
    rows.sort(key=lambda row: STACKS.index(row["policy"].strip("`")))
    result = {
        "command": f"python -P benchmarks/growth.py --lengths {given.lengths} --threads {given.threads}"
        + " --cpu-time" * given.cpu_time,
        "machine": f"{given.threads} CPU core(s){processor()} that read {speed / 1e9:.1f} GB/s, torch {torch.__version__}, "
        f"Python {platform.python_version()}; one layer of {HEADS * GROUP} query and {HEADS} KV heads of {DIM}, "
        f"bfloat16, medians of {STEPS}{', processor time' * given.cpu_time}",
        "columns": {
            "policy": "policy", "context": "context", "read (MB)": "read_MB:.2f", "held (MB)": "held_MB:.2f",
            "by bytes alone (ms)": "model_ms:.2f", "measured (ms)": "ms:.2f",
        },
        "rows": rows,
        "pictures": {"Bytes and time per decoded token against the context": given.out.with_suffix(".png").name},
    }  # fmt: skip
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    plot(rows, given.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
