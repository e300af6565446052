"""What a token costs the host that seals a page: nothing waits, little is made anew, and what was read is told when asked."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import Bare, held
from torch import Tensor

from kvengine.holding import Holding
from kvengine.kernels.page_scores import page_bounds
from kvengine.offload.placement.device import Device
from kvengine.pages import Pages
from kvengine.policies.representation.dense import Dense
from kvengine.policies.selection.landmarks import Landmarks
from kvengine.policies.selection.quest import Quest
from kvengine.policies.selection.retrieval import Retrieval
from kvengine.pool import Pool
from kvengine.tail import Tail

PAGE = 4


def read_now(lane: Holding) -> Tensor:
    """Positions that the last query read, of what has not been moved since: page by page, as a list would have it."""
    near, units = lane.tail.position[:, lane.tail.span].tolist(), lane.units
    assert units is not None and lane.pages is not None
    unit, found = lane.stack.selection.unit, []
    for row, chosen in enumerate(units.tolist()):
        held = lane.pages.position[row].tolist()
        parts = [held[unit * u : unit * (u + 1)] if u >= 0 else [-1] * unit for u in chosen]
        found.append(sum(parts, []) + near[row])
    return torch.tensor(found)


@pytest.mark.parametrize("text", ["quest(budget=24, page=4)", "streaming(recent=50) + quest(budget=24, page=4)"])
@pytest.mark.parametrize("padding", [0, 9], ids=["even", "ragged"])
@pytest.mark.parametrize("room", [0, 40], ids=["grows", "has room"])
def test_what_a_query_read_is_told_after_it_was_sealed(
    text: str, padding: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And after more was written to where its positions lay, and for some of the rows. Nothing is made for it but where memory
    grows."""
    before: list[Tensor] = []
    note = Holding.note_reach

    def noting(self: Holding, position: Tensor | None = None) -> None:
        if self.units is not None:
            before.append(read_now(self))
        note(self, position)

    monkeypatch.setattr(Holding, "note_reach", noting)
    bare, valid = Bare(text, rows=2), torch.ones(2, 60, dtype=torch.bool)
    valid[1, :padding] = False
    bare.feed(60, valid)
    lane, sealed, told = bare.cache.parts[0].lane, 0, 0
    assert lane.pages is not None
    lane.pages.reserve(room)
    lane.pages.pool.ensure(room * len(lane.first))
    for _ in range(70):
        before.clear()
        bare.feed(1)
        if not before:
            assert lane.saw is None
            continue
        sealed += 1
        assert lane.saw is not None and torch.equal(lane.reach(), before[0])
        told += lane.saw.units is None
        rows = torch.tensor([len(lane.first) - 1, 0])
        assert torch.equal(lane.saw.told(rows).positions(), before[0][rows])
    assert sealed >= 4 and (told == 0) == (room > 0 and text.startswith("quest"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("selection", [Quest(), Landmarks(), Retrieval()], ids=lambda x: type(x).__name__)
def test_units_that_are_whole_are_summarised_as_if_each_token_was_asked_for(selection: Any, dtype: torch.dtype) -> None:
    """Bit by bit, of keys that lie apart too. A mean of 12 is not a product with 1/12."""
    for tokens in (12, 16):
        k = torch.randn(5, 2 * tokens, 64, generator=torch.Generator().manual_seed(tokens)).to(dtype)[:, 3 : 3 + tokens]
        some = Quest(page=tokens) if isinstance(selection, Quest) else selection
        found, asked = some.summarise(k, None), some.summarise(k, torch.ones(5, tokens, dtype=torch.bool))
        assert set(found) == set(asked) and all(torch.equal(x, asked[name]) for name, x in found.items())
    low, high = page_bounds(k, None, 8)
    assert all(torch.equal(a, b) for a, b in zip((low, high), page_bounds(k, torch.ones(5, 16).bool(), 8), strict=True))


@pytest.mark.parametrize("per", [1, 2])
def test_pages_that_follow_one_another_are_written_as_those_that_do_not(per: int) -> None:
    pool = Pool(Device(), per=per)
    numbers = torch.arange(48.0).view(6, 4, 2)
    first = pool.put({"a": numbers})
    pool.free = [1, 4, 0]
    apart = pool.put({"a": numbers[:3] + 100})
    pool.free = [3, 5]
    assert first.tolist() == [0, 1, 2, 3, 4, 5] and apart.tolist() == [1, 4, 0] and apart.dtype == first.dtype
    want = numbers.clone()
    want[[1, 4, 0]] = numbers[:3] + 100
    assert torch.equal(pool.read(first)["a"], want)
    assert pool.stamps.tolist() == [8, 6, 2, 3, 7, 5]


def table(rows: int, columns: int) -> Pages:
    """Pages of 4 tokens, units of 2."""
    pages = Pages(Pool(Device()), rows, PAGE, Dense(), Quest(budget=8, page=2), torch.device("cpu"))
    seal(pages, columns)
    return pages


def seal(pages: Pages, columns: int) -> None:
    rows, n = len(pages.filled), columns * PAGE
    position = (pages.columns * PAGE + torch.arange(n, dtype=torch.int32)).expand(rows, -1)
    pages.seal(torch.randn(rows, n, 3), torch.randn(rows, n, 3), position, torch.rand(rows, n), True)


def lies(pages: Pages) -> dict[str, int]:
    return {name: x.data_ptr() for name, x in pages.tensors().items()} | {"free": len(pages.pool.free)}


def test_pages_are_given_back_where_they_lie() -> None:
    """A window that moves on: launches that name the table's memory are good for as long as it is there."""
    pages = table(2, 9)
    seal(pages, 1)
    pages.shared, where = False, lies(pages)
    names = {name: x for name, x in pages.tensors().items() if x.shape[1] >= pages.columns}
    for _ in range(20):
        columns = {name: x.clone() for name, x in names.items()}
        pages.position[:, :PAGE] = -1  # as a kernel does
        pages.alive[:, :2] = False
        assert pages.release() == PAGE and pages.columns == 9
        assert {**lies(pages), "free": 0} == {**where, "free": 0} and len(pages.pool.free) >= 2 and pages.roomy
        for name, x in names.items():
            n = x.shape[1] // pages._table.shape[1]
            assert torch.equal(x[:, : 9 * n], columns[name][:, n : 10 * n]), name
        assert bool((pages._table[:, 9:] == -1).all() and (pages._position[:, 36:] == -1).all())
        assert not bool(pages._alive[:, 18:].any())
        seal(pages, 1)
    twin, pages.shared = pages.__copy__(), True  # a state to go back to
    pages.position[:, :PAGE] = -1
    held = {name: x.clone() for name, x in twin.tensors().items()}
    assert pages.release() == PAGE
    assert all(torch.equal(x, held[name]) for name, x in twin.tensors().items())


def test_what_would_be_too_much_to_spare_is_given_back() -> None:
    pages = table(1, 20)
    pages.position[:, PAGE:] = -1
    assert pages.release() == 19 * PAGE and pages._table.shape == (1, 1) and pages._position.shape == (1, PAGE)


def test_a_tail_beside_pages_grows_by_a_part_of_both() -> None:
    """Where pages get no more tokens: at each time all launches that are noted for a GPU go."""
    token: Any = torch.zeros(1, 1, 1)
    some = Tail(token, token, scored=False, placed=False)
    some.paged_slots, grown = 4096, 0
    for n in range(1, 1001):
        before = some.capacity
        some.append(token, token, torch.zeros(1, 1, dtype=torch.int32), True)
        grown += some.capacity != before
        assert some.capacity - n < (4096 + n) / 64 + 1
    assert grown < 20
    bare = Bare("lowrank(rank=4)", tokens=700)
    bare.feed(640)
    lane = bare.cache.parts[0].lane
    assert lane.pages is not None and lane.tail.paged_slots == len(lane.pages) == 640


@pytest.mark.parametrize("text", ["quest(budget=24, page=4)", "streaming(recent=50) + quest(budget=24, page=4)"])
def test_what_a_query_read_goes_with_its_row(text: str) -> None:
    """Also what has been sealed since."""
    bare, noted = Bare(text, rows=2, tokens=80), set()
    bare.feed(60)
    for _ in range(16):
        bare.feed(1)
        twin, order = copy.deepcopy(bare.cache), torch.tensor([1, 0, 1])
        lane, before = twin.parts[0].lane, bare.cache.parts[0].lane.reach()
        assert not torch.equal(before[:2], before[2:])
        noted.add(lane.saw is None)
        twin.rows(order)
        assert torch.equal(lane.reach(), before.unflatten(0, (2, 2))[order].flatten(0, 1))
    assert noted == {True, False}


@pytest.mark.parametrize("text", ["kivi(bits=4, group=8, residual=8)", "quest(budget=16, page=8)"])
def test_a_page_of_one_row_alone_is_taken_back(text: str) -> None:
    """Rows of different lengths seal at different tokens: what was sealed of one stands in the tail again."""
    drafted, plain, valid = Bare(text, rows=2), Bare(text, rows=2), torch.ones(2, 61, dtype=torch.bool)
    valid[0, :3] = False
    for bare in (drafted, plain):
        bare.feed(61, valid)
        for _ in range(4):
            bare.feed(1)
    drafted.cache.session.recording, before = True, held(drafted.cache)
    sealed = [drafted.cache.parts[0].lane.pages.filled for _ in range(9) if drafted.feed(1) is not None]  # type: ignore[union-attr]
    assert any(len(set(filled.tolist())) == 2 for filled in sealed)
    drafted.back(9)
    drafted.cache.commit()
    drafted.cache.session.recording = False
    assert held(drafted.cache) == before
    for _ in range(9):
        torch.testing.assert_close(drafted.feed(1), plain.feed(1), rtol=0, atol=0)
