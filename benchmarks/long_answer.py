"""What stays of a long answer: text that comes token by token, as when a model thinks, and questions about it afterwards.

    OMP_NUM_THREADS=1 python -P benchmarks/long_answer.py [--length 2048] [--contexts 8] [--prompt 128]

The first tokens of a text with needles are the prompt; the others are taken as decoding takes them, one after the other,
whatever a policy then judges. Each question is asked on a copy of the cache. Beside the answers stands what was held at
most. Policies that judge prompts alone hold everything here, and are left out; `full` is the ceiling. `rkv` with `mix=1`
looks at attention alone. Writes benchmarks/results/long_answer.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from kvengine.evals import loading
from kvengine.evals.engine import Session, opened
from kvengine.evals.prompt import Prompter
from kvengine.evals.protocol import greedy
from kvengine.evals.statistics import interval
from kvengine.evals.tasks import Plan, choose

Reader = Callable[[Session, list[int]], float]
"""Reads a text; the most tokens that a head has held."""
BUDGETS, STEP = (512, 256), 32
TASKS = "quiz_single,quiz_multikey_1"
STACKS = (
    "full",
    *(
        text.format(budget=budget, recent=budget - 4)
        for budget in BUDGETS
        for text in (
            "streaming(recent={recent})", "h2o(budget={budget})", "h2o(budget={budget},recent=0,average=True)",
            "tova(budget={budget})", "elastic(budget={budget})", "rkv(budget={budget},buffer=64)",
            "rkv(budget={budget},buffer=64,mix=1)",
        )
    ),
)  # fmt: skip


def think(session: Session, ids: list[int], prompt: int) -> float:
    """Take these ids but the first `prompt` of them as decoding does. The most tokens held per head."""
    session.read(ids[:prompt])
    session.follow_up()
    held = 0.0
    for i in range(prompt, len(ids), STEP):
        session.read(ids[i : i + STEP])
        held = max(held, session.usage().held)
    return held


def answered(session: Session, task: Any, sample: Any, prompter: Prompter, stop: frozenset[int]) -> list[float]:
    """The score of each question about a context that was read, each asked on a copy."""
    right = []
    for turn in sample.turns:
        branch = session.branch()
        new, _ = greedy(branch, branch.read(prompter.asked(turn)), stop, turn.max_new_tokens)
        right.append(task.score(turn, prompter.text(new))[task.metric])
    return right


def measure(model: Any, tokenizer: Any, policy: str, given: argparse.Namespace, read: Reader) -> dict[str, Any]:
    """A policy's row: what is answered of each task's contexts once they were `read`, and the most tokens that a head held."""
    prompter = Prompter(tokenizer)
    stop = loading.stop_ids(model, tokenizer, "")
    plan = Plan(length=given.length, count=given.contexts, seed=given.seed, measure=prompter.measure)
    row: dict[str, Any] = {"policy": f"`{policy}`"}
    held, means = [], []
    with opened(model, policy) as engine:
        for task in choose("quiz", given.tasks):
            right: list[float] = []
            contexts: list[str] = []
            for sample in task.samples(plan):
                session = engine.session()
                held.append(read(session, prompter.context(sample)))
                found = answered(session, task, sample, prompter, stop)
                right, contexts = right + found, contexts + [sample.id] * len(found)
            mean, name = interval(right, contexts), task.name.removeprefix("quiz_")
            row[name] = f"{100 * mean.mean:.0f} ({100 * mean.low:.0f}–{100 * mean.high:.0f})"
            means.append(100 * mean.mean)
            print(f"{policy}: {name} {row[name]}", flush=True)
    return row | {"mean": statistics.mean(means), "held": max(held)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--contexts", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--policies", default=";".join(STACKS), help="separated by semicolons")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/long_answer.json"))
    given = parser.parse_args()
    model, tokenizer = loading.load("bundled", device="cpu", dtype="float32")
    read = partial(think, prompt=given.prompt)
    rows = [measure(model, tokenizer, policy, given, read) for policy in given.policies.split(";")]
    command = f"python -P benchmarks/long_answer.py --length {given.length} --contexts {given.contexts}"
    asked = f"{given.length} tokens of which {given.prompt} are the prompt, {given.contexts} contexts per task"
    held = "held at most (tokens per head, looked at every 32)"
    save(given, command, asked, {}, held, rows)


def save(
    given: argparse.Namespace, command: str, asked: str, more: dict[str, str], held: str, rows: list[dict[str, Any]]
) -> None:
    """Write rows of `measure` as the documentation wants them. `more`: columns behind the policy; `held`: heading of the last."""
    names = [task.name.removeprefix("quiz_") for task in choose("quiz", given.tasks)]
    result = {
        "command": command,
        "machine": f"the bundled model, {asked}, seed {given.seed}; CPU, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, Python {platform.python_version()}; percent right with 95 % interval",
        "columns": {
            "policy": "policy", **more, **{name: name for name in names}, "mean": "mean:.0f", held: "held:.0f",
        },
        "rows": rows,
    }  # fmt: skip
    given.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
