"""What skipping saves of a prompt's attention: bands (A-shape, streaming heads), blocks, and methods that choose what to read.

    python -P benchmarks/prefill.py [--lengths 4096,8192,16384,32768] [--threads 2] [--cpu-time] [--out FILE.json]
    python -P benchmarks/prefill.py --device cuda [--lengths 8192,32768,131072] --out FILE.json

One sequence; on a CPU 8 query and 2 KV heads of 128 in float32, on a GPU 32 and 8 in bfloat16. Dense is torch's fused causal
attention of the whole prompt. The ideal is the ratio of (query, token) pairs. Candidates take turns; the best of three
rounds up to 8192 tokens, one after; on a GPU always three.

Methods that choose are given what they were made for: each query head looks at two tokens, and along three lines at fixed
distances, which hold about nine tenths of its attention. Their times include choosing, and `error` is how far their output
is from dense attention's (of whole vectors, relative).

On a CPU, also the bundled model's whole prompts, of a novel, under the full cache and under prefill methods; the ideal is of
its attention alone.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import kvengine
from kvengine import attending
from kvengine.hf.names import CACHE
from kvengine.kernels.causal_attention import causal_attention
from kvengine.kernels.span_attention import BLOCK, Band, band_spans, causal_spans, pairs, span_attention
from kvengine.session import Call
from kvengine.stack import Stack

GROUP, DIM, HEADS = 4, 128, {"cpu": 2, "cuda": 8}
SHAPES = {"A-shape, 128 + 1024": (128, 1024), "streaming heads, 64 + 256": (64, 256)}
SPARSE, KEPT, CHUNKS = "block-sparse, 1/8 of the blocks", 8, 8
METHODS = ("xattention", "vertical_slash(slash=512)", "flexprefill")
MODEL = (
    "ashape", "ashape(last=128)", "xattention(threshold=0.8)", "xattention", "vertical_slash(slash=512)", "flexprefill",
)  # fmt: skip
FAILED: list[str] = []
LOOKS = 1.3  # how strongly a query looks at each of its tokens


def sparse_spans(heads: int, length: int) -> Tensor:
    """Per row and block of queries: the first and its own block, and every eighth between, another for each row."""
    blocks = length // BLOCK
    spans = torch.zeros(heads, blocks, blocks // KEPT + 3, 2, dtype=torch.int64)
    for row in range(heads):
        for b in range(blocks):
            chosen = sorted({0, b, *range((row + b) % KEPT, b, KEPT)})
            spans[row, b, : len(chosen)] = torch.tensor([[c * BLOCK, (c + 1) * BLOCK] for c in chosen])
    return spans


def planted(heads: int, length: int, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Queries that look at two tokens and along three lines, other ones for each head; keys, values."""
    k, v = (torch.randn(heads, length, DIM, generator=rng) for _ in range(2))
    q = 0.3 * torch.randn(heads, GROUP, length, DIM, generator=rng)
    for r in range(heads):
        for h in range(GROUP):
            for column in torch.randint(0, length // 8, (2,), generator=rng):
                q[r, h] += LOOKS * k[r, column]
            for distance in torch.randint(0, length // 2, (3,), generator=rng):
                q[r, h, distance:] += LOOKS * k[r, : length - int(distance)]
    return q, k, v


def ours(q: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> Tensor:
    return causal_attention(q, k[:, None], v[:, None], scale=DIM**-0.5, backend=backend).transpose(1, 2)


def chunked(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """A prompt in chunks: with the mask that one fused call needs, in two calls that need none, and by our own kernel."""
    step = q.shape[2] // CHUNKS

    def each(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        ends = range(step, q.shape[2] + 1, step)
        return torch.cat([attend(q[:, :, end - step : end], k[:, :end], v[:, :end]) for end in ends], 2)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[1], dtype=torch.bool, device=q.device).tril(k.shape[1] - q.shape[2])
        wide = (q.flatten(0, 1)[None], k[None], v[None])
        return F.scaled_dot_product_attention(*wide, attn_mask=mask, enable_gqa=True)[0].view_as(q)

    return {
        "masked": lambda: each(masked),
        "two calls": lambda: each(partial(ours, backend="reference")),
        "our kernel": lambda: each(ours),
    }


Way = tuple[float, Callable[[], Tensor]]


def cases(length: int, device: str) -> dict[str, Way]:
    """For each way: the share of pairs it computes, and the call."""
    rng, heads = torch.Generator().manual_seed(0), HEADS[device]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    q, k, v = (x.to(device, dtype) for x in planted(heads, length, rng))
    position = torch.arange(length, dtype=torch.int32, device=device).repeat(heads, 1)
    first = torch.zeros(heads, dtype=torch.int64, device=device)
    stock = q.flatten(0, 1)[None], k[None], v[None]

    def way(spans: Tensor, band: Band | None) -> Way:
        call = partial(span_attention, q, k, v, position, spans.to(device), scale=DIM**-0.5, band=band)
        return pairs(spans, length, length) / (length * (length + 1) / 2), call

    def dense() -> Tensor:
        return F.scaled_dot_product_attention(*stock, is_causal=True, enable_gqa=True)[0].view_as(q)

    found: dict[str, Way] = {"dense": (1.0, dense)}
    if device == "cpu":
        found["dense, our kernel"] = 1.0, lambda: ours(q, k, v)
        found |= {f"dense, in {CHUNKS} chunks, {how}": (1.0, call) for how, call in chunked(q, k, v).items()}
    found["causal, in blocks"] = way(causal_spans(length, length, q.device), None)
    for name, shape in SHAPES.items():
        band = Band(first, *shape)
        found[name] = way(band_spans(length, length, band), band)
    found[SPARSE] = way(sparse_spans(heads, length), None)
    for text in METHODS:
        method = Stack.parse(text).prefill
        tally = attending.Tally()
        call = partial(attending.chosen, q, k, v, position, True, method, method.whole, Call(DIM**-0.5), tally)
        try:
            call()
        except Exception as error:
            if device == "cpu":
                raise
            failed(f"`{text}`, {length} tokens", error)
            continue
        found[f"`{text}`, lines"] = tally.computed / tally.every, call
    return found


def failed(what: str, error: Exception) -> None:
    FAILED.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
    print("FAILED", FAILED[-1], flush=True)
    torch.cuda.empty_cache()


@torch.inference_mode()
def at(length: int, device: str, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """All ways at one length; on a GPU one that fails is named, and the others go on."""
    found, best, error = cases(length, device), {}, {}
    want = found["dense"][1]()
    for name in list(found):
        try:
            got = found[name][1]()
            error[name] = float((got - want).norm() / want.norm()) if name.startswith("`") else None
        except Exception as failure:
            if device == "cpu":
                raise
            failed(f"{name}, {length} tokens", failure)
            del found[name]

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return clock()

    for _ in range(3 if length <= 8192 or device == "cuda" else 1):
        for name, (_, call) in found.items():
            begin = now()
            call()
            best[name] = min(best.get(name, float("inf")), now() - begin)
    return [
        {"way": name, "length": length, "ms": 1e3 * best[name], "speed": best["dense"] / best[name], "ideal": 1 / share,
         "error": error[name]}
        for name, (share, _) in found.items()
    ]  # fmt: skip


def prose(tokens: int) -> Tensor:
    """A prompt of so many tokens of the novel that the evaluation's needles are put into."""
    from transformers import AutoTokenizer

    from kvengine import evals  # what it needs may not be on a machine with a GPU

    text = (Path(evals.__file__).parent / "tasks/data/alice.txt").read_text(encoding="utf-8")
    return AutoTokenizer.from_pretrained(evals.bundled_model())(text, return_tensors="pt").input_ids[:, :tokens]


@torch.inference_mode()
def model(lengths: list[int], clock: Callable[[], float]) -> list[dict[str, Any]]:
    """Whole prompts of the bundled model."""
    from transformers import AutoModelForCausalLM

    from kvengine.evals import bundled_model

    rows, bundled = [], AutoModelForCausalLM.from_pretrained(bundled_model())
    for length in lengths:
        ids, seconds, share = prose(length), dict[str, float](), dict[str, float]()
        for _ in range(3 if length <= 8192 else 2):
            for text in ("full", *MODEL):
                patched = kvengine.patch(bundled, text)
                begin, cache = clock(), kvengine.EngineCache(patched)
                patched(ids, **{CACHE: cache}, logits_to_keep=1)
                seconds[text] = min(seconds.get(text, float("inf")), clock() - begin)
                share[text] = cache.stats().computed or 1.0
        rows += [
            {"way": f"bundled model, `{text}`", "length": length, "ms": 1e3 * s, "speed": seconds["full"] / s,
             "ideal": 1 / share[text], "error": None}
            for text, s in seconds.items()
        ]  # fmt: skip
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=HEADS, default="cpu")
    parser.add_argument("--lengths", default="4096,8192,16384,32768")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="processor time, for one thread on a busy machine")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prefill.json"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    clock, rows = time.process_time if given.cpu_time else time.perf_counter, []
    lengths = [int(length) for length in given.lengths.split(",")]

    def add(found: list[dict[str, Any]]) -> None:
        rows.extend(found)
        for row in found:
            error = "" if row["error"] is None else f", error {row['error']:.3f}"
            about = f"{row['ms']:9.1f} ms {row['speed']:6.2f} x, ideal {row['ideal']:6.2f}{error}"
            print(f"{row['length']:6} {row['way']:42} {about}", flush=True)

    for length in lengths:
        try:
            add(at(length, given.device, clock))
        except Exception as error:
            if given.device == "cpu":
                raise
            failed(f"{length} tokens", error)
        write(rows, given)  # after each length, so that a run that is cut off loses one
    if given.device == "cpu":
        add(model([length for length in lengths if length <= 16384], clock))
        write(rows, given)
    if FAILED:
        sys.exit(f"not all was measured; the rest is in {given.out}")


def write(rows: list[dict[str, Any]], given: argparse.Namespace) -> None:
    sys.path.append(str(Path(__file__).parent))  # behind everything, for the file beside this one
    from where import processor

    heads = HEADS[given.device]
    where = f"{given.threads} CPU cores{processor()}" if given.device == "cpu" else torch.cuda.get_device_name()
    result = {
        "command": f"python -P benchmarks/prefill.py --lengths {given.lengths}"
        + (f" --threads {given.threads}" if given.device == "cpu" else " --device cuda")
        + " --cpu-time" * given.cpu_time,
        "machine": f"{where}, torch {torch.__version__}, Python {platform.python_version()}; "
        f"{heads * GROUP} query and {heads} KV heads of {DIM}, "
        f"{'float32' if given.device == 'cpu' else 'bfloat16'}{', processor time' * given.cpu_time}",
        "columns": {"attention of the prompt": "way", "tokens": "length", "time (ms)": "ms:.0f",
                    "speed-up over dense": "speed:.2f", "ideal by pairs": "ideal:.2f", "error": "error:.3f"},
        "rows": rows,
    } | ({"failed": FAILED} if FAILED else {})  # fmt: skip
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
