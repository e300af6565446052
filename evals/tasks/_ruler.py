"""What RULER's thirteen tasks share: seeds, length fitting and the two substring metrics.

Source: NVIDIA/RULER (arXiv 2404.06654). Differs from the official code: every sample has its own seed, so a sample does
not depend on how many were drawn before it; ids run from 0 (the official `index` of the needle tasks is overwritten by
a character offset); the length counts the beginning-of-sequence token; a budget too small is an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, ClassVar

from kvengine.evals.tasks import Plan, Sample, Task, Turn
from kvengine.evals.tasks._fit import largest, shrink


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A sample before it gets its number: text up to the question, the question, and the answers."""

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    provenance: str = "official"
    meta: Mapping[str, Any] | None = None
    others: tuple[Draft, ...] = ()  # further questions about the same context

    def sample(self, id: str, new_tokens: int) -> Sample:
        """The sample with a number and its turns."""
        turns = tuple(
            Turn(question=one.question, answers=one.answers, max_new_tokens=new_tokens, prefix=one.prefix)
            for one in (self, *self.others)
        )
        return Sample(id=id, context=self.context, turns=turns, provenance=self.provenance, meta=dict(self.meta or {}))


@dataclass(frozen=True)
class RulerTask(Task):
    """A RULER task draws a haystack of some number of units; the base finds how many fit the length."""

    name: str
    new_tokens: int
    metric: str = "string_match_all"
    suite: ClassVar[str] = "ruler"

    def draw(self, units: int, source: Random, plan: Plan, index: int) -> Draft:
        """One sample with a haystack of `units` units."""
        raise NotImplementedError

    def smallest(self) -> int:
        """The fewest units that still make a sample."""
        return 1

    def step(self, length: int) -> int:
        """By how many units a sample shrinks when it overflows."""
        return 10

    def fit(self, plan: Plan) -> int:
        """The most units with which sample 0 stays within the length."""
        return largest(lambda units: self._fits(plan, self._sample(plan, 0, units)), self.smallest())

    def samples(self, plan: Plan) -> Iterator[Sample]:
        units = self.fit(plan)
        for index in range(plan.count):
            draw, fits = partial(self._sample, plan, index), partial(self._fits, plan)
            yield shrink(draw, fits, units, self.smallest(), self.step(plan.length))

    def score(self, turn: Turn, prediction: str) -> dict[str, float]:
        text = clean(prediction)
        return {
            "string_match_all": match_all(text, turn.answers),
            "string_match_part": match_part(text, turn.answers),
            "word_match_all": match_all(text, turn.answers, words=True),
        }

    def _fits(self, plan: Plan, sample: Sample) -> bool:
        return plan.measure(sample) + self.new_tokens <= plan.length

    def _sample(self, plan: Plan, index: int, units: int) -> Sample:
        draft = self.draw(units, Random(f"{plan.seed}/{self.name}/{plan.length}/{index}"), plan, index)
        return replace(draft, meta={"units": units, **(draft.meta or {})}).sample(str(index), self.new_tokens)


def clean(prediction: str) -> str:
    """Strip, turn control characters into newlines, strip again (the official post-processing)."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def match_all(text: str, answers: tuple[str, ...], *, words: bool = False) -> float:
    """The fraction of answers found in the text, ignoring case.

    `words` asks for whole words: the official substring test finds "art" in "party".
    """
    return sum(_found(answer, text, words) for answer in answers) / len(answers)


def match_part(text: str, answers: tuple[str, ...]) -> float:
    """1 if any answer is found. (lm-evaluation-harness calls a *fraction* by this name and so scores lower.)"""
    return float(any(_found(answer, text, False) for answer in answers))


def _found(answer: str, text: str, words: bool) -> bool:
    if not words:
        return answer.lower() in text.lower()
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None
