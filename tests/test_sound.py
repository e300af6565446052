"""What a file gave to a lane fits together (kvengine/sound.py): what may be, to its last value, and what may not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvengine import sound
from kvengine.errors import CorruptBitstream
from kvengine.pages import Pages
from kvengine.tail import Tail

zeros, whole = torch.zeros, torch.tensor
MOST = 1 << 40

FRESH = {
    "fixed": None, "ahead": None, "x": zeros(3, 2), "flag": True, "count": 5, "judged": 0, "name": "a", "open": None
}  # fmt: skip
SAVED: dict[str, Any] = {**FRESH, "x": zeros(3, 9), "flag": False, "count": 0, "judged": 1, "name": "b"}
KINDS: list[tuple[dict[str, Any], str | None]] = [
    ({"count": MOST - 1}, None), ({"judged": zeros(7)}, None), ({"open": 0}, None), ({"open": MOST - 1}, None),
    ({"open": zeros(1)}, None), ({"open": True}, None), ({"x": zeros(3, 0)}, None),
    ({"fixed": 0}, "fixed is kept within a pass"), ({"ahead": zeros(1)}, "ahead is kept within a pass"),
    *(({"x": x}, r"x is not a tensor of 3 rows and 2 axes of torch\.float32")
      for x in (None, 3, zeros(3), zeros(4, 2), zeros(3, 2).long(), SimpleNamespace(**{
          "dtype": torch.float32, "ndim": 2, "shape": (3, 2)}))),
    ({"flag": 1}, "not yes or no"), ({"flag": None}, "not yes or no"),
    *(({"count": x}, "count is .*, not a count") for x in (-1, MOST, True, 1.0, zeros(2), None)),
    *(({"judged": x}, "judged is .*, not a count") for x in (-1, MOST, None)),
    ({"name": 3}, "name is a int, not a str"), ({"name": None}, "name is a NoneType, not a str"),
    *(({"open": x}, f"open is a {type(x).__name__}") for x in ("x", {}, [], ())),
    *(({"open": x}, "open is .*, not a count") for x in (-1, MOST)),
]  # fmt: skip

TAIL = {
    "k": zeros(2, 5, 4), "v": zeros(2, 5, 4), "start": 0, "end": 5, "lead": 5, "next": 5, "placed": True,
    "_position": zeros(2, 5), "score": zeros(2, 5), "scored": True,
}  # fmt: skip
LOOSE = {"placed": False, "_position": zeros(2, 0)}
TAILS: list[tuple[dict[str, Any], str | None]] = [
    ({"lead": 0, "next": 0}, None), ({"scored": False, "score": zeros(2, 0)}, None), (LOOSE, None),
    ({**LOOSE, "next": 9}, None), ({"v": zeros(2, 5, 3)}, None),
    *(({name: x}, "counts are not numbers") for name in ("start", "end", "lead", "next") for x in (True, 1.0, zeros(1))),
    ({"start": 1}, "5 slots says that it ends at 5"), ({"end": 4}, "ends at 4"), ({"end": 6}, "ends at 6"),
    ({"start": 1, "end": 4}, "ends at 4"), ({"lead": 6}, "begins with 6 tokens"), ({**LOOSE, "next": 4}, "has seen 4 tokens"),
    ({"v": zeros(2, 4, 4)}, "differ in their slots"), ({"v": zeros(1, 5, 4)}, "differ in their slots"),
    *(({"_position": zeros(2, n)}, "positions are not those") for n in (0, 4, 6)),
    ({"placed": False}, "positions are not those"), ({"scored": False}, "scores are not those"),
    *(({"score": zeros(2, n)}, "scores are not those") for n in (0, 4, 6)),
]  # fmt: skip

PAGES = {  # of four tokens, in units of two
    "page": 4, "selection": SimpleNamespace(unit=2), "_table": whole([[0, 1, 2], [3, 4, -1]]), "filled": whole([3, 2]),
    "columns": 3, "even": False, "clean": True, "_position": zeros(2, 12), "scored": True, "_score": zeros(2, 12),
    "_alive": zeros(2, 6), "_summary": {"low": zeros(2, 6, 8), "high": zeros(2, 6)},
}  # fmt: skip
SHORT = {"columns": 2, "filled": whole([2, 2])}
BOOK: list[tuple[dict[str, Any], str | None]] = [
    ({**SHORT, "even": True}, None), (SHORT, None), ({"filled": whole([0, 0])}, None), ({"_summary": {}}, None),
    ({"scored": False, "_score": zeros(2, 0)}, None), ({"clean": False, "filled": whole([3, 3])}, None),
    ({"columns": 0, "filled": whole([0, 0]), "even": True}, None),
    *(({"columns": x}, "columns are in use") for x in (4, 2.0, True, None)),
    *(({"filled": whole(x)}, "filled more columns") for x in ([4, 2], [3, -1], [3.0, 2.0], [True, False])),
    ({**SHORT, "filled": whole([3, 2])}, "filled more columns"), ({"even": True}, "rows are not as even"),
    ({**SHORT, "filled": whole([2, 1]), "even": True}, "rows are not as even"),
    ({"_table": whole([[0, 1, 2], [3, 5, -1]])}, "a table names a page beyond 5"),
    ({"_table": whole([[0, 1, 2], [3, 4, -2]])}, "a table names a page beyond 5"),
    ({"_table": zeros(2, 3)}, "a table names a page beyond 5"),
    ({"_table": whole([[0, -1, 2], [3, 4, -1]])}, "a table has a hole"), ({"filled": whole([3, 3])}, "a table has a hole"),
    ({"_table": whole([[-1, 1, 2], [3, 4, -1]])}, "a table has a hole"),
    *(({"_position": zeros(2, n)}, "positions are not those of the pages") for n in (11, 13)),
    *(({"_score": zeros(2, n)}, "scores are not those of the pages") for n in (0, 11, 13)),
    ({"scored": False}, "scores are not those of the pages"),
    *(({"_alive": zeros(2, n)}, "units are not those of the pages") for n in (5, 7, 12)),
    *(({"_summary": {"low": x}}, "low is not of the pages' units") for x in (zeros(2, 5, 8), zeros(3, 6), zeros(2), 1)),
]  # fmt: skip

LENGTHS: list[tuple[list[Any], str | None]] = [
    ([(5, None)], None), ([(0, whole([0])), (3, whole([1, 2]))], None), ([(1, whole([], dtype=torch.long))], None),
    ([], "no row has a length"), *(([x], "not a pair") for x in (5, (1,), (1, None, None), [1, None])),
    *(([(5, None), (x, None)], "a row has .* of 5 slots") for x in (-1, 6, True, 1.0, None)),
    *(([(1, x)], "a length is of no row") for x in ("x", 1, whole([3]), whole([0, -1]), whole([1.0]), whole([True]))),
]  # fmt: skip

FIELDS: list[tuple[Any, int | str]] = [
    ({}, 0), ({"a": zeros(0, 2)}, 0), ({"a": zeros(3, 2), "b": zeros(3, 1, 4)}, 3), ({"a": zeros(3, 0), "b": zeros(3, 1)}, 3),
    ([], "fields have no names"), ({"a": zeros(3, 2), "b": zeros(2, 2)}, "differ in their number"),
    ({"a": zeros(3, 2), "b": zeros(3)}, "differ in their number"), ({"a": 3}, "differ in their number"),
    ({"a": zeros(3, 0)}, "3 pages have nothing in them"),
]  # fmt: skip

ROWS: list[tuple[tuple[Any, ...], str | None]] = [
    ((2, 3, [1, 2], [zeros(2), zeros(4)]), None), ((1, 1, [1], [zeros(1)]), None),
    *(((2, 3, lanes, [zeros(2)] * 2), "are not 3 heads") for lanes in ([1, 1], [3, 1], [3, 0], [4, -1], [2, True], [2.0, 1])),
    ((2, 3, [1, 2], [zeros(2), zeros(2)]), "other rows than 2 heads of 2 sequences"),
    ((2, 3, [1, 2], [None, zeros(4)]), "other rows than 1 heads"), ((2, 3, [1, 2], [zeros(3), zeros(4)]), "other rows than 1"),
]  # fmt: skip


def fits(check: Any, given: tuple[Any, ...], says: str | None) -> None:
    if says is None:
        check(*given)
        return
    with pytest.raises(CorruptBitstream, match=f"does not fit together: .*{says}.*changed since it was saved"):
        check(*given)


def made(kind: type, given: dict[str, Any]) -> Any:
    """As a file makes it, of what it gives."""
    found = object.__new__(kind)
    vars(found).update(given)
    return found


def test_attributes_are_of_their_kinds() -> None:
    for change, says in [({}, None), *KINDS]:
        fits(sound.check_kinds, (FRESH, {**SAVED, **change}), says)
    fits(sound.check_kinds, (FRESH, list(SAVED)), "attributes have no names")


def test_slots_and_pages_are_there() -> None:
    for change, says in [({}, None), *TAILS]:
        fits(sound.check_tail, (made(Tail, {**TAIL, **change}),), says)
    for change, says in [({}, None), *BOOK]:
        fits(sound.check_pages, (made(Pages, {**PAGES, **change}), 5), says)


def test_lengths_fields_and_rows_agree() -> None:
    for lengths, says in LENGTHS:
        fits(sound.check_lengths, (lengths, 3, 5), says)
    for fields, count in FIELDS:
        if isinstance(count, int):
            assert sound.check_fields(fields) == count
        else:
            fits(sound.check_fields, (fields,), count)
    for given, says in ROWS:
        fits(sound.check_rows, given, says)
