"""Finding heads: on a model in which one head does all the looking back, by construction."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import configs
from support import SHAPE, llama
from typer.testing import CliRunner

from kvengine.cli import app
from kvengine.errors import EvaluationError, ModelError
from kvengine.evals.duo import checkpoint
from kvengine.evals.duo import compare as comparison
from kvengine.evals.duo.checkpoint import Checkpoint
from kvengine.evals.duo.data import Passkeys, Sample
from kvengine.evals.duo.gates import Gates, gated
from kvengine.evals.duo.train import Recipe, distillation, train
from kvengine.policies.routing.duo import read_pattern, write_pattern

WINDOW = {"sinks": 2, "recent": 6}
RECIPE = Recipe(steps=30, rate=0.1, reg=0.05, shortest=80, longest=120, lengths=3, **WINDOW)


class Letters:
    """A tokenizer of bytes."""

    bos_token_id = 1

    def __call__(self, text: str, **options: Any) -> Any:
        return type("Encoding", (), {"input_ids": [2 + b % 126 for b in text.encode()]})()


class Noise(Passkeys):
    """Random tokens; the last ones are to be predicted."""

    def draw(self, seed: int | str, length: int) -> Sample:
        g = torch.Generator().manual_seed(hash(seed) % 2**31)
        ids = torch.randint(2, 128, (length,), generator=g)
        return Sample(ids[:-20], [(ids[-20:-10], ids[-10:])])


def one_head_matters() -> Any:
    """A model in which the output of every KV head's group but that of head 1 of layer 0 is thrown away."""
    model = llama(num_hidden_layers=2)
    size = SHAPE["hidden_size"] // SHAPE["num_attention_heads"] * 2
    with torch.no_grad():
        for i, layer in enumerate(model.model.layers):
            for head in range(2):
                if (i, head) != (0, 1):
                    layer.self_attn.o_proj.weight[:, head * size : head * size + size] = 0
    return model


def test_the_head_that_matters_is_found_and_the_others_close() -> None:
    model = one_head_matters()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    alpha = train(model, Noise(Letters()), RECIPE)
    assert alpha.shape == (2, 2) and alpha[0, 1] > 0.5
    assert alpha.flatten()[[0, 2, 3]].max() < 0.05
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert model.config._attn_implementation != "kvengine_duo"


def test_models_whose_query_heads_have_each_their_own_keys_are_trained_too() -> None:
    """Their configurations count no KV heads."""
    found = train(configs.build("gpt2"), Noise(Letters()), replace(RECIPE, steps=1))
    assert found.shape == (3, 4)


@pytest.mark.parametrize("within", [False, True])
def test_an_interrupted_training_goes_on_to_the_same_gates(
    within: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a step too, when the optimiser has changed the gates and what follows has not."""
    recipe = replace(RECIPE, rate=0.02)  # so slow that no gate comes to an end
    model, data, asked = one_head_matters(), Noise(Letters()), {"rate": recipe.rate, "style": "noise"}
    want = train(model, data, recipe)

    def stop(step: int, *_: Any) -> None:
        if step == 11:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        real, count = torch.optim.AdamW.step, iter(range(100))
        if within:
            patch.setattr(torch.optim.AdamW, "step", lambda self: (real(self), stop(next(count))))
        first = Checkpoint(tmp_path, asked)
        with pytest.raises(KeyboardInterrupt), first.kept():
            train(model, data, recipe, (lambda *_: None) if within else stop, first)
    second, steps = Checkpoint(tmp_path, asked), []
    assert second.steps == (11 if within else 12)
    with second.kept():
        got = train(model, data, recipe, lambda step, *_: steps.append(step), second)
    assert torch.equal(got, want) and steps == [*range(second.steps, 30)] and not second.path.exists()
    assert float((want - 0.5).abs().min()) < 0.5, "gates that are all at an end would be equal anyhow"


@pytest.mark.parametrize(("every", "written"), [(0, [*range(1, 31)]), (1000, [0] * 30)])
def test_a_training_is_written_as_it_goes(
    every: float, written: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kills the process leaves no time to write."""
    monkeypatch.setattr(checkpoint, "EVERY", every)
    found: list[int] = []
    see = lambda *_: found.append(Checkpoint(tmp_path, {}).steps)  # noqa: E731
    train(llama(), Noise(Letters()), RECIPE, see, Checkpoint(tmp_path, {}))
    assert found == written


def test_an_interrupted_command_goes_on_as_the_same_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["duo", "train", "m", "--steps", "6", "--rate", "0.1", "--style", "magic", "--keys", "1"]
    words += ["--shortest", "300", "--longest", "400", "--lengths", "2", "--sinks", "2", "--recent", "6"]
    monkeypatch.setattr("kvengine.evals.loading.load", lambda *_, **__: (one_head_matters(), Letters()))

    def run(folder: str, *more: str) -> Any:
        return CliRunner().invoke(app, [*words, "--out", str(tmp_path / folder), *more], env={"COLUMNS": "300"})

    assert run("whole").exit_code == 0
    real = Checkpoint.note

    def stopping(self: Checkpoint, steps: int, *rest: Any) -> None:
        real(self, steps, *rest)
        if steps == 3:
            raise KeyboardInterrupt

    for more in ((), ("--restart",)):
        monkeypatch.setattr(Checkpoint, "note", stopping)
        stopped = run("parts", *more)
        goes_on = " without --restart" if more else ""
        assert stopped.exit_code == 130 and f"the same command{goes_on} goes on from there" in stopped.stderr
        monkeypatch.setattr(Checkpoint, "note", real)
    assert sorted(x.name for x in (tmp_path / "parts").iterdir()) == ["checkpoint.json"]
    other = run("parts", "--rate", "0.2", "--sinks", "3")
    assert other.exit_code == 2 and "rate 0.1 (now 0.2), sinks 2 (now 3) came to; give the same" in other.stderr
    model = llama(num_hidden_layers=1)
    with monkeypatch.context() as patch:
        patch.setattr("kvengine.evals.loading.load", lambda *_, **__: (model, Letters()))
        other = run("parts")
        assert other.exit_code == 2 and " model " in other.stderr and "give --restart" in other.stderr
    found = run("parts")
    assert found.exit_code == 0 and "goes on behind step 3 of 6" in found.output
    whole, parts = ({x.name: x.read_bytes() for x in (tmp_path / name).iterdir()} for name in ("whole", "parts"))
    assert whole == parts and len(whole) == 2
    monkeypatch.setattr(Checkpoint, "note", stopping)  # what is done is not done again, unless it is to be
    done = run("parts")
    assert done.exit_code == 0 and "is what this training came to; --restart does it again" in done.output
    assert run("parts", "--restart").exit_code == 130
    monkeypatch.setattr(Checkpoint, "note", real)
    assert "goes on behind step 3 of 6" in run("parts").output
    again = run("parts", "--rate", "0.2")  # what was ended is no reason to refuse
    assert again.exit_code == 0 and "goes on" not in again.output and "came to" not in again.output


ODD = '{"asked": {}, "steps": 2, "alpha": [[1.0]], "optimiser": {"m": [[1.0, 2.0]]}}'


KEPT = {"asked": {"steps": 3}, "steps": 2, "alpha": [[1.0]]}
MOMENTS = {"step": 2.0, "exp_avg": [[0.0]], "exp_avg_sq": [[0.0]]}
IMPOSSIBLE = [
    *({**KEPT, "steps": x, "optimiser": MOMENTS} for x in (-2, 0, 4, 2.5, "2")),
    *({**KEPT, "alpha": x, "optimiser": MOMENTS} for x in (None, [[7.0]], [[float("nan")]], [1.0])),
    *(
        {**KEPT, "optimiser": {**MOMENTS, name: x}}
        for name, x in (("step", -1.0), ("exp_avg", None), ("exp_avg_sq", 0.0))
    ),
    *({**KEPT, "optimiser": x} for x in ({}, {"step": 2.0, "exp_avg": [[0.0]]})),
]  # of these some ended in a traceback, and some were gone on with


@pytest.mark.parametrize("text", ["", "{}", "[1]", ODD, *map(json.dumps, IMPOSSIBLE)])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / checkpoint.CHECKPOINT).write_text(text)
    with pytest.raises(EvaluationError, match=r"checkpoint\.json is damaged .*give --restart to begin anew"):
        Checkpoint(tmp_path, {})
    assert Checkpoint(tmp_path, {}, restart=True).steps == 0
    (tmp_path / checkpoint.CHECKPOINT).write_text(json.dumps({**KEPT, "optimiser": MOMENTS}))
    assert Checkpoint(tmp_path, {"steps": 3}).steps == 2


def test_a_loss_that_is_no_number_ends_the_training(tmp_path: Path) -> None:
    """All gates would be 0, or not a number, and the pattern be written."""
    model = llama()
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.fill_(float("inf"))
    before = [p.requires_grad for p in model.parameters()]
    kept = Checkpoint(tmp_path, {})
    kept.path.write_text("of steps before this one, to which it would come again")
    with pytest.raises(EvaluationError, match="the loss is nan at step 0"), kept.kept():
        train(model, Noise(Letters()), RECIPE, checkpoint=kept)
    assert [p.requires_grad for p in model.parameters()] == before and not kept.path.exists()


def test_open_gates_are_the_model_itself() -> None:
    model, ids = llama(), torch.randint(2, 128, (1, 50))
    with torch.no_grad():
        want = model(ids).logits
        with gated(model, Gates(torch.ones(2, 2), 2, 6)):
            torch.testing.assert_close(model(ids).logits, want)
        assert torch.equal(model(ids).logits, want)
    sample = Sample(ids[0, :40], [(ids[0, 40:45], ids[0, 45:])])
    with torch.no_grad(), gated(model, gates := Gates(torch.ones(2, 2), 2, 6)):
        assert float(distillation(model, gates, sample)) < 1e-10
        gates.alpha = torch.zeros(2, 2)
        assert float(distillation(model, gates, sample)) > 1e-3


def test_a_closed_gate_sees_sinks_and_recent_tokens_alone() -> None:
    """Tokens outside both windows may be anything: one layer whose gates are closed must not notice."""
    model = llama(num_hidden_layers=1)
    ids = torch.randint(2, 128, (1, 50))
    other = ids.clone()
    other[:, 2:43] = torch.randint(2, 128, (1, 41))
    with torch.no_grad(), gated(model, Gates(torch.zeros(1, 2), 2, 7)):
        assert torch.equal(model(ids).logits[:, -1], model(other).logits[:, -1])
        other[:, 43] = (ids[:, 43] + 1) % 126 + 1
        assert not torch.equal(model(ids).logits[:, -1], model(other).logits[:, -1])


@pytest.mark.parametrize("style", ["passkey", "magic"])
def test_samples_hold_their_answers_once_and_mark_them(style: str) -> None:
    data = Passkeys(Letters(), style, keys=2)
    sample, again = data.draw(3, 1600), data.draw(3, 1600)
    assert torch.equal(sample.ids, again.ids) and not torch.equal(sample.ids, data.draw(4, 1600).ids)
    assert 1400 < len(sample.context) <= 1601
    context = sample.context.tolist()
    for _, answer in sample.turns:
        length = len(answer)
        found = [i for i in range(len(context)) if context[i : i + length] == answer.tolist()]
        assert len(found) == 1
    places = sample.predicts.nonzero()[:, 0]
    assert torch.equal(sample.ids[places + 1], torch.cat([answer for _, answer in sample.turns]))


def test_keys_that_do_not_fit_are_refused() -> None:
    with pytest.raises(EvaluationError, match=r"10 keys do not fit into 100 tokens \(they take \d{3,}\)"):
        Passkeys(Letters()).draw(0, 100)
    with pytest.raises(EvaluationError, match="Did you mean 'magic'"):
        Passkeys(Letters(), "magik")


def test_models_with_other_attention_are_refused() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    model = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=16))
    with (
        pytest.raises(ModelError, match="layers without plain causal attention"),
        gated(model, Gates(torch.ones(2, 2), 2, 6)),
    ):
        pass


def test_lengths_cover_the_range_evenly() -> None:
    recipe = Recipe(steps=200, shortest=100, longest=1000, lengths=10)
    found = [recipe.length(i) for i in range(200)]
    assert set(found) == set(range(100, 1001, 100))
    assert max(map(found.count, set(found))) <= 22
    assert recipe.factor(0) == 0.1 and recipe.factor(100) == 1.0 and recipe.factor(199) == 0.1


def test_choices_keep_what_they_say() -> None:
    alpha = [[0.9, 0.1], [0.5, 0.3]]
    found = dict(comparison.choices(alpha, 3, "x"))
    assert found["all"] is None and comparison.ranked(found["best"]) == [[1.0, 0.0], [2 / 3, 1 / 3]]
    assert comparison.ranked(found["worst"]) == [[0.0, 1.0], [1 / 3, 2 / 3]]
    assert sorted(x for row in found["random 0"] for x in row) == [0, 1, 2, 3]
    assert dict(comparison.choices(alpha, 3, "x"))["random 2"] == found["random 2"]


def test_comparing_counts_right_answers() -> None:
    rows = comparison.compare(
        llama(), Noise(Letters()), [[0.9, 0.1], [0.5, 0.3]], length=60, samples=2, draws=2, sinks=2, recent=6
    )
    assert [row["heads"] for row in rows] == ["all", "best", "worst", "random"]
    assert all(row["low"] <= row["score"] <= row["high"] and row["questions"] == 2 for row in rows)
    assert rows[1]["ahead"] == 0


def test_a_question_is_right_if_the_answer_is() -> None:
    model = llama()
    ids = torch.randint(2, 128, (60,))
    with torch.no_grad():
        answer = model.generate(ids[None], max_new_tokens=3, do_sample=False)[0, 60:]
    with comparison.patched(model, "full"), torch.no_grad():
        right = list(comparison.ask(model, Sample(ids[:50], [(ids[50:], answer)])))
        wrong = list(comparison.ask(model, Sample(ids[:50], [(ids[50:], (answer + 1) % 128)])))
    assert right == [True] and wrong == [False]


def test_the_command_shows_a_pattern(tmp_path: Path) -> None:
    write_pattern(tmp_path / "p", [[0.9, 0.1], [0.5, 0.3]], 16, 64)
    shown = CliRunner().invoke(app, ["duo", "show", str(tmp_path / "p")])
    assert shown.exit_code == 0 and shown.output.splitlines()[1:] == [
        "layer 0  0.900  (0.100)",
        "layer 1  0.500  (0.300)",
    ]
    write_pattern(tmp_path / "wide", [[i / 32 for i in range(32)]] * 11, 16, 64)  # of which a table showed nothing
    shown = CliRunner().invoke(app, ["duo", "show", str(tmp_path / "wide")], env={"COLUMNS": "80"})
    assert shown.output.splitlines()[1].split()[2::31] == ["(0.000)", "0.969"]
    missing = CliRunner().invoke(app, ["duo", "show", str(tmp_path / "none")])
    assert missing.exit_code == 2 and "cannot read the pattern" in missing.output
    assert json.loads((tmp_path / "p" / "config.json").read_text()) == {"sink_size": 16, "recent_size": 64}
    assert read_pattern(str(tmp_path / "p"))[0] == (0.9, 0.1)


@pytest.mark.parametrize(("positions", "options", "lengths", "said"), [
    (10_000, [], (5572, 6845), "5572 tokens at the least: 10 keys take some 2786, contexts have 6845 tokens at the most"),
    (99_000, [], (5572, 32000), "5572 tokens at the least"),
    (10_000, ["--keys", "1"], (1000, 9684), "9684 tokens at the most: with 287 of questions the model knows 10000"),
    (10_000, ["--shortest", "3000", "--longest", "40000"], (3000, 40000), ""),
])  # fmt: skip
def test_lengths_that_are_not_given_are_those_that_keys_and_model_allow(
    positions: int,
    options: list[str],
    lengths: tuple[int, int],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    model = llama(max_position_embeddings=positions)
    monkeypatch.setattr("kvengine.evals.loading.load", lambda *_, **__: (model, Letters()))
    monkeypatch.setattr(
        "kvengine.evals.duo.train.train", lambda model, data, recipe, *_: found.append(recipe) or torch.ones(2, 2)
    )
    words = ["duo", "train", "m", "--out", str(tmp_path), *options]
    told = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert told.exit_code == 0 and [(one.shortest, one.longest) for one in found] == [lengths]
    assert said in told.output.replace("\n", ", ") if said else "contexts" not in told.output


def test_keys_for_which_a_model_has_too_few_positions_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    load = lambda *_, **__: (llama(max_position_embeddings=8000), Letters())  # noqa: E731
    monkeypatch.setattr("kvengine.evals.loading.load", load)
    told = CliRunner().invoke(app, ["duo", "train", "m", "--out", str(tmp_path)], env={"COLUMNS": "300"})
    assert told.exit_code == 2 and "has 8000 positions" in told.output and "give fewer --keys" in told.output


def test_a_pattern_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pattern(tmp_path, [[0.9, 0.1], [0.5, 0.3]], 16, 64)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_pattern(tmp_path, [[0.2] * 9] * 9, 16, 64)
    assert read_pattern(str(tmp_path)) == ((0.9, 0.1), (0.5, 0.3))
    assert len(list(tmp_path.iterdir())) == 2


def test_a_comparison_is_json_that_says_how_to_get_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_pattern(tmp_path / "p", [[0.9, 0.1], [0.5, 0.3]], 2, 6)
    monkeypatch.setattr("kvengine.evals.loading.load", lambda *_, **__: (llama(), Letters()))
    words = ["duo", "compare", "m", str(tmp_path / "p"), "--style", "magic", "--keys", "1", "--samples", "1"]
    words += ["--draws", "1", "--sinks", "2", "--recent", "6", "--seed", "an other"]
    found = CliRunner().invoke(app, [*words, "--length", "300", "--out", str(tmp_path / "rows.json")])
    assert found.exit_code == 0 and "all: " in found.stderr
    kept = json.loads((tmp_path / "rows.json").read_text())
    assert json.loads(found.stdout) == kept["rows"] and "--seed 'an other' --dtype float32" in kept["command"]
    write_pattern(tmp_path / "p", [[0.9, 0.1]], 2, 6)
    other = CliRunner().invoke(app, [*words, "--length", "300"], env={"COLUMNS": "300"})
    assert other.exit_code == 2 and "is for 1 layers of 2 KV heads" in other.stderr and "all: " not in other.stderr


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("words", "message"), [
    (["train", "bundled", "--out", "{}/out", "--sinks", "900", "--recent", "100", "--shortest", "1000", "--longest", "1000",
      "--style", "magic", "--keys", "1"], "all of a context of 1000: streaming heads would lack nothing"),
    (["train", "no-model", "--out", "{}/out", "--keys", "11"], "keys=11 must lie between 1 and 10"),
    (["compare", "bundled", "tiny", "--length", "300", "--style", "magic", "--keys", "1"], "all of a context of 300"),
    (["compare", "bundled", "tiny", "--length", "0"], "--length"),
    (["compare", "no-model", "tiny", "--seed", "7"], "a training may have seen; give a word"),
    (["compare", "no-model", "tiny", "--style", "magik"], "Did you mean 'magic'"),
    (["train", "bundled", "--out", "{}/file"], "FileExistsError"),
    (["train", "bundled", "--out", "{}/out", "--rate", "nan"], "rate=nan: must be a positive number"),
    (["train", "bundled", "--out", "{}/out", "--rate", "inf"], "rate=inf: must be a positive number"),
    (["train", "bundled", "--out", "{}/out", "--reg", "nan"], "reg=nan: must be 0 or a positive number"),
    (["train", "bundled", "--out", "/proc/self"], "FileNotFoundError"),  # there, but nothing can be written into it
    (["train", "bundled", "--out", "{}/out", "--sinks", "-1"], "counts must be positive (sinks may be 0)"),
    (["train", "bundled", "--out", "{}/out", "--keys", "1", "--shortest", "300", "--text", "{}/file"], "not UTF-8"),
    (["train", "bundled", "--out", "{}/out", "--text", "{}/nothing"], "nothing' does not exist"),
    (["train", "bundled", "--out", "{}/out", "--shortest", "1000"], "longer contexts (--shortest, --length) or fewer --keys"),
    (["compare", "bundled", "{}/p", "--samples", "0"], "--samples"),
    (["compare", "no-model", "tiny", "--sparsity", "3"], "sparsity=3.0 must lie between 0"),
    (["compare", "no-model", "{}/p"], "cannot read the pattern"),
    (["compare", "bundled", "tiny", "--out", "/proc/self/rows.json"], "FileNotFoundError"),
    (["compare", "bundled", "{}/p", "--draws", "0"], "--draws"),
    (["compare", "bundled", "{}/p", "--out", "{}"], "is a directory"),
    (["compare", "bundled", "{}/p", "--out", "{}/file/rows.json"], "FileExistsError"),
])  # fmt: skip
def test_wrong_input_is_said_before_anything_is_trained(tmp_path: Path, words: list[str], message: str) -> None:
    (tmp_path / "file").write_bytes(b"\xff")
    found = CliRunner().invoke(app, ["duo", *(word.format(tmp_path) for word in words)], env={"COLUMNS": "300"})
    assert found.exit_code == 2 and message in found.output, found.output
