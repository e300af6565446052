"""What limits a GPU's kernels, bytes or instructions: counted in the compiled code, on a machine without a GPU.

    python -P benchmarks/gpu_budget.py --out benchmarks/results/gpu_budget.json

A multiprocessor has four schedulers, each of which issues at most one instruction of a warp a cycle, and units behind them that
take one less often (`kvengine.kernels.gpu.pipes`, which says what is counted how). While memory delivers its share of some bytes,
each unit has so many cycles and no more; a kernel that needs more of one for these bytes is limited by it, whatever else it
does well. Below 1 everywhere memory can be the limit, and how near a kernel comes only a measurement tells. Shapes: a KV head of
128 channels and its 4 query heads; the chip is an H200.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from kvengine.kernels.gpu.ahead import cases, only_compiling
from kvengine.kernels.gpu.pipes import UNITS, taken
from kvengine.kernels.gpu.schedule import instructions
from kvengine.kernels.gpu.used import dump, inner_loops

BANDWIDTH, MULTIPROCESSORS, CLOCK, QUARTERS = 4.3e12, 132, 1.755e9, 4
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
    *(
        Count(f"KIVI, {n} bits, pages of 32", f"kivi, {n} bits, pages of 32", "kivi_kernel", turns, 64 * kivi(n))
        for n, turns in ((4, 1), (2, 2))
    ),
    *(
        Count(f"KIVI, 4 bits, groups of {n}", f"kivi, 4 bits, groups of {n}", "kivi_kernel", 1, 64 * kivi(4, n))
        for n in (64, 128)
    ),
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


def counted(count: Count) -> dict[str, Any]:
    """Instructions, and of each unit the share of its cycles that they take while memory delivers the bytes."""
    with only_compiling(90) as compiled:
        cases()[count.case]()
    (kernel,) = [kernel for kernel in compiled if kernel.name == count.kernel]
    assembly = dump(kernel.asm["cubin"], "nvdisasm", "--print-code", "--print-instruction-encoding")
    lines, (_, loops) = [x.text for x in instructions(assembly)], inner_loops(assembly)
    parts = [lines[start:end] for start, end in loops[: 1 + count.both]] if count.turns else [lines]
    each = taken(text for part in parts for text in part)
    times = kernel.metadata.num_warps * (count.turns or 1)
    room = count.bytes / (BANDWIDTH / MULTIPROCESSORS) * CLOCK * QUARTERS
    shares = {unit: times * each[unit] / room for unit in UNITS}
    most = max(UNITS, key=lambda unit: shares[unit])
    limit = most if shares[most] > 1 else f"memory, then {most}"
    return {
        "what": count.what,
        "bytes": round(count.bytes),
        "issued": round(times * each["issue"]),
        "limit": limit,
    } | shares


def main() -> None:
    """Compile, count, write a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parsed = parser.parse_args()
    rows = []
    for count in COUNTS:
        row = counted(count)
        rows.append(row)
        shares = " ".join(f"{unit} {row[unit]:4.2f}" for unit in UNITS)
        print(f"{count.what:38} {count.bytes:6.0f} B {row['issued']:6} instructions  {shares}  {row['limit']}")
    columns = {"64 tokens of": "what", "bytes": "bytes", "instructions": "issued"}
    columns |= {unit: f"{unit}:.2f" for unit in UNITS} | {"limit": "limit"}
    machine = (
        f"no GPU: compiled for sm_90 by Triton {triton.__version__} (torch {torch.__version__}), counted for an H200"
    )
    command = "python -P benchmarks/gpu_budget.py --out benchmarks/results/gpu_budget.json"
    result = {"command": command, "machine": machine, "columns": columns, "rows": rows}
    parsed.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
