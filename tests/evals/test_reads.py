"""What a decoded token reads is told by tokens that were decoded, not by the prompt, whose attention is exact."""

from __future__ import annotations

from typing import Any

import pytest
from support_evals import tiny_model, tiny_tokenizer

import kvengine
from kvengine.evals.aggregate import averages
from kvengine.evals.engine import CacheSession
from kvengine.evals.lockstep import play, script
from kvengine.evals.prompt import Prompter
from kvengine.evals.protocol import Protocol
from kvengine.evals.records import Row
from kvengine.evals.runner import outcome
from kvengine.evals.tasks import Sample, Task, Turn

BUDGET = 8
NEVER, AT_ONCE = frozenset[int](), frozenset(range(640))


class Asking(Task):
    """A task whose answers are worth nothing."""

    metric = "none"

    def score(self, turn: Turn, prediction: str) -> dict[str, float]:
        return {"none": 0.0}


@pytest.fixture(scope="module")
def model() -> Any:
    made = tiny_model()
    kvengine.patch(made)
    return made


def rows(model: Any, mode: str, stop: frozenset[int], most: int, together: bool, forced: bool = False) -> list[Row]:
    """Rows of a sample with two questions under an exact top-k."""
    prompter = Prompter(tiny_tokenizer(), False)
    turns = tuple(
        Turn(question=f" What is {some}?", answers=("the sun is",), max_new_tokens=most, forced=forced)
        for some in ("it", "that")
    )
    sample = Sample(id="0", context="the grass is green " * 30, turns=turns)
    session = CacheSession(model, kvengine.EngineCache(model, f"oracle_topk(budget={BUDGET})"))
    asking = Protocol(prompter=prompter, mode=mode, stop=stop)
    if together:
        read = script(asking, sample)
        assert read is not None
        answers = [some[0] for some in play(asking, session, [read])]
    else:
        answers = list(asking.play(session, sample))
    return [outcome(Asking(), turn, answer) for turn, answer in zip(turns, answers, strict=True)]


@pytest.mark.parametrize("together", [False, True], ids=["alone", "lockstep"])
@pytest.mark.parametrize(
    ("stop", "most", "decoded"), [(AT_ONCE, 4, False), (NEVER, 1, False), (NEVER, 2, True)], ids=["stop", "one", "two"]
)
@pytest.mark.parametrize("mode", ["multi-turn", "multi-request"])
def test_an_answer_without_a_decoded_token_says_nothing_of_what_one_reads(
    model: Any, mode: str, stop: frozenset[int], most: int, decoded: bool, together: bool
) -> None:
    """The first question of a conversation is of the prompt; all others are read under the selection."""
    first, second = rows(model, mode, stop, most, together)
    assert first["held"] > 10 * BUDGET and first["bytes_held"] > 0
    assert BUDGET <= second["attended"] < 2 * BUDGET and second["read_per_token"] > 0
    if mode == "multi-turn" and not decoded:
        assert first["attended"] is None and first["read_per_token"] is None
        some = [{**row, "turn": 0, "placement": "aware", "peak_bytes": 0} for row in (first, second)]
        assert averages(some)["attended"] == second["attended"]
    else:
        assert BUDGET <= first["attended"] < 2 * BUDGET
        assert first["read_per_token"] < first["bytes_held"] / 2


def test_an_answer_that_is_read_tells_what_its_tokens_read(model: Any) -> None:
    first, second = rows(model, "multi-turn", NEVER, 1, False, forced=True)
    assert first["attended"] is None and second["attended"] < 2 * BUDGET
    first, second = rows(model, "multi-turn", NEVER, 9, False, forced=True)
    assert first["attended"] < 2 * BUDGET and second["attended"] < 2 * BUDGET
