"""Runs a notebook cell by cell in this process, as a kernel would, and collects what it shows."""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure


@dataclass
class Shown:
    """What the code cells of a notebook left: values of last expressions, and pictures of any kind."""

    values: list[Any] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)


def code_cells(path: Path) -> list[str]:
    """Sources of the code cells."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_notebook(path: Path, **replaced: Any) -> Shown:
    """Execute all cells. `replaced`: values of top-level names that are put in place of those the cells assign."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = Shown(names={"__name__": "__main__"})
    try:
        for number, source in enumerate(code_cells(path)):
            run_cell(source, f"{path.name}, code cell {number + 1}", shown, replaced)
            shown.figures += [plt.figure(at) for at in plt.get_fignums()]
            plt.close("all")
    finally:
        plt.close("all")
    return shown


def run_cell(source: str, name: str, shown: Shown, replaced: dict[str, Any]) -> None:
    """One cell: its statements, then the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    for statement in tree.body:
        exec(compile(ast.Module([statement], []), name, "exec"), shown.names)
        shown.names |= {key: value for key, value in replaced.items() if key in shown.names}
    if isinstance(last, ast.Expr):
        value = eval(compile(ast.Expression(last.value), name, "eval"), shown.names)
        if isinstance(value, Figure):
            shown.figures.append(value)
        elif value is not None:
            shown.values.append(value)
