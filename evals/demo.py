"""The demonstration: every policy on the bundled model, in minutes, with a table and a report.

Samples are done in rounds, one of every cell at a time, until the time is over: a slow machine gets fewer samples, not
fewer policies. Running it again goes on where it stopped.
"""

from __future__ import annotations

import time
from math import inf
from pathlib import Path

from rich.console import Console

from kvengine.errors import EvaluationError
from kvengine.evals import drive, manifest, report, tables
from kvengine.evals.claim import claimed
from kvengine.evals.config import RunConfig
from kvengine.evals.drive import rounds
from kvengine.evals.progress import Bar

TASKS = "niah_single_2,niah_multikey_1"
TOGETHER = "duo+quest(budget=0.125)+kivi(bits=4)"


def settings(out: Path, *, model: str = "bundled", length: int = 2048, samples: int = 20) -> RunConfig:
    """What the demonstration runs."""
    return RunConfig(
        suite="ruler",
        out=out,
        model=model,
        policies=("full", "all", TOGETHER),
        tasks=TASKS,
        lengths=(length,),
        samples=samples,
        modes=("multi-request",),  # the question comes after the context was compressed: the harder case
    )


def main(out: Path = Path("runs/demo"), minutes: float = 5.0, console: Console | None = None, **more: object) -> int:
    """Run for about so many minutes (a round is never cut), then report. Returns the exit code: 1 if nothing was measured."""
    if not 0 < minutes < inf:
        raise EvaluationError(f"minutes={minutes}: must be positive")
    console = console or Console()
    wanted = settings(out, **more)  # type: ignore[arg-type]  # its keywords
    with claimed(out):
        run = drive.prepare(wanted)
        manifest.write(out / "manifest.json", run)
        with Bar(len(run.cells()), run.config.samples_per_cell, console) as bar:
            done = rounds(run, time.monotonic() + 60 * minutes, bar)
        manifest.write(out / "manifest.json", run)
    found = report.write(out)
    drive.summarise(found, console)
    if not any(cell.score for cell in found):
        console.print(f"nothing was measured: {', '.join(tables.unique(cell.status for cell in found))}", markup=False)
        return 1
    console.print(f"{done} samples of every task under every policy; report: {out / 'report.html'}", markup=False)
    return 0
