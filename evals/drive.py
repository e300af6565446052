"""From a configuration to a finished run folder: load, resume, run, report, judge."""

from __future__ import annotations

import time
from functools import partial
from math import inf
from typing import Any, Literal

from rich.box import SIMPLE
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape
from rich.table import Column, Table
from transformers.utils import logging

from kvengine.errors import EvaluationError
from kvengine.evals import loading, manifest, report, tables, together
from kvengine.evals.aggregate import CellResult
from kvengine.evals.claim import claimed
from kvengine.evals.config import RunConfig
from kvengine.evals.engine import opened
from kvengine.evals.progress import Bar
from kvengine.evals.records import ROWS, Journal, complete
from kvengine.evals.runner import GIVEN_UP, Cell, Observer, Run, verdict
from kvengine.evals.tasks import choose
from kvengine.evals.tasks._fit import NoData

NARROW = 72
"""Characters of a line that the table of policies needs."""


def prepare(config: RunConfig) -> Run:
    """Load the model and open the journal. Policies and tasks are checked first: loading may take minutes.

    Who is going to write holds the folder before (`claimed`): what another run does from here on would be done twice.
    Raises `EvaluationError` for what cannot be run.
    """
    check(config)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call,unused-ignore]  # ours is enough
    return ready(config, *loading.load(config.model, device=config.device, dtype=config.dtype))


def check(config: RunConfig) -> None:
    """Raises `EvaluationError` for tasks that there are not or that lack their data, `PolicyError` for policies."""
    for task in choose(config.suite, config.tasks):
        if config.tasks != "all" and (lacks := task.lacks(config.data)):  # of all, those are left out
            raise NoData(lacks)
    config.arms()


def ready(config: RunConfig, model: Any, tokenizer: Any) -> Run:
    """`prepare` for a model that is loaded."""
    most = manifest.position_table(model)
    if most is not None and max(config.lengths) > most:
        raise EvaluationError(
            f"{config.model} has learned {most} positions and knows none beyond; length {max(config.lengths)} is more: "
            f"give lengths up to {most}"
        )
    made = Run(config, model, tokenizer, Journal.open(config.out / ROWS))
    if config.judge_every is not None:
        made.opener = partial(opened, judge_every=config.judge_every)
    if not made.cells():
        raise EvaluationError(_no_data(config, made))
    for name in config.fail_under:
        if not any(_barred(name, cell.task.name, cell.arm.policy) for cell in made.cells()):
            raise EvaluationError(
                f"fail_under {name}: this run has no such cell; name a task, or POLICY:TASK with the policy as it was given"
            )
        if any(one.metric == "nll" and one.name == name.rpartition(":")[2] for one in made.tasks()):
            raise EvaluationError(
                f"fail_under {name}: a loss is no percentage, and none would be below the bar; leave it out"
            )
    return made


def _no_data(config: RunConfig, made: Run) -> str:
    wanted = f"{made.tasks()[0].name}.jsonl"
    if config.suite in config.data:
        return f"no {config.suite} task can run: {config.data[config.suite]} holds no file such as {wanted}"
    return (
        f"no {config.suite} task can run without data; give --data {config.suite}=FOLDER, with files such as {wanted}"
    )


def run(config: RunConfig, console: Console) -> int:
    """Run to the end and report. Exit code 0, or 1 if a score is below `fail_under` or no cell has one.

    Raises `EvaluationError` if another run is in the folder.
    """
    check(config)
    with claimed(config.out):
        return _run(config, console)


def _run(config: RunConfig, console: Console) -> int:
    task = prepare(config)
    warn(task, console)
    if task.left_out():
        console.print(
            f"left out for want of data: {', '.join(one.name for one in task.left_out())}",
            highlight=False,
            markup=False,
        )
    with Bar(len(task.cells()), config.samples_per_cell, console) as bar:
        execute(task, bar)
    found = report.write(config.out) if config.report else report.found(config.out)
    summarise(found, console)
    console.print(f"rows, tables and report: {config.out}", highlight=False, markup=False)
    if found and not any(cell.score for cell in found):
        console.print(
            f"[red]nothing was measured[/red]: {', '.join(tables.unique(cell.status for cell in found))}",
            highlight=False,
        )
        return 1
    failures = below(found, config)
    for line in failures:
        console.print(f"[red]below the bar[/red]: {escape(line)}", highlight=False)
    return int(bool(failures))


def execute(task: Run, observer: Observer) -> None:
    """Do what the run folder lacks, as the run's settings say: one cell after the other, shared, or in rounds.

    Raises `EvaluationError` if the folder is another run's, or has rows that no report could be made of, before anything is added
    to it.
    """
    config = task.config
    complete(task.journal.rows, task.journal.path)
    manifest.write(config.out / "manifest.json", task)
    end = inf if config.minutes is None else time.monotonic() + 60 * config.minutes
    if config.shared:
        together.execute(task, observer, end=end)
    elif config.minutes is None:
        task.execute(observer)
    else:
        rounds(task, end, observer)
    if not task.journal.path.exists():
        raise EvaluationError(f"{config.minutes:g} minutes were over before a sample was done; give more")
    manifest.write(config.out / "manifest.json", task)


def warn(run: Run, console: Console) -> None:
    """Of lengths that the model was not made for, and of a template that spends answers on thoughts."""
    over = tables.beyond(list(run.config.lengths), manifest.positions(run.model))
    for line in [*over, *tables.thinking(run.prompter.wrapper.tail)]:
        console.print(line, style="yellow", highlight=False, markup=False)


def rounds(run: Run, end: float, observer: Observer) -> int:
    """One sample of every cell after the other while the next round would end in time. Returns the rounds done."""
    for limit in range(1, run.config.samples_per_cell + 1):
        start = time.monotonic()
        run.execute(observer, limit)
        if 2 * time.monotonic() - start > end:
            return limit
    return run.config.samples_per_cell


def preview(config: RunConfig, console: Console) -> int:
    """Print the matrix with prompt tokens, and what is done already."""
    task = prepare(config)
    warn(task, console)
    rows = []
    for cell in task.cells():
        tokens, state = foreseen(task, cell)
        rows.append([cell.task.name, str(cell.length), cell.mode, cell.arm.policy, tokens, state])
    show(console, "", ["task", "length", "mode", "policy", "prompt tokens", "state"], rows, justify="left")
    return 0


def foreseen(task: Run, cell: Cell) -> tuple[str, str]:
    """Prompt tokens of a cell, and how far it is, or why it will be given up.

    Beyond the model's positions nothing is drawn: the length may be a slip, and its text more than the memory holds.
    """
    key, most = task.key(cell), manifest.positions(task.model)
    if most is not None and cell.length > most and not cell.arm.refused:
        return "–", f"{task.journal.count(key)}/{task.config.samples_per_cell} done"
    try:
        samples = task.samples(cell)
    except tuple(GIVEN_UP) as error:
        return "–", f"{verdict(error)}: {error}"
    tokens = [task.prompter.measure(sample) for sample in samples]
    done = sum(task.journal.holds(key, sample, cell.arm.code) for sample in samples)
    state = f"refused: {cell.arm.refused}" if cell.arm.refused else f"{done}/{len(samples)} done"
    if not cell.arm.refused and done < len(samples) and not task.missing(cell, samples):
        state += f", then {task.journal.done[key, None][0]}; --retry does the others"
    return f"{min(tokens)}–{max(tokens)}", state


def summarise(found: list[CellResult], console: Console) -> None:
    """Scores and costs, for the terminal."""
    for suite, length, mode in tables.unique((cell.suite, cell.length, cell.mode) for cell in found):
        chosen = [cell for cell in found if (cell.suite, cell.length, cell.mode) == (suite, length, mode)]
        means = {policy: tables.figure(mean) for policy, mean in tables.mean_scores(chosen).items()}
        losses = {cell.policy: tables.loss(cell) for cell in chosen if cell.metric == "nll"}
        head = ["policy", "NLL" if losses else "score", "attended", "held", "read/token", "first token s", "tokens/s"]
        rows = []
        for policy, mine in tables.by_policy(chosen).items():
            texts = tables.cost_texts(mine)
            rows.append([policy, losses.get(policy) or means.get(policy, "–"), *texts[1:6]])
        show(console, f"{suite}, {length} tokens, {mode}", head, rows)
        console.print(
            Markdown("\n".join(f"- {line}" for line in tables.in_short(chosen)) + "\n" + tables.notes(chosen))
        )


def show(
    console: Console, title: str, head: list[str], rows: list[list[str]], justify: Literal["left", "right"] = "right"
) -> None:
    """A row per policy, or a list per policy where columns would be too narrow for their numbers. Nothing is cut off."""
    if console.width < NARROW:
        lines = [title] if title else []
        for first, *texts in rows:
            lines += ["", first, *(f"  {name}: {text}" for name, text in zip(head[1:], texts, strict=True))]
        console.print("\n".join(lines), highlight=False, markup=False)
        return
    columns = (Column(name, justify=justify, overflow="fold") for name in head[1:])
    shown = Table(Column(head[0], overflow="fold"), *columns, title=title or None, box=SIMPLE, pad_edge=False)
    for texts in rows:
        shown.add_row(*map(escape, texts))
    console.print(shown)


def below(found: list[CellResult], config: RunConfig) -> list[str]:
    """Cells under their bar. A bar is named TASK, or POLICY:TASK; a bar that matches nothing counts as missed."""
    asked = {arm.spelled: arm.policy for arm in config.arms()}  # a table may have another name for one of them
    lines = []
    for name, bar in config.fail_under.items():
        chosen = [cell for cell in found if _barred(name, cell.task, asked.get(cell.stack, cell.policy))]
        chosen = chosen if name.rpartition(":")[0] else [cell for cell in chosen if cell.role != "oracle"]
        lines += [f"{name}: no such cell"] if not chosen else []
        lines += [
            f"{cell.policy} on {cell.task}: {tables.score_text(cell)} < {bar}" for cell in chosen if _under(cell, bar)
        ]
    return lines


def _barred(name: str, task: str, policy: str) -> bool:
    only, _, wanted = name.rpartition(":")
    return task == wanted and only in ("", policy)


def _under(cell: CellResult, bar: float) -> bool:
    return cell.score is None or round(100 * cell.score.mean, 9) < bar  # 57 of 100 are 56.99999999999999 %
