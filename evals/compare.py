"""Two runs side by side: the paired difference of every cell that both have."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvengine.errors import EvaluationError
from kvengine.evals import report, tables
from kvengine.evals.aggregate import by_sample, named
from kvengine.evals.manifest import installed
from kvengine.evals.records import Row, same_code
from kvengine.evals.statistics import paired

At = tuple[str, str, int, str, str]
OF_A_RUN = ("model", "tokenizer", "dtype", "chat", "attention")
"""Of a manifest, what makes answers differ whatever the policy."""


def text(a: Path, b: Path) -> str:
    """A Markdown table of B - A in percent points, and before it what else the runs differ in, and what only one of them has.

    A policy is known again by its options, else by its name: what that meant in each run is then told.

    Raises `EvaluationError` if the runs share no cell, or asked different data under the same name.
    """
    (first, one), (second, other) = _groups(a), _groups(b)
    if not (shared := _shared(first, second)):
        raise EvaluationError(f"{a} and {b} share no task, length, mode and policy: nothing to compare")
    rows = []
    for at, to in shared.items():
        _same_data(at, first[at], second[to])
        shares = first[at][0]["metric"] != "nll"
        difference = paired(by_sample(second[to]), by_sample(first[at]), shares=shares)
        times = 100.0 if shares else 1.0
        sure = difference is not None and (difference.low > 0 or difference.high < 0)
        rows.append([at[1], str(at[2]), at[3], f"`{at[4]}`", tables.span(difference, times), "yes" if sure else ""])
    lines = [*_unlike(one, other), *_changed((first[at], second[to]) for at, to in shared.items())]
    unlike = "".join(f"- the runs differ in {line}\n" for line in lines)
    for folder, cells, both in ((a, first, shared.keys()), (b, second, shared.values())):
        known = {at[4] for at in both}
        left = dict.fromkeys(at[4] for at in cells if at[4] not in known)
        unlike += f"- only {folder} has {', '.join(f'`{policy}`' for policy in left)}\n" if left else ""
    return (unlike and unlike + "\n") + tables.table(["task", "length", "mode", "policy", "B - A", "differs"], rows)


def _shared(first: dict[At, list[Row]], second: dict[At, list[Row]]) -> dict[At, At]:
    """The cells that both have, and what each is called in the second."""
    twins = {(*at[:4], rows[0]["stack"]): at for at, rows in second.items()}
    pairs = {at: twins.get((*at[:4], rows[0]["stack"])) for at, rows in first.items()}
    left = second.keys() - set(pairs.values())
    found = {at: at if twin is None and at in left else twin for at, twin in pairs.items()}
    return {at: twin for at, twin in found.items() if twin is not None}


def _changed(pairs: Iterable[tuple[list[Row], list[Row]]]) -> list[str]:
    """What a policy of one name was in one run and in the other, and whose code is not the same."""
    told: dict[str, None] = {}
    for (a, *_), (b, *_) in pairs:
        if a["stack"] != b["stack"]:
            told[f"`{a['policy']}`: {a['stack']} and {b['stack']}"] = None
        elif not same_code(a.get("code"), b.get("code")):
            told[f"the code of `{a['policy']}`"] = None
    return list(told)


def _unlike(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What is not the same of the models and of how they were asked; of what a manifest does not tell nothing is known."""
    pairs = [(name, one.get(name), other.get(name)) for name in OF_A_RUN]
    pairs += [("golden", one["config"].get("golden"), other["config"].get("golden"))]
    judged = [run["config"].get("judge_every") or "a prompt's end" for run in (one, other)]
    pairs += [("judge_every", judged[0], judged[1])]
    pairs += [(name, version, installed(other).get(name)) for name, version in installed(one).items()]
    return [f"{name}: {x} and {y}" for name, x, y in pairs if x != y and None not in (x, y)]


def _groups(folder: Path) -> tuple[dict[At, list[Row]], dict[str, Any]]:
    groups: dict[At, list[Row]] = {}
    rows, manifest = report.read(folder)
    for row in rows:
        if row["status"] == "ok":
            at = row["suite"], named(row), row["length"], row["mode"], row["policy"]
            groups.setdefault(at, []).append(row)
    return groups, manifest


def _same_data(at: At, first: list[Row], second: list[Row]) -> None:
    hashes = {row["sample"]: row["sample_hash"] for row in first}
    for row in second:
        if hashes.get(row["sample"], row["sample_hash"]) != row["sample_hash"]:
            raise EvaluationError(
                f"{at[1]} at {at[2]} tokens: sample {row['sample']} differs between the runs (other seed or tokenizer)"
            )
