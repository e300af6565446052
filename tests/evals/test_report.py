"""Aggregation, tables, the page, pictures, comparison and the formats of peers, from rows made by hand."""

from __future__ import annotations

import csv
import errno
import html
import io
import json
import math
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from kvengine.errors import EvaluationError
from kvengine.evals import compare, drive, page, peers, plots, report, ruler_summary, tables
from kvengine.evals.aggregate import cells, current, overall
from kvengine.evals.records import Row
from kvengine.evals.tasks import catalogue

MANIFEST = {
    "started": "2026-01-01T00:00:00+00:00",
    "resumed": [],
    "model": "m" * 16,
    "tokenizer": "t" * 16,
    "model_name": "some/model",
    "parameters": 1234,
    "dtype": "torch.float32",
    "device": "cpu (x86_64)",
    "threads": 1,
    "versions": {"kvengine": "0.1.0"},
    "config": {"seed": 42},
    "data": {},
}


def row(task: str, policy: str, sample: int, score: float, turn: int = 0, turns: int = 1, **more: Any) -> Row:
    return {
        "key": f"{task}/{policy}/{more.get('length')}/{more.get('mode')}",
        "suite": "ruler",
        "task": task,
        "length": 2048,
        "mode": "multi-turn",
        "placement": "aware",
        "policy": policy,
        "role": "ceiling" if policy == "full" else "policy",
        "stack": policy + " spelled",
        "seed": 42,
        "sample": str(sample),
        "turn": turn,
        "turns": turns,
        "kind": "",
        "sample_hash": f"hash {task} {sample}",
        "question": "Q?",
        "prefix": " A:",
        "max_new_tokens": 128,
        "provenance": "official",
        "meta": {"depth": sample / 10, "answer": "gold"},
        "status": "ok",
        "answers": ["gold"],
        "prediction": "gold" if score else "",
        "null": not score,
        "finish": "stop",
        "truncated": False,
        "metric": "string_match_all",
        "score": score,
        "scores": {"string_match_all": score, "official": score},
        "prompt_tokens": 1990,
        "new_tokens": 10,
        "held": 2000.0 if policy == "full" else 500.0,
        "attended": 500.0,
        "bytes_held": 4000 if policy == "full" else 1000,
        "read_per_token": 1000,
        "tiers": {"device": 1000},
        "ttft": 0.1,
        "decode": 1.0,
        "tokens_per_s": 9.0,
        "peak_bytes": 10_000,
        **more,
    }


def refusal(task: str, policy: str) -> Row:
    gone = {"status": "refused", "message": "no heads | here", "sample": None}
    return {**row(task, policy, 0, 0.0), **gone}


def some_rows() -> list[Row]:
    rows = []
    for sample in range(10):
        rows += [row("easy", "full", sample, 1.0), row("easy", "less", sample, float(sample % 2))]
        rows += [row("hard", "full", sample, float(sample == 0)), row("hard", "less", sample, 0.0)]
    return [*rows, refusal("easy", "odd"), refusal("hard", "odd")]


def folder(path: Path, rows: list[Row]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (path / "manifest.json").write_text(json.dumps(MANIFEST))
    return path


@pytest.mark.usefixtures("undrawn")
def test_rows_of_another_version_are_told_and_not_a_traceback(tmp_path: Path) -> None:
    """Every field is left out of one row of a folder, once; what is only measured may be missing."""
    rows, kept = [row("easy", name, i, 1.0) for name in ("full", "less") for i in range(2)], []
    for name in rows[2]:
        folder(tmp_path, [*rows[:2], {at: value for at, value in rows[2].items() if at != name}, rows[3]])
        try:
            report.read(tmp_path)
        except EvaluationError as error:
            assert str(error).endswith("--out") and ("lacks " + name in str(error) or "no row of a run" in str(error))
            continue
        report.write(tmp_path)
        kept.append(name)
    optional = {"attended", "read_per_token", "ttft", "tokens_per_s", "peak_bytes", "tiers", "decode"}
    assert set(kept) == optional | {"kind", "truncated", "finish"}
    folder(tmp_path, [*rows[:2], {**rows[2], "score": "1.0"}, rows[3]])
    with pytest.raises(EvaluationError, match=r"easy, sample 0, turn 0, 'less' lacks score \('1.0'\)"):
        report.read(tmp_path)


HUGE = 10**400
ASKED = {"suite": "scbench", "task": "scbench_kv"}
STRANGE: dict[str, Any] = {
    **{"config": 5, "data": 1, "versions": {"torch": 1}, "parameters": None, "vocabulary": -1, "positions": "x"},
    **{"policies": [1], "calls": ["a"], "machines": [None], "wrapper": {"tail": 1}},
}


def test_values_that_no_run_writes_are_told_by_file_and_field(tmp_path: Path) -> None:
    """A traceback told of them, and for a task of such a name a file was written outside of the folder."""
    wrong: list[tuple[str, Row]] = [
        *(("mode", {"mode": "single"}), ("sample", {"sample": "x"}), ("task", {"task": "../../evil"})),
        *(
            (name, {name: HUGE})
            for name in ("length", "held", "bytes_held", "new_tokens", "ttft", "peak_bytes", "score")
        ),
        *(("attended", {"attended": -1}), ("held", {"held": math.nan}), ("score", {"score": 1.5})),
        *(
            ("score", {"metric": "nll", "score": HUGE}),
            ("meta", {"meta": {"depth": "x"}}),
            ("meta", {**ASKED, "meta": {}}),
        ),
        *(("scores", {**ASKED, "scores": {}}), ("kind", {**ASKED, "kind": "a/b"})),
    ]
    for name, change in wrong:
        folder(tmp_path, [row("easy", "full", 0, 1.0), {**row("easy", "full", 1, 1.0), **change}])
        with pytest.raises(EvaluationError, match=rf"rows.jsonl: .* sample (1|x), .* lacks {name} \("):
            report.read(tmp_path)
    for name, value in STRANGE.items():
        folder(tmp_path, some_rows())
        (tmp_path / "manifest.json").write_text(json.dumps({**MANIFEST, name: value}))
        with pytest.raises(EvaluationError, match=rf"manifest.json is damaged: no run writes such {name} \("):
            report.read(tmp_path)
    losses = [row("ppl_book", "full", i, x, suite="ppl", metric="nll") for i, x in enumerate((math.nan, math.inf, 9.5))]
    assert len(report.read(folder(tmp_path, losses))[0]) == 3  # of a model that overflows


@pytest.mark.usefixtures("undrawn")
def test_a_manifest_says_what_the_report_says_of_a_run(tmp_path: Path) -> None:
    for name in MANIFEST:
        folder(tmp_path, some_rows())
        (tmp_path / "manifest.json").write_text(json.dumps({at: MANIFEST[at] for at in MANIFEST if at != name}))
        with pytest.raises(EvaluationError, match=f"lacks {name}; delete it"):
            report.read(tmp_path)
    report.write(folder(tmp_path, some_rows()))
    (tmp_path / "manifest.json").write_text(json.dumps({**MANIFEST, "config": {}}))
    report.write(tmp_path)
    assert "Seed of the data: unknown" in (tmp_path / "report.md").read_text()


def test_what_runs_differ_in_stands_before_their_differences(tmp_path: Path) -> None:
    """The questions are the same with and without a chat template, or in another dtype: their differences looked like any."""
    rows = [row("easy", "full", i, 1.0) for i in range(3)]
    a, b = (folder(tmp_path / name, rows) for name in "ab")
    alike = compare.text(a, b)
    assert alike.startswith("| task ")
    changed = {**MANIFEST, "dtype": "torch.bfloat16", "chat": True, "config": {"seed": 42, "golden": False}}
    (b / "manifest.json").write_text(json.dumps(changed))
    assert compare.text(a, b) == f"- the runs differ in dtype: torch.float32 and torch.bfloat16\n\n{alike}"
    (a / "manifest.json").write_text(json.dumps({**MANIFEST, "chat": False, "config": {"golden": True}}))
    told = compare.text(a, b).splitlines()[:4]
    assert told[1:] == ["- the runs differ in chat: False and True", "- the runs differ in golden: True and False", ""]


def test_what_a_name_meant_in_each_run_is_told(tmp_path: Path) -> None:
    """Another default, another code or another torch looked like a difference of nothing."""
    runs = []
    for name, every, code, torch in (("a", 8, "c1", "2.13.0"), ("b", 16, "c2", "2.14.0")):
        rows = [row("easy", p, i, 1.0, code=code) for p in ("full", "h2o") for i in range(3)]
        rows += [row("easy", "mine", i, 1.0, stack=f"mine(every={every})", code=code) for i in range(3)]
        runs.append(folder(tmp_path / name, rows))
        changed = {**MANIFEST, "versions": {"kvengine": "0.1.0", "torch": torch}}
        (runs[-1] / "manifest.json").write_text(json.dumps(changed))
    told = compare.text(*runs).split("\n\n")[0].splitlines()
    assert [line.removeprefix("- the runs differ in ") for line in told] == [
        "torch: 2.13.0 and 2.14.0", "the code of `full`", "the code of `h2o`", "`mine`: mine(every=8) and mine(every=16)",
    ]  # fmt: skip
    assert "differ" not in compare.text(runs[0], runs[0]).split("| task")[0]


def test_a_policy_is_compared_with_what_it_was_and_not_with_its_name(tmp_path: Path) -> None:
    """The second run has both: what the name meant before, by its options, and what it means now."""
    a = folder(tmp_path / "a", [row("t", "mine", i, 0.0, stack="mine(every=8)") for i in range(8)])
    rows = [row("t", "mine(every=8)", i, 0.0, stack="mine(every=8)") for i in range(8)]
    b = folder(tmp_path / "b", rows + [row("t", "mine", i, 1.0, stack="mine(every=16)") for i in range(8)])
    said = compare.text(a, b)
    assert said.count("| t | 2048 | multi-turn | `mine` | 0.0 [") == 1 and "differ in" not in said


def test_what_was_tried_again_and_went_well_has_failed_no_more(tmp_path: Path) -> None:
    """A mixed task's failure stood beside its scores for good, and a run that was stopped after it was told to have failed."""
    failed = {**refusal("mixed", "less"), "status": "out of memory"}
    rows = [row("mixed", "full", i, 1.0, kind=kind, turn=t, turns=2) for i in range(3) for t, kind in enumerate("ab")]
    for i in range(2):
        rows += [row("mixed", "less", i, 1.0, kind=kind, turn=t, turns=2) for t, kind in enumerate("ab")]
        rows += [failed] * (not i)
    rows += [{**refusal("mixed", "more"), "status": "out of memory"}]
    found = report.found(folder(tmp_path, rows))
    assert [(cell.task, cell.policy, cell.status) for cell in found[2:]] == [
        ("mixed/a", "less", "ok"), ("mixed/b", "less", "ok"), ("mixed", "more", "out of memory"),
    ]  # fmt: skip
    assert not any(cell.message for cell in found[:4])


@pytest.mark.usefixtures("undrawn")
def test_a_report_that_finds_no_room_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.write(folder(tmp_path, some_rows()))
    names = ("report.md", "cells.csv", "report.html")
    before = [(tmp_path / name).read_bytes() for name in names]

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        report.write(folder(tmp_path, some_rows()[:4]))
    assert [(tmp_path / name).read_bytes() for name in names] == before


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("task", "peers"), [("vt", ["ruler", "kvpress"]), ("scbench_kv", ["scbench"])])
def test_names_of_any_length_and_letters_are_written(task: str, peers: list[str], tmp_path: Path) -> None:
    """A trained pattern is named by its path, which may have whatever a file system takes."""
    deep = "/".join(["a rather long folder name"] * 12)
    policies = ["full", *(f"duo(pattern='/{deep}/{one}')" for one in ("a", "b")), "duo(pattern='/$\\frac{1}$')"]
    report.write(folder(tmp_path, [row(task, p, 0, 1.0, suite=peers[0]) for p in policies]))
    for peer in peers:
        assert len(list((tmp_path / "compat" / peer).iterdir())) == 4


def test_the_legend_is_there_where_a_cost_was_not_measured() -> None:
    rows = [row("easy", policy, i, 1.0, bytes_held=0) for policy in ("full", "less") for i in range(2)]
    legends = plots.pareto(cells(rows)).legends
    assert [text.get_text() for text in legends[0].get_texts()] == ["full", "less"]


def test_texts_that_lost_their_middle_are_told() -> None:
    """What was asked for may have been there: a score says then less of the policies."""
    rows = [row("easy", policy, i, 1.0, truncated=i < 3) for policy in ("full", "less") for i in range(10)]
    assert [cell.cut for cell in cells(rows)] == [3, 3]
    told = "- easy: 3 of 10 texts were longer than the length and lost their middle\n"
    assert tables.notes(cells(rows)) == told and ",cut," in tables.long_csv(cells(rows))


def test_log_likelihoods_are_no_shares_however_small(tmp_path: Path) -> None:
    """What compression costs is known as well where a model is sure of its text as where it is not."""
    found = []
    for low in (0.2, 2.2):
        losses = [("full", i, low + i / 100) for i in range(20)]
        losses += [("less", i, low + i / 100 + 0.02 + 0.001 * (i % 3)) for i in range(20)]
        made = cells([row("ppl", *one, metric="nll") for one in losses])[1]
        assert made.score and made.delta and made.delta.low > 0.015
        found.append([made.score.low - low, made.score.high - low, made.delta.low, made.delta.high])
        runs = [
            [row("ppl", "full", i, x, metric="nll") for name, i, x in losses if name == one] for one in ("full", "less")
        ]
        text = compare.text(*(folder(tmp_path / f"{low}{i}", rows) for i, rows in enumerate(runs)))
        assert text.splitlines()[-1].endswith("| yes |")
    assert found[0] == pytest.approx(found[1])


def test_cells_carry_score_ceiling_difference_and_flag() -> None:
    found = {(cell.task, cell.policy): cell for cell in cells(some_rows())}
    less = found["easy", "less"]
    assert less.score is not None and less.delta is not None
    assert (less.score.mean, less.ceiling, less.delta.mean, less.nulls) == (0.5, 1.0, -0.5, 5)
    assert (page.square(less)["text"], page.square(less)["small"][-7:]) == ("50.0", "Δ -50.0")
    assert found["easy", "full"].delta is None and less.flag == ""
    assert found["hard", "less"].flag == "not discriminative" == found["hard", "full"].flag
    assert found["easy", "odd"].status == "refused"
    assert less.means["held"] == 500 and less.means["peak_bytes"] == 10_000


def test_the_flag_counts_from_what_guessing_earns() -> None:
    rows = [row("choice", "full", sample, float(sample < 4)) for sample in range(10)]
    assert cells(rows)[0].flag == "" and cells(rows, {"choice": 0.25})[0].flag == "not discriminative"
    assert cells([row("choice", "full", i, float(i < 1)) for i in range(5)])[0].flag == ""  # 0.2 above is enough


def test_without_a_ceiling_cells_say_so() -> None:
    assert cells([row("easy", "less", 0, 1.0)])[0].flag == "no ceiling"


def test_a_row_done_again_replaces_the_first() -> None:
    rows = [row("easy", "less", 0, 0.0), row("easy", "less", 0, 1.0)]
    found = cells(rows)[0]
    assert found.score is not None and (found.score.mean, found.score.n) == (1.0, 1)


def test_answers_about_data_that_changed_are_left_out_and_who_has_no_others_says_so() -> None:
    """Of full, less and few, only full was asked about the new sample 0; at another length it is another sample."""
    rows = [row("easy", policy, i, 1.0) for policy, of in (("full", 2), ("less", 2), ("few", 1)) for i in range(of)]
    rows += [row("easy", "few", 0, 1.0, length=4096), refusal("easy", "odd")]
    new = row("easy", "full", 0, 0.0, sample_hash="new")
    kept = current([*rows, new])
    told = [(one["policy"], one["length"], one["sample"], one["status"]) for one in kept]
    assert told == [
        ("full", 2048, "1", "ok"), ("less", 2048, "1", "ok"), ("few", 4096, "0", "ok"), ("odd", 2048, None, "refused"),
        ("full", 2048, "0", "ok"), ("few", 2048, None, "other data"),
    ]  # fmt: skip
    assert current(rows) == rows and "run it again" in cells(kept)[-1].message


def test_turns_are_kept_apart_and_mixed_kinds_are_cells_of_their_own() -> None:
    rows = [row("s", "full", i, float(turn == 0), turn, 2, suite="scbench") for i in range(3) for turn in range(2)]
    assert cells(rows)[0].turns == (1.0, 0.0)
    kinds = [row("s", "full", 0, float(t), t, 2, kind="ab"[t]) for t in range(2)]
    assert [cell.task for cell in cells(kinds)] == ["s/a", "s/b"]


def test_the_mean_leaves_out_tasks_that_a_policy_lacks() -> None:
    rows = [row("a", "full", 0, 1.0), row("b", "full", 0, 0.0), row("a", "less", 0, 1.0)]
    assert set(overall(cells(rows)).values()) == {1.0}
    assert set(overall(cells([*rows, refusal("b", "less")])).values()) == {1.0}  # as where it was refused
    apart = [*rows, row("b", "less", 0, 0.5, length=4096), row("b", "late", 0, 0.25, mode="single")]
    assert sorted(overall(cells(apart)).values()) == [0.25, 0.5, 1.0, 1.0]


def test_samples_turns_and_tasks_are_averaged() -> None:
    """Two right answers of three are two thirds, not what most of them are; and so for tasks."""
    scores = {"a": (1.0, 1.0, 0.0), "b": (1.0, 1.0, 1.0), "c": (0.0, 0.0, 0.0)}
    rows = [row(task, "full", i, x) for task, found in scores.items() for i, x in enumerate(found)]
    assert list(overall(cells(rows)).values()) == [pytest.approx(5 / 9)]
    assert [sum(cell.turns) for cell in cells(rows)] == pytest.approx([2 / 3, 1, 0])
    assert cells([*rows, row("a", "less", 0, 0.0)])[-1].ceiling == pytest.approx(2 / 3)


def test_what_is_counted_is_averaged_and_what_is_timed_has_its_median() -> None:
    """The time to the first token is that of turns that read the context: the first, or each one on its own."""
    times = [(0, 1.0), (1, 20.0), (0, 2.0), (1, 40.0), (0, 9.0), (1, 80.0)]
    for placement, first in (("aware", 2.0), ("agnostic", 14.5)):
        rows = [
            row(
                "s",
                "full",
                i // 2,
                1.0,
                turn,
                2,
                placement=placement,
                ttft=t,
                tokens_per_s=t,
                held=t,
                peak_bytes=int(t),
            )
            for i, (turn, t) in enumerate(times)
        ]
        means = cells([*rows, row("s", "full", 3, 1.0, ttft=None, tokens_per_s=None, held=None, peak_bytes=None)])[
            0
        ].means
        assert (means["ttft"], means["tokens_per_s"], means["peak_bytes"]) == (first, 14.5, 80)
        assert means["held"] == pytest.approx(152 / 6) and means["bytes_held"] == 4000


def test_turns_stand_in_order_whatever_came_first() -> None:
    assert cells([row("s", "full", i, turn / 4, turn, 3) for turn in (2, 0, 1) for i in range(2)])[0].turns == (
        0,
        0.25,
        0.5,
    )


def test_perplexity_is_not_averaged_and_flagged_where_guessing_is_as_good() -> None:
    rows = [
        row("p", policy, i, 2.0 + 0.5 * (policy != "full"), metric="nll") for policy in ("full", "x") for i in range(4)
    ]
    full, x = cells(rows)
    assert x.delta is not None and x.delta.mean == 0.5 and x.flag == ""
    assert [cells(rows, {"p": guessing})[1].flag for guessing in (2.1, 2.0, 1.9)] == ["", *2 * ["not discriminative"]]
    assert cells(rows, {"p": 0.7})[1].flag == "not discriminative"  # of two tokens
    assert cells(rows[4:], {"p": 2.0})[0].flag == ""  # with nothing to hold it against
    assert overall([full, x]) == {}
    assert tables.score_text(x).startswith("2.500 [")
    assert (tables.loss(full), tables.loss(x)) == ("2.000", "2.500 (+0.500)")
    assert tables.differences([full, x]).endswith("| `x` | 0.500 [0.500, 0.500] |\n")
    assert (page.square(x)["text"], page.square(x)["small"][-8:]) == ("2.500", "Δ +0.500")


def test_a_loss_is_held_against_the_models_vocabulary() -> None:
    tasks = catalogue()
    told, untold = report.floors({"vocabulary": 64}), report.floors({})
    assert told["ppl_book"] == math.log(64) and untold["ppl_book"] == tasks["ppl_book"].floor
    assert all(told[name] == task.floor for name, task in tasks.items() if task.metric != "nll")


def test_markdown_says_it_all() -> None:
    text = tables.markdown(cells(some_rows()), MANIFEST)
    assert "| `less` | 50.0 [23.7, 76.3] | 0.0 [0.0, 27.8] † | 25.0 | 50.0 |" in text
    assert "| `less` | -50.0 [" in text
    assert "- `odd` on easy, hard: refused: no heads | here" in text
    assert "† hard:" in text


def test_csv_has_one_line_per_cell(tmp_path: Path) -> None:
    lines = list(csv.DictReader(tables.long_csv(cells(some_rows())).splitlines()))
    assert len(lines) == 6
    less = next(line for line in lines if (line["task"], line["policy"]) == ("easy", "less"))
    assert float(less["score"]) == 0.5 and float(less["delta"]) == -0.5 and less["bytes_held"] == "1000.0"


class Tags(HTMLParser):
    """Collects what a browser would fetch, and whether tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_holds_tables_and_pictures(tmp_path: Path) -> None:
    rows = some_rows()
    rows += [
        row("n", p, i, 1.0, suite="niah", length=n) for p in ("full", "less") for i in range(11) for n in (512, 1024)
    ]
    rows += [row("s", p, 0, 1.0, t, 3, suite="scbench") for p in ("full", "<less>") for t in range(3)]
    report.write(folder(tmp_path, rows))
    text = (tmp_path / "report.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert tags.open == [] and all(link.startswith(("#", "data:")) for link in tags.fetched)
    assert not re.search(r"@import|url\((?!#)", text)
    assert "&lt;less&gt;" in text and "<less>" not in text
    assert text.count("<svg") == len(list((tmp_path / "pictures").glob("*.png"))) >= 6
    for name in ("pareto", "turns", "heat", "lengths"):
        assert list((tmp_path / "pictures").glob(f"{name}_*.png")), name


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_shows_the_page_without_complaint(tmp_path: Path, width: int) -> None:
    """No console message, no request but the page itself, nothing wider than the window. Wants playwright and chromium."""
    playwright = pytest.importorskip("playwright.sync_api")
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no chromium here")
    rows = some_rows()
    rows += [
        row("s", p, 0, 1.0, t, 3, suite="scbench") for p in ("full", "a_policy(with=1)+long(name=2)") for t in range(3)
    ]
    report.write(folder(tmp_path, rows))
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=program, args=["--no-sandbox"])
        page, said, asked = browser.new_page(viewport={"width": width, "height": 900}), [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "report.html").as_uri())
        assert page.locator("figure svg").count() == 3 and page.locator("p.short").count() == 2
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert said == [] and len(asked) == 1
        browser.close()


def test_who_is_as_good_for_less_is_said_in_a_sentence() -> None:
    rows = [row("easy", policy, i, 1.0) for policy in ("full", "less", "more") for i in range(5)]
    rows = [one | ({"bytes_held": 4000} if one["policy"] == "more" else {}) for one in rows]
    said = tables.in_short(cells(rows))
    assert said == ["Of the policies within 5 points of the full cache, `less` holds least: 25 % of its bytes."]
    worse = [one | {"score": 0.0} if one["policy"] != "full" else one for one in rows]
    assert tables.in_short(cells(worse)) == ["No policy comes within 5 points of the full cache here."]
    assert tables.in_short(cells([one for one in rows if one["policy"] != "full"])) == []
    assert tables.in_short(cells([one for one in rows if one["policy"] == "full"])) == []  # nobody to judge


def test_who_lacks_the_longest_task_does_not_look_cheap() -> None:
    """Costs are compared over the tasks that scores are: those that every policy has."""
    short, long = ({"held": n, "bytes_held": 1024 * n, "read_per_token": 1024 * n} for n in (1, 9))
    rows = [row("short", policy, i, 1.0, **short) for policy in ("full", "less") for i in range(4)]
    rows += [row("long", "full", i, 1.0, **long) for i in range(4)]
    found = cells([*rows, refusal("long", "less")])
    assert tables.in_short(found) == []
    axes = plots.pareto(found).axes[0]
    assert [float(dots.get_offsets()[0][0]) for dots in axes.collections] == [1.0, 1.0]
    lines = [line for line in tables.costs(found).splitlines() if "`" in line]
    assert len(lines) == 2 and lines[0].split("|")[2:] == lines[1].split("|")[2:]
    apart = cells([one for one in rows if (one["task"], one["policy"]) != ("short", "full")])
    assert all(f"| {n}.0 KiB |" in tables.costs(apart) for n in (1, 9))  # nothing to compare: each as it is


def test_the_oracle_is_not_on_the_line_of_the_best() -> None:
    rows = [row("easy", "full", i, 1.0) for i in range(4)]
    rows += [row("easy", "oracle_topk", i, 1.0, role="oracle", bytes_held=10, read_per_token=10) for i in range(4)]
    rows += [row("easy", "less", i, float(i > 1), bytes_held=100, read_per_token=100) for i in range(4)]
    held = plots.pareto(cells(rows)).axes[0]
    assert held.lines[0].get_xdata()[0] == pytest.approx(100 / 1024)
    assert [text.get_text() for text in held.texts] == ["less"]


@pytest.mark.parametrize("apart", [1.0, 1.02, 1.7, 30.0])
def test_every_axis_of_costs_has_a_scale(apart: float) -> None:
    """Where all policies cost about the same, one number stood under the picture, or none."""
    rows = [
        row("easy", name, 0, 1.0, ttft=0.93 * times, bytes_held=3e5) for name, times in (("full", 1), ("less", apart))
    ]
    for ax in plots.pareto(cells(rows)).axes:
        low, high = ax.get_xlim()
        assert sum(low <= tick <= high for tick in ax.get_xticks()) >= 2


def test_a_cost_that_was_not_measured_says_so() -> None:
    rows = [row("easy", "full", 0, 1.0, ttft=None, tokens_per_s=None, decode=None, bytes_held=9, read_per_token=9)]
    axes = plots.pareto(cells(rows)).axes
    assert [bool(ax.texts and "not measured" in ax.texts[0].get_text()) for ax in axes] == [False, False, True, True]
    assert plots.svg(plots.pareto(cells(rows))).startswith("<svg")


def test_the_terminal_leaves_tasks_that_tell_nothing_out_of_its_score() -> None:
    """It was a mean over all of them, beside a sentence that judged by the others."""
    rows = [
        row(task, policy, i, float(task == "easy"))
        for task in ("easy", "hard")
        for policy in ("full", "less")
        for i in range(4)
    ]
    for chosen, score in ((rows, "100.0"), (rows[8:], "0.0")):  # of none that tells, all count
        console = Console(file=io.StringIO(), width=120, force_terminal=False)
        drive.summarise(cells(chosen), console)
        lines = [line.split() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
        assert [line[1] for line in lines if line[:1] in (["full"], ["less"])] == [score, score]


def test_a_failure_of_every_policy_is_one_line() -> None:
    notes = tables.notes(cells([refusal("easy", "full"), refusal("easy", "less")]))
    assert notes == "- every policy on easy: refused: no heads | here\n"
    judged = [row("easy", "full", 0, 0.0)]
    judged += [{**refusal("easy", p), "status": "not measured", "message": "floor"} for p in ("less", "more")]
    assert "- every policy but the full cache on easy: not measured: floor\n" in tables.notes(cells(judged))


def test_who_was_asked_less_is_named() -> None:
    """A policy that ran out of memory halfway looked as sure as the others."""
    rows = [row("easy", "full", i, 1.0) for i in range(4)] + [row("easy", "less", i, 1.0) for i in range(2)]
    (cell,) = cells(rows[:1])
    where = f"- `less` on easy ({cell.length}, {cell.mode}): 2 of 4 answers"
    assert tables.notes(cells(rows)) == where + "\n"
    rows.append({**refusal("easy", "less"), "status": "oom", "message": "no room"})
    assert tables.notes(cells(rows)) == where + ", then oom: no room\n"
    rows += [row("easy", "less", i, 1.0) for i in (2, 3)]  # done after all
    assert tables.notes(cells(rows)) == ""


def test_the_page_says_over_how_many_answers() -> None:
    assert page.counts(cells([row("easy", "full", i, 1.0) for i in range(3)])) == "n=3"
    rows = [row("s", p, i, 1.0, t, 3, suite="scbench") for p in ("full", "less") for t in range(3) for i in range(2)]
    assert page.counts(cells(rows)) == "n=6, 2 contexts"
    assert page.counts(cells([*rows, row("s", "less", 2, 1.0, 0, 3, suite="scbench")])) == "n=6–7, 2–3 contexts"
    assert page.counts([]) == ""


def test_a_run_with_shared_contexts_says_how_it_was_timed() -> None:
    manifest = {**MANIFEST, "config": {**MANIFEST["config"], "shared": True}}
    assert "read once for all policies" in tables.markdown(cells(some_rows()), manifest)
    assert "read once" not in tables.markdown(cells(some_rows()), MANIFEST)


def test_pictures_are_the_same_again() -> None:
    found = [cell for cell in cells(some_rows()) if cell.task == "easy"]
    assert plots.svg(plots.pareto(found)) == plots.svg(plots.pareto(found))


def test_heat_map_puts_depth_down_and_length_across() -> None:
    rows = [
        row("n", "full", 0, score, length=n, meta={"depth": d}) for n, d, score in ((512, 0.0, 1.0), (1024, 1.0, 0.0))
    ]
    figure = plots.heat_map(rows)
    assert figure is not None
    grid = figure.axes[0].images[0].get_array()
    assert grid is not None and grid.shape == (10, 2)
    assert grid[0, 0] == 1.0 and grid[9, 1] == 0.0
    assert (figure.get_supxlabel(), figure.get_supylabel()) == ("length (tokens)", "depth of the needle")
    assert plots.shown("x" * 100).count("…") == 1
    assert plots.HEAT(0.0)[:3] == pytest.approx((0xF0 / 255, 0x49 / 255, 0x6E / 255), abs=0.01)


def test_a_square_is_hatched_when_it_says_nothing() -> None:
    found = {(cell.task, cell.policy): cell for cell in cells(some_rows())}
    assert page.square(found["hard", "less"])["flag"] and not page.square(found["easy", "less"])["flag"]
    assert page.square(found["easy", "odd"])["text"] == "refused" and page.square(None)["text"] == "–"


def test_comparison_is_paired_and_refuses_other_data(tmp_path: Path) -> None:
    a = folder(tmp_path / "a", [row("t", "p", i, 0.0) for i in range(8)])
    b = folder(tmp_path / "b", [row("t", "p", i, 1.0) for i in range(8)])
    assert "| t | 2048 | multi-turn | `p` | 100.0 [43.5, 100.0] | yes |" in compare.text(a, b)
    other = folder(tmp_path / "c", [row("t", "p", 0, 1.0, sample_hash="another")])
    with pytest.raises(EvaluationError, match="sample 0 differs between the runs"):
        compare.text(a, other)
    with pytest.raises(EvaluationError, match="share no task"):
        compare.text(a, folder(tmp_path / "d", [row("u", "p", 0, 1.0)]))
    (tmp_path / "file").write_text("")
    for wrong in ("nothing", "file"):
        with pytest.raises(EvaluationError, match="is no run folder"):
            compare.text(a, tmp_path / wrong)
    for damaged in ("{", "{}", "[]", "3"):
        (tmp_path / "d" / "manifest.json").write_text(damaged)
        with pytest.raises(EvaluationError, match=r"manifest\.json is damaged"):
            compare.text(a, tmp_path / "d")
    (tmp_path / "c" / "rows.jsonl").write_text("garbage\n{}\n")
    with pytest.raises(EvaluationError, match=r"^[^ ]*rows\.jsonl is damaged at byte 0"):
        compare.text(a, tmp_path / "c")


def test_a_picture_is_shown_where_pyplot_has_drawn_nothing() -> None:
    made = plots.pareto(cells(some_rows()))
    assert made._repr_png_().startswith(b"\x89PNG")


def test_a_difference_is_one_where_its_interval_leaves_nothing_out(tmp_path: Path) -> None:
    """Up, down and unsure; losses in nats, alike or worse; samples that only one run has; a refusal, which is no answer."""
    pairs = {"up": (0, 1, 8), "down": (1, 0, 8), "unsure": (0, 1, 1)}
    runs: list[list[Row]] = [[refusal("t", "never")], [refusal("t", "never")]]
    for run, rows in enumerate(runs):
        rows += [row("t", p, i, float(pairs[p][run if i < pairs[p][2] else 0])) for p in pairs for i in range(8)]
        rows += [row("t", "other", i, 1.0, length=64) for i in range(8 * run, 8 * run + 8)]
        rows += [row("ppl", "same", i, 2.0 + i, metric="nll") for i in range(8)]
        rows += [row("ppl", "worse", i, 2.0 + i + run / 2, metric="nll") for i in range(8)]
        rows += [row("ppl", "sure", i, 0.1 + 0.02 * run, metric="nll") for i in range(2)]  # as losses, not as shares
    lines = compare.text(*(folder(tmp_path / str(i), rows) for i, rows in enumerate(runs))).splitlines()[2:]
    found = {
        cells[4].strip("` "): (cells[5].split(), cells[6].strip()) for cells in (line.split("|") for line in lines)
    }
    assert {policy: (said[0], sure) for policy, (said, sure) in found.items()} == {
        "up": ("100.0", "yes"), "down": ("-100.0", "yes"), "unsure": ("12.5", ""), "other": ("–", ""),
        "same": ("0.000", ""), "worse": ("0.500", "yes"), "sure": ("0.020", "yes"),
    }  # fmt: skip


@pytest.mark.usefixtures("undrawn")
def test_a_folder_gets_every_report_from_what_it_says_itself(tmp_path: Path) -> None:
    """Of four words guessing costs log 4 = 1.39: who needs 2 says nothing."""
    rows = [*some_rows(), *(row("ppl_book", "full", i, 2.0, metric="nll", suite="ppl") for i in range(4))]
    folder(tmp_path, rows)
    manifest = {**MANIFEST, "vocabulary": 4}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    made = report.write(tmp_path)
    assert made == report.found(tmp_path) and [x.task for x in made if x.suite == "ppl" and x.flag] == ["ppl_book"]
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == tables.markdown(made, manifest)
    assert (tmp_path / "cells.csv").read_text(encoding="utf-8") == tables.long_csv(made)
    assert (tmp_path / "compat" / "ruler" / "less").is_dir() and (tmp_path / "report.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_the_page_says_how_a_run_was_measured_as_the_text_does(tmp_path: Path) -> None:
    """It kept to itself that prompts were judged in parts and lengths too long, and called losses percent."""
    losses = [row("ppl_book", "full", i, 2.0, metric="nll", suite="ppl") for i in range(4)]
    folder(tmp_path, [*some_rows(), *losses])
    manifest = {**MANIFEST, "positions": 1024, "config": {"seed": 42, "judge_every": 64}, "machines": ["A", "B"]}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    report.write(tmp_path)
    for name in ("report.html", "report.md"):
        text = html.unescape((tmp_path / name).read_text(encoding="utf-8"))
        assert "in parts of 64 tokens" in text and "Beyond the 1024 positions" in text and "A, then B" in text
    shown = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert shown.count("Percent with 95 %") == 1 and shown.count("Nats per token (mean negative log-likelihood") == 1


def test_ruler_files_have_the_official_shape(tmp_path: Path) -> None:
    peers.write(tmp_path / "x", some_rows(), MANIFEST)
    summary = tmp_path / "x" / "ruler" / "less" / "multi-turn" / "2048" / "summary.csv"
    assert summary.read_text() == "0,1,2\nTasks,easy,hard\nScore,50.0,0.0\nNulls,5/10,10/10\n"
    line = json.loads((summary.parent / "easy.jsonl").read_text().splitlines()[0])
    assert line["pred"] == "" and line["outputs"] == ["gold"] and line["index"] == 0
    assert {"input", "others", "truncation", "length"} < line.keys() and line["others"].get("id", line["index"]) == 0
    one = [one for one in some_rows() if one["task"] == "easy"]
    peers.write(tmp_path / "one", one, MANIFEST)  # a single task's summary has its name
    assert (tmp_path / "one" / "ruler" / "less" / "multi-turn" / "2048" / "summary-easy.csv").exists()


def test_kvpress_files_have_its_shape_and_its_ratio(tmp_path: Path) -> None:
    peers.write(tmp_path / "x", some_rows(), MANIFEST)
    found = tmp_path / "x" / "kvpress" / "ruler__2048__model__less__0.75__query_aware"
    lines = list(csv.DictReader((found / "predictions.csv").read_text().splitlines()))
    assert len(lines) == 20 and "context" not in lines[0] and lines[1]["predicted_answer"] == ""
    assert json.loads((found / "metrics.json").read_text())["easy"] == {"string_match": 50.0}
    assert yaml.safe_load((found / "config.yaml").read_text())["compression_ratio"] == 0.75


def test_scbench_files_have_the_official_shape_and_are_not_doubled(tmp_path: Path) -> None:
    rows = [row("scbench_kv", "p", i, float(t == 0), t, 2, suite="scbench") for i in range(3) for t in range(2)]
    rows += [{**one, "mode": "multi-request", "key": "another"} for one in rows]
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "mine").write_text("a folder of that name may be the user's")
    for _ in range(2):
        peers.write(tmp_path / "x", rows, MANIFEST)
    assert (tmp_path / "x" / "mine").exists()
    found = tmp_path / "x" / "scbench" / "model_kvengine_p"
    lines = [json.loads(line) for line in (found / "prediction_scbench_kv_multi_turn.jsonl").read_text().splitlines()]
    assert [(line["id"], line["turn_idx"]) for line in lines] == [(i, t) for i in range(3) for t in range(2)]
    assert lines[0]["ground_truth"] == "gold" and lines[0]["prediction"] == "gold"
    for mode, line in (("multi_turn", "2048,100.000,0.000"), ("scdq", "scdq_mode,2048,50.000")):
        name = f"model_kvengine_{mode}_p"
        assert (found / f"{name}_summary.txt").read_text() == f"{name},scbench_kv,{line}\n"


def test_a_mixed_task_is_summarised_by_turn_and_kind() -> None:
    """The published line has a number per kind in every turn, 0 where the turn has none of a kind."""
    kinds = ("scbench_kv", "scbench_vt")
    rows = [
        {**row("scbench_mixed", "p", i, 1.0, t, 2, suite="scbench"), "kind": kinds[t]}
        for i in range(2)
        for t in range(2)
    ]
    assert peers._accuracies(rows, "multi_turn") == ["100.000", "0.000", "0.000", "100.000"]
    assert peers._accuracies(rows, "scdq") == ["100.000", "100.000"]


def test_weighted_averages_reproduce_a_published_line() -> None:
    """Llama-3.1-8B: 95.5 93.8 91.6 87.4 84.7 77.0 gives 85.4 (inc) and 91.3 (dec); it is effective up to 32k."""
    scores = [95.5, 93.8, 91.6, 87.4, 84.7, 77.0]
    assert round(ruler_summary.weighted(scores, later=True), 1) == 85.4
    assert round(ruler_summary.weighted(scores, later=False), 1) == 91.3
    assert ruler_summary.effective(dict(zip((4, 8, 16, 32, 64, 128), scores, strict=True))) == 32


def test_a_policy_that_was_asked_at_one_length_takes_none_from_the_others() -> None:
    rows = [row("easy", "full", 0, 1.0, length=n) for n in (1024, 2048)]
    rows += [row("easy", "less", 0, 0.5, length=n) for n in (1024, 2048)] + [row("easy", "late", 0, 1.0, length=2048)]
    text = tables.markdown(cells(rows), MANIFEST).partition("over lengths")[2].splitlines()
    assert [line for line in text if "`" in line] == [
        "| `full` | multi-turn | 100.0 | 100.0 | 100.0 | 100.0 | 100.0 | 2048 |",
        "| `less` | multi-turn | 50.0 | 50.0 | 50.0 | 50.0 | 50.0 | – |",
        "| `late` | multi-turn | – | 100.0 | – | – | – | 2048 |",
    ]


def test_lengths_are_weighted_in_their_order_and_those_of_other_suites_are_not() -> None:
    rows = [row("easy", "full", i, float(n < 2000 or i < 2), length=n) for n in (2048, 1024) for i in range(4)]
    rows += [row("n", "full", i, 0.0, length=n, suite="niah") for n in (1024, 4096) for i in range(4)]
    line = (
        "| `full` | multi-turn | 100.0 | 50.0 | 75.0 | 66.7 | 83.3 | 1024 |"  # (100 + 2 * 50) / 3, (2 * 100 + 50) / 3
    )
    assert line in tables.over_lengths(cells(rows))
    assert ruler_summary.effective({4: ruler_summary.BAR}) is None


def test_lengths_are_summarised() -> None:
    rows = [row("easy", "full", i, 1.0, length=n) for i in range(3) for n in (1024, 2048)]
    assert "| `full` | multi-turn | 100.0 | 100.0 | 100.0 | 100.0 | 100.0 | 2048 |" in tables.markdown(
        cells(rows), MANIFEST
    )


def test_a_policy_of_two_spellings_is_one_line_over_all_its_tasks() -> None:
    """It was two, each with a mean over tasks of its own, beside the full cache's over all."""
    rows = [row(task, "full", i, 1.0) for i in range(4) for task in "ab"]
    rows += [row("a", "kivi", i, 1.0, stack="S") for i in range(4)]
    rows += [row("b", "kivi(bits=4)", i, 0.0, stack="S") for i in range(4)]
    found = cells(current(rows))
    assert tables.policy_means(found) == {"full": 100.0, "kivi(bits=4)": 50.0}
    assert list(tables.by_policy(found)) == ["full", "kivi(bits=4)"]


def test_a_policy_whose_defaults_have_changed_is_not_averaged_with_what_it_was() -> None:
    """Its costs were the mean of both, and of its scores the later ones stood beside tasks of the earlier."""
    rows = [row("a", "full", i, 1.0) for i in range(4)]
    for every, score, held in ((8, 0.0, 1000), (16, 1.0, 9000)):
        rows += [row("a", "mine", i, score, stack=f"mine(every={every})", bytes_held=held) for i in range(4)]
    found = cells(current(rows))
    assert tables.policy_means(found) == {"full": 100.0, "mine(every=8)": 0.0, "mine": 100.0}
    held = {policy: tables.cost(mine, "bytes_held") for policy, mine in tables.by_policy(found).items()}
    assert held == {"full": 4000, "mine(every=8)": 1000, "mine": 9000}
    found = cells(
        current(rows, {"full": "full spelled", "mine": "mine(every=8)"})
    )  # changed back, and nothing measured since
    assert tables.policy_means(found) == {"full": 100.0, "mine": 0.0, "mine(every=16)": 100.0}


def test_runs_that_spell_a_policy_otherwise_are_compared_and_what_one_lacks_is_named(tmp_path: Path) -> None:
    """Of two runs that shared the full cache alone, nothing else was said."""
    runs = [[row("a", "full", i, 1.0) for i in range(4)] for _ in range(2)]
    for rows, name, other, score in ((runs[0], "kivi", "h2o", 1.0), (runs[1], "kivi(bits=4)", "tova", 0.0)):
        rows += [row("a", name, i, score, stack="S") for i in range(4)] + [row("a", other, 0, 1.0)]
    a, b = (folder(tmp_path / name, rows) for name, rows in zip("ab", runs, strict=True))
    said = compare.text(a, b)
    assert said.startswith(f"- only {a} has `h2o`\n- only {b} has `tova`\n\n| task |")
    assert "| a | 2048 | multi-turn | `kivi` | -100.0 [" in said


def test_a_report_says_what_its_figures_are() -> None:
    manifest = {"device": "cpu", "threads": 1, "dtype": "float32", "model": "m", "parameters": 1, "config": {"seed": 1}}
    scored, lost = (tables.provenance(cells([row("p", "full", 0, 1.0, metric=m)]), manifest) for m in ("f1", "nll"))
    assert "Held: tokens per layer" in scored and "nats per token" in lost and "nats" not in scored
