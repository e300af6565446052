"""How large a haystack may be, and what may be wrong with the user's data."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from kvengine.errors import EvaluationError
from kvengine.evals.tasks import Sample

HALF = re.compile("[\ud800-\udfff]")
"""A surrogate that stands alone: JSON can spell it, UTF-8 cannot."""


class TooShort(EvaluationError):
    """The length leaves no room for the task."""


class NoData(EvaluationError):
    """The task lives on data that the user must supply."""


def missing(folder: Path, name: str, has: list[str]) -> str:
    """That a folder of the user's lacks a task's file, with the tasks whose files it `has`."""
    others = f"only files of {', '.join(has)}" if has else "nor a file of another task"
    return f"{name}: {folder} has no {name}.jsonl, {others}"


def stamp(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, times of writing and sizes of a file, or of those in a folder: what was read before may be taken while they last."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    found = ((file.name, file.stat()) for file in files if file.is_file())
    return tuple((name, state.st_mtime_ns, state.st_size) for name, state in found)


def json_lines(path: Path, most: int | None = None) -> list[tuple[str, Any]]:
    """The first `most` values of a JSON-lines file, each with its place in words: "FILE, line 3".

    Only newlines end a line: texts hold U+2028 and the like as they are. Raises `EvaluationError` if it is none.
    """
    try:
        lines = enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1)
    except ValueError as error:
        raise EvaluationError(f"{path} is not UTF-8 text ({error}); unpack or convert it first") from error
    return [
        (f"{path}, line {number}", _value(path, number, line))
        for number, line in islice(((number, line) for number, line in lines if line.strip()), most)
    ]


def _value(path: Path, number: int, line: str) -> Any:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise EvaluationError(
            f"{path}, line {number} is not JSON ({error.msg} at letter {error.colno}); a file has one value on each line"
        ) from error
    halves = HALF.search(json.dumps(found, ensure_ascii=False)) if r"\ud" in line.lower() else None
    if halves:
        raise EvaluationError(
            f"{path}, line {number} has half of a letter in it, {halves[0]!r}, which is no text; take it out"
        )
    return found


@contextlib.contextmanager
def published(complaint: str) -> Iterator[None]:
    """Make an `EvaluationError` of what fails in the block because the user's data are not as they were published."""
    try:
        yield
    except EvaluationError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise EvaluationError(f"{complaint}: {error!r}") from error


def largest(fits: Callable[[int], bool], start: int, most: int = 10_000_000) -> int:
    """The largest n ≥ start with `fits(n)`, for a `fits` that turns false once.

    Doubles until something no longer fits, then halves the gap. Raises `TooShort` if not even `start` fits (the
    official loops spin for ever there).
    """
    if not fits(start):
        raise TooShort(
            f"the length is too small: not even {start} pieces of context (sentences, lines, words) fit; ask for a longer one"
        )
    good, bad = start, 2 * start + 1
    while bad < most and fits(bad):
        good, bad = bad, 2 * bad
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def shrink(draw: Callable[[int], Sample], fits: Callable[[Sample], bool], most: int, least: int, step: int) -> Sample:
    """The sample of the most units that fits, going down from `most` by `step`; `TooShort` if none does."""
    for units in range(most, least - 1, -step):
        sample = draw(units)
        if fits(sample):
            return sample
    raise TooShort(f"the length is too small for one of the samples even at {least} units; ask for a longer one")
