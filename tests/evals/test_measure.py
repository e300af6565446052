"""Evaluation from Python, and the maps of what a cache holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support_evals import tiny_model, tiny_tokenizer

import kvengine
from kvengine.errors import EvaluationError
from kvengine.evals import maps, report
from kvengine.evals.measure import measure
from kvengine.evals.policies import arms

SETTINGS = {"policies": "full;streaming(recent=40)", "tasks": "fwe", "lengths": 512, "samples": 2, "oracle": False}


def test_a_loaded_model_gives_cells_and_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cells = measure("ruler", model=tiny_model(), tokenizer=tiny_tokenizer(), **SETTINGS)
    assert [(cell.policy, cell.status) for cell in cells] == [("full", "ok"), ("streaming(recent=40)", "ok")]
    assert cells[0].means["held"] and cells[1].means["held"] and cells[1].means["held"] < cells[0].means["held"]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_resumed(tmp_path: Path) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    first = measure("ruler", model=model, tokenizer=tokenizer, out=tmp_path, **SETTINGS)
    rows = (tmp_path / "rows.jsonl").read_bytes()
    assert measure("ruler", model=model, tokenizer=tokenizer, out=tmp_path, **SETTINGS) == first
    assert (tmp_path / "rows.jsonl").read_bytes() == rows


def test_a_folder_of_another_seed_is_left_as_it_was(tmp_path: Path) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    measure("ruler", model=model, tokenizer=tokenizer, out=tmp_path, **SETTINGS)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(EvaluationError, match="with seed 42, this one has 7"):
        measure("ruler", model=model, tokenizer=tokenizer, out=tmp_path, seed=7, **SETTINGS)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.usefixtures("undrawn")
def test_prompts_are_read_in_parts(tmp_path: Path) -> None:
    model, tokenizer, passes = tiny_model(), tiny_tokenizer(), list[int]()
    settings = SETTINGS | {"policies": "full;streaming(recent=40);lowrank(rank=2)"}
    whole = measure("ruler", model=model, tokenizer=tokenizer, **settings)
    hook = model.register_forward_pre_hook(lambda m, a, kw: passes.append(kw["input_ids"].shape[1]), with_kwargs=True)
    cells = measure("ruler", model=model, tokenizer=tokenizer, out=tmp_path, judge_every=100, **settings)
    hook.remove()
    assert max(passes) == 100 and passes.count(100) >= 4 * 2 * 2
    assert [cell.status for cell in cells] == ["ok", "ok", "refused"]
    assert cells[0].score == whole[0].score  # nothing is judged there
    report.write(tmp_path)
    assert "read in parts of 100 tokens" in (tmp_path / "report.md").read_text()
    with pytest.raises(EvaluationError, match="with judge_every 100, this one has None"):
        measure("ruler", model=model, tokenizer=tokenizer, out=tmp_path, **settings)
    for given, match in (
        ({"judge_every": 1}, "2 tokens or more"),
        ({"judge_every": 64, "shared": True}, "leave shared out"),
    ):
        with pytest.raises(EvaluationError, match=match):
            measure("ruler", model=model, tokenizer=tokenizer, **settings, **given)


def test_contexts_are_shared_and_time_ends_as_on_the_command_line(tmp_path: Path) -> None:
    ours = {"model": tiny_model(), "tokenizer": tiny_tokenizer()}
    measure("ruler", **ours, out=tmp_path / "a", **{**SETTINGS, "samples": 3}, shared=True)
    rows = [json.loads(line) for line in (tmp_path / "a" / "rows.jsonl").read_text().splitlines()]
    assert None in {row["ttft"] for row in rows}  # only what is asked alone is timed
    measure("ruler", **ours, out=tmp_path / "b", **{**SETTINGS, "samples": 50}, minutes=1e-6)
    assert len((tmp_path / "b" / "rows.jsonl").read_text().splitlines()) == 2  # one round
    with pytest.raises(EvaluationError, match="compare the scores"):
        measure("ruler", **ours, **SETTINGS, fail_under={"fwe": 50})


def test_what_a_loaded_model_cannot_be_asked_is_an_error() -> None:
    ours = {"model": tiny_model(), "tokenizer": tiny_tokenizer()}
    with pytest.raises(EvaluationError, match="no longbench task can run without data"):
        measure("longbench", **ours, policies="full")
    with pytest.raises(EvaluationError, match="no longbench task can run without data"):
        measure("longbench", **ours, policies="full", minutes=1)


@pytest.mark.parametrize("given", [
    {"model": None}, {"model": tiny_model}, {"tokenizer": tiny_tokenizer}, {"model": tiny_tokenizer, "tokenizer": tiny_model},
])  # fmt: skip
def test_a_model_comes_with_its_tokenizer(given: dict[str, Any]) -> None:
    ours = {name: make and make() for name, make in given.items()}
    with pytest.raises(EvaluationError, match="give a model's name alone, or a model that is loaded and its tokenizer"):
        measure("ruler", **ours, **SETTINGS)


def test_a_setting_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(EvaluationError, match="Did you mean 'samples'"):
        measure("ruler", model=tiny_model(), tokenizer=tiny_tokenizer(), sampels=2)


def test_an_oracle_asked_for_is_still_the_oracle() -> None:
    roles = {arm.policy: arm.role for arm in arms(["quest(budget=64)", "oracle_topk(budget=64)", "oracle_topk + kivi"])}
    assert roles["oracle_topk(budget=64)"] == "oracle" and roles["oracle_topk + kivi"] == "policy"


@pytest.mark.parametrize(
    "policy",
    ["full", "h2o(budget=24)", "quest(budget=48, page=4)", "adakv(budget=40, window=8) + kivi(group=8, residual=8)",
     "duo(sinks=2, recent=10) + quest(budget=24, page=4)"],
)  # fmt: skip
def test_maps_count_what_stats_count(policy: str) -> None:
    model = tiny_model()
    ids = torch.randint(5, 600, (2, 90), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode(), kvengine.patched(model, policy):
        cache = kvengine.EngineCache(model)
        model(ids, cache=cache)
        model(ids[:, :1], cache=cache)
        held, read, stats = maps.held(cache), maps.read(cache), cache.stats()
    assert torch.equal(held.sum(-1), stats.held) and torch.equal(read.sum(-1), stats.attended)
    assert held.shape[-1] == 91 and bool((held | ~read).all()) and bool(read[..., -1].all())
