"""Two runs side by side: the paired difference of every cell that both have."""

from __future__ import annotations

from pathlib import Path

from kvengine.errors import EvaluationError
from kvengine.evals import report, tables
from kvengine.evals.aggregate import by_sample, named
from kvengine.evals.records import Row
from kvengine.evals.statistics import paired

At = tuple[str, str, int, str, str]


def text(a: Path, b: Path) -> str:
    """A Markdown table of B - A in percent points.

    Raises `EvaluationError` if the runs share no cell, or asked different data under the same name.
    """
    first, second = _groups(a), _groups(b)
    shared = [at for at in first if at in second]
    if not shared:
        raise EvaluationError(f"{a} and {b} share no task, length, mode and policy: nothing to compare")
    rows = []
    for at in shared:
        _same_data(at, first[at], second[at])
        shares = first[at][0]["metric"] != "nll"
        difference = paired(by_sample(second[at]), by_sample(first[at]), shares=shares)
        times = 100.0 if shares else 1.0
        sure = difference is not None and (difference.low > 0 or difference.high < 0)
        rows.append([at[1], str(at[2]), at[3], f"`{at[4]}`", tables.span(difference, times), "yes" if sure else ""])
    return tables.table(["task", "length", "mode", "policy", "B - A", "differs"], rows)


def _groups(folder: Path) -> dict[At, list[Row]]:
    groups: dict[At, list[Row]] = {}
    for row in report.read(folder)[0]:
        if row["status"] == "ok":
            at = row["suite"], named(row), row["length"], row["mode"], row["policy"]
            groups.setdefault(at, []).append(row)
    return groups


def _same_data(at: At, first: list[Row], second: list[Row]) -> None:
    hashes = {row["sample"]: row["sample_hash"] for row in first}
    for row in second:
        if hashes.get(row["sample"], row["sample_hash"]) != row["sample_hash"]:
            raise EvaluationError(
                f"{at[1]} at {at[2]} tokens: sample {row['sample']} differs between the runs (other seed or tokenizer)"
            )
