"""What a run folder's rows say, written beside them: report.md, cells.csv, report.html, pictures, peers' formats."""

from __future__ import annotations

from math import log
from pathlib import Path
from typing import Any

from kvengine.errors import EvaluationError
from kvengine.evals import page, peers, tables
from kvengine.evals.aggregate import CellResult, cells, current
from kvengine.evals.manifest import read as read_manifest
from kvengine.evals.records import ROWS, Row, complete, read_rows
from kvengine.evals.tasks import catalogue
from kvengine.offload.stores.filesystem import replace_file


def read(folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Rows of the data asked last, and manifest of a run folder. Raises `EvaluationError` if it is not one."""
    try:
        manifest = read_manifest(folder / "manifest.json")
        rows, _ = read_rows(folder / ROWS)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise EvaluationError(f"{folder} is no run folder: {error.filename} is missing") from error
    return current(complete(rows, folder / ROWS), manifest.get("policies")), manifest


def floors(manifest: dict[str, Any]) -> dict[str, float]:
    """What guessing earns, by task; of losses, what it costs: every token as likely as any."""
    words = manifest.get("vocabulary")
    return {name: log(words) if task.metric == "nll" and words else task.floor for name, task in catalogue().items()}


def found(folder: Path) -> list[CellResult]:
    """The cells of a run folder."""
    rows, manifest = read(folder)
    return cells(rows, floors(manifest))


def write(folder: Path) -> list[CellResult]:
    """Write every report of a run folder. Tables and page are written each as a whole: where that fails, those of before stay."""
    rows, manifest = read(folder)
    made = cells(rows, floors(manifest))
    replace_file(folder / "report.md", tables.markdown(made, manifest).encode())
    replace_file(folder / "cells.csv", tables.long_csv(made).encode())
    page.write(folder, made, rows, manifest)
    peers.write(folder / "compat", rows, manifest)
    return made
