"""SCBench's tasks over all of the context: the extremes of a list, many solved examples, summaries."""

from __future__ import annotations

import re
from dataclasses import dataclass
from random import Random
from typing import Any

from kvengine.evals.tasks._scbench import Row, SessionTask, both
from kvengine.evals.tasks._scores import any_character, first_number, only_number, option_letter, rouge_lsum

TARGETS = ("largest number", "smallest number", "second largest number", "second smallest number")
NAMES = ("Alice", "Bob", "Claire", "Dave", "Eve", "Fred", "Gertrude")
THINGS = ("red ball", "blue ball", "green ball", "white ball", "black ball", "brown ball", "pink ball")
SWAPS = 3


@dataclass(frozen=True)
class MathFind(SessionTask):
    """A list of integers. The question is named before the context too; only in multi-turn mode is it the first one."""

    def render(self, context: Any) -> str:
        return str(list(context)) if isinstance(context, list | tuple) else str(context)

    def question(self, turn: Row) -> str:
        return f"{target(turn['input'])}\n\n{turn['input']}"

    def label(self, turn: Row, row: Row) -> Any:
        answer = turn["answer"]
        return int(answer[0] if isinstance(answer, list | tuple) else answer)

    def opening(self, row: Row) -> str:
        ask = row["multi_turns"][0]["input"]
        return f"{target(ask)}\n\n{self.render(row['context'])}\n\n{ask}"


def target(question: str) -> str:
    """`What is the largest number of the list?`, cut from the question's own words.

    >>> target("No other words. The largest number of the list is: ")
    'What is the largest number of the list?'
    """
    found = re.search(r"The .+ is", question)
    return f"What is {found[0].lower()[:-3]}?" if found else "What is asked?"


def extremes(source: Random, size: int) -> Row:
    """`size` integers of up to three digits; the bounds are drawn anew each time, so that the extremes vary."""
    high, low = source.randint(800, 999), source.randint(0, 199)
    numbers = [source.randint(low, high) for _ in range(size)]
    ranked = sorted(set(numbers))
    answers = dict(zip(TARGETS, (ranked[-1], ranked[0], ranked[-2], ranked[1]), strict=True))
    turns = [
        {
            "input": f"You should answer with only one number, no other words. The {name} of the list is: ",
            "answer": answers[name],
        }
        for name in source.sample(TARGETS, 3)
    ]
    return {"context": numbers, "multi_turns": turns}


def shots(source: Random, size: int) -> Row:
    """`size` solved puzzles about who holds what after some swaps, then five unsolved ones; answers are letters."""
    solved = "\n\n".join(" ".join(_puzzle(source)) for _ in range(size))
    turns = [dict(zip(("input", "answer"), _puzzle(source), strict=True)) for _ in range(5)]
    return {"context": f"{solved}", "task": "tracking", "multi_turns": turns}


def _puzzle(source: Random) -> tuple[str, str]:
    people, things = source.sample(NAMES, 3), source.sample(THINGS, 3)
    holds = dict(zip(people, things, strict=True))
    story = [f"{name} holds the {holds[name]}." for name in people]
    for _ in range(SWAPS):
        one, other = source.sample(people, 2)
        holds[one], holds[other] = holds[other], holds[one]
        story.append(f"{one} and {other} swap.")
    options = " ".join(f"({letter}) {thing}" for letter, thing in zip("ABC", things, strict=True))
    who = source.choice(people)
    return f"{' '.join(story)} What does {who} hold? Options: {options}\nA:", f"({'ABC'[things.index(holds[who])]})"


TASKS = (
    MathFind("scbench_mf", {"scbench_mf": 5}, {"scbench_mf": both(first_number, only_number)}, generate=extremes),
    SessionTask(
        "scbench_many_shot",
        {"scbench_many_shot": 10},
        {"scbench_many_shot": both(any_character, option_letter)},
        metric="strict",  # the official score is 1 for nearly any output: see any_character
        floor=1 / 3,
        generate=shots,
    ),
    SessionTask(
        "scbench_summary",
        {"scbench_summary": 200},
        {"scbench_summary": both(rouge_lsum, rouge_lsum)},
        lead="This paper",
    ),
)
