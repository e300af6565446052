"""Sealed pages by themselves, and how many of them a lane goes on holding."""

import pytest
import torch
from support import Bare

from kvengine.offload.placement.device import Device
from kvengine.pages import Pages
from kvengine.policies.representation.dense import Dense
from kvengine.policies.selection.quest import Quest
from kvengine.pool import Pool


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
        assert len(set(pages.pages_in_use())) == 3 + refilled


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
