"""SCBench's tasks over natural text: questions on books in two languages, multiple choice, functions by description.

They run on the user's copy of the data; nothing here is generated.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from math import exp, log
from typing import Any

from kvengine.evals.tasks._scbench import Row, SessionTask, both
from kvengine.evals.tasks._scores import (
    any_label,
    chinese_f1,
    chinese_f1_by_character,
    choice,
    choice_letter,
    english_f1,
)

SIMILAR = 0.8


@dataclass(frozen=True)
class BookQuestion(SessionTask):
    """`scaffold` puts words around the question."""

    scaffold: str = "Question: {question}\nAnswer:"

    def question(self, turn: Row) -> str:
        return self.scaffold.format(question=turn["input"])


@dataclass(frozen=True)
class BookChoice(SessionTask):
    """Four options; the label is the right one's text and letter."""

    def question(self, turn: Row) -> str:
        options = "\n".join(f"{letter}. {text}" for letter, text in zip("ABCD", turn["options"], strict=True))
        return f"Question: {turn['input']}\n{options}\n\nThe the correct answer is"  # "The the" is official

    def label(self, turn: Row, row: Row) -> Any:
        answer = turn["answer"][0] if isinstance(turn["answer"], list | tuple) else turn["answer"]
        return [answer, "ABCD"[turn["options"].index(answer)]]


@dataclass(frozen=True)
class Repository(SessionTask):
    """Repeat the function that a description means; the label knows every function asked of the repository."""

    def label(self, turn: Row, row: Row) -> Any:
        others = [
            other["answer"] for other in row["multi_turns"] if other.get("task", "scbench_repoqa") == "scbench_repoqa"
        ]
        return {"answer": turn["answer"], "others": others} if turn["answer"] in others else turn["answer"]


def right_function(prediction: str, label: Any) -> float:
    """1 if the code block resembles the wanted function most of all asked ones, with BLEU of at least 0.8.

    Differs from the official code: the code block is taken as it is, not the first function in it that a parser finds;
    candidates are the session's own functions, not those of all of the repository's sessions.
    """
    code = code_block(prediction)
    scores = {other: bleu(code, other) for other in label["others"]}
    best = max(scores, key=lambda other: scores[other])
    return float(best == label["answer"] and scores[best] >= SIMILAR)


def same_function(prediction: str, label: Any) -> float:
    """1 if the code block is the wanted function, whitespace aside."""
    return float(code_block(prediction).split() == str(label["answer"]).split())


def code_block(text: str) -> str:
    """What stands between the first pair of triple backticks; all of the text if there is none."""
    found = re.search(r"```(?:\w+\n)?(.*?)(?:```|\Z)", text, re.DOTALL)
    return found[1] if found else text


def bleu(text: str, reference: str, order: int = 4) -> float:
    """Sentence BLEU (Papineni et al. 2002) over whitespace tokens; orders longer than either text are left out."""
    a, b = text.split(), reference.split()
    order = min(order, len(a), len(b))
    if not order:
        return 0.0
    precisions = [_precision(a, b, n) for n in range(1, order + 1)]
    if not all(precisions):
        return 0.0
    return min(1.0, exp(1 - len(b) / len(a))) * exp(sum(log(p) for p in precisions) / order)


def _precision(a: list[str], b: list[str], n: int) -> float:
    grams = [Counter(tuple(side[i : i + n]) for i in range(len(side) - n + 1)) for side in (a, b)]
    return sum((grams[0] & grams[1]).values()) / sum(grams[0].values())


REPOSITORY = (
    "Based on the function description and code context, please retrieve and repeat the exact described function "
    "from the code context in a code block wrapped by ```:\n\n"
)

TASKS = (
    Repository(
        "scbench_repoqa",
        {"scbench_repoqa": 1024},
        {"scbench_repoqa": both(right_function, same_function)},
        REPOSITORY,
    ),
    BookQuestion(
        "scbench_qa_eng",
        {"scbench_qa_eng": 40},
        {"scbench_qa_eng": both(any_label, english_f1)},
        "Read the book and answer the question. Be very concise in your answer.\n\n",
    ),
    BookQuestion(
        "scbench_qa_chn",
        {"scbench_qa_chn": 40},
        {"scbench_qa_chn": both(chinese_f1_by_character, chinese_f1)},
        "阅读以下书籍然后回答问题。\n\n",
        metric="strict",  # the official score compares single characters: see chinese_f1_by_character
        scaffold="问题：{question}\n答案：",
    ),
    BookChoice(
        "scbench_choice_eng",
        {"scbench_choice_eng": 40},
        {"scbench_choice_eng": both(choice, choice_letter)},
        "Read the book and answer the question.\n\n",
        floor=0.25,
    ),
)
