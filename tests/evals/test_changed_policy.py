"""A policy whose file changes between two runs into one folder: what it was measured with before does not count for it."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support_evals import tiny_model, tiny_tokenizer

from kvengine.evals.aggregate import CellResult
from kvengine.evals.measure import measure
from kvengine.evals.policies import arms

MODULE = "kvengine.policies.retention.own_some"
SOURCE = '''"""Keep some."""

from dataclasses import dataclass
from kvengine.policies.retention import Retention
from kvengine.policies.retention._own_helper import newest

@dataclass(frozen=True)
class Some(Retention):
    def keep(self, seen):
        return newest(seen, 20)  # tokens
'''
HELPER = "def newest(seen, n):\n    return seen.recent(n)\n"
Again = Callable[[str, str], list[CellResult]]


@pytest.fixture
def again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Again:
    """Measures the full cache and `own_some`, with this text in its file and in that of its helper, into the same folder."""
    package = importlib.import_module("kvengine.policies.retention")
    mine, model, tokenizer = tmp_path / "mine" / "retention", tiny_model(), tiny_tokenizer()
    mine.mkdir(parents=True)
    monkeypatch.setattr(package, "__path__", list(package.__path__))
    monkeypatch.setenv("KVENGINE_POLICIES", str(mine.parent))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(source: str, helper: str = HELPER, **settings: Any) -> list[CellResult]:
        (mine / "own_some.py").write_text(source)
        (mine / "_own_helper.py").write_text(helper)
        for name in (MODULE, "kvengine.policies.retention._own_helper"):
            sys.modules.pop(name, None)  # as in another process
        importlib.invalidate_caches()
        asked = {"policies": "full;own_some", "tasks": "fwe", "lengths": 512, "samples": 2, "oracle": False} | settings
        return measure("ruler", model=model, tokenizer=tokenizer, out=tmp_path / "run", **asked)

    yield run
    for name in (MODULE, "kvengine.policies.retention._own_helper"):
        sys.modules.pop(name, None)


def held(cells: list[CellResult]) -> float | None:
    return cells[1].means["held"]


def lines(tmp_path: Path) -> int:
    return (tmp_path / "run" / "rows.jsonl").read_text().count("\n")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shared", [False, True])
def test_a_policy_that_was_changed_is_measured_again_and_no_other(again: Any, tmp_path: Path, shared: bool) -> None:
    first = again(SOURCE, shared=shared)
    more = again(SOURCE.replace("20", "60"), shared=shared)
    assert held(more) == pytest.approx(held(first) + 40) and more[0].means == first[0].means
    assert lines(tmp_path) == 2 * 2 + 2, "the full cache is what it was"
    assert held(again(SOURCE, HELPER.replace("(n)", "(n + 1)"), shared=shared)) == pytest.approx(held(first) + 1)
    assert held(again(SOURCE, shared=shared)) == held(first) and lines(tmp_path) == 10  # as it was first
    again(SOURCE.replace("Keep some", "Keep a few").replace("  # tokens", "\n"), shared=shared)
    assert lines(tmp_path) == 10, "comments and docstrings change no result"


def test_a_default_that_changed_back_is_called_by_its_name_again(again: Any, tmp_path: Path) -> None:
    """The name stayed with what was measured last, and what it means was called by its options."""
    option = SOURCE.replace("(Retention):", "(Retention):\n    most: int = 20").replace("seen, 20", "seen, self.most")
    first = again(option)
    assert held(again(option.replace("= 20", "= 60"))) == pytest.approx(held(first))  # of the older, which comes first
    found = {cell.policy: cell.means["held"] for cell in again(option)}
    older = next(name for name in found if "own_some(most=60)" in name)
    assert found["own_some"] == held(first) and found[older] == held(first) + 40 and lines(tmp_path) == 6


def test_samples_that_were_measured_before_the_change_are_in_no_mean(again: Any) -> None:
    again(SOURCE)
    cells = again(SOURCE.replace("20", "60"), limit=1)
    assert cells[1].score and cells[1].score.n == 1 and held(cells) > 60


def test_what_a_policy_failed_at_is_tried_again_when_it_was_mended(again: Any) -> None:
    assert again(SOURCE)[1].status == "ok"
    assert again(SOURCE.replace("newest(seen, 20)", "None if seen.prompt else seen.valid[0]"))[1].status == "ok"
    wrong = again(SOURCE.replace("newest(seen, 20)", "seen.valid[0]"))[1]
    assert wrong.status == "failed" and "Some.keep returned bool" in wrong.message
    assert again(SOURCE)[1].status == "ok"


def test_the_heads_that_a_pattern_names_are_part_of_a_policy(tmp_path: Path) -> None:
    (tmp_path / "full_attention_heads.tsv").write_text("0.1\t0.9\n")
    code = [arms([f"duo(pattern={str(tmp_path)!r})"])[1].code]
    (tmp_path / "full_attention_heads.tsv").write_text("0.9\t0.1\n")
    code += [arms([f"duo(pattern={str(tmp_path)!r})"])[1].code, arms(["duo"])[1].code]
    assert len(set(code)) == 3


def test_a_folder_of_before_is_gone_on_with(again: Any, tmp_path: Path) -> None:
    """Rows did not say which code they were measured with."""
    first, rows = again(SOURCE), tmp_path / "run" / "rows.jsonl"
    was = [json.loads(line) for line in rows.read_text().splitlines()]
    rows.write_text("".join(json.dumps({name: x for name, x in row.items() if name != "code"}) + "\n" for row in was))
    assert '"code"' not in rows.read_text()
    assert again(SOURCE, samples=3)[1].score.n == 3
    assert held(first) and lines(tmp_path) == 6
