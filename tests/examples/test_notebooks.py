"""Every notebook runs on the bundled model, is committed without outputs, and ends with a picture and a sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from layout import ROOT
from support_examples import code_cells, run_notebook

from kvengine.policies import retention

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def test_all_five_are_there() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "1_patch_and_measure",
        "2_compare_policies",
        "3_second_question",
        "4_attention_maps",
        "5_your_own_policy",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert cells[0]["cell_type"] == "markdown" and cells[0]["source"][0].startswith("# ")
    assert [cell["id"] for cell in cells if cell.get("outputs") or cell.get("execution_count")] == []


@pytest.mark.parametrize(
    ("path", "fewer"),
    [
        pytest.param(NOTEBOOKS[0], {"policies": ["full", "snapkv(budget=128)", "retrieval(budget=128)"]}, id="first"),
        *(pytest.param(path, {}, id=path.stem, marks=pytest.mark.slow) for path in NOTEBOOKS),
    ],
)
def test_a_notebook_runs_and_ends_with_a_picture_and_a_sentence(
    path: Path, fewer: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVENGINE_POLICIES", "")  # forgotten afterwards, and so is what a notebook makes of it
    monkeypatch.setattr(retention, "__path__", list(retention.__path__))
    shown = run_notebook(path, **fewer)
    assert shown.figures
    lines = capsys.readouterr().out.strip().splitlines()
    said = lines[-1]
    if path.stem.startswith("1"):  # the first answer that a newcomer sees under a policy is the right one
        asked, found = (next(line for line in lines if line.startswith(word)) for word in ("asked for", "generated"))
        assert asked.split()[-1] == found.split()[-1].rstrip(".")
    if path.stem.startswith("4"):  # what is covered, and with how many tokens: duo reads all in half of the heads
        covered, total = re.search(r"with (\d+) of (\d+) tokens read, ", said).groups()  # type: ignore[union-attr]
        assert int(covered) > int(total) / 2
        # What the exact choice of so many tokens covers is the most, or the masses are another token's than the reads.
        found, spent = shown.names["covered"], shown.names["share"]
        others = [policy for policy in found if spent[policy] <= 65]
        assert len(others) > 5 and max(others, key=found.get) == "oracle_topk(budget=64)"
    assert len(said.split()) > 12 and said.endswith("."), said


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_a_real_kernel(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel brings its own
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    shown = [[out.get("data", {}) for out in cell.get("outputs", [])] for cell in notebook.cells]
    pictures = [sum("image/png" in data for data in cell) for cell in shown]
    assert max(pictures) == 1  # and no cell shows one twice
    assert not [data for cell in shown for data in cell if "<Figure" in data.get("text/plain", "") and len(data) == 1]


def test_a_notebook_that_fails_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "bad.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "source": ["1 / 0"]}]}))
    assert code_cells(path) == ["1 / 0"]
    with pytest.raises(ZeroDivisionError):
        run_notebook(path)
