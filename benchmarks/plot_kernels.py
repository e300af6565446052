"""Draw what `benchmarks/kernels.py` measured.

    python -P benchmarks/plot_kernels.py benchmarks/results/kernels_cpu.json kernels_cpu.png

Left: bandwidth against length, as a share of a copy's. Right: speed-up over the dense cache beside the ratio of bytes.
One figure for the last dtype and batch of the file.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt


def plot(rows: list[SimpleNamespace], file: Path) -> None:
    """Draw the rows of the last dtype and batch."""
    last = rows[-1]
    rows = [row for row in rows if (row.dtype, row.batch) == (last.dtype, last.batch) and row.case != "copy"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 5), layout="constrained")
    left.set_prop_cycle(color=plt.colormaps["tab20"].colors)
    for case in dict.fromkeys(row.case for row in rows):
        line = [row for row in rows if row.case == case]
        left.plot([r.length for r in line], [r.of_copy for r in line], marker="o", label=case)
    left.set(
        xscale="log",
        xlabel="tokens",
        ylabel="bytes read / time, share of a copy's",
        title=f"{last.dtype}, batch {last.batch}",
    )
    left.axhline(1, color="grey", linewidth=0.8)
    left.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    longest = [row for row in rows if row.length == last.length]
    right.barh([r.case for r in longest], [r.over_full for r in longest], label="measured")
    right.plot([r.byte_ratio for r in longest], [r.case for r in longest], "k|", markersize=14, label="by bytes")
    right.set(xlabel="speed-up over our full decode", title=f"{last.length} tokens")
    right.legend()
    figure.savefig(file, dpi=110)


def main() -> None:
    """Read the file, write the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("figure", type=Path)
    args = parser.parse_args()
    plot([SimpleNamespace(**row) for row in json.loads(args.results.read_text())["rows"]], args.figure)


if __name__ == "__main__":
    main()
