"""Pages that a retention empties: what is left of several moves into one, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Bare, held
from torch import Tensor

from kvengine import compaction
from kvengine.offload.placement.device import Device
from kvengine.pages import Pages
from kvengine.policies.representation import Representation
from kvengine.policies.representation.dense import Dense
from kvengine.policies.representation.kivi import Kivi
from kvengine.policies.representation.turboquant import TurboQuant
from kvengine.policies.selection.all import All
from kvengine.pool import Pool

STACKS = [
    "tova(budget=40) + turboquant(residual=16)",
    "rkv(budget=40, buffer=16, window=4) + turboquant(bits=3, values=2, residual=8)",
    "h2o(budget=40, recent=0) + turboquant(residual=0)",
]
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
    """Tokens in each page of each row, fewest first."""
    counts = (pages.position >= 0).unflatten(1, (-1, pages.page)).sum(2)
    return [
        sorted(n for n, page in zip(*row, strict=True) if page >= 0)
        for row in zip(counts.tolist(), pages.table.tolist(), strict=True)
    ]


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


@pytest.mark.parametrize("padding", [0, 13], ids=["even", "ragged"])
@pytest.mark.parametrize("stack", STACKS)
def test_answers_are_those_of_pages_with_holes(stack: str, padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    valid = torch.ones(2, 60, dtype=torch.bool)
    valid[1, :padding] = False
    made, merged = [], compaction.fill_up
    for fill_up in (merged, lambda pages: None):
        monkeypatch.setattr("kvengine.holding.fill_up", fill_up)
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


@pytest.mark.parametrize("stack", STACKS)
def test_fewer_than_half_of_the_slots_are_holes(stack: str) -> None:
    bare, most = Bare(stack, tokens=600), 0
    bare.feed(60)
    for _ in range(500):
        bare.feed(1)
        pages = pages_of(bare)
        if (
            pages.columns and bare.cache.parts[0].lane.lengths[0][0] == bare.cache.parts[0].lane.stack.room
        ):  # just sealed
            for counts in counted(pages):
                assert sum(counts[:2]) > pages.page or len(counts) < 2
            most = max(most, pages.pool.pages)
    assert most <= 2 * (2 * 40 // pages.page + 2) * 9 // 8


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
        for x in (self.resident(torch.zeros(1), None, 1) or {}).values():
            x[taken] = float("nan")
        return taken

    monkeypatch.setattr(Pool, "fresh", poisoned)
    held = lambda: [by_position(pages, x) for x in (*pages.decoded(), pages.score)]  # noqa: E731
    before, last = held(), pages.table[3].tolist()
    in_use = len(pages.pages_in_use())
    while compaction.merge(pages):
        assert len(pages.pages_in_use()) < in_use
        in_use = len(pages.pages_in_use())
    assert held() == before and pages.table[3].tolist() == last and not pages.clean
    assert (
        all(sum(counts[:2]) > 8 or len(counts) < 2 for counts in counted(pages)) and min(map(len, counted(pages))) == 2
    )
    assert torch.equal(pages.alive, pages.position >= 0)  # whose units are slots
    assert torch.equal((pages.position >= 0).unflatten(1, (-1, 8)).any(2), pages.table >= 0)
    assert all(bool(x.isfinite().all()) for x in pages.decoded())


def test_a_remembered_state_is_what_it_was() -> None:
    bare, plain = (Bare(STACKS[0], tokens=260) for _ in range(2))
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
    monkeypatch.setattr(compaction, "merge", lambda pages: pytest.fail("these are not on the compute device"))
    bare = Bare(f"{STACKS[0]} + host", tokens=260)
    bare.feed(60)
    for _ in range(100):
        bare.feed(1)
