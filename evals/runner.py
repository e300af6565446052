"""One run: every task at every length under every policy, each sample measured once and written down at once.

A **cell** is one task, length, mode and policy. A cell that a policy refuses, or that runs out of memory, is recorded
with its reason and the rest goes on. Whatever the journal holds already is not done again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any, Protocol, runtime_checkable

import torch

from kvengine.errors import EvaluationError, KVEngineError, UnsupportedPolicy
from kvengine.evals import memory
from kvengine.evals.config import RunConfig
from kvengine.evals.engine import Engine, opened
from kvengine.evals.loading import model_digest, stop_ids
from kvengine.evals.policies import Arm
from kvengine.evals.prompt import Prompter
from kvengine.evals.protocol import Answer, alone
from kvengine.evals.protocol import Protocol as Asking
from kvengine.evals.records import MODES, Journal, Row, key_of
from kvengine.evals.tasks import Plan, Sample, Task, Turn, choose
from kvengine.evals.tasks._fit import NoData, TooShort


class NotTelling(EvaluationError):
    """A task that the model cannot do says nothing about policies."""


GIVEN_UP: dict[type[BaseException], str] = {
    UnsupportedPolicy: "refused",
    NotTelling: "not measured",
    TooShort: "too short",
    NoData: "no data",
    KVEngineError: "failed",
    torch.OutOfMemoryError: "out of memory",
    MemoryError: "out of memory",
}
"""What ends a cell but not the run, and what the cell is then called."""


def verdict(error: BaseException) -> str:
    """What a cell is called that such an error ends."""
    return next(name for kind, name in GIVEN_UP.items() if isinstance(error, kind))


@dataclass(frozen=True)
class Cell:
    """One square of the matrix."""

    task: Task
    length: int
    mode: str
    arm: Arm

    def __str__(self) -> str:
        return f"{self.task.name} {self.length} {self.mode} {self.arm.policy}"


@runtime_checkable
class Observer(Protocol):
    """Told what happens; shows progress."""

    def cell(self, cell: Cell, done: int) -> None: ...
    def sample(self, cell: Cell, rows: list[Row]) -> None: ...
    def refused(self, cell: Cell, row: Row) -> None: ...


@dataclass
class Run:
    """A configuration with its model, tokenizer and journal.

    `opener(model, policy)` opens an engine; tests put their own here.
    """

    config: RunConfig
    model: Any
    tokenizer: Any
    journal: Journal
    opener: Callable[[Any, str], Any] = opened
    _drawn: dict[tuple[str, int], list[Sample]] = field(default_factory=dict)
    _hashes: dict[tuple[str, int], list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        chat = {"on": True, "off": False}.get(self.config.chat, bool(getattr(self.tokenizer, "chat_template", None)))
        self.prompter = Prompter(self.tokenizer, chat)
        self.stop = stop_ids(self.model, self.tokenizer, self.prompter.wrapper.between)
        self.base = {
            "model": model_digest(self.model),
            "tokenizer": self.prompter.digest(),
            "dtype": str(self.model.dtype),
            "seed": self.config.seed,
            "golden": self.config.golden,
            "data": {name: str(path) for name, path in sorted(self.config.data.items())},
        }
        if self.config.judge_every is not None:
            self.base["judge_every"] = self.config.judge_every

    def tasks(self) -> list[Task]:
        """The tasks asked for."""
        return choose(self.config.suite, self.config.tasks)

    def left_out(self) -> list[Task]:
        """Tasks of "all" whose data the user has not got."""
        everything = self.config.tasks == "all"
        return [task for task in self.tasks() if everything and not task.available(self.config.data)]

    def cells(self) -> list[Cell]:
        """The matrix, ceilings first."""
        tasks = [task for task in self.tasks() if task not in self.left_out()]
        return [
            Cell(task, length, mode, arm)
            for task in tasks
            for length in self.config.lengths
            for mode in self.config.modes
            for arm in self.config.arms()
        ]

    def key(self, cell: Cell) -> str:
        """What identifies the cell's results."""
        where = {"suite": cell.task.suite, "length": cell.length, "mode": cell.mode, "stack": cell.arm.spelled}
        return key_of({**self.base, **cell.task.recipe(), **where})

    def samples(self, cell: Cell) -> list[Sample]:
        """The cell's samples; drawn once for all policies."""
        at = cell.task.name, cell.length
        if at not in self._drawn:
            plan = Plan(
                length=cell.length,
                count=self.config.samples,
                seed=self.config.seed,
                measure=self.prompter.measure,
                conversation=partial(self.prompter.conversation, golden=self.config.golden),
                data=self.config.data,
            )
            drawn = list(cell.task.samples(plan))
            if not drawn:
                raise NoData(f"{cell.task.name} finds no sample in its data; give a file that is not empty")
            self._drawn[at] = drawn
        return self._drawn[at][: self.config.limit]

    def absent(self, cell: Cell) -> int:
        """Samples asked for that the cell's data do not have."""
        return self.config.samples_per_cell - len(self.samples(cell))

    def data_hashes(self) -> dict[str, str]:
        """One hash per task and length drawn so far."""
        every = self._hashes | {at: [sample.digest() for sample in drawn] for at, drawn in self._drawn.items()}
        return {f"{task}/{length}": key_of({"samples": hashes}) for (task, length), hashes in every.items()}

    def execute(self, observer: Observer, limit: int | None = None) -> None:
        """Do what the journal lacks, of the first `limit` samples of each cell."""
        for at, cells in groupby(self.cells(), key=lambda cell: (cell.task.name, cell.length)):
            for cell in cells:
                self.fill(cell, observer, limit)
            if limit is None and (drawn := self._drawn.pop(at, None)):  # all tasks' long texts may be more than fits
                self._hashes[at] = [sample.digest() for sample in drawn]

    def fill(self, cell: Cell, observer: Observer, limit: int | None = None) -> None:
        """Do what the journal lacks of one cell."""
        key = self.key(cell)
        try:
            samples = self.samples(cell)[:limit]
        except (TooShort, NoData) as error:
            self.give_up(cell, key, error, observer)
            return
        missing = self.missing(cell, samples)
        observer.cell(cell, len(samples) - len(missing) + self.absent(cell))
        if missing:
            self.attempt(cell, missing, observer)

    def missing(self, cell: Cell, samples: list[Sample]) -> list[Sample]:
        """Those that the cell has still to be asked; none if it was given up before, and is not to be tried again."""
        key, code = self.key(cell), cell.arm.code
        if self.journal.given_up(key, code, drawn=True) and not self.config.retry:
            return []
        return [sample for sample in samples if not self.journal.holds(key, sample, code)]

    def attempt(self, cell: Cell, missing: list[Sample], observer: Observer) -> None:
        """Do some samples of one cell, one after the other, or record why they cannot be done."""
        key = self.key(cell)
        try:
            self.measure(cell, key, missing, observer)
        except tuple(GIVEN_UP) as error:
            self.give_up(cell, key, error, observer)

    def give_up(self, cell: Cell, key: str, error: BaseException, observer: Observer) -> None:
        """Record why a cell cannot be done."""
        row = self._refusal(cell, key, error)
        if not self.journal.given_up(key, cell.arm.code):
            self.journal.append([row])
        observer.refused(cell, row)

    def measure(self, cell: Cell, key: str, missing: list[Sample], observer: Observer) -> None:
        if cell.arm.refused:
            raise UnsupportedPolicy(cell.arm.refused)
        with self.opener(self.model, cell.arm.policy) as engine:
            for sample in missing:
                rows = self._ask(cell, key, sample, engine)
                self.journal.append(rows)
                observer.sample(cell, rows)

    def _ask(self, cell: Cell, key: str, sample: Sample, engine: Engine) -> list[Row]:
        asking = self.asking(cell, sample)
        with memory.peak(self.model.device) as peak:
            answers = [answer for part in parts(cell, sample) for answer in asking.play(engine.session(), part)]
        return [
            {
                **self.place(cell, key),
                **about(sample, index),
                **outcome(cell.task, sample.turns[index], answer),
                "peak_bytes": peak.bytes,
                "together": 1,
            }
            for index, answer in enumerate(answers)
        ]

    def asking(self, cell: Cell, sample: Sample) -> Asking:
        """How the cell asks this sample."""
        limit = room(cell, sample, self.prompter, self.config.golden)
        return Asking(
            prompter=self.prompter, mode=cell.mode, stop=self.stop, golden=self.config.golden, limit=limit
        )  # fmt: skip

    def place(self, cell: Cell, key: str) -> Row:
        return {
            "key": key,
            "suite": cell.task.suite,
            "task": cell.task.name,
            "length": cell.length,
            "mode": cell.mode,
            "placement": MODES[cell.mode],
            "policy": cell.arm.policy,
            "role": cell.arm.role,
            "stack": cell.arm.spelled,
            "code": cell.arm.code,
            "seed": self.config.seed,
        }

    def _refusal(self, cell: Cell, key: str, error: BaseException) -> Row:
        where = {"sample": None, "turn": 0, "turns": 1}
        return {**self.place(cell, key), **where, "status": verdict(error), "message": str(error)[:500]}


def parts(cell: Cell, sample: Sample) -> list[Sample]:
    """What the cell asks in one session each."""
    together = cell.task.conversation or cell.mode != "multi-turn"
    return [sample] if together else alone(sample)


LEAST = 16
"""Tokens of a first prompt, below which nothing of the user's text would be left of it."""


def room(cell: Cell, sample: Sample, prompter: Prompter, golden: bool = True) -> int | None:
    """Tokens left for the first prompt of the user's data: the length without the answers and, where questions come
    later, without the only one or, of several, 1000 tokens (SCBench's rule; or what they take, if that is more). A
    conversation of the model's own answers is cut by its later questions too. Generated data fit already.

    Raises `TooShort` if next to nothing is left.
    """
    if sample.provenance != "user data":
        return None
    one, turns = prompter.of(sample), sample.turns
    said, taken = sum(turn.max_new_tokens for turn in turns), 0
    if cell.mode == "multi-request":
        taken = max(len(one.asked(turn)) + turn.max_new_tokens for turn in turns)
        said += 1000 if len(turns) > 1 else 0
    elif cell.task.conversation and golden:
        read = accumulate((len(one.follow(a.answers[0], b)) for a, b in pairwise(turns)), initial=0)
        taken = max(before + turn.max_new_tokens for before, turn in zip(read, turns, strict=True))
    elif cell.task.conversation:
        taken = said + sum(len(one.follow("", turn)) for turn in turns[1:])
    if (left := cell.length - max(said, taken)) < LEAST:
        raise TooShort(
            f"the length is too small: answers and later questions take {max(said, taken)} tokens; ask for a longer one"
        )
    return left


def about(sample: Sample, index: int) -> Row:
    """Which sample and turn a row is about."""
    return {
        "sample": sample.id,
        "turn": index,
        "turns": len(sample.turns),
        "kind": sample.turns[index].kind,
        "sample_hash": sample.digest(),
        "question": sample.turns[index].question,
        "prefix": sample.turns[index].prefix,
        "max_new_tokens": sample.turns[index].max_new_tokens,
        "provenance": sample.provenance,
        "meta": {**sample.meta, **sample.turns[index].meta},
    }


def outcome(task: Task, turn: Turn, answer: Answer) -> Row:
    """Scores and measurements of one answer."""
    scores = {"nll": answer.nll} if answer.nll is not None else task.score(turn, answer.text)
    metric = task.metric if task.metric in scores else next(iter(scores))
    steps = answer.tokens - (answer.finish == "length")  # decoded: not the first token, but what ended the answer
    return {
        "status": "ok",
        "answers": [] if turn.forced else list(turn.answers),
        "prediction": answer.text,
        "null": not turn.forced and not answer.text.strip(),
        "finish": answer.finish,
        "truncated": answer.truncated,
        "metric": metric,
        "score": scores[metric],
        "scores": scores,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": answer.tokens,
        "held": answer.usage.held,
        "attended": answer.usage.attended if answer.tells_reads else None,
        "bytes_held": answer.usage.bytes_held,
        "read_per_token": answer.usage.read_per_token if answer.tells_reads else None,
        "tiers": answer.usage.tiers,
        "ttft": answer.ttft,
        "decode": answer.decode,
        "tokens_per_s": steps / answer.decode if answer.decode and steps > 0 and not turn.forced else None,
    }
