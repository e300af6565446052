"""RULER's aggregation tasks: the most common words of a list (cwe), the most frequent coded words of a text (fwe)."""

from __future__ import annotations

from dataclasses import dataclass
from math import pi
from random import Random
from string import ascii_lowercase

from kvengine.evals.tasks import Plan, Sample
from kvengine.evals.tasks._fit import largest
from kvengine.evals.tasks._ruler import Draft, RulerTask
from kvengine.evals.tasks._words import distinct_words

CWE = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n{context}\n"
)
CWE_QUESTION = "Question: What are the 10 most common words in the above list?"
CWE_PREFIX = " Answer: The top 10 words that appear most often in the list are:"

FWE = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words. {context}\n"
)
FWE_QUESTION = (
    "Question: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
FWE_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
ZETA_2 = pi**2 / 6


@dataclass(frozen=True)
class CommonWords(RulerTask):
    """Ten words appear often, the rest rarely; one solved example comes first."""

    new_tokens: int = 120
    common: int = 10

    def draw(self, units: int, source: Random, plan: Plan, index: int) -> Draft:
        short = plan.length < 4096
        example, theirs = word_list_text(source, 20 if short else 40, (3, 1) if short else (10, 3), plan.seed)
        text, answers = word_list_text(source, units, (6, 1) if short else (30, 3), plan.seed)
        solved = CWE.format(context=example) + CWE_QUESTION + CWE_PREFIX + " " + numbered(theirs)
        return Draft(
            context=solved + "\n" + CWE.format(context=text),
            question=CWE_QUESTION,
            prefix=CWE_PREFIX,
            answers=tuple(answers),
        )

    def smallest(self) -> int:
        return self.common + 1


def word_list_text(source: Random, words: int, times: tuple[int, int], seed: int) -> tuple[str, list[str]]:
    """A numbered, shuffled list in which the first ten of `words` words appear `times[0]` times, the others `times[1]`.

    The permutation depends on the seed and the length alone, as in the official code: equal lists put the common words
    at equal places in every sample.
    """
    drawn = distinct_words(source, words)
    common, rare = drawn[:10], drawn[10:]
    flat = common * times[0] + rare * times[1]
    Random(seed).shuffle(flat)
    return numbered(flat), common


def numbered(words: list[str]) -> str:
    """`1. cat 2. dog`."""
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, 1))


@dataclass(frozen=True)
class FrequentWords(RulerTask):
    """Coded words with Zipf-like frequencies; the commonest is noise (`...`), the next three are asked."""

    new_tokens: int = 50
    letters: int = 6

    def draw(self, units: int, source: Random, plan: Plan, index: int) -> Draft:
        room = plan.length - self.new_tokens - plan.measure(_frame(""))
        vocabulary = coded_words(source, max(room // 50, 8), self.letters)
        text = coded_text(vocabulary, units, plan.seed)
        return Draft(
            context=FWE.format(context=text), question=FWE_QUESTION, prefix=FWE_PREFIX, answers=tuple(vocabulary[1:4])
        )

    def fit(self, plan: Plan) -> int:
        """Grow in steps of 1/32 of the length, as in the official code."""
        step = max(plan.length // 32, 1)
        return step * largest(lambda many: self._fits(plan, self._sample(plan, 0, many * step)), 2)

    def smallest(self) -> int:
        return 64

    def step(self, length: int) -> int:
        return max(length // 32, 1)


def coded_words(source: Random, count: int, letters: int) -> list[str]:
    """Distinct random words; the first is the noise."""
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(source.choices(ascii_lowercase, k=letters))] = None
    return ["...", *list(words)[1:]]


def coded_text(vocabulary: list[str], words: int, seed: int) -> str:
    """Rank r appears int(words · r⁻² / ζ(2)) times; the order is a permutation fixed by the seed."""
    flat = [word for rank, word in enumerate(vocabulary, 1) for _ in range(int(words * rank**-2 / ZETA_2))]
    Random(seed).shuffle(flat)
    return " ".join(flat)


def _frame(text: str) -> Sample:
    draft = Draft(context=FWE.format(context=text), question=FWE_QUESTION, prefix=FWE_PREFIX, answers=("",))
    return draft.sample("frame", 0)


TASKS = (CommonWords("cwe"), FrequentWords("fwe"))
