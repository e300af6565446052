"""The first table of the README, from a finished run of `kvengine eval ruler`.

    kvengine eval ruler --model bundled --policies POLICIES --lengths 4096 --samples 20 --mode multi-request --out RUN
    python -P benchmarks/ruler_front.py RUN [--out benchmarks/results/ruler.json]

One row per policy: the score of each task in percent, with its 95 % interval, and what is held and read.
"""

from __future__ import annotations

import argparse
import csv
import json
import platform
from pathlib import Path
from typing import Any

import torch
import transformers


def percent(cell: dict[str, str]) -> str:
    score, low, high = (100 * float(cell[name]) for name in ("score", "low", "high"))
    return f"{score:.0f} ({low:.0f}–{high:.0f})"


def row(policy: str, cells: list[dict[str, str]]) -> dict[str, Any]:
    """One policy's cells, one per task."""
    done = [cell for cell in cells if cell["status"] == "ok"]
    scores = {cell["task"]: percent(cell) for cell in done}
    mean = {name: sum(float(c[name]) for c in done) / len(done) for name in ("score", "bytes_held", "read_per_token")}
    return {
        "policy": f"`{policy}`",
        **scores,
        "mean": 100 * mean["score"],
        "held_MB": mean["bytes_held"] / 1e6,
        "read_MB": mean["read_per_token"] / 1e6,
        "n": int(float(done[0]["n"])),
        "spelled": done[0]["stack"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ruler.json"))
    parser.add_argument("--command", default="", help="the command that made the run")
    given = parser.parse_args()
    with (given.run / "cells.csv").open(encoding="utf-8") as file:
        cells = list(csv.DictReader(file))
    tasks = list(dict.fromkeys(cell["task"] for cell in cells))
    policies = list(dict.fromkeys(cell["policy"] for cell in cells))
    rows = [row(p, [c for c in cells if c["policy"] == p]) for p in policies]
    lengths = ", ".join(dict.fromkeys(cell["length"] for cell in cells))
    result = {
        "command": given.command or "kvengine eval ruler; python -P benchmarks/ruler_front.py RUN",
        "machine": f"bundled model, {lengths} tokens, {rows[0]['n']} contexts per task, the question asked after the "
        f"context was compressed; percent right with 95 % interval; CPU, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, Python {platform.python_version()}",
        "columns": {
            "policy": "policy",
            **{task: task for task in tasks},
            "mean": "mean:.0f",
            "held (MB)": "held_MB:.2f",
            "read per token (MB)": "read_MB:.2f",
        },
        "rows": sorted(rows, key=lambda r: -r["mean"]),
    }
    given.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
