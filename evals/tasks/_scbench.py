"""What SCBench's tasks share: rows in the published schema become sessions, from local files, the hub, or a generator.

Source: microsoft/MInference, folder scbench (arXiv 2412.10319). A row is `{"id", "context" (or "input"), "multi_turns":
[{"input", "answer", …}]}`. Generated rows have the same schema and take the same way through `session`.

Differs from the official code: the context ends in a blank line in both modes (officially only before the first
question of multi-turn); math-find's context carries no question in multi-request mode (officially the first one);
each of its later questions is named before itself (officially the last one is before all of them, under a chat
template); without a chat template, later turns of multiple choice keep the first one's words (officially "The letter of
the correct answer is"); the history has a list of names as "A, B" (officially as Python prints it).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from kvengine.errors import EvaluationError
from kvengine.evals.tasks import Plan, Sample, Task, Turn, catalogue
from kvengine.evals.tasks._fit import NoData, json_lines, largest, missing, published, shrink, stamp

Row = dict[str, Any]
Scorer = Callable[[str, Any], dict[str, float]]
Generator = Callable[[Random, int], Row]
HUB = "microsoft/SCBench"


@dataclass(frozen=True)
class SessionTask(Task):
    """`kinds`: most new tokens by kind of turn (one kind, named after the task, unless it is mixed). `own`: it is this
    project's, none of the published ones."""

    name: str
    kinds: Mapping[str, int]
    scorers: Mapping[str, Scorer]
    introduction: str = ""
    metric: str = "official"
    floor: float = 0.0
    generate: Generator | None = None
    lead: str = ""
    own: bool = False
    suite: ClassVar[str] = "scbench"

    def samples(self, plan: Plan) -> Iterator[Sample]:
        rows = self._rows(plan)
        if rows is not None:
            for index, row in enumerate(rows[: plan.count]):
                with published(f"{self._path(plan.data)}: row {index} is not of SCBench's schema"):
                    made = self.session(row, str(row.get("id", index)) + f".{index}", "user data")
                    self.check(made)
                yield made
        else:
            yield from self._generated(plan)

    def score(self, turn: Turn, prediction: str) -> dict[str, float]:
        return self.scorers[turn.kind or self.name](prediction, turn.meta["answer"])

    def lacks(self, data: Mapping[str, Path]) -> str:
        path, made = self._path(data), self.generate is not None
        if path is None:
            what = f"give --data scbench=FOLDER with {self.name}.jsonl, or scbench=hub"
            return "" if made else f"{self.name} has no generator: {what}"
        given = self.name if self.name in data else "scbench"
        out = "leave the task out" + (f", or --data {given}: then its contexts are made" if made else "")
        if str(path) == "hub":
            return f"{self.name} is none of the published tasks; {out}" if self.own else ""
        if stored(path, self.name) is not None:
            return ""
        has = [name for name in catalogue("scbench") if stored(path, name) is not None]
        return f"{missing(path, self.name, has)}; put it there, {'' if made else 'or '}{out}"

    def recipe(self) -> dict[str, Any]:
        return {**super().recipe(), "kinds": dict(self.kinds)}

    def session(self, row: Row, id: str, provenance: str) -> Sample:
        """A row of the published schema as a sample."""
        turns = tuple(self.turn(row, index) for index in range(len(row["multi_turns"])))
        context = row["context"] if "context" in row else row["input"]
        return Sample(
            id=id,
            context=f"{self.introduction}{self.render(context)}\n\n",
            opening=self.opening(row),
            turns=turns,
            provenance=provenance,
            meta=row.get("meta", {}),
        )

    def check(self, made: Sample) -> None:
        """Raise what scoring its turns would raise, or ValueError if it has none or one that any answer would be right for."""
        if not made.turns:
            raise ValueError("no turns")
        for turn in made.turns:
            if any(self.score(turn, "").values()):
                raise ValueError("an empty answer, which every text contains")

    def turn(self, row: Row, index: int) -> Turn:
        """One of the row's turns."""
        turn = row["multi_turns"][index]
        kind = turn.get("task", "") if len(self.kinds) > 1 else ""
        extra = {name: turn[name] for name in ("options", "name") if name in turn}
        known: dict[str, Any] = {name: row[name] for name in ("lang", "repo") if name in row}
        return Turn(
            question=self.question(turn),
            answers=golden(turn["answer"]),
            max_new_tokens=self.kinds[kind or self.name],
            prefix=turn.get("prefix", ""),
            lead=self.lead,
            kind=kind,
            meta={"answer": self.label(turn, row), **extra, **known},
        )

    def question(self, turn: Row) -> str:
        """The question with its scaffolding."""
        return str(turn["input"])

    def label(self, turn: Row, row: Row) -> Any:
        """What the scorer compares with."""
        return turn["answer"]

    def render(self, context: Any) -> str:
        """The context as text."""
        return str(context)

    def opening(self, row: Row) -> str | None:
        """Context and first question of multi-turn mode, where they differ from the two put together."""
        return None

    def _rows(self, plan: Plan) -> list[Row] | None:
        """The user's; None where none were given and a generator makes them."""
        if lacks := self.lacks(plan.data):
            raise NoData(lacks)
        path = self._path(plan.data)
        return None if path is None else load_rows(path, self.name)

    def _path(self, data: Mapping[str, Path]) -> Path | None:
        return data.get(self.name) or data.get("scbench")

    def _generated(self, plan: Plan) -> Iterator[Sample]:
        size = largest(lambda n: self._fits(plan, self._draw(plan, 0, n)), 8)
        for index in range(plan.count):
            yield shrink(partial(self._draw, plan, index), partial(self._fits, plan), size, 8, max(1, size // 50))

    def _draw(self, plan: Plan, index: int, size: int) -> Sample:
        if self.generate is None:
            raise NoData(f"{self.name} has no generator")
        row = self.generate(Random(f"{plan.seed}/{self.name}/{plan.length}/{index}"), size)
        return self.session({**row, "meta": {"units": size}}, str(index), "re-created")

    def _fits(self, plan: Plan, sample: Sample) -> bool:
        tokens = plan.measure(as_one(sample))
        if plan.conversation is not None:  # a chat template puts words around every turn
            tokens = max(tokens, plan.conversation(sample))
        return tokens + max(self.kinds.values()) <= plan.length


def as_one(sample: Sample) -> Sample:
    """The whole session as one prompt: every question and golden answer, to measure it."""
    text = "\n\n".join(f"{turn.question}{turn.prefix}\n\n{turn.answers[0]}" for turn in sample.turns)
    return Sample(id=sample.id, context=sample.context, turns=(Turn(question=text, answers=("",), max_new_tokens=0),))


def golden(answer: Any) -> tuple[str, ...]:
    """The answer as the history shows it: a list of names as one text."""
    if isinstance(answer, list | tuple):
        return (", ".join(str(part) for part in answer),)
    return (str(answer),)


def stored(path: Path, name: str) -> Path | None:
    """Where a task's rows are: a JSONL file, one of a folder of them, or a folder that `datasets` saved; None: nowhere."""
    if path.is_file():
        return path
    for candidate in (path / f"{name}.jsonl", path / name / "test.jsonl"):
        if candidate.is_file():
            return candidate
    return path / name if (path / name / "dataset_info.json").is_file() else None


def load_rows(path: Path, name: str) -> list[Row]:
    """Rows of a task from what the user gave, which has them (`stored`), or from the hub."""
    if str(path) == "hub":
        return _published(name)
    if (found := stored(path, name)) is None:
        raise NoData(f"{path} has no {name}.jsonl")
    return _rows(found, stamp(found))


@functools.cache
def _published(name: str) -> list[Row]:
    return [dict(row) for row in _datasets().load_dataset(HUB, name, split="test")]


@functools.lru_cache(maxsize=16)
def _rows(path: Path, written: tuple[object, ...]) -> list[Row]:
    return _lines(path) if path.is_file() else [dict(row) for row in _datasets().load_from_disk(str(path))]


def _lines(path: Path) -> list[Row]:
    rows: list[Row] = []
    for place, row in json_lines(path):
        if not isinstance(row, dict) or "multi_turns" not in row or not {"context", "input"} & row.keys():
            raise EvaluationError(f"{place}: a row lacks 'multi_turns' or 'context'; expected SCBench's schema")
        rows.append(row)
    return rows


def _datasets() -> Any:
    try:
        import datasets  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise EvaluationError("this data needs the `datasets` package: pip install datasets") from error
    return datasets


def both(scorer: Callable[[str, Any], float], strict: Callable[[str, Any], float]) -> Scorer:
    """The official score and the strict one, side by side."""
    return lambda prediction, answer: {"official": scorer(prediction, answer), "strict": strict(prediction, answer)}
