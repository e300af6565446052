"""Every script in `examples/` runs on the bundled model and says what it should."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from layout import ROOT
from support_evals import saved_model

EXAMPLES = ROOT / "examples"
SAYS = {
    "generate": r"tokens of prompt; hidden: 4817263; answer: 4817263\.\n.*tokens seen; .*\nthe unpatched model:",
    "conversation": r"turn 3: read +\d\d new tokens; holds .*\n.*\d of 3 right",
    "saved_session": r"answer: .*, the same as that of the session that was never saved",
    "compare_policies": r"(?s)quest.*kivi.*reads least: \d+ % of its bytes",
    "evaluate": r"(?s)full .*turns: .*quest.* against full: .*report.html",
    "triforce": r"(the same text|a near tie fell the other way)\n(.*\n)*coupled sampling: ",
}


def run(name: str, monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    """The script as `python examples/NAME.py WORDS` runs it, in this process."""
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *words])
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__", "__file__": str(path)})


def test_every_script_has_a_test() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SAYS, "document_qa"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("compare_policies", "evaluate", "triforce") else [])
        for name in SAYS
    ],
)
def test_an_example_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run(name, monkeypatch, *([str(tmp_path / "run")] if name == "evaluate" else []))
    said = capsys.readouterr().out
    assert re.search(SAYS[name], said), said


def test_policies_are_compared_on_a_file_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"text": "The sky is blue. " * 20, "questions": [{"question": "The sky is", "answer": "blue"}]}
    (tmp_path / "task.json").write_text(json.dumps(task), encoding="utf-8-sig")  # as Windows writes it
    run("compare_policies", monkeypatch, str(tmp_path / "task.json"))
    assert "1 of 1" in capsys.readouterr().out


@pytest.mark.parametrize("name", SAYS)
def test_an_example_says_what_it_takes(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        run(name, monkeypatch, "--help")
    assert left.value.code == 0 and f"python examples/{name}.py" in capsys.readouterr().out


@pytest.mark.parametrize("words", [
    ("conversation", "snapkw"), ("saved_session", "snapkw"), ("generate", "snapkw"),
    ("conversation", "full", "/no/model"), ("saved_session", "full", "/no/model"), ("generate", "full", "/no/model"),
    ("triforce", "/no/model"), ("triforce", str(EXAMPLES), "/no/text"), ("evaluate", "/no/run", "/no/model"),
])  # fmt: skip
def test_what_is_typed_wrong_is_told(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        run(words[0], monkeypatch, *words[1:])
    told = capsys.readouterr().err
    assert left.value.code == 2 and f"{words[0]}.py: error: " in told and words[-1] in told


def test_damaged_weights_are_told_and_so_is_a_text_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A download that broke off ended in a traceback of safetensors; of a text in Latin 1 its name was not told."""
    model, latin = saved_model(tmp_path / "model"), tmp_path / "latin.txt"
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    latin.write_bytes(b"\xf6")
    task = tmp_path / "task.json"
    task.write_text('{"text": "a", "questions": [{"question": "b", "answer": "c"}]}')
    for name, first in {
        "generate": "full",
        "conversation": "full",
        "saved_session": "full",
        "compare_policies": task,
    }.items():
        with pytest.raises(SystemExit):
            run(name, monkeypatch, str(first), str(model))
        assert "its weights are damaged or cut" in capsys.readouterr().err, name
    with pytest.raises(SystemExit):
        run("triforce", monkeypatch, str(model), str(task))
    assert "its weights are damaged or cut" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("triforce", monkeypatch, str(model), str(latin))
    assert f"{latin} is no text" in capsys.readouterr().err


@pytest.mark.parametrize("text", [
    "{", '{"text": "a b"}', '{"text": "", "questions": []}', "[1]", "\udcff" * 10000, '{"text": "a b", "questions": []}',
    '{"text": 5, "questions": [{"question": "a", "answer": "b"}]}',
    '{"text": "a", "questions": [{"question": "b", "answer": ""}]}',
    '{"text": "\\ud800", "questions": [{"question": "b", "answer": "c"}]}',
])  # fmt: skip
def test_another_file_than_texts_and_questions_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "task.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SystemExit):
        run("compare_policies", monkeypatch, str(tmp_path / "task.json"))
    told = capsys.readouterr().err
    assert "task.json is not such a file" in told and len(told) < 1000  # not the bytes of a file that is no text


def test_nobody_wins_where_the_full_cache_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"text": "The sky is blue. " * 20, "questions": [{"question": "Who?", "answer": "no such words"}]}
    (tmp_path / "task.json").write_text(json.dumps(task))
    run("compare_policies", monkeypatch, str(tmp_path / "task.json"))
    assert "tells nothing about policies" in capsys.readouterr().out.replace("\n", " ")
