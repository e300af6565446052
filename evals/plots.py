"""The report's pictures: score against cost, score by turn, score by length, depth × length heat maps."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from kvengine.evals.aggregate import CellResult
from kvengine.evals.records import Row
from kvengine.evals.tables import by_policy, cost, mean_scores, unique

COSTS = {
    "bytes_held": "bytes held (KiB)",
    "read_per_token": "bytes read per token (KiB)",
    "ttft": "time to first token (ms)",
    "per_token": "time per decoded token (ms)",
}
SCALES = {"bytes_held": 1 / 1024, "read_per_token": 1 / 1024, "ttft": 1000.0, "per_token": 1000.0}
HEAT = LinearSegmentedColormap.from_list("depth", ["#F0496E", "#EBB839", "#0CD79F"])
MARKS = "osD^vP*X<>dhp8"


class Picture(Figure):
    """A figure that notebooks show as one. They know how to show matplotlib's own only when pyplot has drawn something."""

    def _repr_png_(self) -> bytes:
        out = io.BytesIO()
        self.savefig(out, format="png")
        return out.getvalue()


def svg(figure: Figure) -> str:
    """The picture as text to put into a page."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvengine"}):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def style(at: int) -> dict[str, Any]:
    """Colour and mark of the policy at a place in the list: the same in every picture."""
    return {"color": matplotlib.colormaps["tab20"](at * 2 % 20 + at * 2 // 20), "marker": MARKS[at % len(MARKS)]}


def line(at: int, role: str) -> dict[str, Any]:
    """How a curve shows the policy at a place in the list: the full cache in black, the oracle dashed."""
    special: dict[str, dict[str, Any]]
    special = {"ceiling": {"color": "black", "linewidth": 2.5}, "oracle": {"color": "gray", "linestyle": "--"}}
    return special[role] | {"marker": "*"} if role in special else style(at)


def shown(policy: str, most: int = 46) -> str:
    """A policy's name as matplotlib takes it for text, cut in the middle if long."""
    name = policy if len(policy) <= most else policy[: most // 2] + "…" + policy[-most // 2 :]
    return name.replace("$", r"\$")  # a file's name may have them, which would begin a formula


def spent(mine: list[CellResult], name: str) -> float | None:
    """One of `COSTS` over a policy's cells, in the unit of its label."""
    if name == "per_token":
        rate = cost(mine, "tokens_per_s")
        return SCALES[name] / rate if rate else None
    value = cost(mine, name)
    return None if value is None else value * SCALES[name]


def pareto(found: list[CellResult]) -> Figure:
    """Score against each cost, one point per policy; the line joins those that nothing beats in both.

    The full cache is a black star. The oracle is a white one and never on the line: it reads everything to choose.
    """
    figure = Picture(figsize=(11, 8.6), layout="constrained")
    axes = figure.subplots(2, 2)
    roles = {cell.policy: cell.role for cell in found if cell.score}
    means, cells = mean_scores(found), by_policy(found)
    for ax, name in zip(axes.flat, COSTS, strict=True):
        points = {policy: (spent(cells[policy], name), means.get(policy)) for policy in roles}
        if not any(x for x, _ in points.values()):
            ax.set(xlabel=COSTS[name], xticks=(), yticks=())
            ax.text(0.5, 0.5, "not measured in this run", ha="center", color="#666666", transform=ax.transAxes)
            continue
        _scatter(ax, roles, points)
        ax.set(xlabel=COSTS[name], ylabel="mean score (%)", xscale="log", ylim=(-4, 109), yticks=range(0, 101, 20))
        ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        low, high = ax.get_xlim()
        if sum(low <= tick <= high for tick in ax.get_xticks()) < 2:  # all cost about the same: one number is no scale
            ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.grid(alpha=0.3)
    handles = next(([*ax.collections] for ax in axes.flat if ax.collections), [])
    labels = [shown(policy) for policy in roles][: len(handles)]
    figure.legend(handles, labels, loc="outside lower center", ncols=2 if len(roles) < 9 else 3, fontsize=8)
    return figure


def _scatter(ax: Axes, roles: dict[str, str], points: dict[str, tuple[float | None, float | None]]) -> None:
    there = {policy: (x, y) for policy, (x, y) in points.items() if x is not None and y is not None and x > 0}
    for at, policy in enumerate(roles):  # one collection per policy, empty or not: the legend counts on it
        xs, ys = [[value] for value in there[policy]] if policy in there else ([], [])
        ax.scatter(xs, ys, edgecolors="black", linewidths=0.5, zorder=3, **mark(at, roles[policy]))
    best = frontier(point for policy, point in there.items() if roles[policy] != "oracle")
    if len(best) > 1:
        ax.plot(*zip(*best, strict=True), color="gray", linestyle="--", linewidth=1, zorder=1)
    _label(ax, {policy: there[policy] for policy in there if there[policy] in best and roles[policy] == "policy"})


def _label(ax: Axes, points: dict[str, tuple[float, float]]) -> None:
    """Names beside points, in turn above and below them, and towards the middle."""
    ranked = sorted(points, key=lambda policy: points[policy])
    for at, policy in enumerate(ranked):
        right = at >= len(ranked) / 2
        place: dict[str, Any] = {
            "xytext": (-8 if right else 8, 6 if at % 2 else -11),
            "ha": "right" if right else "left",
        }
        name = shown(re.sub(r"\([^()]*\)", "", policy))
        ax.annotate(name, points[policy], textcoords="offset points", fontsize=7, color="#333333", **place)


def mark(at: int, role: str) -> dict[str, Any]:
    """How a scatter shows the policy at a place in the list."""
    special = {"ceiling": {"color": "black"}, "oracle": {"color": "white"}}
    return special[role] | {"marker": "*", "s": 170} if role in special else style(at) | {"s": 70}


def frontier(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other beats: cheaper points with lower scores, by cost.

    >>> frontier([(1, 10), (2, 30), (3, 20), (4, 40)])
    [(1, 10), (2, 30), (4, 40)]
    """
    best: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return best


def by_turn(found: list[CellResult]) -> Figure | None:
    """Mean score of each turn, one line per policy, over tasks with several turns (those that tell policies apart)."""
    several = [cell for cell in found if len(cell.turns) > 1]
    several = [cell for cell in several if not cell.flag] or several
    if not several:
        return None
    figure = Picture(figsize=(8, 4.6), layout="constrained")
    ax = figure.subplots()
    roles = {cell.policy: cell.role for cell in found if cell.score}
    for at, policy in enumerate(roles):
        turns = [cell.turns for cell in several if cell.policy == policy]
        most = max((len(one) for one in turns), default=0)
        means = [100 * fmean(one[turn] for one in turns if len(one) > turn) for turn in range(most)]
        ax.plot(range(1, most + 1), means, label=shown(policy), **line(at, roles[policy]))
    ax.set(xlabel="turn", ylabel="mean score (%)", xticks=range(1, max(len(cell.turns) for cell in several) + 1))
    return _finish(figure, ax)


def by_length(found: list[CellResult]) -> Figure | None:
    """Mean score by length, one line per policy."""
    lengths = sorted({cell.length for cell in found})
    if len(lengths) < 2:
        return None
    figure = Picture(figsize=(8, 4.6), layout="constrained")
    ax = figure.subplots()
    means = [mean_scores([cell for cell in found if cell.length == length]) for length in lengths]
    roles = {cell.policy: cell.role for cell in found if cell.score}
    for at, policy in enumerate(roles):
        ax.plot(lengths, [one.get(policy, np.nan) for one in means], label=shown(policy), **line(at, roles[policy]))
    ax.set_xscale("log", base=2)
    ax.set(xlabel="length (tokens)", ylabel="mean score (%)", xticks=lengths, xticklabels=[str(n) for n in lengths])
    return _finish(figure, ax)


def _finish(figure: Figure, ax: Axes) -> Figure:
    ax.set_ylim(-3, 103)
    ax.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=7)
    return figure


def heat_map(rows: list[Row]) -> Figure | None:
    """Depth down, length across, one map per policy; red is 0, green is 1."""
    rows = [row for row in rows if row["status"] == "ok" and "depth" in row["meta"] and len(row["answers"]) < 4]
    if not rows:
        return None
    policies = unique(row["policy"] for row in rows)
    across = min(3, len(policies))
    down = -(-len(policies) // across)
    lengths = sorted({row["length"] for row in rows})
    figure = Picture(figsize=(2.2 + (1.4 + 0.5 * len(lengths)) * across, 0.6 + 2.7 * down), layout="constrained")
    axes = figure.subplots(down, across, squeeze=False)
    for ax in axes.flat[len(policies) :]:
        ax.axis("off")
    for ax, policy in zip(axes.flat, policies, strict=False):
        image = _heat(ax, [row for row in rows if row["policy"] == policy], lengths)
        ax.set_title(shown(policy, 30), fontsize=8)
    figure.supxlabel("length (tokens)", fontsize=9)
    figure.supylabel("depth of the needle", fontsize=9)
    figure.colorbar(image, ax=axes, label="score", shrink=0.8)
    return figure


def _heat(ax: Axes, rows: list[Row], lengths: list[int]) -> Any:
    cells: dict[tuple[int, int], list[float]] = defaultdict(list)
    for row in rows:
        cells[min(9, int(10 * row["meta"]["depth"])), lengths.index(row["length"])].append(row["score"])
    grid = np.full((10, len(lengths)), np.nan)
    for at, scores in cells.items():
        grid[at] = fmean(scores)
    image = ax.imshow(grid, cmap=HEAT, vmin=0, vmax=1, aspect="auto")
    ax.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=7)
    ax.set_yticks(range(0, 10, 3), [f"{10 * at}–{10 * at + 10} %" for at in range(0, 10, 3)], fontsize=7)
    ax.set_xticks(np.arange(len(lengths) + 1) - 0.5, minor=True)
    ax.set_yticks(np.arange(11) - 0.5, minor=True)
    ax.grid(which="minor", color="white", linewidth=1)
    ax.tick_params(which="minor", length=0)
    return image
