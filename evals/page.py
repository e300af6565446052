"""The report as one HTML page that needs nothing from outside."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

from kvengine.evals import plots, tables
from kvengine.evals.aggregate import CellResult, named
from kvengine.evals.manifest import installed, machines
from kvengine.evals.records import Row
from kvengine.offload.stores.filesystem import replace_file

PLACEMENT = {
    "multi-turn": "The question is part of the prompt, so compression sees it (of several, the first).",
    "multi-request": "The context is compressed before any question is known; every question meets the same cache.",
}


@dataclass(frozen=True)
class Picture:
    """A figure with its name (of the PNG file) and caption."""

    name: str
    figure: Figure
    caption: str

    @property
    def svg(self) -> str:
        return plots.svg(self.figure)


@dataclass
class Section:
    """One suite, length and mode."""

    suite: str
    length: int
    mode: str
    cells: list[CellResult]
    pictures: list[Picture] = field(default_factory=list)

    @property
    def title(self) -> str:
        return f"{self.suite}, {self.length} tokens, {self.mode}"

    @property
    def about(self) -> str:
        return PLACEMENT[self.mode]

    @property
    def unit(self) -> str:
        """What the scores are."""
        losses = any(cell.metric == "nll" for cell in self.cells)
        return "Nats per token (mean negative log-likelihood, less is better)" if losses else "Percent"

    @property
    def tasks(self) -> list[str]:
        return tables.unique(cell.task for cell in self.cells)

    @property
    def heads(self) -> list[tuple[str, str]]:
        """Every task, and over how many answers and contexts its scores are."""
        return [(task, counts([cell for cell in self.cells if cell.task == task])) for task in self.tasks]

    @property
    def rows(self) -> list[dict[str, Any]]:
        by = {(cell.policy, cell.task): cell for cell in self.cells}
        means, usable = tables.policy_means(self.cells), tables.policy_means(self.cells, usable_only=True)
        roles = {cell.policy: cell.role for cell in self.cells}
        order = sorted(
            roles, key=lambda policy: (roles[policy] != "ceiling", -usable.get(policy, means.get(policy, -1.0)))
        )
        return [
            {
                "policy": policy,
                "role": roles[policy],
                "cells": [square(by.get((policy, task))) for task in self.tasks],
                "mean": tables.figure(means.get(policy)),
                "usable": tables.figure(usable.get(policy)),
            }
            for policy in order
        ]

    @property
    def cost_head(self) -> tuple[str, ...]:
        return tables.COST_HEAD

    @property
    def costs(self) -> list[list[str]]:
        return [[policy, *tables.cost_texts(mine)] for policy, mine in tables.by_policy(self.cells).items()]

    @property
    def in_short(self) -> list[str]:
        return [line.replace("`", "") for line in tables.in_short(self.cells)]

    @property
    def notes(self) -> list[str]:
        return [line.removeprefix("- ").replace("`", "") for line in tables.notes(self.cells).splitlines()]


def counts(cells: list[CellResult]) -> str:
    """`n=24`, or `n=100, 20 contexts`; a range where policies differ."""
    found = sorted({(cell.score.n, cell.score.clusters) for cell in cells if cell.score})
    if not found:
        return ""
    ns, contexts = ("–".join(map(str, unique_ends(values))) for values in zip(*found, strict=True))
    return f"n={ns}" + (f", {contexts} contexts" if contexts != ns else "")


def unique_ends(values: tuple[int, ...]) -> list[int]:
    """The least and the most; one of them if they are the same."""
    return sorted({min(values), max(values)})


def square(cell: CellResult | None) -> dict[str, str]:
    """One cell of the score table."""
    if cell is None or cell.score is None:
        return {"text": "–" if cell is None else cell.status, "small": "", "colour": "", "flag": "", "title": ""}
    times = 1.0 if cell.metric == "nll" else 100.0
    mean, _, bounds = tables.span(cell.score, times).partition(" ")
    return {
        "text": mean,
        "small": bounds + (f" Δ {times * cell.delta.mean:+.{3 if times == 1 else 1}f}" if cell.delta else ""),
        "colour": "" if cell.metric == "nll" else shade(cell.score.mean),
        "flag": cell.flag if cell.flag == "not discriminative" else "",
        "title": f"{cell.stack}, n={cell.score.n}, contexts {cell.score.clusters}, Δ {tables.span(cell.delta, times)}",
    }


def breakable(policy: str) -> Markup:
    """A policy's name that a narrow column breaks behind brackets, plus signs and commas.

    >>> str(breakable("a(b=1)+<c>"))
    'a(<wbr>b=1)+<wbr>&lt;c&gt;'
    """
    return Markup("<wbr>").join(re.split(r"(?<=[(+,])", policy))


def shade(score: float) -> str:
    """A pale red-yellow-green for a score in [0, 1]."""
    red, green, blue, _ = (round(255 * (0.55 + 0.45 * channel)) for channel in plots.HEAT(score))
    return f"rgb({red},{green},{blue})"


def sections(found: list[CellResult], rows: list[Row]) -> list[Section]:
    """The page's parts, with their pictures."""
    groups: dict[tuple[str, int, str], list[CellResult]] = {}
    for cell in found:
        groups.setdefault((cell.suite, cell.length, cell.mode), []).append(cell)
    made = [Section(suite, length, mode, mine) for (suite, length, mode), mine in groups.items()]
    for section in made:
        section.pictures = pictures(section)
    return made


def pictures(section: Section) -> list[Picture]:
    """Score against cost, and by turn."""
    name = f"{section.suite}_{section.length}_{section.mode}"
    drawn = []
    if any(cell.metric != "nll" and cell.score for cell in section.cells):
        caption = (
            "Score against cost; dashed: nothing else is both cheaper and better. Mean over the tasks that tell policies "
            "apart. Black star: the full cache. White star: exact top-k, which reads everything in order to choose."
        )
        drawn.append(Picture(f"pareto_{name}", plots.pareto(section.cells), caption))
    turns = plots.by_turn(section.cells)
    if turns is not None:
        caption = "Score by turn. In multi-turn mode only turn 1 was seen by a compression at the end of the prompt."
        drawn.append(Picture(f"turns_{name}", turns, caption))
    return drawn


def overview(found: list[CellResult], rows: list[Row]) -> list[Picture]:
    """Pictures over all lengths of a suite and mode."""
    drawn = []
    for suite, mode in tables.unique((cell.suite, cell.mode) for cell in found):
        curve = plots.by_length([cell for cell in found if (cell.suite, cell.mode) == (suite, mode)])
        if curve is not None:
            drawn.append(Picture(f"lengths_{suite}_{mode}", curve, f"{suite}, {mode}: mean score by length."))
        chosen = [row for row in rows if row["suite"] == suite and row["mode"] == mode]
        for task in tables.unique(named(row) for row in chosen) if suite == "niah" else []:
            heat = plots.heat_map([row for row in chosen if named(row) == task])
            if heat is not None:
                drawn.append(Picture(f"heat_{task}_{mode}", heat, f"{task}, {mode}: score by depth and length."))
    return drawn


def write(folder: Path, found: list[CellResult], rows: list[Row], manifest: dict[str, Any]) -> None:
    """Write report.html, and each picture as PNG under `pictures/`."""
    parts, above = sections(found, rows), overview(found, rows)
    template = (resources.files("kvengine.evals") / "report.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["breakable"] = breakable
    text = environment.from_string(template).render(
        title=f"{Path(str(manifest['model_name'])).name}: policies compared",
        facts=" · ".join(facts(found, manifest)),
        overview=above,
        sections=parts,
        manifest=json.dumps(manifest, indent=2, ensure_ascii=False),
    )
    replace_file(folder / "report.html", text.encode())
    for picture in [*above, *(one for part in parts for one in part.pictures)]:
        (folder / "pictures").mkdir(exist_ok=True)
        picture.figure.savefig(folder / "pictures" / f"{picture.name}.png", dpi=110, metadata={"Software": None})


def facts(found: list[CellResult], manifest: dict[str, Any]) -> list[str]:
    """One line about the run."""
    versions = installed(manifest)
    return [
        f"{manifest['parameters']:,} parameters, {manifest['dtype']}",
        ", then ".join(machines(manifest)),
        *(f"{name} {versions[name]}" for name in ("kvengine", "torch", "transformers") if name in versions),
        f"seed {manifest['config'].get('seed', 'unknown')}",
        f"started {manifest['started']}",
        *tables.conditions(found, manifest),
    ]
