"""Contexts read once for all policies: the same rows as when every policy reads for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support_evals import tiny_model, tiny_tokenizer

from kvengine.evals import together
from kvengine.evals.config import RunConfig
from kvengine.evals.progress import Silent
from kvengine.evals.records import MEASURED, Journal, Row
from kvengine.evals.runner import Run
from kvengine.evals.tasks.quiz import Quiz

POLICIES = (
    "full", "h2o(budget=0.25)", "d2o(budget=0.25)", "snapkv(budget=0.25)", "expected_attention(budget=0.25)",
    "zipcache(block=32)", "quest(budget=0.25, page=8)", "duo(sparsity=0.5) + kivi(group=8)", "ashape(sinks=4, local=64)",
)  # fmt: skip
TASK = Quiz("noisy", haystack="noise", keys=2, apart=2, new_tokens=4)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


def run(folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch, task: Quiz, mode: str) -> Run:
    monkeypatch.setattr(Run, "tasks", lambda self: [task])
    config = RunConfig(
        suite="quiz", out=folder, policies=POLICIES, lengths=(900,), samples=1, modes=(mode,), oracle=False
    )
    return Run(config, model, tiny_tokenizer(), Journal.open(folder / "rows.jsonl"))


def lasting(rows: list[Row], mode: str) -> list[Row]:
    """What must agree. A prompt that comes in two parts leaves more free slots than one that comes at once."""
    free = {"bytes_held", "tiers"} if mode == "multi-turn" else set()
    return [{name: x for name, x in row.items() if name not in MEASURED | free} for row in rows]


@pytest.mark.parametrize("mode, apart", [("multi-request", 2), ("multi-turn", 1)])
def test_rows_are_those_of_the_runner(
    mode: str, apart: int, tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Quiz("noisy", haystack="noise", keys=2, apart=apart, new_tokens=4)
    alone, shared = (run(tmp_path / name, model, monkeypatch, task, mode) for name in ("alone", "shared"))
    alone.execute(Silent())
    together.execute(shared, Silent(), questions=2)
    assert [row["status"] for row in shared.journal.rows] == ["ok"] * len(POLICIES) * apart
    assert lasting(shared.journal.rows, mode) == lasting(alone.journal.rows, mode)
    before = list(shared.journal.rows)
    together.execute(shared, Silent(), questions=2)
    assert shared.journal.rows == before  # nothing is done twice


def test_every_question_of_an_aware_quiz_is_alone_with_the_context(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run(tmp_path, model, monkeypatch, TASK, "multi-turn")
    together.execute(made, Silent(), questions=2)
    rows = [row for row in made.journal.rows if row["policy"] == "full"]
    assert [row["turn"] for row in rows] == [0, 1]
    for row in rows:  # context, this question and the answer, and nothing of the other
        assert row["held"] <= row["prompt_tokens"] + row["new_tokens"]


def test_a_context_is_read_once_and_its_mass_counted_once(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run(tmp_path, model, monkeypatch, TASK, "multi-request")
    reads: list[int] = []
    keep = together.read
    monkeypatch.setattr(together, "read", lambda model, ids: reads.append(len(ids)) or keep(model, ids))
    together.execute(made, Silent(), questions=2)
    assert len(reads) == 1


def test_what_a_reading_shares_with_a_prompt() -> None:
    reading = together.Reading([1, 2, 3], [], torch.zeros(1))
    assert [reading.shared(ids) for ids in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 9, 9], [1, 2])] == [3, 3, 2, 1]
