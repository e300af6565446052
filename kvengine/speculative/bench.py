"""Speculative decoding against plain decoding, in the same run and on the same prompts.

Every row of a comparison says what was measured and, beside it, what the model of independent acceptance predicts from
the measured cost of a drafted token and of a judging pass.
"""

from __future__ import annotations

import platform
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib
import torch
from jaxtyping import Int64
from matplotlib.figure import Figure
from torch import Tensor

from kvengine.errors import EvaluationError
from kvengine.speculative.check import Gamma
from kvengine.speculative.report import Report
from kvengine.speculative.triforce import TriForce

Ids = Int64[Tensor, "1 token"]
WARM = 16  # new tokens that each setting decodes before it is timed


@dataclass(frozen=True)
class Setting:
    """One way to decode: the options of `TriForce`. All None decodes plainly."""

    draft: Any = None
    middle: str | None = None
    gamma: Gamma = (1, 6)
    stack: str = "full"

    @property
    def drafter(self) -> str:
        return "none" if self.draft is None else self.draft if isinstance(self.draft, str) else "model"

    @property
    def steps(self) -> str:
        return "" if self.draft is None and self.middle is None else str(self.gamma)

    def decoder(self, target: Any) -> TriForce:
        return TriForce(target, self.draft, self.middle, self.gamma, stack=self.stack)


@dataclass(frozen=True)
class Result:
    """A setting at a context length. Seconds are of decoding, prompts apart; a speed-up is against plain decoding.

    same_text: prompts whose text is that of plain decoding; None where tokens are drawn, and texts differ by right.
    """

    context: int
    middle: str
    draft: str
    gamma: str
    prompts: int
    new_tokens: int
    tokens_per_second: float
    speedup: float
    cpu_speedup: float | None
    predicted: float
    tokens_per_pass: float
    acceptance: float | None
    acceptance_by_place: list[float]
    draft_acceptance: float | None
    pass_cost: float
    token_cost: float | None
    bytes_per_token: int
    view_bytes: int
    same_text: int | None
    target_seconds: float
    draft_seconds: float
    draft_acceptance_by_place: list[float]
    prompt_seconds: float
    middle_seconds: float
    lowest_seconds: float

    @property
    def places(self) -> str:
        return shares(self.acceptance_by_place)

    @property
    def draft_places(self) -> str:
        return shares(self.draft_acceptance_by_place)

    @property
    def mib_per_token(self) -> float:
        return self.bytes_per_token / 2**20


def compare(
    target: Any,
    prompts: Sequence[Ids],
    settings: Sequence[Setting],
    new: int = 64,
    progress: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> list[Result]:
    """Decode every prompt plainly and under each setting, in turns, so that a busy machine slows all alike.

    Args:
        prompts: of one length. new: tokens after each. options: as in `TriForce.generate`; greedy if there are none.

    Raises:
        EvaluationError: nothing was decoded.
    """
    options = options or {"do_sample": False}
    for setting in (
        Setting(),
        *settings,
    ):  # the first passes of each pay for others; by decoders that nothing remembers
        setting.decoder(target).generate(prompts[0], max_new_tokens=min(new, WARM), seed=0, **options)
    decoders = [Setting().decoder(target), *(setting.decoder(target) for setting in settings)]
    totals, same = [Report() for _ in decoders], [0] * len(decoders)
    for number, ids in enumerate(prompts):
        texts = []
        for total, decoder in zip(totals, decoders, strict=True):
            texts.append(decoder.generate(ids, max_new_tokens=new, seed=number, **options).tolist())
            total.add(decoder.report)
        same = [count + (text == texts[0]) for count, text in zip(same, texts, strict=True)]
        progress(f"{prompts[0].shape[1]} tokens: prompt {number + 1} of {len(prompts)}")
    if totals[0].emitted == totals[0].rows:
        why = "ask for more" if new == 1 else "the model ended there: give a text that it goes on with"
        raise EvaluationError(f"decoding plainly, every prompt got one token, and one costs no pass; {why}")
    counts = same if options.get("do_sample") is False else [None] * len(same)
    made = zip((Setting(), *settings), totals, counts, strict=True)
    return [result(prompts[0].shape[1], setting, total, totals[0], count) for setting, total, count in made]


def result(context: int, setting: Setting, total: Report, baseline: Report, same: int | None) -> Result:
    """A row, from the sum of a setting's reports and that of plain decoding."""
    total.against(baseline)
    plain = total.plain_pass or 1.0
    busy = baseline.cpu_seconds / (baseline.emitted - baseline.rows) * (total.emitted - total.rows)
    top, middle = total.tiers[0], next((tier for tier in total.tiers if tier.name == "middle"), None)
    return Result(
        context, setting.middle or "", setting.drafter, setting.steps, total.rows,
        total.emitted, (total.emitted - total.rows) / total.seconds, total.measured_speedup or 0.0,
        busy / total.cpu_seconds if total.cpu_seconds else None,
        total.predicted_speedup or 0.0, total.tokens_per_target_pass, top.acceptance, top.by_position,
        middle.acceptance if middle else None, top.seconds / max(1, top.passes) / plain,
        top.draft_seconds / top.drafted / plain if top.drafted else None, int(total.bytes_per_token),
        middle.cache_bytes if middle else 0, same, top.seconds, top.draft_seconds,
        middle.by_position if middle else [], total.prefill_seconds, middle.seconds if middle else 0.0,
        (middle or top).draft_seconds,
    )  # fmt: skip


COLUMNS = {  # heading: key of a row, and its format
    "Context": "context",
    "Middle": "middle",
    "Draft": "draft",
    "γ": "gamma",
    "Accepted by target": "acceptance:.2f",
    "Accepted by middle": "draft_acceptance:.2f",
    "Tokens per target pass": "tokens_per_pass:.2f",
    "Cost of a drafted token": "token_cost:.2f",
    "Cost of a judging pass": "pass_cost:.2f",
    "Tokens/s": "tokens_per_second:.1f",
    "Speed-up": "speedup:.2f",
    "in CPU time": "cpu_speedup:.2f",
    "Predicted": "predicted:.2f",
    "Prompts": "prompts",
    "Same text": "same_text",
}

DETAILS = {
    **{heading: COLUMNS[heading] for heading in ("Context", "Middle", "Draft", "γ")},
    "Accepted by target, by place": "places",
    "Accepted by middle, by place": "draft_places",
    "Read per token (MiB)": "mib_per_token:.2f",
    "Seconds: prompts": "prompt_seconds:.2f",
    "target": "target_seconds:.2f",
    "middle": "middle_seconds:.2f",
    "draft": "lowest_seconds:.2f",
    "Speed-up": "speedup:.2f",
    "Predicted": "predicted:.2f",
}


def shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def table(results: Sequence[Result], columns: Mapping[str, str] = COLUMNS) -> str:
    """Markdown. Costs are in plainly decoded tokens, seconds those of all prompts together."""
    return markdown(records(results), columns)


def markdown(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A table that lines up in a terminal too. `columns`: heading: key of a row, and its format."""
    lines = [list(columns), ["---"] * len(columns)]
    for row in rows:
        cells = [(row[key], form) for key, _, form in (column.partition(":") for column in columns.values())]
        lines.append(["–" if value is None else format(value, form) for value, form in cells])
    wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines[1] = ["-" * n for n in wide]
    padded = [[cell.ljust(n) for cell, n in zip(line, wide, strict=True)] for line in lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in padded) + "\n"


def plot(results: Sequence[Result], path: Path | BinaryIO) -> None:
    """Measured (lines) and predicted (pale dots) speed-up against context length, a colour per setting."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    axes = figure.add_subplot()
    shown = [row for row in results if row.middle or row.draft != "none"]
    names = labels(shown)
    for number, name in enumerate(dict.fromkeys(names)):
        mine = sorted((row for row, its in zip(shown, names, strict=True) if its == name), key=lambda row: row.context)
        colour, contexts = matplotlib.colormaps["tab20"](number % 20), [row.context for row in mine]
        axes.plot(contexts, [row.speedup for row in mine], "-o", color=colour, label=name)
        axes.plot(contexts, [row.predicted for row in mine], ".", color=colour, alpha=0.5, markersize=14)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row.context for row in shown}), [str(c) for c in sorted({row.context for row in shown})])
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel("speed-up over plain decoding (pale: predicted)")
    figure.legend(loc="outside right center", fontsize=8)
    figure.savefig(path)


def labels(rows: Sequence[Result]) -> list[str]:
    """The settings' names, the same at every length: budgets in tokens are told as parts of the context where they grow with
    it, that is where none is at two lengths."""
    lengths: dict[str, set[int]] = {}
    for row in rows:
        lengths.setdefault(row.middle, set()).add(row.context)
    fixed = len({row.context for row in rows}) == 1
    return [label(row, parts=not fixed and len(lengths[row.middle]) == 1) for row in rows]


def label(row: Result, *, parts: bool = True) -> str:
    """A setting's name, budgets in tokens as parts of the context, or as they are."""

    def part(found: re.Match[str]) -> str:
        parts = round(row.context / int(found[2])) if int(found[2]) else 0
        return f"{found[1]}1/{parts}" if parts else found[0]  # none, or more than there are: no part

    middle = re.sub(r"((?:budget|recent)=)(\d+)(?![\d.])", part, row.middle) if parts else row.middle
    names = [middle, "" if row.draft == "none" else row.draft]
    return " over ".join(name for name in names if name) + f", γ={row.gamma}"


def records(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Rows for a file."""
    names = [*(field.name for field in fields(Result)), "places", "draft_places", "mib_per_token"]
    return [{name: getattr(row, name) for name in names} for row in results]


def document(results: Sequence[Result], command: str, columns: Mapping[str, str] = COLUMNS) -> dict[str, Any]:
    """Everything needed to show the results and to get them again."""
    return {"command": command, "machine": machine(), "columns": columns, "rows": records(results)}


def command_line() -> str:
    """What was typed, as a shell takes it again."""
    return shlex.join(["kvengine", *sys.argv[1:]])


def png(draw: Callable[[BinaryIO], None]) -> bytes:
    """A picture that is drawn into a file."""
    file = BytesIO()
    draw(file)
    return file.getvalue()


def conditions(model: Any) -> dict[str, str]:
    """On what a model was measured."""
    return {"machine": machine(model.device), "dtype": str(model.dtype).removeprefix("torch.")}


def machine(device: torch.device | None = None) -> str:
    """What measures. `device`: where the model is; None: on a GPU if there is one."""
    used = torch.cuda.is_available() if device is None else device.type == "cuda"
    chip = f", {torch.cuda.get_device_name(device)}" if used else ""
    return (
        f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}{chip}"
    )


def windows(tokens: Sequence[int], context: int, count: int) -> list[Ids]:
    """Up to `count` prompts of `context` tokens, evenly spread over a text."""
    if len(tokens) < context:
        return []
    steps = max(1, count - 1)
    starts = dict.fromkeys((len(tokens) - context) * i // steps for i in range(count))
    return [torch.tensor([list(tokens[start : start + context])]) for start in starts]
