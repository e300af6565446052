"""RULER's question answering over documents: SQuAD (qa_1) and HotpotQA (qa_2), or a labelled substitute."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from kvengine.errors import EvaluationError
from kvengine.evals.tasks import Plan, Sample
from kvengine.evals.tasks._fit import published, stamp
from kvengine.evals.tasks._ruler import Draft, RulerTask
from kvengine.evals.tasks._words import pair

INSTRUCTION = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words."
)
CONTEXT = INSTRUCTION + "\n\nThe following are given documents.\n\n{context}\n\n" + INSTRUCTION + "\n\n"
CITIES = "Lisbon Oslo Kyoto Quito Accra Perth Turin Lyon Ghent Sofia Tunis Lima Osaka Malmo Cork Bergen".split()
TRADES = "potter sailor printer weaver surgeon baker mason tailor farmer painter clerk miller".split()


@dataclass(frozen=True)
class Question:
    """A question, its accepted answers, the documents that hold them and the ones that only look like it."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]
    near: tuple[str, ...]


@dataclass(frozen=True)
class Library:
    """Questions in file order and every document."""

    questions: tuple[Question, ...]
    documents: tuple[str, ...]


@dataclass(frozen=True)
class DocumentQA(RulerTask):
    """`source` names the user's file in `plan.data`."""

    new_tokens: int = 32
    metric: str = "string_match_part"
    source: str = "squad"

    def samples(self, plan: Plan) -> Iterator[Sample]:
        """One sample of each question: fewer than asked for where there are fewer."""
        return super().samples(replace(plan, count=min(plan.count, len(self.library(plan).questions))))

    def draw(self, units: int, source: Random, plan: Plan, index: int) -> Draft:
        library = self.library(plan)
        question = library.questions[index]
        texts = gather(library, question, max(units, len(question.gold)), source)
        Random(plan.seed).shuffle(texts)  # fixed per count, as officially: the gold document keeps its place
        numbered = "\n\n".join(f"Document {place}:\n{text}" for place, text in enumerate(texts, 1))
        return Draft(
            context=CONTEXT.format(context=numbered),
            question=f"Question: {question.text}",
            prefix=" Answer:",
            answers=question.answers,
            provenance="official" if self.source in plan.data else "substitute: generated facts",
        )

    def library(self, plan: Plan) -> Library:
        """The user's file, else generated facts (two-hop for HotpotQA's place)."""
        if self.source in plan.data:
            path = plan.data[self.source]
            with published(f"{path} is not the published {self.source} file"):
                found = _read(self.source, path, stamp(path))
            if not found.questions:
                raise EvaluationError(
                    f"{path} has no question that has an answer; give the published {self.source} file"
                )
            return found
        return facts(plan.seed, hops=2 if self.source == "hotpotqa" else 1)

    def recipe(self) -> dict[str, Any]:
        return {**super().recipe(), "source": self.source}


def gather(library: Library, question: Question, count: int, source: Random) -> list[str]:
    """Gold documents, then near ones (any of them, if not all have room), then random others, `count` in all and none twice."""
    room = max(count - len(question.gold), 0)
    near = question.near if len(question.near) <= room else source.sample(question.near, room)
    chosen = dict.fromkeys((*question.gold, *near))
    others = source.sample(library.documents, min(len(library.documents), count + len(chosen)))
    for text in others:
        if len(chosen) >= count:
            break
        chosen[text] = None
    return list(chosen)


def read_squad(path: Path) -> Library:
    """SQuAD 2.0 development set: answerable questions; the near documents are the article's other paragraphs."""
    questions, documents = [], dict[str, None]()
    for article in _json(path)["data"]:
        paragraphs = [_text(paragraph["context"]) for paragraph in article["paragraphs"]]
        documents |= dict.fromkeys(paragraphs)
        for paragraph in article["paragraphs"]:
            near = tuple(text for text in paragraphs if text != paragraph["context"])
            asked = [qa for qa in paragraph["qas"] if qa["answers"] and not qa.get("is_impossible", False)]
            questions += [
                Question(
                    _text(qa["question"]), tuple(_text(a["text"]) for a in qa["answers"]), (paragraph["context"],), near
                )
                for qa in asked
            ]
    return Library(tuple(questions), tuple(documents))


def read_hotpotqa(path: Path) -> Library:
    """HotpotQA development set, distractor setting: each question's ten paragraphs are its documents."""
    questions, documents = [], dict[str, None]()
    for row in _json(path):
        texts = tuple(f"{title}\n{''.join(lines)}" for title, lines in row["context"])
        documents |= dict.fromkeys(texts)
        questions.append(Question(_text(row["question"]), (_text(row["answer"]),), texts, ()))
    return Library(tuple(questions), tuple(documents))


READERS = {"squad": read_squad, "hotpotqa": read_hotpotqa}


@functools.lru_cache(maxsize=8)
def _read(source: str, path: Path, written: tuple[object, ...]) -> Library:
    return READERS[source](path)


@functools.cache
def facts(seed: int, *, hops: int, people: int = 2000) -> Library:
    """Invented people with a town and a teacher. One hop asks for a town; two for the town of someone's teacher."""
    source = Random(f"{seed}/facts/{hops}")
    names = list(dict.fromkeys(pair(source).replace("-", " ").title() for _ in range(people)))
    towns = {name: source.choice(CITIES) for name in names}
    teachers = {name: source.choice(names) for name in names}
    texts = {name: _portrait(name, towns[name], teachers[name], source.choice(TRADES)) for name in names}
    if hops == 1:
        made = [Question(f"In which town was {n} born?", (towns[n],), (texts[n],), ()) for n in names]
    else:
        made = [_two_hop(name, teachers[name], towns, texts) for name in names]
    return Library(tuple(made), tuple(texts.values()))


def _portrait(name: str, town: str, teacher: str, trade: str) -> str:
    return f"{name}\n{name} was a {trade} born in {town}. The first teacher of {name} was {teacher}."


def _two_hop(name: str, teacher: str, towns: dict[str, str], texts: dict[str, str]) -> Question:
    gold = tuple(dict.fromkeys((texts[name], texts[teacher])))
    return Question(f"In which town was the first teacher of {name} born?", (towns[teacher],), gold, ())


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip():  # an empty answer would be found in every text
        raise TypeError(f"{value!r} is no text")
    return value


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise EvaluationError(f"cannot read {path} as JSON ({error}); give the published file") from error


TASKS = (DocumentQA("qa_1"), DocumentQA("qa_2", source="hotpotqa"))
