"""Pages that a retention empties: what is left of several moves into one, and nothing else changes."""

from __future__ import annotations

from copy import copy
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import Bare, held
from torch import Tensor

from kvengine import compaction
from kvengine.compaction import shed
from kvengine.kernels.page_scores import best_units
from kvengine.lane import Lane
from kvengine.offload.placement.device import Device
from kvengine.pages import Pages
from kvengine.policies.representation import Representation
from kvengine.policies.representation.dense import Dense
from kvengine.policies.representation.kivi import Kivi
from kvengine.policies.representation.turboquant import TurboQuant
from kvengine.policies.selection.all import All
from kvengine.policies.selection.quest import Quest
from kvengine.pool import Pool

STACKS = [
    "tova(budget=40) + turboquant(residual=16)",
    "rkv(budget=40, buffer=16, window=4) + turboquant(bits=3, values=2, residual=8)",
    "h2o(budget=40, recent=0) + turboquant(residual=0)",
]
READ = [  # by a selection
    "rkv(budget=40, buffer=16, window=4) + quest(budget={}, page=8)",
    "rkv(budget=40, buffer=16, window=4) + landmarks(budget={}, chunk=4, local=4)",
    "rkv(budget=40, buffer=16, window=4) + quest(budget={}, page=8) + turboquant(bits=3, values=2, residual=8)",
    "rkv(budget=40, buffer=16, window=4) + ann(budget={})",
]
ALL = [text.format(4096) for text in READ]
EVERY: list[Representation] = [
    Dense(),
    *(TurboQuant(bits=b, values=v) for b in (1, 2, 3, 4) for v in (2, 4)),
    TurboQuant(scale="least"),
]


def pages_of(bare: Bare) -> Pages:
    pages = bare.cache.parts[0].lane.pages
    assert pages is not None
    return pages


def counted(pages: Pages) -> list[list[int]]:
    """Tokens in each page of each row that has any, in order."""
    counts = (pages.position >= 0).unflatten(1, (-1, pages.page)).sum(2)
    return [[n for n in row if n] for row in counts.tolist()]


def by_position(pages: Pages, x: Tensor) -> list[dict[int, Any]]:
    """What belongs to slots, by the position of their tokens."""
    rows = zip(pages.position.tolist(), x.tolist(), strict=True)
    return [{p: it for p, it in zip(*row, strict=True) if p >= 0} for row in rows]


@pytest.mark.parametrize("form", EVERY, ids=str)
def test_a_slot_stands_for_itself(form: Representation) -> None:
    """In whatever order they come, tokens have the same codes."""
    k, v, order = torch.randn(2, 16, 64), torch.randn(2, 16, 32), torch.randperm(16)
    assert form.by_slot
    fields = form.encode(k, v, torch.zeros(2, 16))
    moved = form.encode(k[:, order], v[:, order], torch.zeros(2, 16))
    assert all(x.shape[:2] == (2, 16) and torch.equal(x[:, order], moved[name]) for name, x in fields.items())


def test_codes_that_share_a_range_stay() -> None:
    assert not Kivi(bits=4, group=16).by_slot


@pytest.mark.sampled(6)
@pytest.mark.parametrize("padding", [0, 13], ids=["even", "ragged"])
@pytest.mark.parametrize("stack", STACKS + ALL)
def test_answers_are_those_of_pages_with_holes(stack: str, padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    valid = torch.ones(2, 60, dtype=torch.bool)
    valid[1, :padding] = False
    made, merged = [], compaction.fill_up
    for fill_up in (merged, lambda pages, rows=None: None):
        monkeypatch.setattr("kvengine.sealing.fill_up", fill_up)
        monkeypatch.setattr("kvengine.verdicts.fill_up", fill_up)
        bare = Bare(stack, rows=2, tokens=260)
        out = [bare.feed(60, valid)[:, -1:], *(bare.feed(1) for _ in range(200))]
        made.append((torch.cat(out, 1), held(bare.cache), pages_of(bare)))
    (got, tokens, full), (want, same, holes) = made
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert tokens == same and len(full.pages_in_use()) < 0.8 * len(holes.pages_in_use())
    if full.scored:
        scores, others = by_position(full, full.score), by_position(holes, holes.score)
        assert [sorted(row) for row in scores] == [sorted(row) for row in others]
        for row, other in zip(scores, others, strict=True):
            assert row == pytest.approx(other, abs=1e-4)
    keys, others = (by_position(x, x.decoded()[0]) for x in (full, holes))
    assert keys == others  # bit for bit


@pytest.mark.sampled(6)
@pytest.mark.parametrize("stack", STACKS + [text.format(16) for text in READ])
def test_fewer_than_half_of_the_slots_are_holes(stack: str) -> None:
    """However long the text becomes; and rows have as many columns as the fullest of them has pages."""
    bare, most, columns = Bare(stack, rows=2, tokens=600), 0, 0
    bare.feed(60)
    for _ in range(500):
        bare.feed(1)
        pages, lane = pages_of(bare), bare.cache.parts[0].lane
        if pages.columns and lane.lengths[0][0] == lane.stack.room:  # just sealed
            for counts in counted(pages):
                assert all(a + b > pages.page for a, b in pairwise(counts[:-1]))  # the last has just come
            most, columns = max(most, pages.pool.pages), max(columns, pages.columns)
    fullest = 2 * (40 + lane.stack.room + 16) // pages.page + 2
    assert columns <= fullest and most <= 4 * fullest * 9 // 8


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", READ)
def test_a_row_reads_beside_others_what_it_reads_alone(text: str) -> None:
    """What is read follows from where tokens lie: their pages are merged when the row is judged, whatever others do."""
    valid = torch.ones(3, 60, dtype=torch.bool)
    valid[1, :13] = valid[2, :22] = False
    stack, steps = text.format(16), 150
    whole = Bare(stack, rows=3, tokens=60 + steps)
    got = torch.cat([whole.feed(60, valid)[:, -1:], *(whole.feed(1) for _ in range(steps))], 1)
    for row, skip in enumerate((0, 13, 22)):
        one = Bare(stack, tokens=60 + steps)
        one.q, one.k, one.v = (x[row : row + 1, :, skip:] for x in (whole.q, whole.k, whole.v))
        want = [one.feed(60 - skip)[:, -1:], *(one.feed(1) for _ in range(steps))]
        torch.testing.assert_close(got[row : row + 1], torch.cat(want, 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", ["", " + turboquant(residual=8)"])
def test_what_is_known_of_merged_pages_is_that_of_the_tokens_left(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of the others what it was; and what the last query read is told as before."""
    bare = Bare(f"rkv(budget=40, buffer=16, window=4) + quest(budget=24, page=8){form}", tokens=260)
    merged, compact = [], Lane.compact

    def look(lane: Lane, rows: Tensor) -> None:
        pages, reach = pages_of(bare), lane.reach()
        table, was = pages.table.clone(), {name: x.clone() for name, x in pages.summary.items()}
        compact(lane, rows)
        assert torch.equal(lane.reach(), reach)
        k, there = pages.decoded()[0].unflatten(1, (-1, 8)), (pages.position >= 0).unflatten(1, (-1, 8, 1))
        new = ((pages.table != table) & (pages.table >= 0)).repeat_interleave(pages.page // 8, 1)
        for name, x in pages.summary.items():
            low = name == "low"
            want = k.masked_fill(~there, float("inf" if low else "-inf"))
            assert torch.equal(x[new & pages.alive], (want.amin(2) if low else want.amax(2))[new & pages.alive])
            assert torch.equal(x[~new], was[name][~new])
        merged.append(int(new.sum()))

    monkeypatch.setattr(Lane, "compact", look)
    bare.feed(60)
    for _ in range(150):
        bare.feed(1)
    assert sum(merged) > 10 and len(merged) > 5


def made(scored: bool) -> Pages:
    """Of four rows and six columns; the first rows have lost most of what they held, the last has two columns and all of it."""
    g = torch.Generator().manual_seed(1)
    pages = Pages(Pool(Device()), 4, 8, Dense(), All(), torch.device("cpu"), scored=scored)
    k, v = torch.randn(4, 48, 4, generator=g), torch.randn(4, 48, 3, generator=g)
    position, score = torch.arange(48).repeat(4, 1), torch.rand(4, 48, generator=g)
    pages.seal(k, v, position, score, True)
    keep = torch.rand(4, 48, generator=g) < torch.tensor([0.1, 0.4, 0.8, 1.0])[:, None]
    keep[0, 8:16] = keep[1, :40:8] = True
    keep[3, 16:] = False
    pages.judge(score, keep)
    pages.release()
    return pages


@pytest.mark.parametrize("scored", [True, False])
def test_tokens_take_with_them_what_is_theirs(scored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what nobody wrote is no token's."""
    pages, fresh = made(scored), Pool.fresh

    def poisoned(self: Pool, count: int) -> list[int]:
        taken = fresh(self, count)
        for x in (self.resident(torch.zeros(1)) or {}).values():
            x[taken] = float("nan")
        return taken

    monkeypatch.setattr(Pool, "fresh", poisoned)
    held = lambda: [by_position(pages, x) for x in (*pages.decoded(), pages.score)]  # noqa: E731
    before, last = held(), pages.table[3].tolist()
    in_use, most = len(pages.pages_in_use()), pages.pool.pages
    compaction.fill_up(pages)
    assert len(pages.pages_in_use()) < in_use and pages.pool.pages == most  # what one leaves the next may take
    assert held() == before and pages.table[3].tolist() == last and not pages.clean
    assert all(a + b > 8 for counts in counted(pages) for a, b in pairwise(counts))
    assert [len(counts) for counts in counted(pages)] == [2, 2, 6, 2]
    assert torch.equal(pages.alive, pages.position >= 0)  # whose units are slots
    assert torch.equal((pages.position >= 0).unflatten(1, (-1, 8)).any(2), pages.table >= 0)
    assert all(bool(x.isfinite().all()) for x in pages.decoded())


def test_rows_that_nobody_named_stay() -> None:
    pages = made(scored=True)
    others, before = pages.table[1:].tolist(), pages.position[1:].tolist()
    compaction.fill_up(pages, torch.tensor([True, False, False, False]))
    assert [len(counts) for counts in counted(pages)][:1] == [2]
    assert pages.table[1:].tolist() == others and pages.position[1:].tolist() == before


def test_a_copy_of_the_table_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = made(scored=True)
    twin, pages.shared = copy(pages), True
    before = {name: x.clone() for name, x in twin.tensors().items()}
    compaction.fill_up(pages)
    assert all(torch.equal(x, before[name]) for name, x in twin.tensors().items())


@pytest.mark.parametrize("columns", [16, 640])
def test_what_one_run_leaves_the_next_may_take(columns: int) -> None:
    """The pool does not grow by all that is merged; and an 8-bit copy of bounds, which few units have not, is that of the new."""
    selection = Quest(budget=64, page=8)
    pages = Pages(Pool(Device()), 1, 8, Dense(), selection, torch.device("cpu"), scored=False)
    k = torch.randn(1, columns * 8, 4)
    k[:, 1::8] *= 9
    pages.seal(k, k, torch.arange(columns * 8)[None], torch.zeros(1, columns * 8), True)
    keep = torch.zeros(1, columns * 8, dtype=torch.bool)
    keep[:, ::8] = keep[:, 4::8] = True
    q = torch.randn(1, 2, 4)

    def best() -> list[int]:
        s = pages.summary
        found = best_units(q, s["low"], s["high"], pages.alive, 8, coarse=pages.bounds)
        assert torch.equal(found, best_units(q, s["low"], s["high"], pages.alive, 8))
        return found[0].tolist()

    before = best()
    pages.judge(torch.zeros(1, columns * 8), keep)
    pages.pool.collect()
    assert not pages.pool.free
    compaction.fill_up(pages)
    assert counted(pages) == [[8] * (columns // 4)] and pages.pool.pages <= columns + columns // 8
    assert best() != before


@given(st.lists(st.lists(st.integers(0, 8), min_size=5, max_size=5), min_size=1, max_size=4))
def test_neighbours_are_taken_as_far_as_a_page_holds_them(counts: list[list[int]]) -> None:
    row, columns = compaction.neighbours(np.array(counts), 8)
    got = [(r, [c for c in run if c >= 0]) for r, run in zip(row.tolist(), columns.tolist(), strict=True)]
    want = []
    for r, mine in enumerate(counts):
        runs: list[list[int]] = []
        for column, n in enumerate(mine):
            if n and runs and sum(mine[c] for c in runs[-1]) + n <= 8:
                runs[-1].append(column)
            elif n:
                runs.append([column])
        want += [(r, run) for run in runs if len(run) > 1]
    assert got == want


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stack", [STACKS[0], READ[0].format(16)])
def test_a_remembered_state_is_what_it_was(stack: str) -> None:
    bare, plain = (Bare(stack, tokens=260) for _ in range(2))
    for one in (bare, plain):
        one.feed(60)
        for _ in range(100):
            one.feed(1)
    bare.cache.session.recording = True
    for _ in range(40):
        bare.feed(1)
    bare.back(40)
    bare.cache.commit()
    bare.cache.session.recording = False
    assert held(bare.cache) == held(plain.cache)
    for _ in range(60):
        torch.testing.assert_close(bare.feed(1), plain.feed(1), rtol=1e-4, atol=1e-5)


def test_pages_elsewhere_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "merge", lambda *run: pytest.fail("these are not on the compute device"))
    bare = Bare(f"{STACKS[0]} + host", tokens=260)
    bare.feed(60)
    for _ in range(100):
        bare.feed(1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "form",
    [
        "{} + kivi(bits=4, group=8, residual=8)",
        "{} + turboquant(residual=8)",
        "{} + zipcache(block=8)",
        "rkv(budget=40, buffer=16, window=4) + ann(budget=16)",  # an index knows what pages hold
        "rkv(budget=40, buffer=16, window=4) + quest(budget=16, page=4) + kivi(bits=4, group=8, residual=8)",
    ],
)
def test_memory_of_pages_that_were_once_needed_is_given_back(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those for the tokens of a recording, say. A state that is remembered, and a copy, keep what they have."""
    bare = Bare(form.format("tova(budget=40, recent=8)"), rows=2, tokens=200)
    bare.feed(90)
    lane = bare.cache.parts[0].lane
    pages_of(bare).pool.ensure(60)
    much, before = pages_of(bare).pool, copy(pages_of(bare))
    twin = Bare(form.format("tova(budget=40, recent=8)"), rows=2, tokens=200)
    monkeypatch.setattr("kvengine.sealing.shed", lambda pages, fresh: fresh.__self__ is lane and shed(pages, fresh))
    twin.feed(90)
    keys, places = before.decoded()[0].clone(), before.table.clone()
    pages_of(bare).shared = True
    for _ in range(100):
        torch.testing.assert_close(bare.feed(1), twin.feed(1), rtol=1e-4, atol=1e-5)
        if lane.lengths[0][0] == lane.stack.room:
            assert pages_of(bare).pool is not much
            assert pages_of(bare).pool.pages <= 2 * 4 * pages_of(bare).columns + 4  # which have just been asked for
    assert torch.equal(before.decoded()[0], keys) and torch.equal(before.table, places) and before.pool is much


def test_what_lies_in_pages_keeps_its_number_where_they_move() -> None:
    """By which an index knows them. None of these numbers is given again."""
    bare = Bare("rkv(budget=40, buffer=16, window=4) + ann(budget=16)", rows=2, tokens=200)
    bare.feed(60)
    for _ in range(40):
        bare.feed(1)
    pages, lane = pages_of(bare), bare.cache.parts[0].lane
    stamps, keys, old = pages.stamps, pages.decoded()[0].clone(), pages.pool
    old.ensure(60)
    assert stamps.max() > (stamps >= 0).sum() and shed(pages, lane.new_pool)
    assert np.array_equal(pages.stamps, stamps) and torch.equal(pages.decoded()[0], keys)
    assert pages.pool is not old and pages.pool.written == old.written
    assert not shed(pages, lane.new_pool)
