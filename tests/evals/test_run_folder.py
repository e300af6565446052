"""A run folder that is continued: what may join its rows, and a manifest that was damaged."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from support_evals import saved_model
from typer.testing import CliRunner

from kvengine.cli import app


def run(folder: Path, *more: str) -> tuple[int, str]:
    """A run of one sample in `folder`/run: exit code, and what was said."""
    words = ["--model", str(folder / "model"), "--out", str(folder / "run"), "--tasks", "fwe", "--lengths", "1024"]
    found = CliRunner().invoke(app, ["eval", "ruler", *words, "--samples", "1", "--no-report", *more])
    return found.exit_code, found.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model, and with a run of it."""
    saved_model(tmp_path / "model")
    assert run(tmp_path)[0] == 0
    return tmp_path


@pytest.mark.parametrize("other", [("--seed", "7"), ("--own-answers",)])
def test_other_questions_may_not_join_a_run(folder: Path, other: tuple[str, ...]) -> None:
    """Its policies would be compared, sample by sample, on questions that differ."""
    rows = (folder / "run" / "rows.jsonl").read_bytes()
    code, text = run(folder, *other)
    assert code == 2 and "choose another --out" in text
    assert (folder / "run" / "rows.jsonl").read_bytes() == rows
    assert run(folder, "--policies", "streaming(recent=64)")[0] == 0  # another policy may


def test_a_damaged_manifest_is_told_and_can_be_made_anew(folder: Path) -> None:
    rows, manifest = folder / "run" / "rows.jsonl", folder / "run" / "manifest.json"
    before = rows.read_bytes()
    manifest.write_bytes(manifest.read_bytes()[:100])
    code, text = run(folder)
    assert code == 2 and "is damaged" in text and "delete it" in text
    manifest.unlink()
    assert run(folder)[0] == 0 and json.loads(manifest.read_bytes())["config"]["seed"] == 42
    assert rows.read_bytes() == before


def test_a_manifest_is_written_whole_or_not_at_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = (folder / "run" / "manifest.json").read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    code, text = run(folder)
    assert code == 2 and "No space left" in text
    assert (folder / "run" / "manifest.json").read_bytes() == before
