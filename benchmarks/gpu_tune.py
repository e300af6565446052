"""How many programs, warps and stages the decode kernels should have: tried on the GPU that is there.

    python -P benchmarks/gpu_tune.py --out benchmarks/results/gpu_tune.json
    python -P benchmarks/gpu_tune.py --dry --out FILE       no GPU: some of it is compiled, for sm_90, and nothing timed

What is in use was chosen by counting (`gpu_budget.py`), not by measuring: each case is timed as it is launched now, and with
other settings. All are CUDA graphs over a cache far larger than the last-level cache, medians of 15; only the bounds of one
sequence fit into that, and are read from there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton

from kvengine.kernels import codecs, turboquant
from kvengine.kernels.gpu import stream
from kvengine.kernels.gpu.ahead import only_compiling
from kvengine.kernels.page_scores import triton as page_scores
from kvengine.kernels.paged_attention import kivi, mixed, words
from kvengine.kernels.paged_attention import triton as dense

HEADS, GROUP, DIM, PAGE = 8, 4, 128, 64
TRIED = {  # programs for each multiprocessor, stages, warps
    "full": (dense, "attend_kernel", ((2, 5, 4), *itertools.product((2, 3, 4), (3, 5, 7), (4, 8)))),
    "KIVI, 4 bits": (kivi, "kivi_kernel", ((8, 3, 1), *itertools.product((8, 12, 16), (2, 3, 4, 5), (1, 2)))),
    "TurboQuant, 4 bits": (words, "words_kernel", ((12, 3, 1), *itertools.product((8, 12), (2, 5), (1, 2)))),
    "ZipCache": (mixed, "mixed_kernel", ((10, 3, 1), *itertools.product((8, 10, 12), (2, 3, 4), (1,)))),
    "Quest, bounds": (page_scores, "score_kernel", ((4, 3, 2), *itertools.product((3, 4, 6, 8), (2, 3, 4), (1, 2, 4)))),
    "Quest, 1 of 64 units": (page_scores, "top_kernel", tuple((1, 3, warps) for warps in (8, 4, 16, 32))),
}
UNIT = 16


class Launcher:
    """A kernel with other options."""

    def __init__(self, kernel: Any, **options: int) -> None:
        self.kernel, self.options = kernel, options

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        launch = self.kernel[grid]
        return lambda *args, **kwargs: launch(*args, **(kwargs | self.options))


@contextmanager
def setting(module: Any, name: str, each: int, stages: int, warps: int) -> Iterator[None]:
    """The kernel with these, for a while."""
    kernel, programs = getattr(module, name), stream.programs
    options = {"num_stages": stages, "num_warps": warps}
    if module in (kivi, mixed, words):  # compiled for as many registers as leave room for so many programs
        options["maxnreg"] = min(248, 65536 // (32 * each * warps) // 8 * 8)
    setattr(module, name, Launcher(kernel, **options))
    stream.programs = lambda device, _: programs(device, each)
    try:
        yield
    finally:
        setattr(module, name, kernel)
        stream.programs = programs


def call(what: str, batch: int, length: int, device: str) -> Callable[[], object]:
    """One decode step's attention over all pages, or what it does before."""
    if what.startswith("Quest"):
        return choosing(what, batch * HEADS, max(length // UNIT, 64), device)
    page = 128 if what == "ZipCache" else PAGE  # as the policy has it
    rows, pages = batch * HEADS, batch * HEADS * length // page
    q = torch.randn(rows, GROUP, 1, DIM, device=device).bfloat16()
    table = torch.arange(pages, dtype=torch.int32, device=device).view(rows, -1)
    position = torch.arange(length, dtype=torch.int32, device=device).repeat(rows, 1)
    x = torch.randn(pages, page, DIM, device=device).bfloat16()
    if what == "full":
        fields, codec = {"k": x, "v": x.clone()}, "dense"
    elif what.startswith("TurboQuant"):
        code, scale = turboquant.encode(x, 4, "unbiased", torch.float16)
        fields, codec = {"k_code": code, "k_scale": scale}, "turboquant"
        fields |= {"v_code": code.clone(), "v_scale": scale.clone()}  # the same memory would be read once for both
    elif what == "ZipCache":
        salient = torch.rand(pages, page, device=device).argsort(1) < round(0.6 * page)
        fields, codec = codecs.encode_zipcache(x, x, (4, 2), salient), "zipcache"
    else:  # ranges as the policy has them
        fields, codec = codecs.encode_kivi(x, x, 4, 32), "kivi"
    rest = (None, page, codec, DIM, None, None, None, None, False)  # all pages, no window, softcap, sinks or scores
    return lambda: dense.paged_attention(q, fields, table, position, page, 0.1, *rest)


def choosing(what: str, rows: int, units: int, device: str) -> Callable[[], object]:
    """The two halves of a choice of units."""
    bounds = [torch.randn(rows, units, DIM, device=device).bfloat16() for _ in range(2)]
    alive, q = torch.ones(rows, units, dtype=torch.bool, device=device), torch.randn(rows, GROUP, DIM, device=device)
    if what == "Quest, bounds":
        return lambda: page_scores.page_scores(q.bfloat16(), *bounds, alive, "max")
    scores = torch.randn(rows, units, device=device)
    return lambda: page_scores.top_units(scores, units // 64)


def timed(step: Callable[[], object], device: str) -> float:
    """Milliseconds."""
    if device == "cpu":
        with only_compiling(90):
            step()
        return 0.0
    step()
    sys.path.append(str(Path(__file__).parent))
    from peers import between_events, captured

    replay = captured(step)
    return statistics.median([between_events(replay) for _ in range(17)][2:])


def main() -> None:
    """Try all, write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--dry", action="store_true", help="without a GPU: compile some, time nothing")
    parsed = parser.parse_args()
    device = "cpu" if parsed.dry else "cuda"
    rows: list[dict[str, Any]] = []
    for what, (module, name, settings) in TRIED.items():
        for batch, length in [(1, 128)] if parsed.dry else [(1, 131072), (16, 32768)]:
            case = {"what": what, "batch": batch, "tokens": length}
            try:
                step = call(what, batch, length, device)
                used = timed(step, device)
            except Exception as error:  # the others go on
                left_out(case, error)
                continue
            for each, stages, warps in settings[:2] if parsed.dry else settings:
                row = case | {"each": each, "stages": stages, "warps": warps}
                try:
                    with setting(module, name, each, stages, warps):
                        row["ms"] = timed(step, device)
                except Exception as error:  # more than the chip has, for one
                    left_out(row, error)
                    continue
                rows.append(row | {"gain": used / row["ms"] if row["ms"] else None})
                print(rows[-1], flush=True)
            save(rows, parsed.out, device)


def left_out(what: dict[str, Any], error: Exception) -> None:
    print(f"left out {what}: {type(error).__name__}: {str(error)[:200]}", flush=True)


def save(rows: list[dict[str, Any]], out: Path, device: str) -> None:
    """The best of each kernel and batch, and all."""
    best: dict[tuple[str, int], dict[str, Any]] = {}
    for row in rows:
        key = row["what"], row["batch"]
        best[key] = min(best.get(key, row), row, key=lambda row: row["ms"])
    columns = {"kernel": "what", "batch": "batch", "tokens": "tokens", "programs": "each", "stages": "stages",
               "warps": "warps", "ms": "ms:.3f", "over what is used": "gain:.2f"}  # fmt: skip
    chip = torch.cuda.get_device_name() if device == "cuda" else "no GPU"
    machine = f"{chip}, torch {torch.__version__}, Triton {triton.__version__}"
    command = "python -P benchmarks/gpu_tune.py --out benchmarks/results/gpu_tune.json"
    result = {"command": command, "machine": machine, "columns": columns, "rows": list(best.values()), "all": rows}
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
