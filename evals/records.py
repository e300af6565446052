"""The journal of a run: one JSON line per turn, appended and flushed to disk sample by sample.

All turns of a sample are one write. What a killed process leaves is therefore whole samples and at most one torn tail,
which `Journal.open` cuts off; the sample is then done again. One process writes
(`claim`); one that opens the journal beside it, for a preview, waits for a write to end, and takes nothing for torn that
came meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from kvengine.errors import EvaluationError
from kvengine.evals.tasks import Sample

Row = dict[str, Any]

ROWS = "rows.jsonl"
"""The journal's name in a run folder."""
LACKING = ("no data", "too short", "not measured")
"""What a cell is called that was in want of something: of samples, or of a full cache that was to beat guessing first."""
PLACE = {"key": str, "sample": str | None, "turn": int, "turns": int}
"""Fields without which a line is no row."""
WHERE = {"suite": str, "task": str, "length": int, "mode": str, "policy": str, "role": str, "stack": str, "status": str}
"""Further fields of every row that tables are made of."""
FOUND = {
    **{name: str for name in ("sample", "sample_hash", "provenance", "placement", "question", "prefix", "prediction", "metric")},
    **{name: int for name in ("seed", "max_new_tokens", "prompt_tokens", "new_tokens")},
    **{name: int | float for name in ("score", "held", "bytes_held")},
    **{"answers": list, "null": bool, "scores": dict, "meta": dict},
}  # fmt: skip
"""And of every row that holds a result."""
COSTS = {name: int | float | None for name in ("attended", "read_per_token", "ttft", "tokens_per_s", "peak_bytes")}
"""Those that it may lack."""
COUNTED = ("max_new_tokens", "prompt_tokens", "new_tokens", "held", "bytes_held")
"""Those of a result that are numbers from 0 on, as the length and the costs are."""
MOST = 1 << 63
"""No number of these is as large."""
MODES = {"multi-turn": "aware", "multi-request": "agnostic"}
"""What the compression of a context knows of the questions, by how they are asked."""
NAME = re.compile(r"[\w.-]{1,100}")
"""What suites, tasks and kinds are called: files of a report are named by them."""
MEASURED = frozenset({"ttft", "decode", "tokens_per_s", "peak_bytes", "together"})
"""Fields that differ from run to run; all others are the same for the same configuration."""


def key_of(configuration: dict[str, Any]) -> str:
    """Hash of a cell's configuration.

    >>> key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
    True
    """
    text = json.dumps(configuration, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class Journal:
    """Rows of one run folder.

    `done`: by cell key and sample id, the hash of what was asked, and the policy's code; id None: the whole cell, and why it
    was given up.
    """

    path: Path
    rows: list[Row] = field(default_factory=list)
    done: dict[tuple[str, str | None], tuple[str | None, str | None]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> Journal:
        """Read what is there and cut off a torn tail. Raises `EvaluationError` if an earlier line is damaged."""
        journal = cls(path)
        if path.exists():
            with path.open("rb") as file:
                alone(file)
                whole, size = read_rows(path)
                if size < path.stat().st_size:
                    os.truncate(path, size)
            journal._remember(whole)
        return journal

    def holds(self, key: str, sample: Sample, code: str) -> bool:
        """Is this very sample done? (The same id over other data, say an edited file, is not, nor under other code.)"""
        asked, before = self.done.get((key, sample.id), (None, None))
        return asked == sample.digest() and same_code(before, code)

    def count(self, key: str) -> int:
        """Samples of this cell that are done, whatever their data were."""
        return sum(key == cell and sample is not None for cell, sample in self.done)

    def given_up(self, key: str, code: str, drawn: bool = False) -> bool:
        """Was this cell found to be impossible, for the code as it is now? `drawn`: its samples are there by now and it is to be
        asked, so what was in want of that is not (a file may have come since, or `few` is no longer wished)."""
        status, before = self.done.get((key, None), ("", None))
        return bool(status) and same_code(before, code) and not (drawn and status in LACKING)

    def timed(self, length: int, mode: str, stack: str, code: str) -> bool:
        """Is there a time to the first token of this policy at this length?"""
        place = (length, mode, stack)
        return any(
            (row["length"], row["mode"], row["stack"]) == place and row.get("ttft") and same_code(row.get("code"), code)
            for row in self.rows
        )

    def append(self, rows: list[Row]) -> None:
        """Write the rows of one sample (or of a refused cell) and wait until they are on the disk.

        Raises `EvaluationError` if the file went away since: what follows would be told as if it were all.
        """
        if self.rows and not self.path.exists():
            raise EvaluationError(
                f"{self.path} is gone, which this run was writing: was its folder moved? Give the command again with --out "
                "where it is now"
            )
        from kvengine.offload.stores.filesystem import FileSystem  # brings torch, which `--help` does not wait for

        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        new, files = not self.path.exists(), FileSystem()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            alone(file)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        for folder in (self.path.parent, self.path.parent.parent) if new else ():  # its name, and that of its folder
            files.sync_folder(folder)
        self._remember(rows)

    def _remember(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.rows.append(row)
            asked = row.get("sample_hash") if row["sample"] is not None else row.get("status", "failed")
            self.done[row["key"], row["sample"]] = asked, row.get("code")
            if row["sample"] is not None:
                self.done.pop((row["key"], None), None)  # what it failed at before was tried again, and went well


def same_code(before: str | None, now: str | None) -> bool:
    """Rows of a folder that is older than the field are taken as they are."""
    return before is None or now is None or before == now


def alone(file: IO[bytes]) -> None:
    """Wait until no other process is here, and keep them out until the file is closed."""
    with suppress(ImportError, OSError):  # Windows, or a file system without locks
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)


def ok(rows: Iterable[Row]) -> Iterator[Row]:
    """Rows that hold a result."""
    return (row for row in rows if row["status"] == "ok")


def read_rows(path: Path) -> tuple[list[Row], int]:
    """Rows of whole samples, and the bytes they take. A torn or incomplete last sample is left out."""
    rows: list[Row] = []
    size = end = whole = 0
    text = path.read_bytes()
    for line in text.splitlines(keepends=True):
        row = _parse(line)
        if row is None:
            if end + len(line) < len(text):
                raise EvaluationError(f"{path} is damaged at byte {end}: not a torn last line. Choose another --out")
            break
        if not all(isinstance(row.get(name, ...), kind) for name, kind in PLACE.items()):  # whole: not ours to cut off
            raise EvaluationError(f"{path} has a line that is no row of a run, at byte {end}. Choose another --out")
        end += len(line)
        rows.append(row)
        if row["turn"] == row["turns"] - 1:
            size, whole = end, len(rows)
    return rows[:whole], size


def complete(rows: list[Row], path: Path) -> list[Row]:
    """These rows. Raises `EvaluationError` if one lacks what tables are made of, as another version's may."""
    for row in rows:
        fields = {**WHERE, **FOUND} if row.get("status") == "ok" else WHERE
        lacks = [name for name, kind in fields.items() if not isinstance(row.get(name, ...), kind)]
        lacks += [name for name, kind in COSTS.items() if not isinstance(row.get(name), kind)]
        if lacks := lacks or impossible(row):
            told = ", ".join(f"{name} ({str(row[name])[:80]!r})" if name in row else name for name in lacks)
            where = f"{row.get('task')}, sample {row['sample']}, turn {row['turn']}, '{row.get('policy')}'"
            raise EvaluationError(
                f"{path}: the row of {where} lacks {told} as this version reads it; it is another version's, or was edited: "
                "measure it anew in another --out"
            )
    return rows


def impossible(row: Row) -> list[str]:
    """Fields of a row that are of the right kind, and hold what no run writes."""
    measured, suite = row["status"] == "ok", row["suite"]
    names = {"suite": suite, "task": row["task"], "kind": row.get("kind") or "none"}
    found = [name for name, told in names.items() if not NAME.fullmatch(str(told))]
    found += [] if row["mode"] in MODES else ["mode"]
    counted = ("length", *COSTS, *(COUNTED if measured else ()))
    found += [name for name in counted if not 0 <= (row.get(name) or 0) < MOST]
    if not measured:
        return found
    loss = row["metric"] == "nll" and isinstance(row["score"], float)  # which may be anything, where a model overflows
    depth, asked = row["meta"].get("depth", 0), suite == "scbench"
    fits = {
        "score": loss or 0 <= row["score"] <= 1,
        "sample": suite != "ruler" or row["sample"].isdecimal(),
        "kind": not asked or "kind" in row,
        "meta": isinstance(depth, int | float) and 0 <= depth < MOST and (not asked or "answer" in row["meta"]),
        "scores": not asked or isinstance(row["scores"].get("official"), int | float),
    }
    return found + [name for name, right in fits.items() if not right]


def _parse(line: bytes) -> Row | None:
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else {}
