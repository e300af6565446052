"""Evaluate from Python: the run of `kvengine eval`, with its results as objects.

cells = measure("scbench", policies="full;snapkv(budget=0.125);quest(budget=0.125)", tasks="scbench_needles",
                lengths=1024, samples=4, modes="multi-turn")
print(tables.scores(cells))
plots.by_turn(cells)
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from kvengine.errors import EvaluationError
from kvengine.evals import drive, report
from kvengine.evals.aggregate import CellResult
from kvengine.evals.claim import claimed
from kvengine.evals.config import build
from kvengine.evals.progress import Silent
from kvengine.evals.runner import Observer


def measure(
    suite: str,
    *,
    model: Any = "bundled",
    tokenizer: Any = None,
    out: str | Path | None = None,
    show: Observer | None = None,
    **settings: Any,
) -> list[CellResult]:
    """Run a suite and return its cells: score with interval, difference to the full cache, tokens, bytes, times.

    Args:
        suite: "ruler", "quiz", "scbench", "niah", "ppl" or "longbench".
        model: a folder, a hub id, "bundled", or a model that is loaded already (then with its `tokenizer`). It may not
            be patched: each policy patches it for the length of its cells.
        tokenizer: of a loaded model.
        out: the run folder. One that exists is resumed; by default a temporary one that is deleted at the end.
        show: told of every sample; `kvengine.evals.progress.Bar` draws a bar.
        settings: those of `kvengine.evals.config.RunConfig`, as values or spelled as on the command line. Reports and bars
            to pass are the caller's: `kvengine.evals.report.write` makes the former, `fail_under` is an error.

    Raises:
        EvaluationError: a setting, task, model or file is not as expected, or `out` is another run's folder, or
            one that a run is in.
        PolicyError: a policy does not exist.
    """
    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            return measure(suite, model=model, tokenizer=tokenizer, out=folder, show=show, **settings)
    loaded = not isinstance(model, str | Path)
    if loaded != (tokenizer is not None) or (loaded and not hasattr(model, "config")):
        raise EvaluationError(
            "give a model's name alone, or a model that is loaded and its tokenizer, not "
            f"model={type(model).__name__}, tokenizer={type(tokenizer).__name__}"
        )
    name = str(getattr(model, "name_or_path", "") or "model") if loaded else str(model)
    config = build(suite, None, {**settings, "model": name, "out": out})
    if config.fail_under:
        raise EvaluationError("fail_under ends a command; from Python compare the scores of the cells returned")
    drive.check(config)
    with claimed(config.out):
        run = drive.ready(config, model, tokenizer) if loaded else drive.prepare(config)
        drive.execute(run, show or Silent())
    return report.found(config.out)
