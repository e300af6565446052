"""What limits a GPU's kernels, bytes or instructions: counted in the compiled code, on a machine without a GPU.

    python -P benchmarks/gpu_budget.py --out benchmarks/results/gpu_budget.json

A multiprocessor has four schedulers, each of which issues at most one instruction of a warp a cycle. While memory delivers its
share of some bytes, it can issue so many instructions and no more; a kernel that needs more of them for these bytes is
limited by them, whatever else it does well. Below 1 memory can be the limit, and how near a kernel comes only a measurement
tells. Shapes: a KV head of 128 channels and its 4 query heads; the chip is an H200.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from kvengine.kernels.gpu.ahead import compile_all

BANDWIDTH, MULTIPROCESSORS, CLOCK, SCHEDULERS = 4.3e12, 132, 1.755e9, 4
"""Of an H200: bytes a second that a copy reaches, and a clock that it holds under load."""
POSITION = 4


class Count(NamedTuple):
    """One kernel's work for 64 tokens (or bounds of 64 units)."""

    what: str
    case: str
    kernel: str
    turns: float
    """Turns of its loop; 0: it has none, and runs once."""
    bytes: float
    both: bool = False
    """Whether a turn is one of each of its two longest loops."""


def kivi(bits: int, group: int = 32) -> float:
    """Of a token: codes, ranges in float16 for every so many numbers, a position."""
    return 2 * 128 * bits / 8 + 2 * 4 * 128 / group + POSITION


COUNTS = (
    Count("full, bfloat16", "pages", "attend_kernel", 1, 64 * (512 + POSITION)),
    Count("chosen units of 16", "units of 16", "attend_kernel", 4, 64 * (512 + POSITION)),
    Count("latents, 16 heads", "latents, 16 heads", "attend_kernel", 2, 64 * (2 * 576 + POSITION)),
    Count("latents, 128 heads, in two passes", "latents, 128 heads", "attend_kernel", 4, 64 * (2 * 576 + POSITION)),
    Count("bounds of 64 units", "bounds", "score_kernel", 0, 64 * 512),
    *(Count(f"KIVI, {n} bits", f"kivi, {n} bits", "kivi_kernel", 2 if n == 8 else 1, 64 * kivi(n)) for n in (8, 4, 2)),
    Count("KIVI, 4 bits, groups of 64", "kivi, 4 bits, groups of 64", "kivi_kernel", 1, 64 * kivi(4, 64)),
    Count("KIVI, 4 bits, chosen units of 16", "kivi, 4 bits, units of 16", "kivi_kernel", 4, 64 * kivi(4)),
    Count("QuantSpec, 8 bits in nibbles", "quantspec", "kivi_kernel", 2, 64 * kivi(8, 64)),
    *(
        Count(
            f"TurboQuant, {bits} bits",
            f"turboquant, {bits} bits",
            "words_kernel",
            2,
            64 * (2 * 128 * bits / 8 + 4 + POSITION),
        )
        for bits in (4, 2)
    ),
    Count(
        "TurboQuant, 4 bits, chosen units of 16",
        "turboquant, 4 bits, units of 16",
        "words_kernel",
        2,
        64 * (128 + 4 + POSITION),
    ),
    Count(
        "ZipCache, 60 % 4 bits, 40 % 2", "zipcache, pages of 128", "mixed_kernel", 0.5,
        64 * (2 * 128 * 3.2 / 8 + 14 + POSITION), both=True,
    ),
)  # fmt: skip


def main() -> None:
    """Compile, count, write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parsed = parser.parse_args()
    compiled = {(row.case, row.kernel): row for row in compile_all(90, [count.case for count in COUNTS])}
    rows = []
    for count in COUNTS:
        found = compiled[count.case, count.kernel]
        loop = found.loop + found.second * count.both
        issued = found.warps * (loop * count.turns or found.instructions)
        room = count.bytes / (BANDWIDTH / MULTIPROCESSORS) * CLOCK * SCHEDULERS
        rows.append({"what": count.what, "bytes": round(count.bytes), "issued": round(issued), "share": issued / room})
        print(f"{count.what:32} {count.bytes:8.0f} B {issued:8.0f} instructions {issued / room:6.2f} of what fits")
    columns = {"64 tokens of": "what", "bytes": "bytes", "instructions": "issued", "of those that fit": "share:.2f"}
    machine = f"no GPU: compiled for sm_90 by Triton {triton.__version__} (torch {torch.__version__}), for an H200"
    command = "python -P benchmarks/gpu_budget.py --out benchmarks/results/gpu_budget.json"
    result = {"command": command, "machine": machine, "columns": columns, "rows": rows}
    parsed.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
