"""LongBench v1's fourteen English and two code tasks, from the user's copy of the data (`--data longbench=FOLDER`).

Source: THUDM/LongBench (arXiv 2308.14508): FOLDER/TASK.jsonl with rows {"input", "context", "answers", "all_classes"}.
Differs from the official code: a class whose name is within the right one's never counts as named (its loop skips the
class after one that it drops); code similarity comes from difflib, as there without python-Levenshtein; the chat template
stands within the length that prompts are cut to; samsum's answers go on behind their first line (officially they end there), of
which the score is either way. The five Chinese tasks need a word segmenter and are left out.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvengine.errors import EvaluationError
from kvengine.evals.tasks import Plan, Sample, Task, Turn
from kvengine.evals.tasks._fit import NoData, json_lines, missing, published
from kvengine.evals.tasks._scores import english_f1, rouge_l

BRIEF = "Only give me the answer and do not output any other words."
PASSAGES = (
    f"Answer the question based on the given passages. {BRIEF}\n\nThe following are given passages.\n{{context}}\n\n"
    f"Answer the question based on the given passages. {BRIEF}\n\nQuestion: {{input}}\nAnswer:"
)
CONCISE = "as concisely as you can, using a single phrase"
PAPER = (
    'if possible. If the question cannot be answered based on the information in the article, write "unanswerable". '
    'If the question is a yes/no question, answer "yes", "no", or "unanswerable". Do not provide any explanation.'
)

PROMPTS = {
    "narrativeqa": (
        "You are given a story, which can be either a novel or a movie script, and a question. "
        f"Answer the question {CONCISE} if possible. Do not provide any explanation.\n\nStory: {{context}}\n\n"
        f"Now, answer the question based on the story {CONCISE} if possible. Do not provide any explanation.\n\n"
        "Question: {input}\n\nAnswer:"
    ),
    "qasper": (
        f"You are given a scientific article and a question. Answer the question {CONCISE} or sentence {PAPER}\n\n"
        f"Article: {{context}}\n\n Answer the question based on the above article {CONCISE} or sentence {PAPER}\n\n"
        "Question: {input}\n\nAnswer:"
    ),
    "multifieldqa_en": (
        "Read the following text and answer briefly.\n\n{context}\n\nNow, answer the following question based on the "
        "above text, only give me the answer and do not output any other words.\n\nQuestion: {input}\nAnswer:"
    ),
    "hotpotqa": PASSAGES,
    "2wikimqa": PASSAGES,
    "musique": PASSAGES,
    "gov_report": (
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:"
    ),
    "qmsum": (
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\n"
        "Now, answer the query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:"
    ),
    "multi_news": (
        "You are given several news passages. Write a one-page summary of all news. \n\nNews:\n{context}\n\n"
        "Now, write a one-page summary of all the news.\n\nSummary:"
    ),
    "trec": (
        "Please determine the type of the question below. Here are some examples of questions.\n\n{context}\n{input}"
    ),
    "triviaqa": (
        f"Answer the question based on the given passage. {BRIEF} The following are some examples.\n\n"
        "{context}\n\n{input}"
    ),
    "samsum": (
        "Summarize the dialogue into a few short sentences. The following are some examples.\n\n{context}\n\n{input}"
    ),
    "passage_count": (
        "There are some paragraphs below sourced from Wikipedia. Some of them may be duplicates. Please carefully read "
        "these paragraphs and determine how many unique paragraphs there are after removing duplicates. In other "
        "words, how many non-repeating paragraphs are there in total?\n\n{context}\n\nPlease enter the final count "
        "of unique paragraphs after removing duplicates. The output format should only contain the number, such as 1, "
        "2, 3, and so on.\n\nThe final answer is: "
    ),
    "passage_retrieval_en": (
        "Here are 30 paragraphs from Wikipedia, along with an abstract. Please determine which paragraph the abstract "
        "is from.\n\n{context}\n\nThe following is an abstract.\n\n{input}\n\nPlease enter the number of the paragraph "
        'that the abstract is from. The answer format must be like "Paragraph 1", "Paragraph 2", etc.\n\n'
        "The answer is: "
    ),
    "lcc": "Please complete the code given below. \n{context}Next line of code:\n",
    "repobench-p": "Please complete the code given below. \n{context}{input}Next line of code:\n",
}


def numbers_right(prediction: str, wanted: str) -> float:
    """Fraction of the numbers in the prediction that are the wanted one."""
    numbers = re.findall(r"\d+", prediction)
    return numbers.count(wanted) / len(numbers) if numbers else 0.0


def count_score(prediction: str, answer: str, classes: list[str]) -> float:
    """The answer is a count."""
    return numbers_right(prediction, answer)


def paragraph_score(prediction: str, answer: str, classes: list[str]) -> float:
    """The answer is "Paragraph N"."""
    return numbers_right(prediction, re.findall(r"Paragraph (\d+)", answer)[0])


def code_score(prediction: str, answer: str, classes: list[str]) -> float:
    """Similarity of the first line that is neither comment nor fence."""
    lines = prediction.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def class_score(prediction: str, answer: str, classes: list[str]) -> float:
    """1 over the number of classes named, if the right one is; a class within the right one's name does not count."""
    named = [one for one in classes if one in prediction]
    named = [one for one in named if one == answer or one not in answer]
    return 1 / len(named) if answer in named else 0.0


def f1_score(prediction: str, answer: str, classes: list[str]) -> float:
    """Token F1."""
    return english_f1(prediction, answer)


def rouge_score(prediction: str, answer: str, classes: list[str]) -> float:
    """ROUGE-L as published scores count it."""
    return rouge_l(prediction, answer)


@dataclass(frozen=True)
class LongBench(Task):
    """One data set. `plain`: no chat template. `line`: only the first line of the prediction counts."""

    name: str
    new_tokens: int
    scorer: Callable[[str, str, list[str]], float] = f1_score
    metric: str = "f1"
    plain: bool = False
    line: bool = False
    suite: ClassVar[str] = "longbench"

    def lacks(self, data: Mapping[str, Path]) -> str:
        if "longbench" not in data:
            return f"{self.name} needs its data: give --data longbench=FOLDER with {self.name}.jsonl"
        folder = data["longbench"]
        if (folder / f"{self.name}.jsonl").is_file():
            return ""
        has = [name for name in PROMPTS if (folder / f"{name}.jsonl").is_file()]
        return f"{missing(folder, self.name, has)}; put it there, or leave the task out"

    def samples(self, plan: Plan) -> Iterator[Sample]:
        if lacks := self.lacks(plan.data):
            raise NoData(lacks)
        path = plan.data["longbench"] / f"{self.name}.jsonl"
        for index, (place, row) in enumerate(json_lines(path, plan.count)):
            made = self.sample(self._checked(place, row), index)
            with published(f"{place}: the row is not of LongBench's schema"):
                self.score(made.turns[0], "")
            yield made

    def _checked(self, place: str, row: Any) -> dict[str, Any]:
        lacks = [name for name in ("input", "context", "answers") if not isinstance(row, dict) or name not in row]
        if lacks:
            names = " and ".join(", ".join(map(repr, lacks)).rsplit(", ", 1))
            raise EvaluationError(f"{place}: a row lacks {names}; expected an object of LongBench's schema")
        if not _texts(row["input"], row["context"]) or not _list_of_texts(row["answers"]):
            raise EvaluationError(
                f"{place}: input and context are texts, answers a list of some, in LongBench's schema"
            )
        if self.scorer is class_score and not _list_of_texts(row.get("all_classes")):
            raise EvaluationError(f"{place}: all_classes is a list of texts for {self.name}, which is scored by them")
        return row

    def sample(self, row: dict[str, Any], index: int) -> Sample:
        """A row as a sample; what the prompt says after the context belongs to the question."""
        before, _, after = PROMPTS[self.name].partition("{context}")
        turn = Turn(
            question=after.replace("{input}", row["input"]),
            answers=tuple(row["answers"]),
            max_new_tokens=self.new_tokens,
            meta={"classes": row.get("all_classes") or []},
        )
        return Sample(
            id=str(index), context=before + row["context"], turns=(turn,), provenance="user data", raw=self.plain
        )

    def score(self, turn: Turn, prediction: str) -> dict[str, float]:
        text = prediction.lstrip("\n").split("\n")[0] if self.line else prediction
        return {self.metric: max(self.scorer(text, answer, turn.meta["classes"]) for answer in turn.answers)}


def _texts(*values: Any) -> bool:
    return all(isinstance(value, str) for value in values)


def _list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and _texts(*value)


TASKS = (
    LongBench("narrativeqa", 128),
    LongBench("qasper", 128),
    LongBench("multifieldqa_en", 64),
    LongBench("hotpotqa", 32),
    LongBench("2wikimqa", 32),
    LongBench("musique", 32),
    LongBench("gov_report", 512, rouge_score, "rouge_l"),
    LongBench("qmsum", 512, rouge_score, "rouge_l"),
    LongBench("multi_news", 512, rouge_score, "rouge_l"),
    LongBench("trec", 64, class_score, "classification", plain=True, line=True),
    LongBench("triviaqa", 32, plain=True, line=True),
    LongBench("samsum", 128, rouge_score, "rouge_l", plain=True, line=True),
    LongBench("passage_count", 32, count_score, "count"),
    LongBench("passage_retrieval_en", 32, paragraph_score, "retrieval"),
    LongBench("lcc", 64, code_score, "code_similarity", plain=True),
    LongBench("repobench-p", 64, code_score, "code_similarity", plain=True),
)
