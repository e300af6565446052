"""RULER against lm-evaluation-harness, where that is installed: `pip install "lm_eval[ruler]"`.

Its generators draw in another order, so samples are compared by taking theirs apart and putting them together again
with ours: texts must be equal to the letter.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest

from kvengine.evals.tasks import Turn, catalogue
from kvengine.evals.tasks._ruler import clean
from kvengine.evals.tasks._words import NOISE
from kvengine.evals.tasks.ruler_niah import Needles, among_lines, enumeration, wording
from kvengine.evals.tasks.ruler_words import CWE, CWE_QUESTION, FWE, FWE_QUESTION, coded_text, numbered

pytestmark = pytest.mark.slow
ruler = pytest.importorskip("lm_eval.tasks.ruler.niah_utils", reason="lm-evaluation-harness is not installed")

TASKS = {name: task for name, task in catalogue("ruler").items() if isinstance(task, Needles)}


class Words:
    """A tokenizer of theirs that counts words."""

    def __call__(self, text: str) -> Any:
        return type("Encoded", (), {"input_ids": text.split()})


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.haystack != "essay"])
def test_needle_prompts_are_equal(name: str) -> None:
    from lm_eval.tasks.ruler import prepare_niah

    task = TASKS[name]
    haystack = NOISE if task.haystack == "noise" else prepare_niah.NEEDLE
    random.seed(7)
    text, answers, query = prepare_niah.generate_input_output(
        30,
        haystack,
        type_haystack="repeat" if task.haystack == "noise" else "needle",
        num_needle_k=task.all_keys,
        type_needle_k=task.key,
        num_needle_v=task.values,
        type_needle_v=task.value,
        template=ruler.TEMPLATE,
        num_needle_q=task.queried,
    )
    introduction, question, prefix = wording(task.value, single=True)
    context = text.partition("afterwards.\n")[2].rpartition("\nWhat is")[0]
    asked = {"query": enumeration([query]), "context": context}
    assert text == introduction.format(**asked) + question.format(**asked)
    lines = context.split("\n")
    needle = f"One of the special magic {task.value} for {query} is: {answers[0]}."
    at = lines.index(needle)
    rest = lines[:at] + lines[at + 1 :]
    again = next(
        text
        for seed in range(2000)
        if (text := among_lines(rest, [needle], random.Random(seed))).split("\n")[at] == needle
    )
    assert again == context
    assert prefix.format(**asked).strip().startswith("The special magic")


def test_frequent_words_are_equal() -> None:
    from lm_eval.tasks.ruler import fwe_utils

    random.seed(3)
    text, answers, words = fwe_utils.generate_input_output(4096, Words(), num_words=900, vocab_size=60)
    coded = text.partition("coded words. ")[2].partition("\n")[0]
    ranked = [word for word, _ in Counter(coded.split()).most_common()]
    order = sorted(set(ranked), key=lambda word: (-coded.split().count(word), word != "..."))
    assert order[0] == "..." and set(order[1:4]) == set(answers)
    random.seed(3)
    vocabulary = ["".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(60)]
    vocabulary = sorted(set(vocabulary))
    random.Random(42).shuffle(vocabulary)
    assert coded_text(["...", *vocabulary[1:]], words, 42) == coded
    assert text.startswith(FWE.format(context=coded) + FWE_QUESTION)


def test_common_words_are_equal() -> None:
    from lm_eval.tasks.ruler import cwe_utils

    random.seed(5)
    example, text, answers = cwe_utils.generate_input_output(50, 4096)
    flat = re.findall(r"\d+\. (\S+)", text)
    assert text.startswith(CWE.format(context=numbered(flat)) + CWE_QUESTION)
    assert {Counter(flat)[word] for word in answers} == {30} and set(Counter(flat).values()) == {30, 3}
    assert example.startswith(CWE.partition("{context}")[0])


def test_scores_are_equal() -> None:
    from lm_eval.tasks.ruler import common_utils

    source = random.Random(1)
    task = catalogue("ruler")["vt"]
    for _ in range(300):
        answers = tuple("".join(source.choices("abAB1", k=2)) for _ in range(source.randint(1, 4)))
        text = "".join(source.choices("abAB1 \n\x01", k=12))
        theirs = common_utils.string_match_all(common_utils.postprocess_pred([text]), [list(answers)])
        ours = task.score(Turn(question="", answers=answers, max_new_tokens=1), text)["string_match_all"]
        assert theirs == pytest.approx(ours)
        assert common_utils.postprocess_pred([text]) == [clean(text)]
