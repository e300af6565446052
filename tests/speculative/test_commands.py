"""The command line, on a small random model saved to a folder."""

from __future__ import annotations

import io
import itertools
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from families import configs
from support_spec import llama, prompt
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from kvengine.speculative import bench, commands
from kvengine.speculative.commands import bench_app, generate

app = typer.Typer()
app.command("generate")(generate)
app.add_typer(bench_app, name="bench")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.BPE({chr(ord("0") + i): i for i in range(64)}, []))
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    llama().save_pretrained(path)
    (path / "text.txt").write_text("".join(chr(ord("0") + i) for i in prompt(400)[0].tolist()))
    return path


def run(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, [str(a) for a in arguments])
    return found.exit_code, found.output if found.exit_code else found.stdout


def test_generate(folder: Path) -> None:
    text = (folder / "text.txt").read_text()[:80]
    code, plain = run("generate", folder, text, "--new", "20")
    assert code == 0 and len(plain.strip()) == 20
    assert run("generate", folder, text, "--new", "20", "--record") == (0, plain)
    parts = "--policy", "quest(budget=5000)", "--judge-every", "16"
    assert run("generate", folder, text, "--new", "20", *parts) == (0, plain)
    options = ["--speculate", "--middle", "quest(budget=24, page=4)", "--gamma", "2,4"]
    assert run("generate", folder, text, "--new", "20", *options) == (0, plain)
    sampling = ["--new", "20", *options, "--temperature", "1", "--seed", "3", "--report"]
    found = CliRunner().invoke(app, ["generate", str(folder), text, *sampling])
    assert found.exit_code == 0 and "per target pass" in found.stderr
    assert len(found.stdout.strip()) == 20 and found.stdout != plain  # the text alone
    assert run("generate", folder, text, "--new", "20", "--stop", plain.strip()[4], *options)[1].strip() in plain


def test_a_seed_gives_the_same_text_whatever_the_clock_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How much "auto" drafts goes by the clock, and so did the text."""
    text, found = (folder / "text.txt").read_text()[:80], set()
    for seed in range(4):
        ticks = itertools.accumulate(random.Random(seed).choices((1e-6, 1.0), k=10**6))
        monkeypatch.setattr("kvengine.speculative.clock.now", lambda ticks=ticks: (next(ticks),) * 2)
        words = ["--new", "60", "--speculate", "--temperature", "1", "--seed", "3"]
        found.add(run("generate", folder, text, *words))
    assert len(found) == 1 and found.pop()[0] == 0


def test_who_types_the_prompt_is_told_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command waited without a word."""
    monkeypatch.setattr("sys.stdin", io.StringIO("a text"))
    assert commands.given(None) == "a text" and capsys.readouterr().err == ""
    typed = io.StringIO("a text")
    typed.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", typed)
    assert commands.given(None) == "a text" and "type the text" in capsys.readouterr().err


def test_a_prompt_may_speak_of_the_padding(folder: Path, tmp_path: Path) -> None:
    """Its token was hidden from the model, as if it were padding."""
    text = (folder / "text.txt").read_text()[:80]
    shutil.copytree(folder, tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_special_tokens({"pad_token": text[40]})
    tokenizer.save_pretrained(tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "generation_config.json").read_text())
    settings["pad_token_id"] = tokenizer.pad_token_id
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(settings))
    want = run("generate", folder, text, "--new", "9")[1].replace(text[40], "")
    for more in ([], ["--speculate"]):
        assert run("generate", tmp_path / "model", text, "--new", "9", *more) == (0, want)


def test_more_tokens_than_a_model_has_learned_positions_for(folder: Path, tmp_path: Path) -> None:
    configs.build("gpt2").save_pretrained(tmp_path)
    PreTrainedTokenizerFast.from_pretrained(folder).save_pretrained(tmp_path)
    most = json.loads((tmp_path / "config.json").read_text())["n_positions"]
    assert run("generate", tmp_path, "0" * 10, "--new", str(most - 9))[0] == 0
    code, said = run("generate", tmp_path, "0" * 10, "--new", str(most - 8))
    assert code == 2 and f"learned {most} positions, and the prompt's 10 tokens and {most - 8} new ones" in said


def test_special_tokens_are_no_text(folder: Path, tmp_path: Path) -> None:
    text = (folder / "text.txt").read_text()[:80]
    plain = run("generate", folder, text, "--new", "20")[1].strip()
    shutil.copytree(folder, tmp_path / "model")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": plain[3]})
    tokenizer.save_pretrained(tmp_path / "model")
    for more in ([], ["--speculate"]):
        code, said = run("generate", tmp_path / "model", text, "--new", "20", *more)
        assert code == 0 and said.strip() == plain.replace(plain[3], "")


def test_bench(folder: Path, tmp_path: Path) -> None:
    code, text = run(
        "bench", "speculate", folder, "--text", folder / "text.txt", "--contexts", "64,128", "--prompts", "2",
        "--new", "12", "--middle", "none;quest(budget=24, page=4)", "--out", tmp_path,
    )  # fmt: skip
    assert code == 0, text
    rows = json.loads((tmp_path / "speculate.json").read_text())["rows"]
    assert [(r["context"], r["middle"]) for r in rows] == [
        (c, m) for c in (64, 128) for m in ("", "", "quest(budget=24, page=4)")
    ]
    assert all(row["same_text"] == 2 and row["new_tokens"] == 24 for row in rows)
    assert rows[0]["speedup"] == pytest.approx(1) and rows[2]["tokens_per_pass"] >= 1
    assert (tmp_path / "speculate.png").stat().st_size > 5000
    assert (tmp_path / "speculate.md").read_text() in text + "\n"
    last = rows[-1]
    assert last["places"].split() == [f"{share:.2f}" for share in last["acceptance_by_place"]] != []
    assert last["draft_acceptance_by_place"] and last["bytes_per_token"] > 0 and last["predicted"] > 0
    # "auto" goes by the clock: below the last row's middle it may find that nothing is worth drafting
    phases = [last[name] for name in ("prompt_seconds", "target_seconds", "middle_seconds")]
    assert min(phases) > 0 and max(row["lowest_seconds"] for row in rows) > 0
    assert last["middle_seconds"] + last["lowest_seconds"] <= 1.2 * last["draft_seconds"] + 0.01
    for heading in ("by place", "Read per token", "Seconds: prompts", "Predicted"):
        assert heading in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--gamma", "0,4"], "PolicyError: gamma is 'auto' or two counts"),
        (["--gamma", "4"], "EvaluationError: --gamma is 'auto' or two numbers"),
        (["--middle", "qeust"], "Did you mean 'quest'"),
        (["--draft", "no/such/folder"], "EvaluationError: cannot load 'no/such/folder'"),
    ],
)
def test_refusals(folder: Path, arguments: list[str], message: str) -> None:
    code, text = run("generate", folder, "012", "--speculate", *arguments)
    assert code == 2 and message in text


def test_a_small_model_with_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    """Of the same size: the same ids stand for other tokens, and its drafts would never be right."""
    shutil.copytree(folder, tmp_path / "draft")
    tokenizer = Tokenizer(models.BPE({chr(ord("1") + i): i for i in range(64)}, []))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "draft")
    for words in (
        ["generate", folder, "012", "--speculate"],
        ["bench", "speculate", folder, "--text", folder / "text.txt", "--contexts", "16", "--new", "4"],
    ):
        code, text = run(*words, "--draft", tmp_path / "draft")
        assert code == 2 and "the same ids stand for other tokens" in text
    assert run("generate", folder, "012", "--new", "4", "--speculate", "--draft", folder)[0] == 0


def test_lengths_that_were_measured_are_kept_if_a_later_one_is_interrupted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, lengths = bench.compare, list[int]()

    def compare(target: Any, cut: Any, *more: Any, **options: Any) -> Any:
        lengths.append(cut[0].shape[1])
        if len(lengths) > 1:
            raise KeyboardInterrupt
        return measured(target, cut, *more, **options)

    monkeypatch.setattr(bench, "compare", compare)
    words = ["bench", "speculate", folder, "--text", folder / "text.txt", "--prompts", "1", "--new", "4"]
    words += ["--middle", "none", "--out", tmp_path]
    code, text = run(*words, "--contexts", "32,4000")
    assert code == 2 and "400 tokens, fewer than a context of 4000" in text and not lengths  # said before all else
    stopped = CliRunner().invoke(app, [*map(str, words), "--contexts", "32,64"])
    assert stopped.exit_code == 130 and lengths == [32, 64] and "| 32 " in stopped.stdout
    assert {row["context"] for row in json.loads((tmp_path / "speculate.json").read_text())["rows"]} == {32}
    assert (tmp_path / "speculate.md").exists() and (tmp_path / "speculate.png").exists()


def test_every_setting_has_decoded_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first setting paid for what is compiled and allocated once, and plain decoding, which had decoded, did not."""
    decoded, real = list[tuple[str, int, int]](), bench.TriForce.generate

    def generate(self: Any, ids: Any, **options: Any) -> Any:
        decoded.append((str(self.draft), ids.shape[1], options["max_new_tokens"]))
        return real(self, ids, **options)

    monkeypatch.setattr(bench.TriForce, "generate", generate)
    cut = [prompt(40)]
    rows = bench.compare(llama(), cut, [bench.Setting("lookup"), bench.Setting("recycling")], 20, do_sample=False)
    assert decoded == [(x, 40, n) for n in (16, 20) for x in ("None", "lookup", "recycling")]
    assert {row.new_tokens for row in rows} == {20}  # what was decoded before does not count


def test_texts_that_are_drawn_are_not_held_against_each_other() -> None:
    rows = bench.compare(llama(), [prompt(40)], [bench.Setting("lookup")], 8, temperature=1.0)
    assert [row.same_text for row in rows] == [None, None] and "| –" in bench.table(rows)


def test_a_setting_has_one_name_at_all_lengths() -> None:
    def names(*rows: tuple[int, str]) -> list[str]:
        one = bench.compare(llama(), [prompt(40)], [bench.Setting("lookup")], 4, do_sample=False)[1]
        return bench.labels([replace(one, context=context, middle=middle) for context, middle in rows])

    fixed = names((1024, "quest(budget=2048)"), (4096, "quest(budget=2048)"))
    assert fixed == ["quest(budget=2048) over lookup, γ=(1, 6)"] * 2  # was 1/0 and 1/2: a line each
    grows = names((1024, "quest(budget=128)"), (4096, "quest(budget=512)"))
    assert grows == ["quest(budget=1/8) over lookup, γ=(1, 6)"] * 2
    assert names((1024, "quest(budget=128)")) == ["quest(budget=128) over lookup, γ=(1, 6)"]


def test_what_is_asked_for_twice_or_cannot_be_is_said(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["kvengine", "bench", "--middle", "none;quest(budget=24, page=4)"])
    words = ["bench", "speculate", folder, "--text", folder / "text.txt", "--new", "4", "--out", tmp_path]
    done = CliRunner().invoke(app, [*map(str, words), "--contexts", "399,399", "--prompts", "3", "--middle", "none"])
    assert done.exit_code == 0 and "399 tokens: the text has room for 2 different prompts, not for 3" in done.stderr
    found = json.loads((tmp_path / "speculate.json").read_text())
    assert [row["context"] for row in found["rows"]] == [399, 399] and found["dtype"] == "float32"
    assert found["command"] == "kvengine bench --middle 'none;quest(budget=24, page=4)'"
    for more, said in (
        (["--draft", "none", "--middle", "none"], "nothing drafts"),
        (["--contexts", "64", "--new", "100000"], "the model has"),
    ):
        code, text = run(*words[:5], *more)
        assert code == 2 and said in text


def test_windows() -> None:
    assert [w.tolist() for w in bench.windows(range(10), 4, 3)] == [[[0, 1, 2, 3]], [[3, 4, 5, 6]], [[6, 7, 8, 9]]]
    assert bench.windows(range(3), 4, 2) == []
    assert [len(bench.windows(range(4), 4, n)) for n in (1, 5)] == [1, 1]
    assert bench.windows(range(9), 4, 1)[0].dtype == torch.long


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "{}", "123", "--device", "abacus"], "device 'abacus' is not one that torch knows"),
        (["generate", "{}", "123", "--dtype", "int3"], "dtype 'int3' is not one of auto, float32"),
        (["generate", "{}", ""], "the prompt has no token"),
        (["generate", "{}", "123", "--report"], "it needs --speculate"),
        (["generate", "{}", "123", "--record", "--speculate"], "--record is for steps of one token"),
        (["generate", "{}", "123", "--record", "--policy", "ann(budget=24)"], "cannot be recorded"),
        (["generate", "{}", "123", "--fuse"], "it needs --record"),
        (["generate", "{}", "123", "--speculate", "--judge-every", "8"], "by a whole one; leave one out"),
        (["generate", "{}", "123", "--middle", "quest"], "--middle says how to draft; it needs --speculate"),
        (["generate", "{}", "123", "--top-p", "0.5"], "--top-p says what may be drawn; it needs --temperature"),
        (["generate", "{}", "123", "--speculate", "--top-k", "3"], "--top-k says what may be drawn"),
        (["generate", "{}/nowhere", "123"], "cannot load"),
        (["bench", "speculate", "{}/nowhere", "--text", "{}/text.txt", "--out", "{}/text.txt"], "File exists"),
        (["bench", "speculate", "{}/nowhere", "--text", "{}/text.txt", "--out", "/proc/self"], "FileNotFoundError"),
        (["bench", "speculate", "{}", "--text", "{}/text.txt", "--contexts", "64,-5"], "1 or more, not '64,-5'"),
        (["bench", "speculate", "{}", "--text", "{}/text.txt", "--contexts", "0"], "1 or more, not '0'"),
        (["bench", "speculate", "{}", "--text", "{}/latin"], "cannot be read as UTF-8 text"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(folder: Path, words: list[str], message: str) -> None:
    (folder / "latin").write_bytes(b"caf\xe9")
    code, text = run(*(word.format(folder) for word in words))
    assert code == 2 and message in text


def test_a_bench_of_one_token_is_refused_before_it_is_measured(folder: Path) -> None:
    code, text = run("bench", "speculate", "no/such/folder", "--text", folder / "text.txt", "--new", "1")
    assert code == 2 and "give 2 or more" in text
