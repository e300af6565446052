"""What a run shows while it goes: a bar with the time left, and each cell's running score."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvengine.evals.records import Row
from kvengine.evals.runner import Cell


class Silent:
    """Shows nothing."""

    def cell(self, cell: Cell, samples: int, done: int) -> None: ...
    def sample(self, cell: Cell, rows: list[Row]) -> None: ...
    def refused(self, cell: Cell, row: Row) -> None: ...


class Bar(AbstractContextManager["Bar"]):
    """A progress bar over all samples of a run; one printed line per finished cell."""

    def __init__(self, total: int, console: Console) -> None:
        columns = BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("eta"), TimeRemainingColumn()
        self.progress = Progress(*columns, TextColumn("{task.description}"), console=console)
        self.bar = self.progress.add_task("", total=total)
        self.running: tuple[Cell, list[float]] | None = None

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if error is None:
            self._close()
        self.progress.stop()

    def cell(self, cell: Cell, samples: int, done: int) -> None:
        """A cell begins, of whose samples some were done in an earlier run."""
        self._close()
        self.running = cell, []
        self.progress.update(self.bar, advance=done, description=str(cell))

    def sample(self, cell: Cell, rows: list[Row]) -> None:
        """A sample is done."""
        assert self.running is not None  # the runner announces a cell before its samples
        scores = self.running[1]
        scores += [row["score"] for row in rows]
        text = f"{cell}  {sum(scores) / len(scores):.3f}"
        self.progress.update(self.bar, advance=1, description=text)

    def refused(self, cell: Cell, row: Row) -> None:
        """A cell cannot be done."""
        self.progress.console.print(f"{cell}: [yellow]{row['status']}[/yellow]: {row['message']}", highlight=False)

    def _close(self) -> None:
        if self.running and self.running[1]:
            cell, scores = self.running
            mean = sum(scores) / len(scores)
            self.progress.console.print(f"{str(cell):60} {mean:.3f}  ({len(scores)} answers)", highlight=False)
