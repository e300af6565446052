"""How time and bytes per decoded token grow with the context, for every policy, beside what the bytes alone would take.

    python -P benchmarks/growth.py [--lengths 2048,8192,32768,65536] [--threads 1] [--cpu-time] [--out FILE.json]
    python -P benchmarks/growth.py --device cuda [--batch 8] [--budget 2048] [--stacks TEXT ...] --out FILE.json
    python -P benchmarks/growth.py --lengths 131072,1048576 --heads 1 --group 2 --dim 64 --out FILE.json

One layer of 32 query and 8 KV heads of 128 in bfloat16, as in a model of 8 billion weights, or as said, through the engine's
own layer cache; the prompt's own attention is left out, so filling 65536 tokens takes seconds: its time is the policy's, and
beside it stands the most memory that was taken meanwhile. `tidal` is timed in a layer that chooses. The model beside each time is
bytes read (as the cache counts them) over the bandwidth of a sum over more than any cache holds in the same run, and nothing
else: what a line lies above it is computing and overhead. That sum is also taken before each step, as a model reads its
weights and other layers in between: no step finds in the processor's caches what the one before it has read. Policies that
look at all pairs of a prompt's tokens, or at a share of them, are filled up to 8192 or 65536 tokens only (`LONGEST`). Also
draws a picture beside the result.

On a GPU a step is timed on the device, which is kept busy until the host has queued all of it: so a recorded step takes. A
policy that has to ask the device something while a step is made waits for that, and its time says so.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvengine.cache import LayerCache
from kvengine.evals.memory import peak
from kvengine.replay import rerun, tell
from kvengine.rope import Rope
from kvengine.session import Call
from kvengine.stack import Stack
from kvengine.stats import measure

STEPS, WARM = 15, 3
Clock = Callable[[Callable[[], object]], float]
AHEAD = 20_000_000
"""Cycles of a GPU, some 11 ms, in which the host queues a step."""


def stacks(budget: int) -> list[str]:
    """Every policy, with so many tokens where it has a budget."""
    return [
        "full",
        f"streaming(recent={budget - 4})",
        f"h2o(budget={budget})",
        f"tova(budget={budget})",
        f"snapkv(budget={budget})",
        f"pyramidkv(budget={budget})",
        f"adakv(budget={budget})",
        f"chunkkv(budget={budget})",
        f"keydiff(budget={budget})",
        f"expected_attention(budget={budget})",
        f"d2o(budget={budget})",
        f"kvzip(budget={budget})",
        f"rkv(budget={budget})",
        f"elastic(budget={budget})",
        "kivi(bits=4)",
        "kivi(bits=2)",
        "turboquant",
        "turboquant(values=2)",
        "zipcache",
        "quantspec",
        "lowrank(rank=160)",
        f"quest(budget={budget})",
        f"tidal(budget={budget})",
        f"landmarks(budget={budget})",
        f"retrieval(budget={budget})",
        f"ann(budget={budget})",
        f"oracle_topk(budget={budget})",
        "duo(sparsity=0.5)",
        "host",
        f"host + quest(budget={budget})",
        f"quest(budget={budget}) + kivi(bits=4)",
        f"lowrank(rank=160) + landmarks(budget={budget}) + host",
        f"duo(sparsity=0.5) + quest(budget={budget}) + kivi(bits=4)",
    ]


LONGEST = {"h2o": 8192, "d2o": 8192, "elastic": 8192, "kvzip": 65536, "rkv": 65536, "zipcache": 65536}
"""Tokens of a prompt, of which these policies look at all pairs or at a share of them."""


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    group: int
    dim: int

    def __str__(self) -> str:
        sequences = "" if self.batch == 1 else f", {self.batch} sequences"
        return f"{self.heads * self.group} query and {self.heads} KV heads of {self.dim}{sequences}"


def drawn(tokens: int, device: str, shape: Shape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of sequences; their queries repeat after 512, as few policies look at more than the last ones."""
    rng = torch.Generator(device).manual_seed(0)
    new = partial(torch.randn, generator=rng, device=device)
    some = new(shape.batch, shape.heads * shape.group, 512, shape.dim).bfloat16()
    k, v = (new(shape.batch, shape.heads, tokens, shape.dim, dtype=torch.bfloat16) for _ in range(2))
    return some.repeat(1, 1, -(-tokens // 512), 1)[:, :, :tokens], k, v


def timer(device: str, cpu_time: bool) -> tuple[Clock, float]:
    """What says how many seconds a call takes, and how many bytes a second a sum over `others` reads."""
    from peers import between_events
    from where import last_level

    others = torch.ones((4 << 30 if device == "cuda" else max(256 << 20, 2 * last_level())) // 4, device=device)
    clock = time.process_time if cpu_time else time.perf_counter

    def seconds(call: Callable[[], object]) -> float:
        others.sum()
        if device == "cuda":
            return between_events(call, AHEAD) / 1e3
        begin = clock()
        call()
        return clock() - begin

    return seconds, others.nbytes / statistics.median(seconds(others.sum) for _ in range(7))


@torch.inference_mode()
def one(text: str, length: int, qkv: tuple[torch.Tensor, ...], speed: float, seconds: Clock) -> dict[str, Any]:
    """Fill a cache, decode, and count."""
    (batch, heads, _, dim), device = qkv[0].shape, qkv[0].device
    cache, call = LayerCache(Stack.parse(text), *((2, 5) if text.startswith("tidal") else (0, 1))), Call(dim**-0.5)
    cache.session.rope = Rope((10000.0 ** -(torch.arange(dim // 2) * 2 / dim)).to(device))
    nothing = torch.zeros(1, 1, 1, dim, dtype=torch.bfloat16, device=device).expand(batch, length, heads, dim)
    with peak(device) as before:
        pass
    begin = time.perf_counter()
    with peak(device) as most:
        tell(cache, 0, length, rows=batch)
        cache.forward(*(x[:, :, :length] for x in qkv), call, None, lambda k, v: nothing)  # type: ignore[call-arg]
        rerun([cache], [qkv], call)
        if device.type == "cuda":
            torch.cuda.synchronize()
    took = time.perf_counter() - begin
    times = []
    for step in range(WARM + STEPS):
        s = slice(length + step, length + step + 1)
        token = [x[:, :, s].contiguous() for x in qkv]  # as a model's projections leave it
        times.append(1e3 * seconds(lambda token=token: cache.forward(*token, call)))
    stats, cuts = measure([cache]), statistics.quantiles(times[WARM:], n=5)
    return {
        "policy": f"`{text}`", "spelled": Stack.parse(text).spelled(), "context": length,
        "ms": statistics.median(times[WARM:]), "p20_ms": cuts[0], "p80_ms": cuts[3],
        "model_ms": 1e3 * stats.read_per_token / speed,
        "read_MB": stats.read_per_token / 1e6, "held_MB": stats.bytes_held / 1e6,
        "prompt_s": took, "prompt_MB": None if most.bytes is None or before.bytes is None else (most.bytes - before.bytes) / 1e6,
    }  # fmt: skip


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Bytes and time against context, a line of pictures for each kind of policy, with `full` in all of them."""
    import matplotlib

    matplotlib.use("Agg")
    from kinds import KINDS, kind
    from matplotlib import pyplot as plt

    kinds = {name: [row["policy"] for row in rows if kind(row["spelled"]) == name] for name in KINDS}
    kinds = {name: policies for name, policies in kinds.items() if policies}
    full = next((row["policy"] for row in rows if row["spelled"] == Stack().spelled()), None)
    contexts = sorted({row["context"] for row in rows})
    shape = {"figsize": (14, 4.2 * len(kinds)), "layout": "constrained", "squeeze": False}
    figure, pairs = plt.subplots(len(kinds), 2, **shape, sharex=True, sharey="col")
    for (title, policies), (left, right) in zip(kinds.items(), pairs, strict=True):
        for number, name in enumerate(dict.fromkeys([full, *policies] if full else policies)):
            line = [row for row in rows if row["policy"] == name]
            at = [row["context"] for row in line]
            style = {"color": "black" if name == full else plt.colormaps["tab20"](number % 20)}
            mark = {"marker": "os^"[number % 3], "markersize": 4}
            left.plot(at, [row["read_MB"] for row in line], **mark, **style)
            right.plot(at, [row["ms"] for row in line], **mark, **style, label=name.strip("`"))
            right.plot(at, [row["model_ms"] for row in line], linestyle=":", linewidth=0.8, **style)
        left.set(title=f"{title}: read per token and layer (MB)", xscale="log", yscale="log")
        right.set(title=f"{title}: time (ms); dotted: bytes over bandwidth", xscale="log", yscale="log")
        for axes in (left, right):
            axes.set_xticks(contexts, [str(context) for context in contexts])
            axes.minorticks_off()
        right.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    for axes in pairs[-1]:
        axes.set_xlabel("context")
    figure.savefig(file, dpi=70)


def main() -> None:
    """Measure, print, write, draw."""
    sys.path.append(str(Path(__file__).parent))  # behind everything, for the file beside this one
    from where import processor

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--lengths", default="2048,8192,32768,65536")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--group", type=int, default=4, help="query heads of each")
    parser.add_argument("--dim", type=int, default=128, help="channels of a head")
    parser.add_argument("--budget", type=int, default=1024, help="tokens")
    parser.add_argument("--stacks", nargs="+", help="instead of every policy")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cpu-time", action="store_true", help="processor time, for one thread on a busy machine")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/growth.json"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    (seconds, speed), rows, texts = timer(given.device, given.cpu_time), [], given.stacks or stacks(given.budget)
    about = (
        f"{given.threads} CPU core(s){processor()}" if given.device == "cpu" else f"one {torch.cuda.get_device_name()}"
    )
    shape = Shape(given.batch, given.heads, given.group, given.dim)
    result = {
        "command": f"python -P {shlex.join(sys.argv)}",
        "machine": f"{about} that reads {speed / 1e9:.1f} GB/s, torch {torch.__version__}, Python "
        f"{platform.python_version()}; one layer of {shape}, bfloat16, medians of {STEPS}{', processor time' * given.cpu_time}",
        "columns": {
            "policy": "policy", "context": "context", "read (MB)": "read_MB:.2f", "held (MB)": "held_MB:.2f",
            "by bytes alone (ms)": "model_ms:.3f", "measured (ms)": "ms:.3f",
            "prompt (s)": "prompt_s:.2f", "most taken meanwhile (MB)": "prompt_MB:.0f",
        },
        "pictures": {"Bytes and time per decoded token against the context": given.out.with_suffix(".png").name},
    }  # fmt: skip
    failed = []
    for length in map(int, given.lengths.split(",")):
        qkv = drawn(length + WARM + STEPS, given.device, shape)
        for text in texts:
            if length > LONGEST.get(text.partition("(")[0], length):
                continue
            try:
                row = one(text, length, qkv, speed, seconds)
            except Exception as error:  # the others go on
                if given.device == "cpu":
                    raise
                failed.append(f"{text} at {length}")
                print(f"FAILED {failed[-1]}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                continue
            rows.append(row)
            print(f"{length:6} {text:60} {row['ms']:8.3f} ms, by bytes {row['model_ms']:7.3f}", flush=True)
            ordered = sorted(rows, key=lambda row: texts.index(row["policy"].strip("`")))
            given.out.write_text(json.dumps(result | {"rows": ordered}, indent=1) + "\n")
    if not rows:
        sys.exit("nothing was measured")
    try:
        plot(ordered, given.out.with_suffix(".png"))
    except ImportError as error:  # a machine with a GPU may have nothing to draw with
        print(f"no picture is drawn: {error}")
    if failed:
        sys.exit(f"{', '.join(failed)} failed; the rest is in {given.out}")


if __name__ == "__main__":
    main()
