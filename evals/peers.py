"""Rows in the formats that other projects' tools read: RULER's, SCBench's and kvpress's.

    compat/ruler/POLICY/MODE/LENGTH/{TASK.jsonl, summary.csv}          (summary-TASK.csv of a single task)
    compat/scbench/MODEL_kvengine_POLICY/{prediction_TASK_MODE.jsonl, MODEL_kvengine_MODE_POLICY_summary.txt}
    compat/kvpress/ruler__LENGTH__MODEL__POLICY__RATIO[__query_aware]/{predictions.csv, metrics.json, config.yaml}

kvpress's ratio is the fraction of tokens *removed*; ours, like SCBench's, speak of what is kept.
"""

from __future__ import annotations

import csv
import hashlib
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from kvengine.evals.records import Row, ok
from kvengine.evals.tasks import catalogue

SCBENCH_MODES = {"multi-turn": "multi_turn", "multi-request": "scdq"}
LONGEST = 90
"""Letters of a policy's or a model's part in the name of a file, which has two of them and may have 255 on most systems."""
KVPRESS_COLUMNS = (
    *("question", "answer_prefix", "answer", "max_new_tokens", "task", "predicted_answer", "compression_ratio"),
)


def write(folder: Path, rows: list[Row], manifest: dict[str, Any]) -> None:
    """Write what the rows' suites have formats for."""
    for peer in ("ruler", "scbench", "kvpress"):  # summaries are appended to, as their tools do
        shutil.rmtree(folder / peer, ignore_errors=True)
    model = slug(Path(str(manifest["model_name"])).name)
    done = list({(row["key"], row["sample"], row["turn"]): row for row in ok(rows)}.values())
    for suite, policy, mode in _groups(done, "suite", "policy", "mode"):
        mine = [row for row in done if (row["suite"], row["policy"], row["mode"]) == (suite, policy, mode)]
        for (length,) in _groups(mine, "length"):
            some = [row for row in mine if row["length"] == length]
            if suite == "ruler":
                ruler(folder / "ruler" / slug(policy) / mode / str(length), some)
                kvpress(folder / "kvpress", some, model)
        if suite == "scbench":
            name = f"{model}_kvengine_{SCBENCH_MODES[mode]}_{slug(policy)}"
            scbench(folder / "scbench" / f"{model}_kvengine_{slug(policy)}", mine, name)


def slug(text: str) -> str:
    """A policy or model as part of a path.

    >>> slug("snapkv(budget=0.25)+kivi")
    'snapkv-budget-0.25-kivi'
    """
    name = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-")
    if len(name) <= LONGEST:
        return name
    return f"{name[:LONGEST]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"  # no other's, though that begins so


def _groups(rows: Iterable[Row], *names: str) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))


def by_task(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by task."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["task"]].append(row)
    return groups


def ruler(folder: Path, rows: list[Row]) -> None:
    """Predictions by task, and the three-line summary of the official evaluation script."""
    tasks = by_task(rows)
    for task, mine in tasks.items():
        lines = [
            {
                "index": int(row["sample"]),
                "pred": row["prediction"],
                "input": row["question"],
                "outputs": row["answers"],
                "others": {"sample_hash": row["sample_hash"]},
                "truncation": -1,
                "length": row["prompt_tokens"] + row["max_new_tokens"],
            }
            for row in mine
        ]
        write_lines(folder / f"{task}.jsonl", lines)
    scores = [round(100 * fmean(row["score"] for row in mine), 2) for mine in tasks.values()]
    nulls = [f"{sum(row['null'] for row in mine)}/{len(mine)}" for mine in tasks.values()]
    table = [range(len(tasks) + 1), ["Tasks", *tasks], ["Score", *scores], ["Nulls", *nulls]]
    name = "summary.csv" if len(tasks) > 1 else f"summary-{next(iter(tasks))}.csv"  # as theirs
    with (folder / name).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(table)


def scbench(folder: Path, rows: list[Row], name: str) -> None:
    """One line per turn, and a line of scores by turn (multi-turn) or one score (multi-request) appended per task."""
    mode, length = SCBENCH_MODES[rows[0]["mode"]], max(row["length"] for row in rows)
    rows = [row for row in rows if row["length"] == length]
    for task, mine in by_task(rows).items():
        ids = {sample: index for index, (sample,) in enumerate(_groups(mine, "sample"))}
        write_lines(folder / f"prediction_{task}_{mode}.jsonl", [_turn(row, ids[row["sample"]]) for row in mine])
        marks = [name, task, *(["scdq_mode"] if mode == "scdq" else []), str(length)]
        with (folder / f"{name}_summary.txt").open("a", encoding="utf-8") as file:
            file.write(",".join([*marks, *_accuracies(mine, mode)]) + "\n")


def _turn(row: Row, id: int) -> dict[str, Any]:
    meta = row["meta"]
    answer = meta["answer"]
    truth = answer["answer"] if isinstance(answer, dict) else answer  # repoqa's label also holds its rivals
    if row["task"] == "scbench_qa_eng" and isinstance(truth, str):
        truth = [truth]  # their scorer tries every element of the label, which of a text are its letters
    line = {"id": id, "turn_idx": row["turn"], "prediction": row["prediction"], "ground_truth": truth}
    line |= {"task": row["kind"]} if row["kind"] else {}
    line |= {name: meta[name] for name in ("lang", "repo") if name in meta}
    return line | ({"func_name": meta["name"]} if "name" in meta else {})


def _accuracies(rows: list[Row], mode: str) -> list[str]:
    """By turn, and within a turn by kind where a task mixes several (0 where a turn has none of a kind)."""
    task = catalogue("scbench").get(rows[0]["task"])  # None: it was dropped since
    kinds = list(getattr(task, "kinds", {})) or list(dict.fromkeys(row["kind"] for row in rows))
    groups: dict[int, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["turn"] if mode == "multi_turn" else 0].append(row)
    found = []
    for turn in sorted(groups):
        for kind in kinds:
            scores = [row["scores"]["official"] for row in groups[turn] if row["kind"] in ("", kind)]
            found.append(f"{100 * fmean(scores) if scores else 0:.3f}")
    return found


def kvpress(folder: Path, rows: list[Row], model: str) -> None:
    """A result folder as its evaluation script leaves it."""
    one = rows[0]
    ratio = max(0.0, 1 - fmean(row["held"] / (row["prompt_tokens"] + row["new_tokens"]) for row in rows))
    aware = "__query_aware" if one["placement"] == "aware" else ""
    name = f"ruler__{one['length']}__{model}__{slug(one['policy'])}__{ratio:.2f}{aware}"
    (folder / name).mkdir(parents=True, exist_ok=True)
    with (folder / name / "predictions.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, KVPRESS_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(_prediction(row, ratio) for row in rows)
    scores = {task: round(100 * fmean(row["score"] for row in mine), 2) for task, mine in by_task(rows).items()}
    metrics = {task: {"string_match": score} for task, score in scores.items()}
    (folder / name / "metrics.json").write_text(json.dumps(metrics, indent=4) + "\n", encoding="utf-8")
    settings = {"dataset": "ruler", "data_dir": str(one["length"]), "model": model, "press_name": one["stack"]}
    settings |= {"compression_ratio": round(ratio, 4), "query_aware": bool(aware), "seed": one["seed"]}
    (folder / name / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")


def _prediction(row: Row, ratio: float) -> dict[str, Any]:
    return {
        "question": row["question"],
        "answer_prefix": row["prefix"],
        "answer": row["answers"],
        "max_new_tokens": row["max_new_tokens"],
        "task": row["task"],
        "predicted_answer": row["prediction"],
        "compression_ratio": round(ratio, 4),
    }


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
