"""Every method at four budgets on needle retrieval: the table and the pictures of docs/quality.md.

    OMP_NUM_THREADS=1 python -P benchmarks/quality.py [--questions 24] [--length 4096] [--out RUN] [--minutes 30]

Query-agnostic: the context is compressed before its questions are known, each is then read and answered on a copy of the
cache. Query-aware: context and question are one prompt. Contexts are RULER's; of those with several needles four are
asked for, each question as if it were the only one, and intervals are drawn over contexts. `full` is the ceiling,
`oracle_topk` reads the tokens with the most attention of an exact computation. A context is read once for all policies
and questions of equal size go in lockstep (`kvengine.evals.together`). The work goes in rounds, so many questions of every
task under every policy and placement; a round that would end after `--minutes` is not begun, so all cells have the same
number. What is done is kept in RUN/rows.jsonl; run again, it goes on there.

Writes quality.json, quality_held.png, quality_read.png and README's part of it (front.json, front.png) to benchmarks/results
(`--results`), and RUN/report.html.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvengine.command_errors import resumable
from kvengine.evals import drive, manifest, report, together
from kvengine.evals.aggregate import CellResult
from kvengine.evals.claim import claimed
from kvengine.evals.config import RunConfig
from kvengine.evals.plots import frontier, style
from kvengine.evals.policies import everything
from kvengine.evals.progress import Silent
from kvengine.evals.records import ROWS
from kvengine.evals.runner import Cell
from kvengine.evals.tables import cost, unique

BUDGETS = (0.5, 0.25, 0.125, 0.0625)
TASKS = "quiz_single,quiz_multikey_1,quiz_multikey_2"
MODES = ("multi-request", "multi-turn")
WHEN = {"multi-request": "after", "multi-turn": "inside"}
TURNS = tuple(f"quest(budget={budget},page={page},reduce='each')" for budget in BUDGETS[2:] for page in (16, 4))
MEANS = tuple(f"h2o(budget={budget},recent=0,average=True)" for budget in BUDGETS[2:])
SHARED = tuple(f"d2o(budget={budget},shares='measured')" for budget in BUDGETS[:2])
FURTHER = (
    *(
        "kivi(bits=2)",
        "turboquant(values=2)",
        "turboquant(bits=3)",
        "turboquant(bits=2)",
        "duo(sparsity=0.75)",
        "duo(pattern='tiny')",
        "lowrank(rank=16)",
    ),
    *("ashape(last=128)", "xattention(last=0)", "xattention(threshold=0.8)", "vertical_slash(slash=512)"),
    *("quest(budget=0.125)+kivi(bits=4)", *TURNS, *MEANS, *SHARED),
)
# What README shows: a sixteenth of the tokens, the question asked afterwards.
FRONT = re.compile(r"full|kivi|turboquant(\(values=2\))?|zipcache|(?!duo|ashape)\w+\([^()]*=0\.0625[^()]*\)")
ELSEWHERE = ("host",)  # where bytes live changes no score


def policies() -> tuple[str, ...]:
    """Every method of the tree at every budget, some at other settings, and one stack of several axes."""
    found = [policy for budget in BUDGETS for policy in everything(budget) if policy not in ELSEWHERE]
    return tuple(dict.fromkeys([*found, *FURTHER]))


class Log(Silent):
    """Prints what is done. Observer of the runner."""

    def __init__(self) -> None:
        self.at, self.rows = "", 0

    def refused(self, cell: Cell, row: Any) -> None:
        print(f"{cell}: {row['status']}: {row['message']}", flush=True)

    def sample(self, cell: Cell, rows: list[Any]) -> None:
        at, self.rows = f"{cell.task.name} {cell.mode} context {rows[0]['sample']}", self.rows + len(rows)
        if at != self.at:
            print(f"{at}; {self.rows} answers so far", flush=True)
        self.at = at


def percent(cell: CellResult) -> str:
    assert cell.score is not None
    return f"{100 * cell.score.mean:.0f} ({100 * cell.score.low:.0f}–{100 * cell.score.high:.0f})"


def rows(found: list[CellResult]) -> list[dict[str, Any]]:
    """One row per policy; a cell that cannot be has its reason."""
    made = []
    for policy in unique(cell.policy for cell in found):
        mine = [cell for cell in found if cell.policy == policy]
        scored = [cell for cell in mine if cell.score]
        row: dict[str, Any] = {"policy": f"`{policy}`", "stack": mine[0].stack, "role": mine[0].role}
        for cell in mine:
            name = f"{cell.task.removeprefix('quiz_')}, {WHEN[cell.mode]}"
            row[name] = percent(cell) if cell.score else cell.status
            row |= {f"{name}: score": cell.score.mean, f"{name}: n": cell.score.n} if cell.score else {}
        for mode, when in WHEN.items():
            means = [cell.score.mean for cell in scored if cell.mode == mode and cell.score]
            row[f"mean_{when}"] = 100 * sum(means) / len(means) if means else None
        agnostic = [cell for cell in scored if cell.mode == MODES[0]] or scored
        held, read = cost(agnostic, "bytes_held"), cost(agnostic, "read_per_token")
        made.append({**row, "held_MB": held and held / 1e6, "read_MB": read and read / 1e6})
    return made


def draw(made: list[dict[str, Any]], cost: str, label: str) -> Figure:
    """Score against a cost, a line of pictures for each kind of policy. What differs in its budget alone is joined, `full` and
    what nothing beats (dashed) are in all of them."""
    kinds = by_kind(made)
    figure = Figure(figsize=(15, 4.4 * len(kinds)), layout="constrained")
    pairs = figure.subplots(len(kinds), 2, sharex=True, sharey=True, squeeze=False)
    for (name, mine), axes in zip(kinds.items(), pairs, strict=True):
        for ax, when in zip(axes, WHEN.values(), strict=True):
            panel(ax, made, mine, cost, f"mean_{when}")
            ax.set_title(f"{name}: the question {when} the compressed prompt")
        axes[1].legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    for ax in pairs[-1]:
        ax.set_xlabel(label)
    for ax in pairs[:, 0]:
        ax.set_ylabel("mean score (%)")
    return figure


def draw_front(made: list[dict[str, Any]]) -> Figure:
    """README's picture: the three kinds with many methods, the question after, against bytes read."""
    kinds = list(by_kind(made).items())[:3]
    figure = Figure(figsize=(15, 6.6), layout="constrained")
    axes = figure.subplots(1, len(kinds), sharex=True, sharey=True, squeeze=False)[0]
    for (name, mine), ax in zip(kinds, axes, strict=True):
        panel(ax, made, mine, "read_MB", "mean_after")
        ax.set(title=name, xlabel="bytes read per token (MB)")
        ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)
    figure.axes[0].set_ylabel("needles found (%), the question after the compressed prompt")
    return figure


def by_kind(made: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    sys.path.append(str(Path(__file__).parent))  # behind everything, for the file beside this one
    from kinds import KINDS, kind

    found = {name: [row for row in made if kind(row["stack"]) == name and row["policy"] != "`full`"] for name in KINDS}
    return {name: mine for name, mine in found.items() if mine}


def panel(ax: Axes, made: list[dict[str, Any]], mine: list[dict[str, Any]], cost: str, score: str) -> None:
    """`mine` as a line for each method and setting, over its budgets; of all that is made, `full` and what nothing beats."""
    from kinds import series

    for at, name in enumerate(unique(series(row["policy"]) for row in mine)):
        found = points([row for row in mine if series(row["policy"]) == name], cost, score)
        ax.plot(
            [x for x, _ in found],
            [y for _, y in found],
            label=name,
            markersize=5,
            linewidth=0.9,
            alpha=0.85,
            **style(at),
        )
    best = frontier(points([row for row in made if row["role"] != "oracle"], cost, score))
    ax.plot([x for x, _ in best], [y for _, y in best], color="black", linestyle="--", linewidth=1, zorder=0)
    whole = points([row for row in made if row["policy"] == "`full`"], cost, score)
    ax.plot([x for x, _ in whole], [y for _, y in whole], "k*", markersize=12, label="full")
    ax.set(xscale="log", ylim=(-3, 103))
    ax.grid(alpha=0.3)


def points(made: list[dict[str, Any]], cost: str, score: str) -> list[tuple[float, float]]:
    """Cost and score of what has both, the cheapest first."""
    return sorted((row[cost], row[score]) for row in made if row[cost] and row[score] is not None)


def beside(made: list[dict[str, Any]], machine: str, results: Path) -> list[dict[str, Any]]:
    """These rows, and the others of the result that is there, which must have been asked the same."""
    there = json.loads((results / "quality.json").read_text(encoding="utf-8"))
    if there["machine"] != machine:
        raise SystemExit(f"--add: the result that is there is of another run:\n{there['machine']}\n{machine}")
    new = {row["policy"] for row in made}
    return [row for row in there["rows"] if row["policy"] not in new] + made


def summarise(given: argparse.Namespace, found: list[CellResult]) -> None:
    made = rows(found)
    tasks = unique(cell.task.removeprefix("quiz_") for cell in found)
    n = sorted({cell.score.n for cell in found if cell.score})
    result: dict[str, Any] = {
        "command": f"python -P benchmarks/quality.py --questions {given.questions} --length {given.length}",
        "machine": f"the {given.model} model, {given.length} tokens, {'–'.join(map(str, sorted({n[0], n[-1]})))} questions per "
        f"cell, seed {given.seed}; CPU, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}; percent right with 95 % interval, the question after (agnostic) or "
        "inside (aware) the compressed prompt",
        "columns": {
            "policy": "policy",
            **{f"{task}, {when}": f"{task}, {when}" for when in WHEN.values() for task in tasks},
            "mean, after": "mean_after:.0f",
            "mean, inside": "mean_inside:.0f",
            "held (MB)": "held_MB:.2f",
            "read per token (MB)": "read_MB:.2f",
        },
        "pictures": {
            "Score against bytes held": "quality_held.png",
            "Score against bytes read per token": "quality_read.png",
        },
    }
    made = beside(made, result["machine"], given.results) if given.add else made
    result["rows"] = sorted(
        made, key=lambda r: (r["policy"].partition("(")[0], -round(r["held_MB"] or 0, 2), -(r["read_MB"] or 0))
    )
    given.results.mkdir(parents=True, exist_ok=True)
    for name, table in (("quality", result), ("front", front(result))):
        text = json.dumps(table, indent=1, ensure_ascii=False) + "\n"
        (given.results / f"{name}.json").write_text(text, encoding="utf-8")
    if not by_kind(made):
        print("no picture is drawn: the full cache alone was measured")
        return
    for name, label in (("held", "bytes held (MB)"), ("read", "bytes read per token (MB)")):
        draw(made, f"{name}_MB", label).savefig(given.results / f"quality_{name}.png", dpi=75)
    draw_front(made).savefig(given.results / "front.png", dpi=75)


def front(result: dict[str, Any]) -> dict[str, Any]:
    """The rows of README's table, the best first."""
    rows = [
        row for row in result["rows"] if FRONT.fullmatch(row["policy"].strip("`")) and row["mean_after"] is not None
    ]
    heads = ("policy", "held (MB)", "read per token (MB)")
    columns = {name: key for name, key in result["columns"].items() if name in heads or name.endswith(", after")}
    return {
        "command": result["command"],
        "machine": result["machine"].replace("or inside (aware) ", "").replace("(agnostic) ", ""),
        "columns": columns,
        "rows": sorted(rows, key=lambda row: -row["mean_after"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--questions", type=int, default=24)
    parser.add_argument("--round", type=int, default=12, help="questions of each task at a time")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--policies", help="instead of every method; separated by semicolons")
    parser.add_argument("--add", action="store_true", help="put these rows among those of the result that is there")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--out", type=Path, default=Path("runs/quality"), help="folder of the run")
    parser.add_argument(
        "--results", type=Path, default=Path("benchmarks/results"), help="folder of tables and pictures"
    )
    given = parser.parse_args()
    config = RunConfig(
        suite="quiz", out=given.out, model=given.model, dtype="float32", tasks=given.tasks, seed=given.seed,
        policies=tuple(given.policies.split(";")) if given.policies else policies(), lengths=(given.length,),
        samples=given.questions, modes=MODES, shared=True, batch=given.round,
    )  # fmt: skip
    with resumable(given.out / ROWS), claimed(given.out):
        run = drive.prepare(config)
        manifest.write(given.out / "manifest.json", run)
        end = time.monotonic() + 60 * given.minutes
        together.execute(run, Log(), end=end, questions=given.questions, timed=False)
        manifest.write(given.out / "manifest.json", run)
        summarise(given, report.write(given.out))


if __name__ == "__main__":
    main()
