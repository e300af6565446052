"""Contexts read once for all policies, samples in lockstep: the same rows as when every policy reads each for itself."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from support_evals import tiny_model, tiny_tokenizer

import kvengine
from kvengine.cache import LayerCache
from kvengine.errors import UnsupportedPolicy
from kvengine.evals import engine, together
from kvengine.evals.config import RunConfig
from kvengine.evals.engine import CacheSession
from kvengine.evals.progress import Silent
from kvengine.evals.prompt import Prompter
from kvengine.evals.records import MEASURED, Journal, Row
from kvengine.evals.runner import Run
from kvengine.evals.tasks import Plan, Sample, Task, Turn

POLICIES = (
    "full", "h2o(budget=0.25)", "snapkv(budget=0.25,window=8)", "d2o(budget=0.25)", "zipcache(block=32)",
    "quest(budget=0.25, page=8)", "duo(sparsity=0.5) + kivi(group=8)", "ashape(sinks=4, local=64)",
)  # fmt: skip


@dataclass(frozen=True)
class Shuffled(Task):
    """The same words in another order each time, so that texts have equal sizes but for one sample."""

    name: str = "shuffled"
    metric: str = "found"
    suite: ClassVar[str] = "quiz"
    conversation: bool = True  # type: ignore[misc]
    words: int = 160
    questions: int = 2

    def samples(self, plan: Plan) -> Iterator[Sample]:
        for index in range(plan.count):
            source = Random(index)
            words = ["grass", "is", "sky", "sun", "the"] * (self.words // 5 + (index == 2))
            source.shuffle(words)
            asked = [source.sample(["grass", "sky", "sun"], 3) for _ in range(self.questions)]
            turns = tuple(
                Turn(question="\n" + " ".join(some), answers=(" the sun", " blue"), max_new_tokens=3 + number)
                for number, some in enumerate(asked)
            )
            yield Sample(id=str(index), context=" ".join(["the", *words]), turns=turns)

    def score(self, turn: Turn, prediction: str) -> dict[str, float]:
        return {"found": float(turn.answers[0] in prediction)}


@dataclass(frozen=True)
class Forced(Shuffled):
    """Its answers are read, not said, and what they cost is the score."""

    metric: str = "nll"

    def samples(self, plan: Plan) -> Iterator[Sample]:
        for sample in super().samples(plan):
            yield replace(sample, turns=tuple(replace(turn, forced=True) for turn in sample.turns))


@dataclass(frozen=True)
class Long(Shuffled):
    """Texts of the user's, which lose their middle to fit."""

    questions: int = 3
    words: int = 1400

    def samples(self, plan: Plan) -> Iterator[Sample]:
        for sample in super().samples(plan):
            yield replace(sample, provenance="user data")


@dataclass(frozen=True)
class Opened(Shuffled):
    """In a conversation the first question stands before the context too."""

    def samples(self, plan: Plan) -> Iterator[Sample]:
        for sample in super().samples(plan):
            yield replace(sample, opening="Zebra? " + sample.context)


QUIZ, TALK = Shuffled(conversation=False), Shuffled()


@pytest.fixture(scope="module")
def model() -> Any:
    """With weights so large that what it says depends on what it reads, far back too."""
    made = tiny_model()
    with torch.no_grad():
        for layer in made.model.layers:
            for weight in layer.parameters():
                weight *= 10 if weight.ndim > 1 else 1
    return made


def run(folder: Path, model: Any, monkeypatch: pytest.MonkeyPatch, task: Task, **more: Any) -> Run:
    monkeypatch.setattr(Run, "tasks", lambda self: [task])
    settings = {"policies": POLICIES, "lengths": (400,), "samples": 4, "oracle": False, "batch": 4, "shared": True}
    config = RunConfig(**{"suite": task.suite, "out": folder, **settings, **more})
    return Run(config, model, tiny_tokenizer(), Journal.open(folder / "rows.jsonl"))


def lasting(rows: list[Row]) -> dict[tuple[Any, ...], Row]:
    """What must agree. Free slots are laid out by the call: a prompt in two parts, an answer that waits for others."""
    free = MEASURED | {"bytes_held", "read_per_token", "tiers"}
    found = {(r["mode"], r["policy"], r["sample"], r["turn"]): r for r in rows}
    assert len(found) == len(rows)
    return {at: {name: x for name, x in row.items() if name not in free} for at, row in found.items()}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("task", "policies"), [
    pytest.param(QUIZ, POLICIES, id="quiz"),
    pytest.param(Shuffled(questions=3), ("full", "h2o(budget=0.25)"), id="conversation"),
    pytest.param(TALK, POLICIES, id="conversations", marks=pytest.mark.slow),
])  # fmt: skip
def test_rows_are_those_of_the_runner(
    task: Task, policies: tuple[str, ...], tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = ("multi-request", "multi-turn") if policies == POLICIES else ("multi-turn",)
    more = {"modes": modes, "policies": policies, "samples": 4 if policies == POLICIES else 3}
    alone, shared = (run(tmp_path / name, model, monkeypatch, task, **more) for name in ("alone", "shared"))
    alone.execute(Silent())
    together.execute(shared, Silent())
    assert {row["status"] for row in shared.journal.rows} == {"ok"}
    assert max(row["together"] for row in shared.journal.rows) > 1
    assert lasting(shared.journal.rows) == lasting(alone.journal.rows)
    size = {at: row["bytes_held"] for row in alone.journal.rows for at in [(row["policy"], row["mode"], row["turn"])]}
    for row in shared.journal.rows:
        assert row["bytes_held"] == pytest.approx(size[row["policy"], row["mode"], row["turn"]], rel=0.25)
    before = list(shared.journal.rows)
    together.execute(shared, Silent())
    assert shared.journal.rows == before  # nothing is done twice


def test_every_policy_is_timed_once_by_itself(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = run(tmp_path, model, monkeypatch, QUIZ, policies=("full", "h2o(budget=0.25)"), batch=2)
    together.execute(made, Silent())
    timed = [(row["policy"], row["sample"]) for row in made.journal.rows if row["ttft"] is not None]
    assert sorted(set(timed)) == [("full", "0"), ("h2o(budget=0.25)", "0")]
    assert all(row["together"] == 1 for row in made.journal.rows if row["ttft"] is not None)


def test_a_run_that_was_cut_off_ends_with_the_same_rows(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(tmp_path / "whole", model, monkeypatch, QUIZ, policies=("full", "snapkv(budget=0.25)"))
    together.execute(whole, Silent())
    lines = (tmp_path / "whole" / "rows.jsonl").read_bytes().splitlines(keepends=True)
    for cut in (1, 5, len(lines) - 1):
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        (folder / "rows.jsonl").write_bytes(b"".join(lines[:cut]) + lines[cut][:-9])
        again = run(folder, model, monkeypatch, QUIZ, policies=("full", "snapkv(budget=0.25)"))
        together.execute(again, Silent())
        assert lasting(again.journal.rows) == lasting(whole.journal.rows)


def test_every_question_of_an_aware_quiz_is_alone_with_the_context(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run(tmp_path, model, monkeypatch, QUIZ, modes=("multi-turn",), policies=("full",), samples=1)
    together.execute(made, Silent(), timed=False)
    assert [row["turn"] for row in made.journal.rows] == [0, 1]
    for row in made.journal.rows:  # context, this question and the answer, and nothing of the other
        assert row["held"] <= row["prompt_tokens"] + row["new_tokens"]


def test_a_context_is_read_once_for_policies_and_modes(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run(tmp_path, model, monkeypatch, QUIZ, modes=("multi-request", "multi-turn"))
    reads: list[int] = []
    keep = together.read
    monkeypatch.setattr(together, "read", lambda model, ids: reads.append(len(ids)) or keep(model, ids))
    together.execute(made, Silent(), timed=False)
    assert reads == [3, 1]


def test_a_task_that_the_model_cannot_do_is_left_after_a_few_samples(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run(tmp_path, model, monkeypatch, QUIZ, few=1, policies=("full", "h2o(budget=0.25)"))
    together.execute(made, Silent())
    rows = made.journal.rows
    assert [(row["policy"], row["sample"]) for row in rows] == [
        ("full", "1"),
        ("full", "1"),
        ("h2o(budget=0.25)", None),
    ]
    assert rows[-1]["status"] == "not measured" and "hardly beats guessing" in rows[-1]["message"]
    before = list(rows)
    together.execute(made, Silent())
    assert made.journal.rows == before
    whole = {("full", str(i)) for i in range(4)} | {("h2o(budget=0.25)", str(i)) for i in range(4)}
    for shared in (
        True,
        False,
    ):  # who goes on without `few` wants all of it, and was told once more that nothing was asked
        again = run(
            tmp_path / str(shared), model, monkeypatch, QUIZ, shared=shared, policies=("full", "h2o(budget=0.25)")
        )
        for row in before:
            again.journal.append([row])
        together.execute(again, Silent()) if shared else again.execute(Silent())
        assert {(row["policy"], row["sample"]) for row in again.journal.rows if row["status"] == "ok"} == whole


def test_a_few_samples_first_leave_one_for_the_clock(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "MARGIN", -1.0)  # any score tells
    made = run(tmp_path, model, monkeypatch, QUIZ, few=1, policies=("full", "h2o(budget=0.25)"))
    together.execute(made, Silent())
    timed = {(row["policy"], row["sample"]) for row in made.journal.rows if row["ttft"] is not None}
    assert {("full", "0"), ("h2o(budget=0.25)", "0")} <= timed


def test_what_does_not_fit_together_is_asked_one_by_one(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that holds one context but not two: what two took is given up before."""
    keep, tried = CacheSession.rows, list[weakref.ref[Any]]()

    def rows(self: CacheSession, tokens: torch.Tensor) -> torch.Tensor:
        if len(tokens) > 1:
            tried.append(weakref.ref(self.cache))
            raise torch.OutOfMemoryError("two are too many")
        return keep(self, tokens)

    def attempt(*given: Any) -> None:
        assert not any(cache() for cache in tried)
        alone(*given)

    made = run(tmp_path, model, monkeypatch, QUIZ, policies=("full", "ashape(sinks=4, local=64)"), samples=2)
    alone = made.attempt
    monkeypatch.setattr(CacheSession, "rows", rows)
    monkeypatch.setattr(made, "attempt", attempt)
    together.execute(made, Silent())
    assert tried and [row["status"] for row in made.journal.rows] == ["ok"] * 8
    assert {row["together"] for row in made.journal.rows} == {1}


@pytest.mark.parametrize("case", ["forced", "own answers"])
def test_what_is_read_after_an_answer_is_not_known_beforehand(
    case: str, tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss of a text that is forced, and a conversation of the model's own answers: each sample alone, as the runner does."""
    more = {"policies": ("full", "h2o(budget=0.25)"), "samples": 2, "modes": ("multi-request", "multi-turn")}
    task, more = (Forced(), more) if case == "forced" else (TALK, more | {"golden": False})
    alone, shared = (run(tmp_path / name, model, monkeypatch, task, **more) for name in ("alone", "shared"))
    alone.execute(Silent())
    together.execute(shared, Silent())
    most = {mode: max(row["together"] for row in shared.journal.rows if row["mode"] == mode) for mode in more["modes"]}
    assert most == {"multi-request": 1 if case == "forced" else 2, "multi-turn": 1}
    assert lasting(shared.journal.rows) == lasting(alone.journal.rows)


def test_texts_that_were_cut_are_told_by_the_turns_that_read_them(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"policies": ("full",), "samples": 2, "modes": ("multi-request", "multi-turn"), "lengths": (1200,)}
    alone, shared = (run(tmp_path / name, model, monkeypatch, Long(), **more) for name in ("alone", "shared"))
    alone.execute(Silent())
    together.execute(shared, Silent(), timed=False)
    assert {row["together"] for row in shared.journal.rows} == {2}
    assert lasting(shared.journal.rows) == lasting(alone.journal.rows)
    told = {(row["mode"], row["turn"]) for row in shared.journal.rows if row["truncated"]}
    assert told == {("multi-turn", 0), *(("multi-request", turn) for turn in range(3))}


def test_a_length_that_leaves_nothing_of_a_text_is_told_as_where_each_is_asked_alone(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand tokens are for the questions of multi-request mode."""
    more = {"policies": ("full",), "samples": 2, "modes": ("multi-request", "multi-turn"), "lengths": (200,)}
    alone, shared = (run(tmp_path / name, model, monkeypatch, Long(), **more) for name in ("alone", "shared"))
    alone.execute(Silent())
    together.execute(shared, Silent())
    for made in (alone, shared):
        assert {(row["mode"], row["status"]) for row in made.journal.rows} == {
            ("multi-request", "too short"), ("multi-turn", "ok"),
        }  # fmt: skip
    assert lasting(shared.journal.rows) == lasting(alone.journal.rows)


def test_a_prompt_that_shares_nothing_with_the_context_is_read_by_itself(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that names its question first, and a tokenizer that begins with no token of its own."""
    more = {"policies": ("full", "h2o(budget=0.25)"), "samples": 2, "modes": ("multi-request", "multi-turn")}
    alone, shared = (run(tmp_path / name, model, monkeypatch, Opened(), **more) for name in ("alone", "shared"))
    for one in (alone, shared):
        one.prompter = Prompter(tiny_tokenizer(bos=False))
    alone.execute(Silent())
    together.execute(shared, Silent())
    assert lasting(shared.journal.rows) == lasting(alone.journal.rows)
    assert {row["status"] for row in shared.journal.rows} == {"ok"}


def test_bytes_of_a_batch_are_divided_among_its_conversations_and_tokens_are_each_ones() -> None:
    counts = torch.tensor([[[4, 6], [8, 8]], [[2, 4], [6, 10]]])  # layer, sequence, head
    tiers = {"device": {"k": 10, "v": 20}, "host": {"k": 6}}
    stats = SimpleNamespace(held=counts, attended=counts // 2, bytes_held=36, read_per_token=12, bytes=tiers)
    found = engine.engine_usages(stats)
    assert [(one.held, one.attended) for one in found] == [(4.0, 2.0), (8.0, 4.0)]
    assert {(one.bytes_held, one.read_per_token, *one.tiers.items()) for one in found} == {
        (18, 6, ("device", 15), ("host", 3))
    }
    whole = engine.engine_usage(stats)
    assert (whole.held, whole.bytes_held, whole.tiers) == (6.0, 36, {"device": 30, "host": 6})


def test_a_cell_that_was_given_up_is_not_tried_again(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In no later round and no later run: each time it would run out of memory anew."""
    less, opened, room = "h2o(budget=0.25)", list[str](), False

    @contextlib.contextmanager
    def opener(model: Any, policy: str) -> Iterator[Any]:
        opened.append(policy)
        if policy == less and not room:
            raise torch.OutOfMemoryError("too many")
        with engine.opened(model, policy) as found:
            yield found

    def rows(**more: Any) -> list[Any]:
        made = run(tmp_path, model, monkeypatch, QUIZ, policies=("full", less), samples=3, batch=1, **more)
        made.opener = opener
        together.execute(made, Silent())
        return [row["sample"] for row in made.journal.rows if row["policy"] == less]

    for _ in range(2):
        assert rows() == [None] and opened.count(less) == 1
    room = True
    assert rows(retry=True) == [None, *"001122"]


def test_what_a_policy_is_refused_for_is_told_and_the_stock_cache_is_asked_one_by_one(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def opener(model: Any, policy: str) -> Iterator[Any]:
        if policy == "h2o(budget=0.25)":
            raise UnsupportedPolicy("not here")
        with engine.opened(model, policy) as found:
            yield found

    alone, shared = (
        run(tmp_path / name, model, monkeypatch, QUIZ, policies=("stock", "h2o(budget=0.25)"), samples=2)
        for name in ("alone", "shared")
    )
    alone.opener = shared.opener = opener
    alone.execute(Silent())
    together.execute(shared, Silent(), timed=False)
    assert lasting(shared.journal.rows) == lasting(alone.journal.rows)
    assert [row["status"] for row in shared.journal.rows if row["policy"] != "full"] == ["ok"] * 4 + ["refused"]


def test_time_that_is_over_ends_the_run_between_places(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = run(tmp_path, model, monkeypatch, QUIZ, policies=("full",))
    together.execute(made, Silent(), end=0.0)
    assert made.journal.rows == []


@dataclass
class Clock(Silent):
    """Time that passes only when a sample is done: ten seconds."""

    now: float = 1000.0

    def sample(self, cell: Any, rows: list[Row]) -> None:
        self.now += 10


@pytest.mark.parametrize(("end", "done"), [
    (5, {(1, "0")}),  # the second place is not begun, and the first has both policies
    (35, {(1, "0"), (2, "0")}),
    (79, {(1, "0"), (2, "0")}),  # a second round would take as long as the first
    (80, {(1, "0"), (2, "0"), (1, "1"), (2, "1")}),
])  # fmt: skip
def test_a_round_that_would_not_end_in_time_is_not_begun(
    end: float, done: set[Any], tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policies = ("full", "h2o(budget=0.25)")
    made = run(tmp_path, model, monkeypatch, QUIZ, policies=policies, lengths=(1, 2), samples=3, batch=1)
    clock = Clock()
    monkeypatch.setattr(together, "time", SimpleNamespace(monotonic=lambda: clock.now))
    together.execute(made, clock, end=1000 + end)
    for policy in policies:
        assert {(row["length"], row["sample"]) for row in made.journal.rows if row["policy"] == policy} == done


@pytest.mark.parametrize(("batch", "questions", "samples"), [(1, 2, "01"), (4, 3, "01"), (4, 5, "0123"), (2, 6, "012")])
def test_so_many_questions_are_asked_and_not_all_samples(
    batch: int, questions: int, samples: str, tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample has two. A batch's worth of them makes a round."""
    made = run(tmp_path, model, monkeypatch, QUIZ, policies=("full",), batch=batch)
    together.execute(made, Silent(), questions=questions, timed=False)
    assert sorted({row["sample"] for row in made.journal.rows}) == list(samples)
    assert max(row["together"] for row in made.journal.rows) <= batch
    monkeypatch.setattr(Shuffled, "samples", lambda *_: iter(()))
    made = run(tmp_path / "none", model, monkeypatch, QUIZ, policies=("full",), batch=batch)
    together.execute(made, Silent(), questions=questions, timed=False)
    assert [row["status"] for row in made.journal.rows] == ["no data"]


@pytest.mark.parametrize(("floor", "told"), [(0.31, False), (0.3, True)])
def test_what_guessing_earns_is_no_reason_to_ask_on(
    floor: float, told: bool, tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The better mode decides, here the one with half of the answers right; the other has none."""
    found = iter(
        [0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0] + [0.0] * 99
    )  # two samples of two questions, each in both modes
    monkeypatch.setattr(Shuffled, "floor", floor)
    monkeypatch.setattr(Shuffled, "score", lambda *_: {"found": next(found)})
    more = {"few": 2, "modes": ("multi-request", "multi-turn"), "policies": ("full", "h2o(budget=0.25)"), "samples": 3}
    made = run(tmp_path, model, monkeypatch, QUIZ, **more)
    together.execute(made, Silent(), timed=False)
    asked = {mode: {row["sample"] for row in made.journal.rows if row["mode"] == mode and row["policy"] != "full"}
             for mode in more["modes"]}  # fmt: skip
    assert asked == dict.fromkeys(more["modes"], set("012") if told else {None})


@pytest.mark.parametrize("case", ["a single sample", "another place", "no ceiling", "a loss"])
def test_whether_policies_are_asked_is_the_full_caches_to_say_here(
    case: str, tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not what it scored elsewhere. Where it has no score, or what it has is a loss, they are."""
    less, lengths = "h2o(budget=0.25)", (1, 2) if case == "another place" else (2,)
    found = iter([1.0] * 4 * len(lengths[1:]) + [0.0] * 9)
    monkeypatch.setattr(Shuffled, "score", lambda *_: {"found": next(found)})
    monkeypatch.setattr(Shuffled, "floor", 99.0 if case == "a loss" else 0.0)

    @contextlib.contextmanager
    def opener(model: Any, policy: str) -> Iterator[Any]:
        if policy == "full" and case == "no ceiling":
            raise torch.OutOfMemoryError("too many")
        with engine.opened(model, policy) as opened:
            yield opened

    more = {"few": 1, "lengths": lengths, "policies": ("full", less), "samples": 1}
    made = run(tmp_path, model, monkeypatch, Forced() if case == "a loss" else QUIZ, **more)
    made.opener = opener
    together.execute(made, Silent(), timed=False)
    status = {row["length"]: row["status"] for row in made.journal.rows if row["policy"] == less}
    assert status[2] == ("ok" if case in ("no ceiling", "a loss") else "not measured")
    assert status.get(1, "ok") == "ok"


def test_a_cache_for_which_a_reading_is_too_much_goes_at_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when garbage is collected: what is tried next needs the room."""
    reading = together.read(model, [[5, 6, 7, 8]])

    def follow(*_: Any) -> None:
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(LayerCache, "follow", follow)
    gc.collect()
    gc.disable()
    try:
        with kvengine.patched(model, "h2o(budget=2)"):
            cache = kvengine.EngineCache(model)
            with pytest.raises(torch.OutOfMemoryError):
                together.give(model, cache, reading, 4)
            gone = weakref.ref(cache.engines[0].parts[0].lane)
            del cache
        assert gone() is None
    finally:
        gc.enable()


def test_what_a_reading_shares_with_prompts() -> None:
    reading = together.Reading([[1, 2, 3]], [], torch.zeros(1, 1))
    prompts = [[1, 2, 3], [1, 2, 3, 4], [1, 2, 9, 9], [1, 2]]
    assert [reading.shared([ids]) for ids in prompts] == [3, 3, 2, 1]
    two = together.Reading([[1, 2, 3], [1, 5, 6]], [], torch.zeros(2, 1))
    assert two.shared([[1, 2, 3, 7], [1, 5, 8, 7]]) == 2
