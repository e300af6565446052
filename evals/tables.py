"""Markdown and CSV from cells."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

from kvengine.evals.aggregate import AVERAGED, MIDDLED, CellResult, Place, alike, overall
from kvengine.evals.manifest import machines, shared
from kvengine.evals.ruler_summary import BAR, lines
from kvengine.evals.statistics import Interval

COLUMNS = (
    *("suite", "task", "length", "mode", "policy", "role", "stack", "status", "metric", "n", "clusters"),
    *("score", "low", "high", "ceiling", "delta", "delta_low", "delta_high", "nulls", "cut", "flag", "provenance"),
    *AVERAGED,
    *MIDDLED,
    *("peak_bytes", "turns", "message"),
)

COST_HEAD = (
    "policy",
    "tokens held",
    "attended",
    "bytes held",
    "read per token",
    "first token s",
    "tokens/s",
    "peak memory",
)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def size(number: float | None) -> str:
    """Bytes for people.

    >>> size(1536), size(None)
    ('1.5 KiB', '–')
    """
    if number is None:
        return "–"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def figure(number: float | None, digits: int = 1) -> str:
    """A number, or a dash."""
    return "–" if number is None else f"{number:.{digits}f}"


def score_text(cell: CellResult) -> str:
    """`87.5 [80.1, 92.3]`, in percent; NLL as it is."""
    if cell.score is None:
        return cell.status
    return span(cell.score, 1.0 if cell.metric == "nll" else 100.0)


def loss(cell: CellResult) -> str:
    """`2.310`, or `2.452 (+0.142)`: NLL per token and what it is above the full cache's."""
    if cell.score is None:
        return cell.status
    return f"{cell.score.mean:.3f}" + (f" ({cell.delta.mean:+.3f})" if cell.delta else "")


def span(value: Interval | None, times: float = 100.0) -> str:
    """A mean and its interval."""
    if value is None:
        return "–"
    digits = 3 if times == 1.0 else 1
    low, mean, high = (f"{times * number:.{digits}f}" for number in (value.low, value.mean, value.high))
    return f"{mean} [{low}, {high}]" if isfinite(value.high - value.low) else mean


def unique(values: Iterable[Any]) -> list[Any]:
    """Values in order of first appearance."""
    return list(dict.fromkeys(values))


def markdown(found: list[CellResult], manifest: dict[str, Any]) -> str:
    """The report of a run as text."""
    parts = [f"# {manifest['model_name']}: evaluation\n", provenance(found, manifest)]
    for suite, length, mode in unique((cell.suite, cell.length, cell.mode) for cell in found):
        chosen = [cell for cell in found if (cell.suite, cell.length, cell.mode) == (suite, length, mode)]
        parts += [
            f"## {suite}, {length} tokens, {mode}\n",
            "".join(f"{line}\n" for line in in_short(chosen)),
            scores(chosen),
            differences(chosen),
            costs(chosen),
            notes(chosen),
        ]
    return "\n".join(part for part in [*parts, over_lengths(found)] if part)


def over_lengths(found: list[CellResult]) -> str:
    """RULER's averages, if there are several lengths."""
    lengths = sorted({cell.length for cell in found if cell.suite == "ruler"})
    if len(lengths) < 2:
        return ""
    count = len({cell.task for cell in found if cell.suite == "ruler"})
    head = ["policy", "mode", *map(str, lengths), "avg", "wAvg (inc)", "wAvg (dec)", f"effective (> {BAR})"]
    return f"## RULER over lengths, {count} of 13 tasks\n\n" + table(head, lines(found))


def provenance(found: list[CellResult], manifest: dict[str, Any]) -> str:
    """What ran, in a sentence each."""
    device = f"{', then '.join(machines(manifest))}; {manifest['dtype']}"
    lines = [
        f"Model hash `{manifest['model']}`, {manifest['parameters']:,} parameters; {device}.",
        f"Seed of the data: {manifest['config'].get('seed', 'unknown')}.",
        "Scores are percent with 95 % intervals; bytes are means per sample; times are medians.",
        *(
            ["Losses (nll) are nats per token, the mean negative log-likelihood; less is better."]
            if any(cell.metric == "nll" for cell in found)
            else []
        ),
        "Held: tokens per layer and KV head. Attended: those that a decoded token reads. Read per token: the bytes of these, and "
        "of what is looked at to choose them.",
        *conditions(found, manifest),
        "multi-turn: the question is part of the compressed prompt. multi-request: it is asked after compression.",
    ]
    return "\n".join(f"- {line}" for line in lines) + "\n"


def conditions(found: list[CellResult], manifest: dict[str, Any]) -> list[str]:
    """What is not as usual of how a run was measured."""
    over = beyond(unique(cell.length for cell in found), manifest.get("positions"))
    return [*timed(manifest), *parted(manifest), *over, *thinking((manifest.get("wrapper") or {}).get("tail", ""))]


def timed(manifest: dict[str, Any]) -> list[str]:
    """How samples whose contexts were shared were timed."""
    said = "Where contexts were read once for all policies, times and peak memory are those of one sample asked alone."
    return [said] if shared(manifest) else []


def parted(manifest: dict[str, Any]) -> list[str]:
    """How prompts were judged, if not at their end."""
    size = manifest["config"].get("judge_every")
    return [f"Prompts were read in parts of {size} tokens, each judged before the next (judge_every)."] if size else []


def beyond(lengths: list[int], positions: int | None) -> list[str]:
    """Lengths that the model's configuration does not speak of: its scores there are not the policies' fault.

    >>> beyond([1024, 4096], 2048)
    ["Beyond the 2048 positions of the model's configuration: 4096 tokens."]
    """
    over = [str(length) for length in lengths if positions is not None and length > positions]
    return [f"Beyond the {positions} positions of the model's configuration: {', '.join(over)} tokens."] if over else []


def thinking(tail: str) -> list[str]:
    """Templates that have begun a thought where the model goes on: its score is not the policy's fault.

    >>> thinking("<assistant><think></think>")
    []
    """
    if tail.rfind("<think>") <= tail.rfind("</think>"):
        return []
    return [
        "The chat template has the model think first, in the tokens that a task gives to an answer; --chat off asks without it."
    ]


def scores(found: list[CellResult]) -> str:
    """Policies down, tasks across."""
    tasks = unique(cell.task for cell in found)
    by = {(cell.policy, cell.task): cell for cell in found}
    means, usable = policy_means(found), policy_means(found, usable_only=True)
    rows = [
        [
            f"`{policy}`",
            *(_marked(by.get((policy, task))) for task in tasks),
            figure(means.get(policy)),
            figure(usable.get(policy)),
        ]
        for policy in unique(cell.policy for cell in found)
    ]
    return "### Scores\n\n" + table(["policy", *tasks, "mean", "mean of telling tasks"], rows)


def policy_means(found: list[CellResult], *, usable_only: bool = False) -> dict[str, float]:
    """Mean score in percent by policy, of one length and mode, over tasks that every policy has.

    `usable_only` leaves out tasks that cannot tell policies apart.
    """
    return {at[0]: 100 * value for at, value in overall(found, usable_only).items()}


def mean_scores(found: list[CellResult]) -> dict[str, float]:
    """Mean by policy over the tasks that can tell policies apart (over all, if none can), in percent."""
    return policy_means(found, usable_only=True) or policy_means(found)


def _marked(cell: CellResult | None) -> str:
    return "–" if cell is None else score_text(cell) + (" †" if cell.flag == "not discriminative" else "")


def differences(found: list[CellResult]) -> str:
    """Paired differences to the ceiling."""
    tasks = unique(cell.task for cell in found if cell.delta)
    if not tasks:
        return ""
    by = {(cell.policy, cell.task): cell for cell in found if cell.delta}
    rows = [
        [f"`{policy}`", *(_delta(by.get((policy, task))) for task in tasks)] for policy in unique(at[0] for at in by)
    ]
    return "### Difference to the full cache, same samples\n\n" + table(["policy", *tasks], rows)


def _delta(cell: CellResult | None) -> str:
    return "–" if cell is None else span(cell.delta, 1.0 if cell.metric == "nll" else 100.0)


def costs(found: list[CellResult]) -> str:
    """Memory and time by policy, over the tasks."""
    rows = [[f"`{policy}`", *cost_texts(mine)] for policy, mine in by_policy(found).items()]
    return "### Memory and speed\n\n" + table(list(COST_HEAD), rows)


def by_policy(found: list[CellResult]) -> dict[str, list[CellResult]]:
    """The cells that tell each policy's costs: of tasks that every policy has, as those that tell its score.

    Who lacks the longest task would look cheap. Where there is no such task, all that a policy has.
    """
    scored, compared = [cell for cell in found if cell.score], alike(found)
    made = {}
    for policy in unique(cell.policy for cell in scored):
        mine = [[cell for cell in some if cell.policy == policy] for some in (compared, scored)]
        made[policy] = mine[0] or mine[1]
    return made


def cost_texts(mine: list[CellResult]) -> list[str]:
    """One policy's costs over its cells."""
    return [
        figure(cost(mine, "held"), 0),
        figure(cost(mine, "attended"), 0),
        size(cost(mine, "bytes_held")),
        size(cost(mine, "read_per_token")),
        figure(cost(mine, "ttft"), 3),
        figure(cost(mine, "tokens_per_s")),
        size(cost(mine, "peak_bytes")),
    ]


def cost(mine: list[CellResult], name: str) -> float | None:
    """Mean of one cost over cells."""
    values = [value for cell in mine if (value := cell.means.get(name)) is not None]
    return sum(values) / len(values) if values else None


def notes(found: list[CellResult]) -> str:
    """Refusals, flags and substitutes, spelled out."""
    names = unique(cell.policy for cell in found), unique(cell.policy for cell in found if cell.role != "ceiling")
    lines = [given_up([cell for cell in found if _why(cell) == why], *names) for why in unique(map(_why, found)) if why]
    lines += [line for place in unique(cell.place for cell in found) for line in fewer(found, place)]
    flagged = unique(cell.task for cell in found if cell.flag == "not discriminative")
    if flagged:
        lines.append(
            f"- † {', '.join(flagged)}: even the full cache hardly beats guessing; says nothing about policies."
        )
    lines += [line for task in unique(cell.task for cell in found) for line in shortened(found, task)]
    for source in unique(cell.provenance for cell in found if cell.provenance not in ("official", "")):
        lines.append(f"- {source}: {', '.join(unique(cell.task for cell in found if cell.provenance == source))}")
    return "\n".join(lines) + "\n" if lines else ""


def fewer(found: list[CellResult], place: Place) -> list[str]:
    """Who was asked less than others were: its samples were not all measured, or a failure ended them."""
    there = [cell for cell in found if cell.place == place]
    most = max((cell.score.n for cell in there if cell.score), default=0)
    return [
        f"- `{cell.policy}` on {cell.task} ({cell.length}, {cell.mode}): {cell.score.n} of {most} answers"
        + (f", then {cell.message}" if cell.message else "")
        for cell in there if cell.score and cell.score.n < most
    ]  # fmt: skip


def shortened(found: list[CellResult], task: str) -> list[str]:
    """Whose contexts lost their middle: what was asked for may have stood there, whatever the policy."""
    there = [cell for cell in found if cell.task == task]
    cut, of = max(((cell.cut, cell.score.clusters) for cell in there if cell.score), default=(0, 0))
    return [f"- {task}: {cut} of {of} texts were longer than the length and lost their middle"] if cut else []


def _why(cell: CellResult) -> str:
    return "" if cell.score else f"{cell.status}: {cell.message}"


def given_up(mine: list[CellResult], every: list[str], judged: list[str]) -> str:
    """Cells that failed for one reason. `every`: all policies; `judged`: those beside the full cache."""
    policies, tasks = (unique(names) for names in zip(*((c.policy, c.task) for c in mine), strict=True))
    who = ", ".join(f"`{policy}`" for policy in policies)
    if len(policies) > 1 and set(policies) in (set(every), set(judged)):
        who = "every policy" if set(policies) == set(every) else "every policy but the full cache"
    return f"- {who} on {', '.join(tasks)}: {_why(mine[0])}"


def in_short(found: list[CellResult], within: float = 5.0) -> list[str]:
    """Who is as good as the full cache at the least cost, in a sentence per cost, of one length and mode."""
    means = policy_means(found, usable_only=True)
    cells = {policy: mine for policy, mine in by_policy(found).items() if policy in means}
    roles = {policy: mine[0].role for policy, mine in cells.items()}
    top = [policy for policy, role in roles.items() if role == "ceiling"]
    if not top or "policy" not in roles.values():
        return []
    good = [p for p, role in roles.items() if role == "policy" and means[p] >= means[top[0]] - within]
    lines = [] if good else [f"No policy comes within {within:g} points of the full cache here."]
    for name, verb in (("bytes_held", "holds"), ("read_per_token", "reads per token")):
        whole = cost(cells[top[0]], name)
        spent = {policy: value for policy in good if (value := cost(cells[policy], name))}
        best = min(spent, key=lambda policy: spent[policy], default="")
        if whole and best and spent[best] < 0.95 * whole:
            share = f"{100 * spent[best] / whole:.0f} % of its bytes"
            lines.append(f"Of the policies within {within:g} points of the full cache, `{best}` {verb} least: {share}.")
    return lines


def long_csv(found: list[CellResult]) -> str:
    """One line per cell, every figure."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat(cell) for cell in found)
    return out.getvalue()


def flat(cell: CellResult) -> dict[str, Any]:
    """A cell as one line."""
    names = [name for name in COLUMNS if name in CellResult.__dataclass_fields__ and name not in ("score", "delta")]
    line = {name: getattr(cell, name) for name in names} | cell.means
    line["turns"] = " ".join(f"{turn:.4f}" for turn in cell.turns)
    if cell.score:
        line |= {"score": cell.score.mean, "low": cell.score.low, "high": cell.score.high}
        line |= {"n": cell.score.n, "clusters": cell.score.clusters}
    if cell.delta:
        line |= {"delta": cell.delta.mean, "delta_low": cell.delta.low, "delta_high": cell.delta.high}
    return line
