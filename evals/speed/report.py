"""Tables, files and pictures of what decoded tokens cost."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatter

from kvengine.evals.policies import STOCK
from kvengine.evals.speed.measure import Cost
from kvengine.offload.stores.filesystem import replace_file
from kvengine.speculative import bench

STOCK_NAME = "stock transformers"
COLUMNS = {  # heading: key of a row, and its format
    "Context": "context",
    "Policy": "policy",
    "Steps": "steps",
    "Prompt (s)": "prompt_seconds:.2f",
    "Step (ms)": "ms:.2f",
    "20–80 %": "middle",
    "Tokens/s": "tokens_per_second:.1f",
    "× stock": "speedup:.2f",
    "Held (MB)": "held_MB:.2f",
    "Read per token (MB)": "read_MB:.2f",
    "Peak on the device (MB)": "peak_MB:.0f",
}


class Plain(LogFormatter):
    """Numbers as they are, not as powers of ten, at the ticks that matplotlib chooses to name."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        return f"{x:g}" if super().__call__(x, pos) else ""


def rows(found: Sequence[Cost]) -> list[dict[str, Any]]:
    """For a table or a file. `speedup`: over stock transformers at the same length, of its two times the faster one."""
    stock = {
        context: min(cost.ms for cost in found if cost.policy == STOCK and cost.context == context and cost.ms)
        for context in {cost.context for cost in found if cost.policy == STOCK and cost.ms}
    }
    made, seen = [], set()
    for cost in found:
        again = cost.policy == STOCK and cost.context in seen
        seen |= {cost.context} if cost.policy == STOCK else set()
        best = stock.get(cost.context)
        extra = {
            "policy": STOCK_NAME + ", again" * again if cost.policy == STOCK else cost.policy,
            "middle": None if cost.ms is None else f"{cost.p20:.2f}–{cost.p80:.2f}",
            "tokens_per_second": cost.tokens_per_second,
            "speedup": best / cost.ms if best and cost.ms else None,
            **{f"{name}_MB": None if size is None else size / 1e6
               for name, size in (("held", cost.held), ("read", cost.read), ("peak", cost.peak))},
        }  # fmt: skip
        made.append(asdict(cost) | extra)
    return made


def table(found: Sequence[Cost]) -> str:
    """Markdown: what was measured, and below it why the rest was not. On a CPU without the column of a device's memory."""
    shown = rows(found)
    columns: Mapping[str, str] = {
        heading: column for heading, column in COLUMNS.items() if column != "peak_MB:.0f" or any(r["peak"] for r in shown)
    }  # fmt: skip
    text = bench.markdown([row for row in shown if not row["problem"]], columns)
    refused: dict[tuple[str, str, str], list[str]] = {}
    for row in shown:
        if row["problem"]:
            refused.setdefault((row["policy"], row["steps"], row["problem"]), []).append(str(row["context"]))
    lengths = len({row["context"] for row in shown})
    lines = []
    for (policy, steps, problem), contexts in refused.items():
        where = "" if len(contexts) == lengths else f" at {', '.join(contexts)} tokens"
        lines.append(f"- {policy}, {steps}{where}: {problem}")
    return "\n".join([text, *lines]) + "\n" * bool(lines)


def save(found: Sequence[Cost], out: Path, name: str, model: Any) -> None:
    """decode.json, .md and .png in a folder that is there, each as a whole: one of an earlier run is there until then."""
    document = {
        "command": bench.command_line(), "model": name, "stock attention": model.config._attn_implementation,
        **bench.conditions(model), "columns": COLUMNS, "rows": rows(found),
    }  # fmt: skip
    replace_file(out / "decode.json", (json.dumps(document, indent=1) + "\n").encode())
    replace_file(out / "decode.md", table(found).encode())
    if any(cost.ms for cost in found):
        replace_file(out / "decode.png", bench.png(partial(plot, found)))


def plot(found: Sequence[Cost], path: Path | BinaryIO) -> None:
    """Time of a step, and bytes held: against context, a colour for each policy, dashes for steps that are recorded; or as
    bars, where there is one context.
    """
    measured = [cost for cost in found if cost.ms is not None]
    policies = list(dict.fromkeys(cost.policy for cost in measured))
    contexts = sorted({cost.context for cost in measured})
    lines = list(dict.fromkeys((cost.policy, cost.steps) for cost in measured))
    names = [STOCK_NAME if policy == STOCK else f"{policy}, {steps}" for policy, steps in lines]
    colours = ["black" if p == STOCK else matplotlib.colormaps["tab10"](policies.index(p) % 10) for p, _ in lines]
    many = len(contexts) > 1
    figure = Figure(figsize=(11, 4.5 if many else 1.5 + 0.25 * len(lines)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=not many)
    for axes, what in zip(panels, ("a step (ms)", "held (MB)"), strict=True):
        for i, (policy, steps) in enumerate(lines):
            mine = [cost for cost in measured if (cost.policy, cost.steps) == (policy, steps)]
            means = {c: statistics.mean(shown(x, what) for x in mine if x.context == c) for c in contexts
                     if any(x.context == c for x in mine)}  # fmt: skip
            if many:
                style = {"eager": "-", "recorded": "--"}.get(steps, ":")
                axes.plot(*zip(*means.items(), strict=True), style, marker="o", markersize=4, color=colours[i],
                          label=names[i] if axes is panels[0] else None)  # fmt: skip
            else:
                axes.barh(i, list(means.values()), color=colours[i])
        if many:
            axes.set(xscale="log", yscale="log", xlabel="context (tokens)", ylabel=what)
            axes.set_xscale("log", base=2)
            axes.set_xticks(contexts, [str(c) for c in contexts])
            axes.yaxis.set_major_formatter(Plain())
            axes.yaxis.set_minor_formatter(Plain())
        else:
            axes.set(
                xlabel=f"{what}, {contexts[0]} tokens",
                yticks=range(len(names)),
                yticklabels=names,
                ylim=(len(names), -1),
            )
        axes.grid(alpha=0.3)
    if many:
        figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    figure.savefig(path)


def shown(cost: Cost, what: str) -> float:
    return (cost.ms or 0.0) if what.startswith("a step") else (cost.held or 0) / 1e6
