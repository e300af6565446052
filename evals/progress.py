"""What a run shows while it goes: a bar with the time left, and each cell's running score."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from kvengine.evals.records import Row
from kvengine.evals.runner import Cell


class Silent:
    """Shows nothing."""

    def cell(self, cell: Cell, done: int) -> None: ...
    def sample(self, cell: Cell, rows: list[Row]) -> None: ...
    def refused(self, cell: Cell, row: Row) -> None: ...


class Bar(AbstractContextManager["Bar"]):
    """A progress bar over all samples of a run with each cell's running score; one printed line per finished cell.

    `samples`: how many a cell has in all. Cells may come several times, a few samples at a time.
    """

    def __init__(self, cells: int, samples: int, console: Console) -> None:
        whole, rest = Column(no_wrap=True), Column(no_wrap=True, ratio=1)  # where it is narrow, the name gives way
        self.progress = Progress(
            BarColumn(max(3, min(40, console.width // 8))),
            MofNCompleteColumn(table_column=whole),
            TimeElapsedColumn(table_column=whole),
            TextColumn("eta"),
            TimeRemainingColumn(table_column=whole),
            TextColumn("{task.description}", markup=False, table_column=rest),
            console=console,
            expand=True,
        )
        self.bar = self.progress.add_task("", total=cells * samples)
        self.samples = samples
        self.done: dict[str, int] = {}
        self.scores: dict[str, list[float]] = {}

    def __enter__(self) -> Bar:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.progress.stop()

    def cell(self, cell: Cell, done: int) -> None:
        """A cell begins, of whose samples some were done before, or are not in its data."""
        self._advance(str(cell), done)

    def sample(self, cell: Cell, rows: list[Row]) -> None:
        """A sample is done."""
        name = str(cell)
        self.scores.setdefault(name, []).extend(row["score"] for row in rows)
        self._advance(name, self.done[name] + 1)
        if self.done[name] == self.samples:
            self.progress.console.print(f"{name:60} {self._mean(name)}", highlight=False, markup=False)

    def refused(self, cell: Cell, row: Row) -> None:
        """A cell cannot be done."""
        self._advance(str(cell), self.samples)
        told = f"{escape(str(cell))}: [yellow]{row['status']}[/yellow]: {escape(str(row['message']))}"
        self.progress.console.print(told, highlight=False)

    def _advance(self, name: str, done: int) -> None:
        before = self.done.get(name, 0)
        self.done[name] = max(before, done)
        self.progress.update(self.bar, advance=self.done[name] - before, description=f"{name} {self._mean(name)}")

    def _mean(self, name: str) -> str:
        scores = self.scores.get(name)
        return f"{sum(scores) / len(scores):.3f} of {len(scores)}" if scores else ""
