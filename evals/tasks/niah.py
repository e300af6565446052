"""Needle in a haystack: one needle at every depth, for the depth × length heat map.

Source: gkamradt/LLMTest_NeedleInAHaystack. Differs: depths come in an order that spreads even a few samples; the needle
stands between sentences, never inside one; a fixed check of words takes the place of a judging model.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, ClassVar

from kvengine.evals.tasks import Plan, Sample, Task, Turn
from kvengine.evals.tasks._fit import largest, shrink
from kvengine.evals.tasks._words import NOISE, essay, number, pair, prose, sentences
from kvengine.evals.tasks.ruler_niah import NEEDLE, wording

DEPTHS = (0, 100, 50, 20, 80, 30, 70, 10, 90, 40, 60)  # percent


@dataclass(frozen=True)
class Needle:
    """A hidden sentence, the words around the haystack, the question, and what an answer must contain."""

    sentence: str
    before: str
    question: str
    answers: tuple[str, ...]
    prefix: str = ""


def sandwich(source: Random) -> Needle:
    """The classic; an answer is judged by its three facts."""
    return Needle(
        "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a sunny day.",
        "",
        "What is the best thing to do in San Francisco?",
        ("sandwich", "Dolores Park", "sunny day"),
    )


def passkey(source: Random) -> Needle:
    """A five-digit key between noise, in InfiniteBench's words."""
    key = f"{source.randrange(100_000):05d}"
    return Needle(
        f"The pass key is {key}. Remember it. {key} is the pass key.",
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
        "I will quiz you about the important information.\n\n",
        "What is the pass key?",
        (key,),
        " The pass key is",
    )


def magic(source: Random) -> Needle:
    """RULER's single needle."""
    key, value = pair(source), number(source)
    before, question, prefix = (text.format(context="", query=key) for text in wording("numbers", single=True))
    return Needle(
        NEEDLE.format(kind="numbers", key=key, value=value), before.rstrip("\n") + "\n", question, (value,), prefix
    )


MAKERS = {"niah_sandwich": sandwich, "niah_passkey": passkey, "niah_magic": magic}


@dataclass(frozen=True)
class Haystack(Task):
    """A needle in prose or noise; sample i stands at depth `DEPTHS[i % 11]`."""

    name: str
    noise: bool = False
    new_tokens: int = 48
    metric: str = "recall"
    suite: ClassVar[str] = "niah"

    def samples(self, plan: Plan) -> Iterator[Sample]:
        least = 12 if self.noise else 60
        most = largest(lambda units: self._fits(plan, self._sample(plan, 0, units)), least)
        for index in range(plan.count):
            yield shrink(partial(self._sample, plan, index), partial(self._fits, plan), most, least, max(1, most // 50))

    def score(self, turn: Turn, prediction: str) -> dict[str, float]:
        found = [answer.lower() in prediction.lower() for answer in turn.answers]
        return {"recall": sum(found) / len(found), "exact": float(all(found))}

    def recipe(self) -> dict[str, Any]:
        return {**super().recipe(), "noise": self.noise, "new_tokens": self.new_tokens}

    def _fits(self, plan: Plan, sample: Sample) -> bool:
        return plan.measure(sample) + self.new_tokens <= plan.length

    def _sample(self, plan: Plan, index: int, units: int) -> Sample:
        needle = MAKERS[self.name](Random(f"{plan.seed}/{self.name}/{plan.length}/{index}"))
        depth = DEPTHS[index % len(DEPTHS)]
        own = "essays" in plan.data
        text = [NOISE] * units if self.noise else sentences(essay(prose(plan.data.get("essays")), units))
        at = boundary(text, depth / 100)
        joint = "\n" if self.noise else " "
        turn = Turn(
            question=needle.question, answers=needle.answers, max_new_tokens=self.new_tokens, prefix=needle.prefix
        )
        return Sample(
            id=str(index),
            context=needle.before + joint.join([*text[:at], needle.sentence, *text[at:]]) + "\n",
            turns=(turn,),
            provenance="official" if self.noise or own else "substitute: a public-domain novel for the essays",
            meta={"depth": depth / 100, "units": units},
        )


def boundary(sentences: list[str], depth: float) -> int:
    """Before which sentence a fraction `depth` of the characters has passed most nearly.

    >>> boundary(["aaaaaaaa", "b", "c"], 0.5)
    1
    """
    ends = [0, *itertools.accumulate(len(sentence) for sentence in sentences)]
    return min(range(len(ends)), key=lambda at: abs(ends[at] - depth * ends[-1]))


TASKS = (Haystack("niah_magic"), Haystack("niah_passkey", noise=True), Haystack("niah_sandwich"))
