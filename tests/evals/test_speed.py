"""`kvengine bench decode`: what is measured is there, what is refused is said, and all others go on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import configs
from support import llama
from torch._inductor.exc import InductorError
from typer.testing import CliRunner

import kvengine
from kvengine.errors import EvaluationError
from kvengine.evals import bundled_model
from kvengine.evals.speed import measure, report
from kvengine.evals.speed.commands import prompts_of
from kvengine.evals.speed.measure import WARM, Cost, costs

IDS = torch.randint(10, 90, (2, 40), generator=torch.Generator().manual_seed(0))


def run(*arguments: object) -> tuple[int, str, str]:
    from kvengine.cli import app

    done = CliRunner().invoke(app, ["bench", "decode", *map(str, arguments)])
    return done.exit_code, done.stdout, done.stderr


def test_every_policy_in_every_way_between_two_of_stock_transformers() -> None:
    model, begun = llama(), []
    found = list(
        costs(model, IDS, ["full", "ann", "snapkv(budget=16, window=4)"], 3, ("eager", "recorded"), begun.append)
    )
    assert begun == ["stock", "full", "ann", "snapkv(budget=16, window=4)", "stock"]
    assert [(cost.policy, cost.steps) for cost in found] == [
        ("stock", "eager"), ("full", "eager"), ("full", "recorded"), ("ann", "eager"), ("ann", "recorded"),
        ("snapkv(budget=16, window=4)", "eager"), ("snapkv(budget=16, window=4)", "recorded"), ("stock", "eager"),
    ]  # fmt: skip
    assert [cost.problem != "" for cost in found] == [cost.policy == "ann" and cost.steps != "eager" for cost in found]
    assert "index on the host" in found[4].problem and found[4].ms is None
    for cost in found[:4]:
        assert cost.p20 <= cost.ms <= cost.p80 and cost.prompt_seconds > 0 and cost.peak is None  # type: ignore[operator]
        assert cost.tokens_per_second == pytest.approx(2e3 / cost.ms)  # type: ignore[operator]
    config, tokens = model.config, 40 + WARM + 3
    each = 2 * 2 * config.num_key_value_heads * config.head_dim * 4 * config.num_hidden_layers
    assert found[0].held == found[0].read == each * tokens and found[1].read == each * tokens
    assert found[5].read == each * (16 + WARM + 3)


@pytest.mark.parametrize("family", ["gemma3", "falcon_h1"])
def test_windows_and_states_count_for_both(family: str) -> None:
    stock, full, *_ = costs(configs.build(family), IDS % 50, ["full"], 2)
    assert stock.held == stock.read == full.read and full.held >= full.read  # type: ignore[operator]


def test_what_runs_out_of_memory_is_said_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    first, model = measure.first_token, llama()

    def fails(model: Any, ids: Any, cache: Any) -> Any:
        if isinstance(cache, kvengine.EngineCache) and ids.shape[1] > 30 and "h2o" in str(cache.stack):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        if isinstance(cache, kvengine.EngineCache) and "tova" in str(cache.stack):
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return first(model, ids, cache)

    def lacks(*given: Any) -> Any:
        raise InductorError(OSError("No C++ compiler found\nand more"), None)

    with monkeypatch.context() as patch:
        patch.setattr(measure, "_replayed", lacks)
        found = list(costs(model, IDS, ["full"], 2, ("eager", "fused")))
        assert [cost.problem for cost in found] == ["", "", "OSError: No C++ compiler found", ""]
    monkeypatch.setattr(measure, "first_token", fails)
    found = list(costs(model, IDS, ["h2o", "tova", "full"], 2))
    assert [cost.problem for cost in found] == ["", "out of memory", "out of memory", "", ""]
    assert found[3].ms
    kvengine.patch(model, "full")  # which a model that was patched would refuse
    monkeypatch.setattr(measure, "first_token", lambda *given: torch.zeros(1) @ torch.zeros(2))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        next(costs(llama(), IDS, [], 2))


@pytest.mark.parametrize(("new", "ways"), [(1, ("eager",)), (4, ()), (4, ("eager", "fast"))])
def test_what_cannot_be_timed(new: int, ways: tuple[str, ...]) -> None:
    with pytest.raises(EvaluationError, match="two steps or more"):
        next(costs(llama(), IDS, ["full"], new, ways))


def test_speed_up_is_over_the_faster_of_stock_transformers() -> None:
    found = [
        Cost(8, 1, "stock", "eager", 0.1, 6.0, 5.0, 7.0, 10, 10),
        Cost(8, 1, "full", "eager", 0.1, 2.0, 1.0, 3.0, 10, 10),
        Cost(8, 1, "ann", "recorded", problem="why not"),
        Cost(8, 1, "stock", "eager", 0.1, 4.0, 3.0, 5.0, 10, 10),
        Cost(16, 1, "full", "eager", 0.1, 2.0, 1.0, 3.0, 10, 10, 3_000_000),
    ]
    assert [row["speedup"] for row in report.rows(found)] == [4 / 6, 2.0, None, 1.0, None]
    assert [row["policy"] for row in report.rows(found)][::3] == ["stock transformers", "stock transformers, again"]
    text = report.table(found)
    assert text.count("| full") == 2 and "- ann, recorded at 8 tokens: why not" in text and "Peak" in text
    both = [*found, Cost(16, 1, "ann", "recorded", problem="why not")]
    assert report.table(both).count("- ann") == 1 and "- ann, recorded: why not" in report.table(both)
    assert "Peak" not in report.table(found[:4])


@pytest.mark.parametrize("policies", ["ann", pytest.param("full;ann", marks=pytest.mark.slow)])
def test_the_command(policies: str, tmp_path: Path) -> None:
    said = run(bundled_model(), "--contexts", "40,90", "--new", 2, "--policies", policies, "--steps", "eager,recorded",
               "--batch", 2, "--out", tmp_path)  # fmt: skip
    assert said[0] == 0 and "stock transformers, again" in said[1] and "- ann, recorded: " in said[1], said
    rows = json.loads((tmp_path / "decode.json").read_text())["rows"]
    each = 4 if policies == "ann" else 6
    assert [(row["context"], row["batch"]) for row in rows] == [(40, 2)] * each + [(90, 2)] * each
    assert (tmp_path / "decode.md").read_text() in said[1] and (tmp_path / "decode.png").stat().st_size > 5000


def test_what_was_measured_before_an_interruption_is_shown_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "decode.md").write_text("of an earlier run")
    real = measure._measured

    def stopping(model: Any, ids: Any, policy: str, *more: Any) -> Any:
        if policy != "stock":
            raise KeyboardInterrupt
        return real(model, ids, policy, *more)

    monkeypatch.setattr(measure, "_measured", stopping)
    monkeypatch.setattr("sys.argv", ["kvengine", "bench", "--policies", "full;kivi(bits=4)"])
    code, said, _ = run(bundled_model(), "--contexts", "40", "--new", 2, "--policies", "stock;full", "--out", tmp_path)
    assert code == 130 and said.count("| stock transformers ") == 1
    found = json.loads((tmp_path / "decode.json").read_text())
    assert len(found["rows"]) == 1 and found["dtype"] == "bfloat16"
    assert found["command"] == "kvengine bench --policies 'full;kivi(bits=4)'"
    assert (tmp_path / "decode.md").read_text(encoding="utf-8") in said
    assert {file.name for file in tmp_path.iterdir()} == {"decode.json", "decode.md", "decode.png"}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--contexts", "0"], "1 or more"),
        (["--contexts", "40", "--batch", 10**15], "out of memory"),
        (["--contexts", "a"], "whole numbers"),
        (["--contexts", "999999"], "fewer than a context of 999999"),
        (["--steps", "fast"], "--steps are eager"),
        (["--policies", "ful"], "Did you mean 'full'"),
        (["--policies", ";"], "no policy given"),
        (["--text", __file__, "--contexts", "16000"], "fewer than a context of 16000"),
    ],
)
def test_what_is_typed_wrong(given: list[str], why: str) -> None:
    code, _, said = run(bundled_model(), *given)
    assert code == 2 and why in " ".join(said.split())


@pytest.mark.parametrize("words", [
    ["bench", "decode", "/no/model"], ["bench", "speculate", "/no/model", "--text", __file__],
    ["duo", "compare", "/no/model", "tiny"], ["duo", "train", "/no/model"], ["eval", "ppl", "--model", "/no/model"],
])  # fmt: skip
def test_a_model_that_is_not_there_leaves_no_folder(words: list[str], tmp_path: Path) -> None:
    from kvengine.cli import app

    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "runs" / "one" / "file")])
    assert done.exit_code == 2 and "there is no such folder" in done.stderr and not [*tmp_path.iterdir()]


def test_prompts_are_cut_evenly_or_of_tokens_that_are_no_special_ones() -> None:
    class Tokenizer:
        all_special_ids = list(range(1, 90))

    model = llama()
    assert prompts_of(4, 3, list(range(10)), model, Tokenizer()).tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    drawn = prompts_of(50, 2, None, model, Tokenizer())
    assert drawn.shape == (2, 50) and not set(drawn.flatten().tolist()) & set(Tokenizer.all_special_ids)
    assert len(set(drawn.flatten().tolist())) > 2


def test_single_lengths_are_bars(tmp_path: Path) -> None:
    found = [Cost(8, 1, p, "eager", 0.1, 6.0, 5.0, 7.0, 10, 10) for p in ("stock", "full")]
    report.plot(found, tmp_path / "one.png")
    report.plot([*found, Cost(16, 1, "full", "eager", 0.1, 2.0, 1.0, 3.0, 10, 10)], tmp_path / "many.png")
    assert all((tmp_path / f"{name}.png").stat().st_size > 5000 for name in ("one", "many"))
