"""What is typed wrong, in any command: a line on standard error that says it in full, and no traceback."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch._inductor.exc import InductorError
from typer.testing import CliRunner, Result

import kvengine
from kvengine import cli
from kvengine.cli import app
from kvengine.command_errors import readable_errors, resumable
from kvengine.errors import EvaluationError, StoreError
from kvengine.evals.config import build
from kvengine.offload import container, stores

KEY = "a" * 64


def run(*words: object, text: bytes | None = None) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], input=text, env={"COLUMNS": "200"})


def refused(*words: object, text: bytes | None = None) -> str:
    """What is said on standard error; nothing is on standard output."""
    found = run(*words, text=text)
    assert found.exit_code in (1, 2) and not found.stdout, found.output
    assert isinstance(found.exception, SystemExit), found.exception
    return found.stderr


@pytest.mark.parametrize("name", ["[/red]", "[bold]x", "[k, v]", "[link=x]"])
def test_brackets_are_shown_as_they_were_given(name: str, tmp_path: Path) -> None:
    stores.Files(tmp_path / "kv").close()
    assert name in refused("cache", "info", name, "-s", tmp_path / "kv")
    assert name in refused("eval", "report", name)
    assert name in refused("generate", "bundled", "hi", "--policy", name)


@pytest.mark.parametrize(("words", "says"), [
    (["--policy", "snapkw"], "Did you mean 'snapkv'"),
    (["--speculate", "--middle", "snapkw"], "Did you mean 'snapkv'"),
    (["--speculate", "--gamma", "3"], "--gamma is 'auto' or two numbers"),
])  # fmt: skip
def test_what_is_typed_wrong_is_said_before_a_model_is_loaded(words: list[str], says: str) -> None:
    assert says in refused("generate", "no/such-model", "hi", *words)


def test_the_version_is_the_packages() -> None:
    assert run("--version").stdout == f"kvengine {version('kvengine')}\n"
    assert kvengine.__version__ == version("kvengine")


def test_the_package_is_the_command_too() -> None:
    found = subprocess.run(
        [sys.executable, "-P", "-m", "kvengine", "--version"], capture_output=True, text=True, check=True
    )
    assert found.stdout == f"kvengine {version('kvengine')}\n"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("words", "code", "says"), [
    ("--version", 0, version("kvengine")),
    ("--help", 0, "generate"),
    ("generate --help", 0, "--speculate"),
    ("eval ruler --help", 0, "--lengths"),
    ("bench speculate --help", 0, "--contexts"),
    ("duo train --help", 0, "--sinks"),
    ("cache ls --help", 0, "--json"),
    ("demo --help", 0, "--minutes"),
    ("eval ruler --chat maybe", 2, "expected auto, on or off"),
    ("generate bundled hi --report", 2, "needs --speculate"),
    ("eval report", 2, "Missing argument"),
])  # fmt: skip
def test_help_and_what_is_typed_wrong_wait_for_no_library(words: str, code: int, says: str, tmp_path: Path) -> None:
    """torch and transformers take seconds to import."""
    for name in ("torch", "transformers", "matplotlib"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(f'{__name__} was imported')")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-c", "from kvengine.cli import main; main()", *words.split()]
    found = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert found.returncode == code and says in found.stdout + found.stderr, found.stdout + found.stderr


def test_a_prompt_that_is_no_text() -> None:
    assert "not UTF-8" in refused("generate", "bundled", "a\udcffb")
    assert "not UTF-8" in refused("generate", "bundled", text=b"a\xff")


def test_a_closed_standard_input_is_no_prompt() -> None:
    command = [sys.executable, "-P", "-c", "from kvengine.cli import main; main()", "generate", "bundled"]
    found = subprocess.run(["sh", "-c", '"$@" <&-', "sh", *command], capture_output=True, text=True)
    assert found.returncode == 2 and "standard input is closed" in found.stderr and "Traceback" not in found.stderr


@pytest.mark.parametrize(("words", "says"), [
    (("--device", "meta"), "holds no numbers"),
    (("--seed", str(1 << 70), "--temperature", "1"), "--seed"),
    (("--device", "nothing"), "not one that torch knows"),
    (("--device", "xla"), "device 'xla' cannot be used here"),
    (("--stop", "\udcff"), "'\\udcff' is not UTF-8 text"),
    (("--stop", ""), "--stop has no text"),
    (("--temperature", "1e-300"), "give 0 for the likeliest token"),
    (("--temperature", "nan"), "--temperature"),
    (("--temperature", "inf"), "--temperature inf cannot be divided by"),
    (("--temperature", "1", "--top-p", "nan"), "--top-p"),
    (("--seed", "3"), "--seed says what may be drawn; it needs --temperature"),
    (("--speculate", "--draft", "none"), "nothing drafts: give --draft or --middle"),
])  # fmt: skip
def test_settings_of_generate(words: tuple[str, ...], says: str) -> None:
    assert says in refused("generate", "bundled", "hi", "--new", "1", *words)


def test_policies_that_are_no_text() -> None:
    assert "is not UTF-8 text" in refused("eval", "ruler", "--policies", "full;\udcff", "--dry-run")


@pytest.mark.parametrize(("text", "says"), [
    ("policies: 3", "policies=3 is not what this setting takes"),
    ("policies: [3]", "policies is text, got 3"),
    ("tasks: [3]", "tasks is text, got 3"),
    ("out: 2020-01-01", "out=.* is not what"),
    ("data: 3", "data=3 is not what"),
    ("data: {a: 3}", "data=.* is not what"),
    ("data: {5: a}", "data=.*: its names are texts, and 5 is none"),
    ("fail_under: {on: 50}", "fail_under=.*: its names are texts, and True is none"),
    ("minutes: .nan", "minutes=nan: must be positive"),
    ("minutes: .inf", "minutes=inf: must be positive"),
    ("shared: 'no'", "shared is true or false, got 'no'"),
    ("batch: x", "batch is a whole number"),
    ("model: 3", "model is text, got 3"),
    ("mode: ''", "no mode given: write multi-turn"),
    ("tasks: ','", "no task given"),
    ("[" * 5000, "cannot read"),
])  # fmt: skip
def test_settings_of_a_file(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(EvaluationError, match=says):
        build("ruler", tmp_path / "run.yaml", {})


def test_the_words_on_and_off_of_a_file_are_the_chats(tmp_path: Path) -> None:
    for word in ("on", "off"):
        (tmp_path / "run.yaml").write_text(f"chat: {word}")
        assert build("ruler", tmp_path / "run.yaml", {}).chat == word


@pytest.mark.parametrize("words", [("eval", "ruler", "--policies", "full"), ("demo",)])
@pytest.mark.parametrize("kept", [True, False])
def test_an_interrupted_run_says_that_it_goes_on(
    words: tuple[str, ...], kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(config: object) -> None:
        if kept:
            (tmp_path / "rows.jsonl").write_text("{}\n")
        raise KeyboardInterrupt

    monkeypatch.setattr("kvengine.evals.drive.prepare", stopped)
    found = run(*words, "--out", tmp_path)
    said = f"interrupted: what was done is kept in {tmp_path}; the same command goes on from there\n"
    assert found.exit_code == 130 and found.stderr == (said if kept else "interrupted\n")


@pytest.mark.parametrize("importing", [False, True])
def test_an_interrupted_start_is_one_line(importing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise (ModuleNotFoundError("Could not import module") if importing else error) from None

    monkeypatch.setattr("kvengine.evals.loading.load", stopped)
    found = run("generate", "bundled", "hi")
    assert found.exit_code == 130 and found.stderr == "interrupted\n"


def test_a_module_that_is_not_there_is_no_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvengine.evals.loading", None)
    assert isinstance(run("generate", "bundled", "hi").exception, ImportError)


def test_being_asked_to_end_is_an_interruption(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training lost its last steps, a terminal its cursor, and locks and drafts stayed."""

    def stopped(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("kvengine.policies.routing.duo.read_pattern", stopped)
    monkeypatch.setattr(sys, "argv", ["kvengine", "duo", "show", "tiny"])
    try:
        with pytest.raises(SystemExit) as left:
            cli.main()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert left.value.code == 130


def test_a_demo_of_no_minutes(tmp_path: Path) -> None:
    for minutes in ("nan", "0", "-1", "inf"):
        assert "must be positive" in refused("demo", "--minutes", minutes, "--out", tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("ttl", [-5.0, 0.0, float("nan"), float("inf")])
def test_a_value_that_would_expire_as_it_comes_is_not_taken(ttl: float, tmp_path: Path) -> None:
    folder, out = tmp_path / "kv", tmp_path / "one.kv"
    store = stores.Store(stores.Files(folder))
    store.wait(store.submit_put([KEY], [b"a"]))
    with pytest.raises(StoreError, match="positive number of seconds"):
        store.submit_put([KEY], [b"a"], ttl)
    assert store.counts["failed"] == 0
    store.close()
    assert run("cache", "export", KEY, out, "-s", folder).exit_code == 0
    assert "positive number" in refused("cache", "import", out, f"--ttl={ttl}", "-s", folder)
    assert "1 values" in run("cache", "ls", "-s", folder).output


def test_an_import_names_the_file_that_is_wrong(tmp_path: Path) -> None:
    folder, out, bad = tmp_path / "kv", tmp_path / "one.kv", tmp_path / "two.kv"
    store = stores.Files(folder)
    store.put(KEY, [b"a"])
    store.close()
    run("cache", "export", KEY, out, "-s", folder)
    bad.write_bytes(out.read_bytes()[:-1])
    found = run("cache", "import", out, bad, "-s", tmp_path / "other")
    assert found.exit_code == 2 and f"{bad} was not imported" in found.stderr and str(out) in found.stdout


@pytest.mark.sampled(3)
@pytest.mark.parametrize("words", [["info", KEY], ["ls"], ["verify"]])
def test_who_reads_may_leave(words: list[str], tmp_path: Path) -> None:
    """`| head` ended in an error."""
    store = stores.Files(tmp_path / "kv")
    store.put(KEY, [container.pack({"kind": "kv"}, [])])
    store.close()
    command = [sys.executable, "-P", "-m", "kvengine", "cache", *words, "-s", str(tmp_path / "kv")]
    reads, writes = os.pipe()
    os.close(reads)
    found = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert (found.returncode, found.stderr) == (1, "")


def test_a_run_that_stops_as_its_reader_left_says_what_is_kept(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("{}")
    with pytest.raises(BrokenPipeError), readable_errors():
        raise BrokenPipeError
    with pytest.raises(SystemExit), readable_errors(), resumable(tmp_path / "rows"):
        raise BrokenPipeError


@pytest.mark.parametrize(("error", "said"), [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU"), "out of memory: 9.00 GiB more were needed"),
    (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes."), "99 bytes more were needed"),
    (MemoryError(), "out of memory: give it less at once"),
    (InductorError(OSError("No C++ compiler found\nand more"), None), "InductorError: OSError: No C++ compiler found\n"),
])  # fmt: skip
def test_memory_that_runs_out_is_a_line(error: Exception, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left, readable_errors():
        raise error
    assert left.value.code == 2 and said in capsys.readouterr().err
    with pytest.raises(RuntimeError), readable_errors():
        raise RuntimeError("shapes differ")


@pytest.mark.sampled(2)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device without room")
@pytest.mark.parametrize("words", [["--version"], ["--help"], ["eval", "--help"], ["duo", "show", "tiny"]])
def test_where_what_is_said_finds_no_room_that_is_a_line(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            [sys.executable, "-P", "-m", "kvengine", *words], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert found.returncode == 2
    assert found.stderr.splitlines() == ["OSError: [Errno 28] No space left on device"]


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", "461?462 ?"), ("latin-1", "461?462 ?"), ("utf-8", "461–462 †")]
)
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter in the C locale
def test_letters_that_an_encoding_lacks_end_no_command(
    encoding: str, shown: str, errors: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that had measured everything ended in a traceback where it said what it had found."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding=encoding, errors=errors))
    monkeypatch.setattr(cli, "app", lambda: Console().print("461–462 †"))
    cli.main()
    sys.stdout.flush()
    assert written.getvalue().decode(encoding).strip() == shown
