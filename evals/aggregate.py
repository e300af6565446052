"""From rows to cells: one line per task, length, mode and policy, with intervals and the difference to the ceiling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from kvengine.evals.records import Row, ok, same_code
from kvengine.evals.statistics import Interval, interval, paired

MARGIN = 0.2
"""A ceiling less than this above guessing cannot tell policies apart."""

AVERAGED = ("held", "attended", "bytes_held", "read_per_token", "prompt_tokens", "new_tokens")
MIDDLED = ("ttft", "tokens_per_s")

Place = tuple[str, str, int, str]  # suite, task, length, mode


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """A cell as tables show it. `flag`: why the cell must not be used to compare policies, if so. `message`: what failed.
    `cut`: contexts that were longer than the length, and lost their middle."""

    suite: str
    task: str
    length: int
    mode: str
    policy: str
    role: str
    stack: str
    status: str
    message: str = ""
    metric: str = ""
    score: Interval | None = None
    delta: Interval | None = None
    ceiling: float | None = None
    nulls: int = 0
    cut: int = 0
    turns: tuple[float, ...] = ()
    flag: str = ""
    means: dict[str, float | None] = field(default_factory=dict)
    provenance: str = ""

    @property
    def place(self) -> Place:
        """Where the cell stands, whatever the policy."""
        return self.suite, self.task, self.length, self.mode


def cells(rows: Iterable[Row], floors: dict[str, float] | None = None) -> list[CellResult]:
    """Cells in order of appearance. A mixed task makes one cell per kind of turn, named `task/kind`.

    A row that was done again replaces the earlier one.
    """
    groups: dict[tuple[str, str, int, str, str], dict[tuple[Any, int], Row]] = defaultdict(dict)
    for row in rows:
        groups[_at(row)][row["sample"], row["turn"]] = row
    done = {at: list(ok(group.values())) for at, group in groups.items()}
    ceilings = {at[:4]: found for at, found in done.items() if found and found[0]["role"] == "ceiling"}
    made = [
        _cell(at[1], list(group.values()), done[at], ceilings.get(at[:4]), floors or {}) for at, group in groups.items()
    ]
    return made


OTHER_DATA = {
    "status": "other data",
    "message": "the data were changed after it was measured, and others were measured on the new ones; run it again",
    "sample": None,
    "turn": 0,
    "turns": 1,
}


def current(rows: list[Row], names: Mapping[str, str] | None = None) -> list[Row]:
    """Rows without those of samples whose data changed since: only policies that were asked the same may be compared.

    Of a sample the row that was written last says what the data are now. A cell of which nothing is left says so. Of a cell the
    last row says what the policy's code is now: what it was measured with before is another policy's. What a cell failed at is
    left out if it went on since. `names`: as for `by_one_name`.
    """
    rows = by_one_name(rows, names or {})
    answered = {row["key"]: place for place, row in enumerate(rows) if row["status"] == "ok"}
    rows = [row for i, row in enumerate(rows) if row["status"] == "ok" or i > answered.get(row["key"], -1)]
    code = {_at(row): row["code"] for row in rows if row.get("code") is not None}
    rows = [row for row in rows if same_code(row.get("code"), code.get(_at(row)))]
    newest = {(*_at(row)[:4], row["sample"]): row["sample_hash"] for row in ok(rows)}
    kept = [row for row in rows if row["status"] != "ok" or row["sample_hash"] == newest[*_at(row)[:4], row["sample"]]]
    left = {_at(row) for row in ok(kept)}
    lost = {_at(row): {**row, **OTHER_DATA} for row in ok(rows) if _at(row) not in left}
    return [*kept, *lost.values()]


def by_one_name(rows: list[Row], said: Mapping[str, str]) -> list[Row]:
    """Rows with one name for each stack, the last that it was given, and no name for two: what a text meant before its defaults
    changed is called by its options. Tables go by names. `said`: what names meant when they were last asked for, which need not
    be what was last measured."""
    means = {row["policy"]: row["stack"] for row in rows} | dict(said)
    names = {row["stack"]: row["policy"] for row in rows if means[row["policy"]] == row["stack"]}
    return [{**row, "policy": names.get(row["stack"], row["stack"])} for row in rows]


def _at(row: Row) -> tuple[str, str, int, str, str]:
    """What makes a cell in tables: suite, task, length, mode, stack."""
    return row["suite"], named(row), row["length"], row["mode"], row["stack"]


def named(row: Row) -> str:
    """The task, with the kind of turn where a task mixes several."""
    return f"{row['task']}/{row['kind']}" if row.get("kind") else str(row["task"])


def _cell(
    task: str, group: list[Row], found: list[Row], ceiling: list[Row] | None, floors: dict[str, float]
) -> CellResult:
    one = group[0]
    where = {name: one[name] for name in ("suite", "length", "mode", "policy", "role", "stack")}
    if not found:
        return CellResult(**where, task=task, status=one["status"], message=one.get("message", ""))
    failed = [f"{row['status']}: {row.get('message', '')}" for row in group if row["status"] != "ok"]
    top = fmean(row["score"] for row in ceiling) if ceiling else None
    shares = found[0]["metric"] != "nll"
    apart = paired(by_sample(found), by_sample(ceiling), shares=shares) if ceiling and ceiling is not found else None
    return CellResult(
        **where,
        task=task,
        status="ok",
        message=failed[-1] if failed else "",
        metric=found[0]["metric"],
        score=interval([row["score"] for row in found], [row["sample"] for row in found], shares=shares),
        delta=apart,
        ceiling=top,
        nulls=sum(row["null"] for row in found),
        cut=len({row["sample"] for row in found if row.get("truncated")}),
        turns=per_turn(found),
        flag=_flag(found, top, floors.get(one["task"], 0.0)),
        means=averages(found),
        provenance=found[0]["provenance"],
    )


def by_sample(rows: list[Row]) -> dict[tuple[str, int], float]:
    """Score by sample and turn."""
    return {(row["sample"], row["turn"]): row["score"] for row in rows}


def per_turn(rows: list[Row]) -> tuple[float, ...]:
    """Mean score of each turn, in order."""
    turns: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        turns[row["turn"]].append(row["score"])
    return tuple(fmean(turns[turn]) for turn in sorted(turns))


def averages(rows: list[Row]) -> dict[str, float | None]:
    """Means of what is counted, medians of what is timed, the maximum of peaks.

    The time to the first token is that of turns that read the context.
    """
    opening = [row for row in rows if row["turn"] == 0 or row["placement"] == "agnostic"]
    found: dict[str, float | None] = {name: _over(fmean, rows, name) for name in AVERAGED}
    found |= {"ttft": _over(median, opening, "ttft"), "tokens_per_s": _over(median, rows, "tokens_per_s")}
    return found | {"peak_bytes": _over(max, rows, "peak_bytes")}


def _over(how: Callable[[list[float]], float], rows: list[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return float(how(values)) if values else None


def _flag(found: list[Row], ceiling: float | None, floor: float) -> str:
    if found[0]["metric"] == "nll":
        return "not discriminative" if ceiling is not None and 0 < floor <= ceiling else ""
    if ceiling is None:
        return "no ceiling"
    return "not discriminative" if ceiling - floor < MARGIN else ""


def overall(found: list[CellResult], usable_only: bool = False) -> dict[tuple[str, int, str, str], float]:
    """Unweighted mean of the tasks' scores by (policy, length, mode, stack), over tasks that every policy has that has any
    at this length and mode."""
    groups: dict[tuple[str, int, str, str], list[float]] = defaultdict(list)
    for cell in alike([cell for cell in found if cell.metric != "nll" and not (usable_only and cell.flag)]):
        if cell.score:
            groups[cell.policy, cell.length, cell.mode, cell.stack].append(cell.score.mean)
    return {at: fmean(values) for at, values in groups.items()}


def alike(found: list[CellResult]) -> list[CellResult]:
    """Cells with a score, of tasks in which every policy has one that has any at this length and mode."""
    scored = [cell for cell in found if cell.score]
    stacks: dict[tuple[int, str], set[str]] = defaultdict(set)
    having: dict[Place, set[str]] = defaultdict(set)
    for cell in scored:
        stacks[cell.length, cell.mode].add(cell.stack)
        having[cell.place].add(cell.stack)
    return [cell for cell in scored if having[cell.place] == stacks[cell.length, cell.mode]]
