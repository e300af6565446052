"""Perplexity after compression: a prompt is read and compressed, then the text that follows it is teacher-forced.

The score is the mean negative log-likelihood (nats per token) of the continuation; its difference to the full cache on
the same text is what compression costs. Perplexity of the prompt itself would never touch the compressed cache.

Stretches begin anywhere, so that more may be drawn later; of a short book they overlap, and the more of them there are, the less
independent are the continuations that are scored (of the bundled novel's 26 thousand words, none among the first 20).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, ClassVar

from kvengine.evals.tasks import Plan, Sample, Task, Turn
from kvengine.evals.tasks._fit import NoData, largest, shrink
from kvengine.evals.tasks._words import prose


@dataclass(frozen=True)
class Continuation(Task):
    """Stretches of a book: the user's (`--data book=PATH`, a text file or a folder of them), else the bundled novel."""

    name: str
    new_tokens: int = 64
    metric: str = "nll"
    suite: ClassVar[str] = "ppl"

    def samples(self, plan: Plan) -> Iterator[Sample]:
        most = largest(lambda words: self._fits(plan, self._sample(plan, 0, words)), 16)
        if most + self.new_tokens > (known := len(prose(plan.data.get("book")))):
            raise NoData(
                f"the book has {known} words, and a text of {plan.length} tokens takes {most + self.new_tokens}, so that it "
                "would be read twice; give a longer book, or shorter lengths"
            )
        for index in range(plan.count):
            yield shrink(partial(self._sample, plan, index), partial(self._fits, plan), most, 16, max(1, most // 50))

    def score(self, turn: Turn, prediction: str) -> dict[str, float]:
        raise NotImplementedError("the continuation is teacher-forced; there is no prediction to score")

    def recipe(self) -> dict[str, Any]:
        return {**super().recipe(), "new_tokens": self.new_tokens}

    def _fits(self, plan: Plan, sample: Sample) -> bool:
        return plan.measure(sample) + self.new_tokens <= plan.length

    def _sample(self, plan: Plan, index: int, words: int) -> Sample:
        book = prose(plan.data.get("book"))
        start = Random(f"{plan.seed}/{self.name}/{plan.length}/{index}").randrange(len(book))
        text = [book[(start + i) % len(book)] for i in range(words + self.new_tokens)]
        after = " " + " ".join(text[words:])
        return Sample(
            id=str(index),
            context=" ".join(text[:words]),
            turns=(Turn(question="", answers=(after,), max_new_tokens=self.new_tokens, forced=True),),
            provenance="user data" if "book" in plan.data else "substitute: a public-domain novel for a book corpus",
            meta={"units": words, "start": start},
            raw=True,
        )


TASKS = (Continuation("ppl_book"),)
