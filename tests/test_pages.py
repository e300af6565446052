"""Sealed pages by themselves, how many of them a lane goes on holding, and what nodes of a tree see beside holes."""

from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support import Bare, held

from kvengine import page_answers
from kvengine import pages as pages_of
from kvengine.errors import PolicyError
from kvengine.offload.placement.device import Device
from kvengine.pages import Pages
from kvengine.policies.representation.dense import Dense
from kvengine.policies.selection.quest import Quest
from kvengine.pool import Pool
from kvengine.stats import measure


def sealed(rows: int, columns: int) -> Pages:
    """Pages of 4 tokens, chosen by 2, which hold the first tokens of each row."""
    pages = Pages(Pool(Device()), rows, 4, Dense(), Quest(budget=8, page=2), torch.device("cpu"))
    fill(pages, None, rows, columns)
    return pages


def fill(pages: Pages, rows: torch.Tensor | None, count: int, columns: int) -> None:
    n = columns * 4
    k, v = torch.randn(count, n, 3), torch.randn(count, n, 3)
    position = torch.arange(n, dtype=torch.int32).expand(count, -1)
    pages.seal(k, v, position, torch.zeros(count, n), True, rows)


def test_a_row_that_is_cleared_holds_nothing_even_beside_a_longer_one() -> None:
    """What the table names stays in the pool, and a selection spends its budget on what is alive."""
    pages = sealed(2, 3)
    other = set(pages.table[1].tolist())
    pages.clear(torch.tensor([True, False]))
    for refilled in (0, 1):
        if refilled:
            fill(pages, torch.tensor([0]), 1, 1)
        assert pages.columns == 3 and pages.filled.tolist() == [refilled, 3]
        assert (pages.position[0] >= 0).tolist() == [True] * 4 * refilled + [False] * (12 - 4 * refilled)
        assert pages.alive[0].tolist() == [True] * 2 * refilled + [False] * (6 - 2 * refilled)
        assert (pages.table[0] >= 0).tolist() == [True] * refilled + [False] * (3 - refilled)
        assert set(pages.table[1].tolist()) == other and bool(pages.alive[1].all())
        assert len(set(pages.pages_in_use())) == 3 + refilled and not pages.clean
    fill(pages, None, 2, 1)
    assert [(row >= 0).tolist() for row in pages.table] == [[True, True, False, False], [True] * 4]


def test_behind_a_row_that_is_cleared_and_a_longer_one_each_page_goes_to_its_own_place() -> None:
    pages = sealed(2, 3)
    pages.clear(torch.tensor([True, False]))
    fill(pages, None, 2, 1)
    assert (pages.table >= 0).tolist() == [[True, False, False, False], [True] * 4] and pages.filled.tolist() == [1, 4]


def test_what_is_judged_leaves_the_room_that_there_is() -> None:
    pages, score, keep = (
        sealed(2, 2),
        torch.rand(2, 8, dtype=torch.float64),
        torch.tensor([[True, False] * 4, [False] * 8]),
    )
    pages.reserve(5)
    pages.judge(score, keep)
    assert not pages.clean and pages.score.dtype == torch.float32 and torch.equal(pages.score, score.float())
    fill(pages, None, 2, 3)
    assert pages.position.tolist() == [[0, -1, 2, -1, 4, -1, 6, -1, *range(12)], [-1] * 8 + list(range(12))]
    assert pages.alive.tolist() == [[True] * 10, [False] * 4 + [True] * 6] and pages.score.shape == (2, 20)


def test_pages_go_behind_those_that_their_row_has_and_a_state_that_is_remembered_stays() -> None:
    """Two for one of the rows, as many for each as `counts` says, and one for all, where memory is there already."""
    pages, written = sealed(2, 1), [[0], [0]]  # tens of the positions, by page
    pages.reserve(9)

    def tokens(columns: int, ten: int) -> tuple[torch.Tensor, ...]:
        position = torch.arange(4, dtype=torch.int32).repeat(columns) + 10 * ten
        k = position[None, :, None].float().expand(2, -1, 3)
        return k, -k, position.expand(2, -1), torch.rand(2, 4 * columns)

    for ten in range(1, 5):
        twin, before = copy(pages), pages.position.tolist()
        pages.shared = True
        known = {name: x.clone() for name, x in twin.tensors().items()}
        if ten == 2:
            index = torch.arange(8).expand(2, -1)
            pages.seal_chosen(tokens(2, ten), index, torch.tensor([0, 1]))
            written[1] += [ten]
        elif ten == 1:
            pages.seal(*(x[:1] for x in tokens(2, ten)), True, torch.tensor([0]))
            written[0] += [ten, ten]
        else:
            pages.seal(*tokens(1, ten), True)
            written = [[*row, ten] for row in written]
        assert twin.position.tolist() == before
        assert all(torch.equal(x, known[name]) for name, x in twin.tensors().items())
        k, v = pages.decoded()
        for row, tens in enumerate(written):
            want = [10 * ten + i if ten else i for ten in tens for i in range(4)]
            assert pages.position[row].tolist() == want + [-1] * (4 * pages.columns - len(want))
            there = torch.tensor([10.0 * ten + i for ten in tens[1:] for i in range(4)])
            assert torch.equal(k[row, 4 : len(want), 0], there) and torch.equal(v[row, 4 : len(want), 0], -there)
            low = pages.summary["low"][row, 2 : len(want) // 2, 0]
            assert torch.equal(low, there[::2])
        assert pages.filled.tolist() == [len(row) for row in written] and pages.columns == max(map(len, written))


def test_a_slot_without_a_token_is_stored_as_nothing() -> None:
    """Whatever stood there, and a unit is alive if one of its tokens is."""
    pages, k = sealed(1, 1), torch.full((1, 4, 3), torch.nan)
    position = torch.tensor([[-1, 5, -1, -1]], dtype=torch.int32)
    k[0, 1] = 7.0
    pages.seal(k, k, position, torch.zeros(1, 4), False)
    for x in pages.decoded():
        assert x[0, 4:, 0].tolist() == [0, 7, 0, 0]
    assert pages.alive[0, 2:].tolist() == [True, False] and not pages.clean
    assert pages.summary["low"][0, 2:, 0].tolist() == [7, 0]


def test_a_page_of_which_the_first_token_alone_is_left_stays() -> None:
    """And moves to the columns that its row had before it: rows need as many as the fullest of them, wherever pages lay."""
    pages = sealed(3, 3)
    first = pages.table[:, 0].tolist()
    keep = torch.zeros(3, 12, dtype=torch.bool)
    keep[0, 0] = keep[1, 9] = keep[2, 7] = keep[2, 8] = True
    pages.judge(torch.zeros(3, 12), keep)
    assert pages.alive.tolist() == [
        [True] + [False] * 5,
        [False] * 4 + [True, False],
        [False] * 3 + [True] * 2 + [False],
    ]
    second, third = pages.table[2, 1:].tolist()
    low = pages.summary["low"][2, 2:].clone()
    assert pages.release() == 4 and pages.columns == 2
    assert pages.position.tolist() == [[0] + [-1] * 7, [-1, 9] + [-1] * 6, [-1, -1, -1, 7, 8, -1, -1, -1]]
    assert pages.table[0].tolist() == [first[0], -1] and pages.table[1, 0] >= 0 and pages.table[1, 1] == -1
    assert pages.table[2].tolist() == [second, third] and pages.filled.tolist() == [2, 2, 2]
    assert pages.alive.tolist() == [[True] + [False] * 3, [True] + [False] * 3, [False, True, True, False]]
    assert torch.equal(pages.summary["low"][2], low)


class Named:
    """A table that names these pages."""

    def __init__(self, pool: Pool) -> None:
        self.pages: list[int] = []
        pool.users.add(self)

    def pages_in_use(self) -> list[int]:
        return self.pages


@pytest.mark.parametrize("per", [1, 2])
def test_pages_that_no_table_names_are_taken_before_there_are_more(per: int) -> None:
    pool = Pool(Device(), per=per)
    table, counter = Named(pool), iter(range(999))

    def put(count: int) -> list[int]:
        numbers = torch.tensor([next(counter) for _ in range(count)])
        at = pool.put({"a": numbers[:, None].expand(-1, 4).clone()})
        kept.update(zip(at.tolist(), numbers.tolist(), strict=True))
        return at.tolist()

    kept: dict[int, int] = {}
    table.pages = put(16)
    assert pool.pages == 16 and len(set(table.pages)) == 16
    (shelf,), gone = pool.shelves, list[list[int]]()
    shelf.forget = lambda pieces: gone.append(sorted(pieces.tolist()))  # type: ignore[method-assign]
    freed = sorted(table.pages[3:7])
    del table.pages[3:7]
    table.pages += put(4)
    assert pool.pages == 16 and sorted(table.pages) == list(range(16))
    assert gone == [[page * per + piece for page in freed for piece in range(per)]]
    table.pages += put(1)
    assert pool.pages == 18  # an eighth more at a time
    table.pages += put(2)
    assert pool.pages == 20 and len(set(table.pages)) == 19
    pool.ensure(3)
    assert pool.pages == 22  # and here so many as are asked for, of which one was free
    pool.ensure(1)
    del table.pages[:2]
    pool.ensure(5)
    table.pages += put(5)
    assert pool.pages == 22 == len(set(table.pages))
    found = pool.read(torch.tensor(table.pages))["a"]
    assert found.tolist() == [[kept[page]] * 4 for page in table.pages]
    assert len(set(pool.stamps.tolist())) == 22  # each was written at a time of its own
    assert pool.page_bytes == 4 * 8  # four numbers of eight bytes, in however many pieces


def test_no_table_is_looked_at_while_there_are_free_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the host waits for what it names."""
    pool, looks = Pool(Device()), list[int]()
    table = Named(pool)
    monkeypatch.setattr(table, "pages_in_use", lambda: looks.append(pool.pages) or table.pages)

    def put(count: int) -> None:
        table.pages += pool.put({"a": torch.zeros(count, 4)}).tolist()

    put(2)
    pool.ensure(5)
    looks.clear()
    for count in (1, 2, 2):
        put(count)
    assert looks == [] and pool.pages == 7
    put(1)
    pool.ensure(1)
    put(2)  # one of which there is
    assert looks == [7, 8, 9] and sorted(table.pages) == list(range(10)) and pool.pages == 10


def test_a_placement_is_asked_about_its_fields_before_a_page_is_written() -> None:
    class Picky(Device):
        def check(self, fields: tuple[str, ...]) -> None:
            raise PolicyError(f"not {fields}")

    pool = Pool(Picky())
    with pytest.raises(PolicyError, match="not .'a', 'b'."):
        pool.put({"a": torch.zeros(1, 4), "b": torch.zeros(1, 4)})
    assert not pool.shelves and not pool.pages


@pytest.mark.parametrize("more", ["host", "quest(budget=8, page=4)"])
def test_pages_that_a_retention_has_emptied_are_given_back_while_decoding(more: str) -> None:
    """At most 14 tokens are held: the first two, and others that lie in two pages of 16, or three at most."""
    bare, columns = Bare(f"streaming(sinks=2, recent=12) + {more}", heads=1), []
    bare.feed(20)
    lane = bare.cache.parts[0].lane
    for _ in range(150):
        bare.feed(1)
        columns.append(0 if lane.pages is None else lane.pages.columns)
    assert lane.pages is not None and 0 < max(columns) <= 4
    assert len(set(lane.pages.pages_in_use())) <= 4


@pytest.mark.parametrize("more", ["", " + host", " + disk(folder={!r})"])
def test_nodes_of_a_tree_see_all_that_is_held_the_first_token_too(more: str, tmp_path: Path) -> None:
    """Where a retention has left holes, in the tail, in pages, and in pages that are fetched."""
    bare = Bare(f"streaming(sinks=2, recent=12){more.format(str(tmp_path))}", heads=1)
    bare.feed(40)
    for _ in range(20):
        bare.feed(1)
    (at,) = held(bare.cache)[0]
    assert at[:2] == [0, 1] and len(at) == 14
    tree = torch.tensor([[True, False, False], [True, True, False], [False, False, True]])
    bare.cache.session.tree = tree
    found = bare.feed(3)[0].transpose(0, 1)  # [q_head, node, dim]
    q, k, v = bare.q[0, :, 60:63], bare.k[0, 0, [*at, 60, 61, 62]], bare.v[0, 0, [*at, 60, 61, 62]]
    sees = torch.cat([torch.ones(3, len(at), dtype=torch.bool), tree], 1)
    want = (q @ k.T * bare.call.scale).masked_fill(~sees, float("-inf")).softmax(-1) @ v
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


def test_a_row_whose_first_page_is_filled_by_a_later_turn_reads_its_own_keys() -> None:
    """One page of 16, beside a row that has several: keys kept jointly at full rank are those that came."""
    bare, valid = Bare("lowrank(rank=1000)", rows=2), torch.ones(2, 60, dtype=torch.bool)
    valid[1, :36] = False
    bare.feed(40, valid[:, :40])
    bare.feed(20)
    found = bare.feed(1)[1, 0]  # [q_head, dim]
    pages = bare.cache.parts[0].lane.pages
    assert pages is not None and pages.filled.tolist() == [2, 2, 1, 1]
    q, k, v = bare.q[1, :, 60], bare.k[1, :, 36:61].repeat_interleave(2, 0), bare.v[1, :, 36:61].repeat_interleave(2, 0)
    want = (q[:, None] @ k.mT * bare.call.scale).softmax(-1) @ v
    torch.testing.assert_close(found, want[:, 0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("text", ["host", "lowrank(rank=1000)"])
def test_some_columns_of_pages_are_the_tokens_that_lie_there(text: str) -> None:
    """Where pages are copied from elsewhere, and where keys are made from what is kept jointly (at full rank: as they came)."""
    bare = Bare(f"{text} + quest(budget=8, page=4)", heads=1)
    bare.feed(90)
    pages = bare.cache.parts[0].lane.pages
    assert pages is not None and pages.columns > 3
    for first, last in ((0, 1), (1, 3), (2, pages.columns)):
        k, v = pages.decoded(slice(first, last))
        span = slice(first * pages.page, last * pages.page)
        torch.testing.assert_close(k, bare.k[0, :, span], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(v, bare.v[0, :, span], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("text", "per"), [("host", 4), ("disk", 1), ("kivi(bits=8, group=16, residual=0) + disk", 1)])
def test_chosen_units_are_the_tokens_that_lie_there(text: str, per: int) -> None:
    """Whether they are fetched alone, or are parts of pages that are fetched whole."""
    bare = Bare(f"quest(budget=8, page=4) + {text}", heads=1, rows=2)
    bare.feed(90)
    pages = bare.cache.parts[0].lane.pages
    assert pages is not None and pages.page == 16 and pages.pool.per == per
    units = [[7, 0, 5, -1], [2, 4, -1, 3]]
    k, v, position = pages.choosing(torch.tensor(units))()
    for row, chosen in enumerate(units):
        slots = [4 * unit + i if unit >= 0 else -1 for unit in chosen for i in range(4)]
        assert position[row].tolist() == slots
        at = [i for i, slot in enumerate(slots) if slot >= 0]
        for found, given in ((k, bare.k), (v, bare.v)):
            want = given[row, 0, [slots[i] for i in at]]
            torch.testing.assert_close(found[row, at], want, atol=0.03 if "kivi" in text else 0, rtol=0)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "text", ["kivi(bits=4, group=4, residual=4)", "quantspec(group=4, residual=4)", "zipcache(block=8)", "turboquant(residual=4)",
             "landmarks(budget=40)", "adakv(budget=60, window=4)", "lowrank(rank=4)", "host", "disk(device=2048, host=2048)"]
)  # fmt: skip
def test_a_prompt_is_coded_some_pages_at_a_time(text: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made on the way is in floats, and a million tokens' would be several times what is kept of them."""
    valid = torch.ones(2, 150, dtype=torch.bool)
    valid[1, :70] = not padded
    given, fields = list[int](), page_answers.fields

    def listening(representation: Any, k: Any, *more: Any) -> Any:
        given.append(k.shape[0] * k.shape[1])
        return fields(representation, k, *more)

    monkeypatch.setattr(page_answers, "fields", listening)
    whole, parts = (Bare(text, rows=2, heads=2) for _ in range(2))
    want = [whole.feed(150, valid if padded else None), *(whole.feed(1) for _ in range(20))]
    at_once = max(given)
    given.clear()
    monkeypatch.setattr(pages_of, "CODED", 600)
    found = [parts.feed(150, valid if padded else None), *(parts.feed(1) for _ in range(20))]
    assert max(given) <= 64 < at_once
    torch.testing.assert_close(found, want, rtol=0, atol=0)
    a, b = (measure([x.cache]) for x in (whole, parts))
    assert (a.bytes["device"], a.held.tolist(), a.pages_used) == (b.bytes["device"], b.held.tolist(), b.pages_used)
