"""What skipping saves of a prompt's attention: bands (A-shape, streaming heads) and block-sparse spans against causal.

    python -P benchmarks/prefill.py [--lengths 4096,8192,16384,32768] [--threads 2] [--cpu-time] [--out FILE.json]

8 query and 2 KV heads of 128, float32, one sequence. Dense is torch's fused causal attention of the whole prompt. The
ideal is the ratio of (query, token) pairs. Candidates take turns; the best of three rounds up to 8192 tokens, one after.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvengine.kernels.causal_attention import causal_attention
from kvengine.kernels.span_attention import BLOCK, Band, band_spans, causal_spans, span_attention

HEADS, GROUP, DIM = 2, 4, 128
SHAPES = {"A-shape, 128 + 1024": (128, 1024), "streaming heads, 64 + 256": (64, 256)}
SPARSE, KEPT, CHUNKS = "block-sparse, 1/8 of the blocks", 8, 8


def sparse_spans(length: int) -> Tensor:
    """Per row and block of queries: the first and its own block, and every eighth between, another for each row."""
    blocks = length // BLOCK
    spans = torch.zeros(HEADS, blocks, blocks // KEPT + 3, 2, dtype=torch.int64)
    for row in range(HEADS):
        for b in range(blocks):
            chosen = sorted({0, b, *range((row + b) % KEPT, b, KEPT)})
            spans[row, b, : len(chosen)] = torch.tensor([[c * BLOCK, (c + 1) * BLOCK] for c in chosen])
    return spans


def pairs(spans: Tensor, length: int) -> float:
    """Of the causal (query, token) pairs, the share that the spans hold; whole blocks are counted."""
    return float((spans[..., 1] - spans[..., 0]).clamp(min=0).sum()) / len(spans) * BLOCK / (length * length / 2)


def ours(q: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> Tensor:
    return causal_attention(q, k[:, None], v[:, None], scale=DIM**-0.5, backend=backend).transpose(1, 2)


def chunked(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Tensor]]:
    """A prompt in chunks: with the mask that one fused call needs, in two calls that need none, and by our own kernel."""
    step = q.shape[2] // CHUNKS

    def each(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        ends = range(step, q.shape[2] + 1, step)
        return torch.cat([attend(q[:, :, end - step : end], k[:, :end], v[:, :end]) for end in ends], 2)

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[2])
        wide = (q.flatten(0, 1)[None], k[None], v[None])
        return F.scaled_dot_product_attention(*wide, attn_mask=mask, enable_gqa=True)[0].view_as(q)

    return {
        "masked": lambda: each(masked),
        "two calls": lambda: each(partial(ours, backend="reference")),
        "our kernel": lambda: each(ours),
    }


def cases(length: int) -> dict[str, tuple[float, Callable[[], Tensor]]]:
    """For each way: the share of pairs it computes, and the call."""
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(HEADS, GROUP, length, DIM, generator=rng)
    k, v = (torch.randn(HEADS, length, DIM, generator=rng) for _ in range(2))
    position, first = torch.arange(length, dtype=torch.int32).repeat(HEADS, 1), torch.zeros(HEADS, dtype=torch.int64)
    stock = q.flatten(0, 1)[None], k[None], v[None]

    def way(spans: Tensor, band: Band | None) -> tuple[float, Callable[[], Tensor]]:
        return pairs(spans, length), lambda: span_attention(q, k, v, position, spans, scale=DIM**-0.5, band=band)

    found = {"dense": (1.0, lambda: F.scaled_dot_product_attention(*stock, is_causal=True, enable_gqa=True))}
    found["dense, our kernel"] = 1.0, lambda: ours(q, k, v)
    found |= {f"dense, in {CHUNKS} chunks, {how}": (1.0, call) for how, call in chunked(q, k, v).items()}
    found["causal, in blocks"] = way(causal_spans(length, length, q.device), None)
    for name, shape in SHAPES.items():
        band = Band(first, *shape)
        found[name] = way(band_spans(length, length, band), band)
    found[SPARSE] = way(sparse_spans(length), None)
    return found


@torch.inference_mode()
def at(length: int, clock: Callable[[], float]) -> list[dict[str, Any]]:
    """All ways at one length."""
    found, best = cases(length), {}
    for _ in range(3 if length <= 8192 else 1):
        for name, (_, call) in found.items():
            begin = clock()
            call()
            best[name] = min(best.get(name, float("inf")), clock() - begin)
    return [
        {"way": name, "length": length, "ms": 1e3 * best[name], "speed": best["dense"] / best[name], "ideal": 1 / share}
        for name, (share, _) in found.items()
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="4096,8192,16384,32768")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cpu-time", action="store_true", help="processor time, for one thread on a busy machine")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prefill.json"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    clock, rows = time.process_time if given.cpu_time else time.perf_counter, []
    for length in map(int, given.lengths.split(",")):
        for row in at(length, clock):
            rows.append(row)
            print(
                f"{length:6} {row['way']:34} {row['ms']:9.1f} ms {row['speed']:6.2f} x, ideal {row['ideal']:6.2f}",
                flush=True,
            )
    result = {
        "command": f"python -P benchmarks/prefill.py --lengths {given.lengths} --threads {given.threads}"
        + " --cpu-time" * given.cpu_time,
        "machine": f"{given.threads} CPU cores, torch {torch.__version__}, Python {platform.python_version()}; "
        f"{HEADS * GROUP} query and {HEADS} KV heads of {DIM}, float32{', processor time' * given.cpu_time}",
        "columns": {"attention of the prompt": "way", "tokens": "length", "time (ms)": "ms:.0f",
                    "speed-up over dense": "speed:.2f", "ideal by pairs": "ideal:.2f"},
        "rows": rows,
    }  # fmt: skip
    given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
