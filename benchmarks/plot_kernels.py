"""Draw what `benchmarks/kernels.py` measured.

    python -P benchmarks/plot_kernels.py benchmarks/results/kernels_cpu.json kernels_cpu.png

Left: bytes read for a token over its time, against length; the grey line is what a copy reads and writes. Right: speed-up
over the dense cache at the longest length, beside the ratio of bytes. The file's last dtype, a row for each batch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes


def plot(rows: list[Any], file: Path) -> None:
    """Draw the rows of the last dtype, which have the attributes of `kernels.Row`."""
    rows = sorted((row for row in rows if row.dtype == rows[-1].dtype), key=lambda row: (row.batch, row.length))
    batches = list(dict.fromkeys(row.batch for row in rows))
    shape = {"figsize": (16, 6 * len(batches)), "layout": "constrained", "squeeze": False}
    figure, pairs = plt.subplots(len(batches), 2, **shape)
    for batch, (left, right) in zip(batches, pairs, strict=True):
        one([row for row in rows if row.batch == batch], left, right)
    figure.savefig(file, dpi=90 if len(batches) == 1 else 70)


def one(rows: list[Any], left: Axes, right: Axes) -> None:
    """Draw one batch, its lengths in order."""
    last = rows[-1]
    copies = [row for row in rows if row.case == "copy"]
    left.plot([r.length for r in copies], [2 * r.gb_per_s for r in copies], color="grey", linewidth=3, alpha=0.5)
    cases = [case for case in dict.fromkeys(row.case for row in rows) if case != "copy"]
    for number, case in enumerate(cases):
        line = [row for row in rows if row.case == case]
        style = {"color": plt.colormaps["tab20"](number % 20), "marker": "o^s"[number // 20], "markersize": 4}
        left.plot([r.length for r in line], [r.gb_per_s for r in line], label=case, **style)
    lengths = list(dict.fromkeys(row.length for row in rows))
    left.set(xscale="log", yscale="log", xlabel="tokens", ylabel="GB/s", title=f"{last.dtype}, batch {last.batch}")
    left.set_xticks(lengths, [str(length) for length in lengths], fontsize=8)
    left.minorticks_off()
    left.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    longest = [row for row in rows if row.length == last.length and row.case != "copy"][::-1]
    bars = right.barh([r.case for r in longest], [r.over_full for r in longest], label="measured", color="tab:blue")
    right.bar_label(bars, fmt=" %.1f", fontsize=7)
    right.plot([r.byte_ratio for r in longest], [r.case for r in longest], "k|", markersize=12, label="by bytes")
    right.axvline(1, color="grey", linewidth=0.8)
    right.set(xscale="log", xlabel="speed-up over our full decode", title=f"{last.length} tokens, batch {last.batch}")
    right.tick_params(axis="y", labelsize=8)
    right.legend(loc="lower right")


def main() -> None:
    """Read the file, write the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("figure", type=Path)
    args = parser.parse_args()
    plot([SimpleNamespace(**row) for row in json.loads(args.results.read_text())["rows"]], args.figure)


if __name__ == "__main__":
    main()
