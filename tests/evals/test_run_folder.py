"""A run folder that is continued: what may join its rows, and a manifest that was damaged."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support_evals import saved_model
from typer.testing import CliRunner

from kvengine.cli import app
from kvengine.errors import EvaluationError
from kvengine.evals import claim, manifest, page, tables
from kvengine.evals.measure import measure
from kvengine.evals.records import Journal, key_of
from kvengine.evals.runner import Run
from kvengine.evals.tasks import Sample, Turn
from kvengine.offload.stores.filesystem import FileSystem


def run(folder: Path, *more: str, suite: str = "ruler", tasks: str = "fwe") -> tuple[int, str]:
    """A run of one sample in `folder`/run: exit code, and what was said."""
    words = ["--model", str(folder / "model"), "--out", str(folder / "run"), "--tasks", tasks, "--lengths", "1024"]
    found = CliRunner().invoke(app, ["eval", suite, *words, "--samples", "1", "--no-report", *more])
    return found.exit_code, found.output


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model, and with a run of it."""
    saved_model(tmp_path / "model")
    assert run(tmp_path)[0] == 0
    return tmp_path


def test_questions_after_other_answers_may_not_join_a_run(tmp_path: Path) -> None:
    saved_model(tmp_path / "model")
    code, text = run(tmp_path, suite="quiz", tasks="quiz_single")
    assert code == 0, text
    rows = (tmp_path / "run" / "rows.jsonl").read_bytes()
    code, text = run(tmp_path, "--own-answers", suite="quiz", tasks="quiz_single")
    assert code == 2 and "choose another --out" in text
    assert (tmp_path / "run" / "rows.jsonl").read_bytes() == rows


def test_other_questions_may_not_join_a_run(folder: Path) -> None:
    """Its policies would be compared, sample by sample, on questions that differ."""
    rows = (folder / "run" / "rows.jsonl").read_bytes()
    code, text = run(folder, "--seed", "7")
    assert code == 2 and "choose another --out" in text
    assert (folder / "run" / "rows.jsonl").read_bytes() == rows
    assert run(folder, "--policies", "streaming(recent=64)")[0] == 0  # another policy may


def test_what_is_told_of_another_run_is_what_was_asked_for_otherwise(folder: Path) -> None:
    """It was that the model is another, by its hash, where another dtype had been asked for."""
    code, text = run(folder, "--dtype", "bfloat16")
    assert code == 2 and "holds a run with dtype torch.float32, this one has torch.bfloat16" in " ".join(text.split())
    path = folder / "run" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"chat": True, "tokenizer": "another"}))
    assert "holds a run with chat True, this one has False" in " ".join(run(folder)[1].split())


def test_a_damaged_manifest_is_told_and_can_be_made_anew(folder: Path) -> None:
    rows, path = folder / "run" / "rows.jsonl", folder / "run" / "manifest.json"
    before = rows.read_bytes()
    path.write_bytes(path.read_bytes()[:100])
    code, text = run(folder)
    assert code == 2 and "is damaged" in text and "delete it" in text
    path.unlink()
    assert run(folder)[0] == 0 and json.loads(path.read_bytes())["config"]["seed"] == 42
    assert rows.read_bytes() == before


def test_a_continued_folder_says_of_all_its_rows_how_they_were_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last call's machine and settings were told as if all that stands in the folder were its."""
    now = manifest.versions()
    monkeypatch.setattr("kvengine.evals.manifest.device_name", lambda _: "another machine")
    monkeypatch.setattr("kvengine.evals.manifest.versions", lambda: {**now, "torch": "9.9"})
    assert run(folder, "--policies", "streaming(recent=64)", "--shared")[0] == 0
    assert run(folder, "--policies", "streaming(recent=32)")[0] == 0
    found = manifest.read(folder / "run" / "manifest.json")
    assert not found["config"]["shared"]
    said = tables.provenance([], found)
    assert re.search(r"; cpu \(\w+\), \d+ threads, then another machine, \d+ threads; ", said)
    assert "times and peak memory are those of one sample asked alone" in said
    assert {f"torch {now['torch']}, then 9.9", f"transformers {now['transformers']}"} < set(page.facts([], found))


def test_a_manifest_is_written_whole_or_not_at_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = (folder / "run" / "manifest.json").read_bytes()
    monkeypatch.setattr(os, "fsync", full)
    code, text = run(folder)
    assert code == 2 and "No space left" in text
    assert (folder / "run" / "manifest.json").read_bytes() == before


HOLDER = """
import sys, time
from pathlib import Path
from kvengine.evals.claim import claimed
with claimed(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that runs in the folder."""
    command = [sys.executable, "-P", "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_run_in_a_folder_is_refused_until_the_first_is_dead(
    folder: Path, holder: subprocess.Popen[str]
) -> None:
    """Both did every sample, and the folder had each twice."""
    before = {path.name: path.read_bytes() for path in (folder / "run").iterdir()}
    more = ("--samples", "2")
    code, text = run(folder, *more)
    assert code == 2 and f"process {holder.pid}" in text and "another --out" in text and "Traceback" not in text
    with pytest.raises(EvaluationError, match=f"process {holder.pid}"):
        measure("ruler", model=folder / "model", out=folder / "run", tasks="fwe", lengths=1024, samples=2)
    assert CliRunner().invoke(app, ["demo", "--out", str(folder / "run")]).exit_code == 2
    assert {path.name: path.read_bytes() for path in (folder / "run").iterdir()} == before
    assert run(folder, *more, "--dry-run")[0] == 0  # what only reads need not wait
    for words in (["report", str(folder / "run")], ["compare", str(folder / "run"), str(folder / "run")]):
        assert CliRunner().invoke(app, ["eval", *words]).exit_code == 0, words
    holder.kill()
    holder.wait()
    assert (folder / "run" / "run.lock").exists() and run(folder, *more)[0] == 0
    rows = [json.loads(line) for line in (folder / "run" / "rows.jsonl").read_text().splitlines()]
    asked = [(row["key"], row["sample"]) for row in rows]
    assert len(asked) == len(set(asked)) and {sample for _, sample in asked} == {"0", "1"}
    assert not (folder / "run" / "run.lock").exists()


def test_a_claim_is_of_the_file_that_others_would_take(tmp_path: Path) -> None:
    """Whoever waits for the kernel with a file that was removed meanwhile has nothing."""
    with claim.claimed(tmp_path / "run"), pytest.raises(EvaluationError, match=f"process {os.getpid()} on"):
        with claim.claimed(tmp_path / "run"):
            pass
    assert not (tmp_path / "run").exists()  # made for nothing
    with pytest.raises(ZeroDivisionError), claim.claimed(tmp_path / "runs" / "one"):
        1 / 0  # noqa: B018
    assert not (tmp_path / "runs").exists()
    real, opened = os.open, list[int]()

    def late(path: Any, *arguments: Any, **named: Any) -> int:
        found = real(path, *arguments, **named)
        if not opened:
            Path(path).unlink()
        opened.append(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", late)
        with claim.claimed(tmp_path / "new" / "run"):
            assert len(opened) == 2 and (tmp_path / "new" / "run" / "run.lock").exists()
    for handle in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(handle)


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr("fcntl.flock", refuse)
    with claim.claimed(tmp_path / "run"):
        assert "cannot be kept to one run" in caplog.text


def test_a_claim_fails_for_what_fails_in_it(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), claim.claimed(tmp_path / "run"):
        (tmp_path / "run" / "rows.jsonl").touch()
        1 / 0  # noqa: B018
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["rows.jsonl"]


def test_a_folder_that_was_there_stays_though_its_lock_was_cleared_away(tmp_path: Path) -> None:
    with claim.claimed(tmp_path):
        (tmp_path / "run.lock").unlink()
    assert tmp_path.exists()


def test_a_folder_that_is_moved_ends_its_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows that followed began a folder of the old name, whose report was then of these alone."""
    asked = Run._ask

    def late(self: Run, cell: Any, key: str, sample: Sample, engine: Any) -> Any:
        if self.journal.path.exists() and sample.id == "1":
            (folder / "run").rename(folder / "elsewhere")
        return asked(self, cell, key, sample, engine)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_ask", late)
        code, text = run(folder, "--samples", "3")
    assert code == 2 and "is gone, which this run was writing" in text and not (folder / "run").exists()
    (folder / "elsewhere").rename(folder / "run")
    assert run(folder, "--samples", "3")[0] == 0
    rows = [json.loads(line) for line in (folder / "run" / "rows.jsonl").read_text().splitlines()]
    assert sorted(row["sample"] for row in rows) == ["0", "1", "2"]


def test_a_journal_says_what_is_done(tmp_path: Path) -> None:
    """By cell, sample, data and code; of a cell that was given up no sample is."""
    asked = Sample(id="0", context="C", turns=(Turn(question="Q", answers=("A",), max_new_tokens=1),))
    place = {"length": 9, "mode": "single", "stack": "kivi"}
    done = {"key": "a", "turn": 0, "turns": 1, "status": "ok", "code": "old", "ttft": None, **place}
    path = tmp_path / "runs" / "one" / "rows.jsonl"  # made with the first row
    for sample, ttft in (("0", None), ("1", 0.5)):
        digest = asked.digest() if sample == "0" else "of others"
        Journal(path).append([{**done, "sample": sample, "sample_hash": digest, "ttft": ttft}])
    Journal(path).append([{**done, "key": "b", "sample": None, "status": "refused", "stack": "h2o"}])
    journal = Journal.open(path)
    assert [journal.count(key) for key in "abc"] == [2, 0, 0]
    assert journal.holds("a", asked, "old")
    assert not journal.holds("a", asked, "new") and not journal.holds("b", asked, "old")
    assert not journal.holds("a", Sample(id="1", context="C", turns=asked.turns), "old")
    assert journal.given_up("b", "old")
    assert not journal.given_up("b", "new") and not journal.given_up("a", "old")
    assert journal.timed(9, "single", "kivi", "old")
    for other in ((8, "single", "kivi", "old"), (9, "single", "h2o", "old"), (9, "single", "kivi", "new")):
        assert not journal.timed(*other)
    del done["code"]  # as in a folder that is older than the field
    Journal(path).append([{**done, "sample": "0", "sample_hash": asked.digest()}])
    assert Journal.open(path).holds("a", asked, "new")


def test_a_line_that_lacks_its_end_alone_is_torn_too(tmp_path: Path) -> None:
    """The next row would be written onto it."""
    path, one = tmp_path / "rows.jsonl", {"key": "a", "turn": 0, "turns": 1}
    Journal(path).append([{**one, "sample": "0"}])
    whole = path.read_bytes()
    Journal(path).append([{**one, "sample": "1"}])
    path.write_bytes(path.read_bytes()[:-1])
    assert Journal.open(path).count("a") == 1 and path.read_bytes() == whole


def test_the_key_of_a_cell_stays_what_it_was() -> None:
    """A folder that an earlier release began is continued: SHA-256 of sorted JSON as UTF-8, sixteen digits of it."""
    assert key_of({"b": 2, "a": "é"}) == "d35548bce2b40d77"


def test_a_journal_that_is_new_is_there_after_a_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows were on the disk, and the name to find them by was not."""
    synced: list[Path] = []
    monkeypatch.setattr(FileSystem, "sync_folder", lambda self, path: synced.append(path))
    journal = Journal(tmp_path / "run" / "rows.jsonl")
    for _ in range(2):
        journal.append([{"key": "a", "sample": None}])
    assert synced == [tmp_path / "run", tmp_path]
