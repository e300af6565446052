"""Whether what a file gave to a lane belongs together: kernels trust these counts, so a file that was changed must not
reach them.

A file's digests tell damage, not malice. What is checked: each attribute is of the kind that a new lane has, the sides
of its tensors agree, and whatever counts or names slots, rows and pages stays within them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvengine.errors import CorruptBitstream
from kvengine.pages import Pages
from kvengine.tail import Tail

MOST = 1 << 40  # no count of tokens is larger
PASSING = ("fixed", "ahead")  # what is there within a pass, and never between two


def expect(right: Any, what: str) -> None:
    """Raises CorruptBitstream that says what is wrong."""
    if not bool(right):
        raise CorruptBitstream(f"the session does not fit together: {what}; it was changed since it was saved")


def check_kinds(fresh: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Attributes are of the kinds that a new object has; what it has not decided yet may be a number or a tensor."""
    expect(isinstance(saved, dict), "attributes have no names")
    for name, new in fresh.items():
        x = saved[name]
        if name in PASSING:
            expect(x is None, f"{name} is kept within a pass only")
        elif isinstance(new, Tensor):
            like = (
                isinstance(x, Tensor) and x.dtype == new.dtype and x.ndim == new.ndim and x.shape[:1] == new.shape[:1]
            )
            expect(like, f"{name} is not a tensor of {len(new)} rows and {new.ndim} axes of {new.dtype}")
        elif isinstance(new, bool):
            expect(type(x) is bool, f"{name} is {x!r}, not yes or no")
        elif isinstance(new, int):
            by_row = name == "judged" and isinstance(x, Tensor)
            expect(by_row or (type(x) is int and 0 <= x < MOST), f"{name} is {x!r}, not a count")
        elif new is not None:
            expect(type(x) is type(new), f"{name} is a {type(x).__name__}, not a {type(new).__name__}")
        else:
            expect(not isinstance(x, str | dict | list | tuple), f"{name} is a {type(x).__name__}")
            expect(type(x) is not int or 0 <= x < MOST, f"{name} is {x!r}, not a count")


def check_rows(sequences: int, heads: int, lanes: list[Any], firsts: list[Any]) -> None:
    """There are as many heads as lanes share, and rows as lanes have; before anything is made for each of them."""
    expect(
        all(type(x) is int and x > 0 for x in lanes) and sum(lanes) == heads, f"lanes of {lanes} are not {heads} heads"
    )
    for each, first in zip(lanes, firsts, strict=True):
        like = isinstance(first, Tensor) and first.numel() == sequences * each
        expect(like, f"a lane has other rows than {each} heads of {sequences} sequences")


def check_tail(tail: Tail) -> None:
    """Every slot that counts is there."""
    n = tail.k.shape[1]
    counts = (tail.start, tail.end, tail.lead, tail.next)
    expect(all(type(x) is int for x in counts), "the tail's counts are not numbers")
    expect(tail.start == 0 and tail.end == n, f"a tail of {n} slots says that it ends at {tail.end}")
    expect(tail.lead <= n, f"a tail of {n} slots begins with {tail.lead} tokens")
    expect(tail.placed or tail.next >= n, f"a tail of {n} slots has seen {tail.next} tokens")
    expect(tail.v.shape[:2] == tail.k.shape[:2], "keys and values of a tail differ in their slots")
    expect(tail._position.shape[1] == (n if tail.placed else 0), "a tail's positions are not those of its slots")
    expect(tail.score.shape[1] == (n if tail.scored else 0), "a tail's scores are not those of its slots")


def check_lengths(lengths: list[Any], rows: int, slots: int) -> None:
    """How many tokens which rows have in the tail."""
    expect(lengths, "no row has a length")
    for entry in lengths:
        expect(isinstance(entry, tuple) and len(entry) == 2, "a length is not a pair")
        n, index = entry
        expect(type(n) is int and 0 <= n <= slots, f"a row has {n!r} of {slots} slots")
        expect(index is None or (isinstance(index, Tensor) and within(index, 0, rows)), "a length is of no row")


def check_pages(pages: Pages, count: int) -> None:
    """Tables name pages that are there, and what lies beside a table is as long as it."""
    rows, columns = pages._table.shape
    per = pages.page // pages.selection.unit
    expect(type(pages.columns) is int and pages.columns <= columns, f"{pages.columns} of {columns} columns are in use")
    expect(within(pages.filled, 0, pages.columns + 1), "a row has filled more columns than there are")
    expect(not pages.even or bool((pages.filled == pages.columns).all()), "rows are not as even as they are said to be")
    expect(within(pages._table, -1, count), f"a table names a page beyond {count}")
    used = torch.arange(columns, device=pages.filled.device) < pages.filled[:, None]
    expect(bool((pages._table[used] >= 0).all()) or not pages.clean, "a table has a hole, but is said to have none")
    expect(pages._position.shape[1] == columns * pages.page, "positions are not those of the pages")
    expect(pages._score.shape[1] == (columns * pages.page if pages.scored else 0), "scores are not those of the pages")
    expect(pages._alive.shape[1] == columns * per, "units are not those of the pages")
    for name, x in pages._summary.items():
        expect(isinstance(x, Tensor) and x.shape[:2] == (rows, columns * per), f"{name} is not of the pages' units")


def check_fields(fields: Mapping[str, Any]) -> int:
    """The number of pages (or sequences) of which these are the fields."""
    expect(isinstance(fields, dict), "fields have no names")
    sides = {x.shape[0] if isinstance(x, Tensor) and x.ndim > 1 else -1 for x in fields.values()}
    expect(len(sides) <= 1 and -1 not in sides, "fields differ in their number")
    count = max(sides, default=0)
    expect(not count or any(x.numel() for x in fields.values()), f"{count} pages have nothing in them")
    return count


def check_mask(fields: Mapping[str, Any]) -> None:
    """Pages of two widths ("zipcache") have as many tokens of the wider one as there is room for."""
    mask, wide = fields["mask"], fields["k_high"]
    expect(mask.dtype == torch.uint8 and mask.ndim == 2, "a mask is not of bits")
    bits = mask[..., None] >> torch.arange(8, dtype=torch.uint8, device=mask.device) & 1
    expect((bits.sum((1, 2)) == wide.shape[1]).all(), "a page's mask names other tokens than it has room for")


def within(x: Tensor, low: int, end: int) -> bool:
    """Whether these are whole numbers from `low` up to `end`, the latter left out."""
    whole = not x.is_floating_point() and x.dtype != torch.bool
    return whole and (not x.numel() or (int(x.min()) >= low and int(x.max()) < end))
