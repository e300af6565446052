"""The committed evidence: every policy on RULER and on SCBench, with the bundled model, in one to three hours of a core.

    python -P benchmarks/evaluation.py [--only ruler|scbench] [--limit N] [--collect] [--runs runs] [--results FOLDER]

Runs `kvengine eval SUITE --config benchmarks/eval_SUITE.yaml` (one that was cut off is continued: 12 contexts per task
and length, of SCBench 6 with five questions each), then writes to benchmarks/results, or another folder

    eval_SUITE.csv            every cell with every figure
    eval_SUITE[_MODE].json    the table that docs/evaluation.md shows
    eval_*.png                score against cost, score by turn

`--limit 1 --runs TRIAL --results TRIAL` tries it out, `--collect` only collects from runs that are there. `make docs` then
fills in the tables.
"""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from PIL import Image

from kvengine.evals import plots, report, tables
from kvengine.evals.aggregate import CellResult

ROOT = Path(__file__).parent.parent
SUITES = ("ruler", "scbench")
SHOWS = ("score against cost", "score by turn")
SHORT = {"multi-turn": "turns", "multi-request": "requests"}


def run(suite: str, folder: Path, limit: int | None) -> None:
    """Do the run, or what is missing of it."""
    words = ["eval", suite, "--config", f"benchmarks/eval_{suite}.yaml", "--out", str(folder)]
    words += [] if limit is None else ["--limit", str(limit)]
    command = [sys.executable, "-P", "-c", "from kvengine.cli import main; main()", *words]
    subprocess.run(command, cwd=ROOT, check=True)


def line(policy: str, cells: list[CellResult], mean: float | None) -> dict[str, Any]:
    """A policy's row of a table, over its cells; what it costs at the longest length."""
    found: dict[str, Any] = {"policy": f"`{policy}`", "mean": mean}
    for cell in cells:
        times = 100.0 if cell.score else 0.0
        found[f"{cell.task}/{cell.length}"] = interval(cell, times)
    ends = [(first, later) for cell in cells for first, later in [first_and_later(cell)] if first is not None]
    for name, values in zip(("first", "later"), zip(*ends, strict=True), strict=False):
        found[name] = sum(values) / len(values)
    longest = [cell for cell in cells if cell.score and cell.length == max(cell.length for cell in cells)]
    for name, factor in (("bytes_held", 1024), ("read_per_token", 1024), ("ttft", 0.001), ("tokens_per_s", 1)):
        value = tables.cost(longest, name)
        found[name] = None if value is None else value / factor
    return found


def interval(cell: CellResult, times: float) -> str:
    """`92 (65–99)`, with a dagger where the task tells nothing."""
    if cell.score is None:
        return cell.status
    mean, low, high = (round(times * number) for number in (cell.score.mean, cell.score.low, cell.score.high))
    return f"{mean} ({low}–{high})" + (" †" if cell.flag == "not discriminative" else "")


def first_and_later(cell: CellResult) -> tuple[float | None, float | None]:
    """Percent right on the first turn, and on the later ones."""
    if len(cell.turns) < 2:
        return None, None
    return 100 * cell.turns[0], 100 * sum(cell.turns[1:]) / (len(cell.turns) - 1)


def table(cells: list[CellResult], manifest: dict[str, Any], command: str) -> dict[str, Any]:
    """One mode of a run as docs/build.py wants it, the best first; without tasks that tell nothing."""
    told = {cell.place for cell in cells if cell.score and cell.role == "policy"}
    floor = [cell for cell in cells if cell.score and cell.place not in told]
    cells = [cell for cell in cells if cell.place in told]
    places = tables.unique((cell.task, cell.length) for cell in cells)
    lengths = tables.unique(length for _, length in places)
    by_length = [tables.policy_means([c for c in cells if c.length == n], usable_only=True) for n in lengths]
    policies = tables.unique(cell.policy for cell in cells)
    means = {p: sum(m[p] for m in by_length) / len(by_length) for p in policies if all(p in m for m in by_length)}
    rows = [line(policy, [cell for cell in cells if cell.policy == policy], means.get(policy)) for policy in policies]
    turns = any(len(cell.turns) > 1 for cell in cells)
    samples = [cell.score.clusters for cell in cells if cell.score]
    columns = {"policy": "policy", "mean": "mean:.0f"}
    columns |= {f"{task}, {length}": f"{task}/{length}" for task, length in places}
    columns |= {"first turn": "first:.0f", "later turns": "later:.0f"} if turns else {}
    columns |= {"held (KiB)": "bytes_held:.0f", "read per token (KiB)": "read_per_token:.0f"}
    columns |= {"first token (ms)": "ttft:.0f", "tokens/s": "tokens_per_s:.0f"}
    versions = ", ".join(f"{name} {manifest['versions'][name]}" for name in ("torch", "transformers"))
    contexts = f"{min(samples)}" if len(set(samples)) == 1 else f"{min(samples)} to {max(samples)}"
    return {
        "command": command,
        "machine": f"{manifest['device']}, {manifest['threads']} thread, {versions}; model {manifest['model']}, "
        f"{contexts} contexts per task and length; percent right with 95 % interval; mean over tasks that tell "
        f"policies apart; costs at the longest length{not_asked(floor)}",
        "columns": columns,
        "rows": sorted(rows, key=lambda row: -1.0 if row["mean"] is None else -row["mean"]),
    }


def not_asked(floor: list[CellResult]) -> str:
    """The tasks that the model cannot do with its whole cache, and how few samples said so."""
    if not floor:
        return ""
    shown = [f"{c.task} at {c.length}: {100 * c.score.mean:.0f} % of {c.score.n}" for c in floor if c.score]
    return f"; not asked of policies, as the full cache hardly beats guessing ({', '.join(shown)})"


def picture(figure: Figure, file: Path) -> None:
    """A small PNG: 128 colours."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=80)
    Image.open(out).convert("RGB").quantize(128).save(file, optimize=True)


def collect(suite: str, folder: Path, results: Path) -> None:
    """From a run folder to the files that are committed."""
    results.mkdir(parents=True, exist_ok=True)
    cells, (_, manifest) = report.write(folder), report.read(folder)
    shutil.copy(folder / "cells.csv", results / f"eval_{suite}.csv")
    modes = tables.unique(cell.mode for cell in cells)
    for mode in modes:
        mine = [cell for cell in cells if cell.mode == mode and cell.status != "too short"]
        name = f"eval_{suite}" + (f"_{SHORT[mode]}" if len(modes) > 1 else "")
        longest = max(cell.length for cell in mine)
        told = {cell.place for cell in mine if cell.score and cell.role == "policy"}
        drawn = {name: plots.pareto([cell for cell in mine if cell.length == longest])}
        if (turns := plots.by_turn([cell for cell in mine if cell.place in told])) is not None and mode == "multi-turn":
            drawn[f"{name}_by_turn"] = turns
        for each, figure in drawn.items():
            picture(figure, results / f"{each}.png")
        made = table(mine, manifest, "python -P benchmarks/evaluation.py")
        about = f"{suite}, {longest} tokens, {mode}"
        made["pictures"] = {f"{about}: {SHOWS[each.endswith('_by_turn')]}": f"{each}.png" for each in drawn}
        (results / f"{name}.json").write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given.add_argument("--only", choices=SUITES)
    given.add_argument("--limit", type=int, help="only so many samples of each cell: to try it out")
    given.add_argument("--collect", action="store_true", help="run nothing")
    given.add_argument("--runs", type=Path, default=ROOT / "runs", help="folder of the runs")
    given.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks/results", help="folder of tables and pictures"
    )
    args = given.parse_args()
    for suite in [args.only] if args.only else SUITES:
        folder = args.runs.resolve() / f"eval_{suite}"
        if not args.collect:
            run(suite, folder, args.limit)
        collect(suite, folder, args.results)


if __name__ == "__main__":
    main()
