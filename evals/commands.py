"""`kvengine eval …`: run a suite, report a run, compare two."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvengine.command_errors import readable_errors, resumable
from kvengine.evals.config import DATA, RunConfig, build
from kvengine.evals.records import ROWS

app = typer.Typer(help="Measure quality, memory and speed of policies on the same data.", no_args_is_help=True)
console = Console()

DEFAULTS = {one.name: one.default for one in fields(RunConfig)}


def setting(name: str, about: str, *flags: str) -> Any:
    """The option of a setting of `RunConfig`, whose default is shown though the command line leaves it open."""
    usual = DEFAULTS[name]
    if isinstance(usual, bool):
        shown: str | bool = flags[0].split("/")[not usual].removeprefix("--")
    elif isinstance(usual, tuple):
        shown = ",".join(map(str, usual))
    else:
        shown = str(usual) if isinstance(usual, int | float | str) else False
    return typer.Option(*flags, help=about, show_default=shown)


Model = Annotated[str | None, setting("model", "folder, hub id, or 'bundled'")]
Policies = Annotated[str | None, setting("policies", '"full;snapkv(budget=0.25);quest(budget=1024)", or "all"')]
Budget = Annotated[str | None, setting("budget", "of the policies that 'all' stands for: tokens, or a fraction")]
Tasks = Annotated[str | None, setting("tasks", "comma-separated names, or 'all'; --dry-run shows them")]
Lengths = Annotated[str | None, setting("lengths", "tokens, comma-separated; prompt and generated together")]
Samples = Annotated[int | None, setting("samples", "samples per cell")]
Limit = Annotated[int | None, setting("limit", "do only the first so many samples of each cell now")]
Minutes = Annotated[
    float | None, setting("minutes", "stop after about so long; samples then go in rounds over all cells")
]
Shared = Annotated[
    bool | None,
    setting("shared", "read a context once for all policies, ask several samples in lockstep", "--shared/--no-shared"),
]
Batch = Annotated[int | None, setting("batch", "with --shared: samples in lockstep, at most")]
Few = Annotated[
    int | None,
    setting("few", "with --shared: leave tasks that the full cache cannot do after so many samples of it"),
]
JudgeEvery = Annotated[
    int | None, setting("judge_every", "read a prompt in parts of so many tokens, each judged before the next")
]
Modes = Annotated[
    str | None,
    setting("modes", "multi-turn (question in the prompt), multi-request (asked after), or both", "--mode"),
]
Seed = Annotated[int | None, setting("seed", "seed of the data")]
Out = Annotated[
    Path | None, typer.Option(help="run folder; one that exists is resumed", show_default="runs/SUITE-HASH")
]
Config = Annotated[Path | None, typer.Option(help="YAML file with any of these settings")]
Device = Annotated[str | None, setting("device", "auto, cpu, cuda")]
Dtype = Annotated[str | None, setting("dtype", "auto, float32, bfloat16, float16")]
Chat = Annotated[str | None, setting("chat", "chat template: auto, on, off")]
Ceiling = Annotated[bool | None, setting("ceiling", "add the full cache", "--ceiling/--no-ceiling")]
Oracle = Annotated[bool | None, setting("oracle", "add exact top-k at each budget", "--oracle/--no-oracle")]
Golden = Annotated[
    bool | None,
    setting("golden", "multi-turn: later questions follow the right answers, or the model's", "--golden/--own-answers"),
]
Retry = Annotated[
    bool | None, setting("retry", "do what failed, was refused or ran out of memory again", "--retry/--no-retry")
]
Report = Annotated[bool | None, setting("report", "write tables and pictures at the end", "--report/--no-report")]
Data = Annotated[list[str] | None, typer.Option(help=f"NAME=PATH of local data: {', '.join(DATA)}; may be repeated")]
FailUnder = Annotated[
    list[str] | None, typer.Option(help="TASK=SCORE or POLICY:TASK=SCORE in percent; exit 1 below; may be repeated")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the matrix and stop")]


SUITES = {
    "ruler": "RULER: needles, variable tracking, counting, question answering.",
    "quiz": "RULER's needles, several questions about one context.",
    "scbench": "SCBench: several questions about one context, one after the other or each on its own.",
    "niah": "One needle at every depth and length: the heat map.",
    "ppl": "Perplexity of a continuation after the prompt was compressed.",
    "longbench": "LongBench v1 from local files (--data longbench=FOLDER).",
}


def suite_command(suite: str, about: str) -> None:
    """Add `kvengine eval SUITE`."""

    @app.command(suite, help=about)
    def command(
        model: Model = None,
        policies: Policies = None,
        budget: Budget = None,
        tasks: Tasks = None,
        lengths: Lengths = None,
        samples: Samples = None,
        limit: Limit = None,
        minutes: Minutes = None,
        shared: Shared = None,
        batch: Batch = None,
        few: Few = None,
        judge_every: JudgeEvery = None,
        mode: Modes = None,
        seed: Seed = None,
        out: Out = None,
        config: Config = None,
        device: Device = None,
        dtype: Dtype = None,
        chat: Chat = None,
        ceiling: Ceiling = None,
        oracle: Oracle = None,
        golden: Golden = None,
        retry: Retry = None,
        report: Report = None,
        data: Data = None,
        fail_under: FailUnder = None,
        dry_run: DryRun = False,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("config", "dry_run")}
        perform(suite, config, dry_run, given)


def perform(suite: str, config: Path | None, dry_run: bool, given: dict[str, Any]) -> None:
    """Run or preview a suite with the settings given, and leave with its exit code."""
    with readable_errors():
        settings: RunConfig = build(suite, config, given)
        with resumable(settings.out / ROWS):
            from kvengine.evals import drive

            code = drive.preview(settings, console) if dry_run else drive.run(settings, console)
    raise typer.Exit(code)


for _suite, _about in SUITES.items():
    suite_command(_suite, _about)


@app.command("report")
def report_command(folders: Annotated[list[Path], typer.Argument(help="run folders")]) -> None:
    """Write report.md, report.html, cells.csv and pictures of finished or running runs."""
    with readable_errors():
        from kvengine.evals import report

        for folder in folders:
            report.write(folder)
            console.print(f"{folder / 'report.html'}", highlight=False, markup=False)


@app.command("compare")
def compare_command(
    a: Annotated[Path, typer.Argument(help="run folder")], b: Annotated[Path, typer.Argument(help="run folder")]
) -> None:
    """Difference B - A, cell by cell, on identical samples."""
    with readable_errors():
        from kvengine.evals import compare

        console.print(compare.text(a, b), highlight=False, markup=False, soft_wrap=True)
