"""The tables of `benchmarks/kvpress_compare.py`: of every cell, and of all cells of a method together."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvengine.evals.statistics import paired

Row = dict[str, Any]
STEPS = 24
"""Decoded tokens that are timed."""
TIMES = ("compress", "decode")
SIDES = ("kvpress", "kvengine")
COLUMNS = {
    "context": "length", "method": "method", "removed": "removed:g", "right (%): kvpress / kvengine": "scores",
    "difference (95 %)": "gap", "read and compress (s)": "compress", "ratio, compress": "compress_verdict",
    "decode (ms), stock too": "decode", "ratio, decode": "decode_verdict", "held (KiB)": "kib",
    f"after {STEPS} tokens (KiB)": "after", "tokens per head": "held",
}  # fmt: skip
METHOD_COLUMNS = {
    "method": "method", "right (%): kvpress / kvengine": "scores", "difference (95 %)": "gap",
    "read and compress, to theirs (95 %)": "compress_verdict", "decode, to theirs (95 %)": "decode_verdict",
    "bytes held": "bytes_percent", f"after {STEPS} tokens": "after_percent", "pairs of times": "pairs",
}  # fmt: skip


def write(rows: list[Row], methods: Sequence[str], about: Row, out: Path) -> None:
    """Both tables, `out` and one beside it."""
    for place, columns, found in (
        (out, COLUMNS, summary(rows, methods)),
        (out.with_stem(f"{out.stem}_methods"), METHOD_COLUMNS, by_method(rows, methods)),
    ):
        made = {**about, "columns": columns, "rows": beside(found, place, methods)}
        place.write_text(json.dumps(made, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def middle(ratios: list[float]) -> tuple[float, float, float]:
    """The median and its 95 % interval: the closest pair of order statistics that holds it that often.

    >>> middle([float(x) for x in range(1, 10)])
    (5.0, 2.0, 8.0)
    """
    n, found = len(ratios), sorted(ratios)
    outside, k = 2 * 0.5**n, 0  # how often the median lies outside the k-th smallest and the k-th largest, from 0 on
    while k < n // 2 - 1 and outside + 2 * math.comb(n, k + 1) / 2**n <= 0.05:
        k += 1
        outside += 2 * math.comb(n, k) / 2**n
    return statistics.median(found), found[k], found[n - 1 - k]


def spelled(ratio: tuple[float, float, float]) -> str:
    """A ratio with its interval, and what it says: below, no more than, or above theirs."""
    mid, low, high = ratio
    return f"{'<' if high < 1 else '>' if low > 1 else '≈'} {mid:.2f} ({low:.2f} … {high:.2f})"


def summary(rows: list[Row], methods: Sequence[str]) -> list[Row]:
    """One row per length, method and share removed, in this order of methods."""
    places = dict.fromkeys((row["length"], row["method"], row["removed"]) for row in rows)
    made = []
    for length, method, removed in sorted(places, key=lambda p: (p[0], methods.index(p[1]), p[2])):
        some = [row for row in rows if (row["length"], row["method"], row["removed"]) == (length, method, removed)]
        best = lambda side, name, some=some: min(min(row[side][name]) for row in some)  # noqa: E731
        mean = lambda side, name, some=some: statistics.fmean(row[side][name] for row in some)  # noqa: E731
        both = lambda how, name, form, scale=1.0: " / ".join(f"{how(s, name) * scale:{form}}" for s in SIDES)  # noqa: E731
        made.append({
            "length": length, "method": method, "removed": removed, **compared(some),
            "compress": both(best, "compress", ".3f"),
            "decode": f"{both(best, 'decode', '.2f', 1e3)} / {1e3 * best('stock', 'decode'):.2f}",
            "kib": both(mean, "bytes", ".0f", 1 / 1024), "after": both(mean, "after", ".0f", 1 / 1024),
            "held": both(mean, "held", ".0f"), "stock_decode": best("stock", "decode"),
            **{f"{side}_{name}": how(side, name) for side in SIDES
               for how, name in ((best, "compress"), (best, "decode"), (mean, "bytes"), (mean, "after"), (mean, "held"))},
        })  # fmt: skip
    return made


def by_method(rows: list[Row], methods: Sequence[str]) -> list[Row]:
    """One row per method: every length and share removed together."""
    some = {name: [row for row in rows if row["method"] == name] for name in methods}
    return [{"method": name, **compared(found)} for name, found in some.items() if found]


def beside(found: list[Row], place: Path, methods: Sequence[str]) -> list[Row]:
    """With the rows that are there of methods that were not measured now."""
    new = {row["method"] for row in found}
    there = json.loads(place.read_text(encoding="utf-8"))["rows"] if place.exists() else []
    rows = [row for row in there if row["method"] not in new and row["method"] in methods] + found
    return sorted(rows, key=lambda r: (r.get("length", 0), methods.index(r["method"]), r.get("removed", 0)))


def compared(rows: list[Row]) -> Row:
    """Scores, the ratios of times pair by pair, and those of bytes, of these cells."""
    pair = [
        {(f"{row['length']}/{row['context']}", 8 * n + i): score for n, row in enumerate(rows)
         for i, score in enumerate(row[side]["scores"])}
        for side in SIDES
    ]  # fmt: skip
    gap = paired(pair[1], pair[0])
    assert gap is not None
    found: Row = {
        "questions": gap.n, "contexts": gap.clusters, "gap_low": gap.low, "gap_high": gap.high,
        "scores": " / ".join(f"{100 * statistics.fmean(one.values()):.0f}" for one in pair),
        "gap": f"{100 * gap.mean:+.0f} ({100 * gap.low:+.0f} … {100 * gap.high:+.0f})",
        **{f"{side}_score": statistics.fmean(one.values()) for side, one in zip(SIDES, pair, strict=True)},
    }  # fmt: skip
    theirs, mine = SIDES
    for name in TIMES:
        ratios = [b / a for row in rows for a, b in zip(row[theirs][name], row[mine][name], strict=True)]
        found |= {f"{name}_ratio": (ratio := middle(ratios)), f"{name}_verdict": spelled(ratio), "pairs": len(ratios)}
    for name in ("bytes", "after"):
        ratio = sum(row[mine][name] for row in rows) / sum(row[theirs][name] for row in rows)
        found |= {f"{name}_ratio": ratio, f"{name}_percent": f"{100 * ratio:.2f} %"}
    return found
