"""`read_per_token` of pages that hold codes: what kernels read of the tokens that are chosen or named, and where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from jaxtyping import Int
from support import Bare
from support_layer import draw
from torch import Tensor

from kvengine.cache import LayerCache
from kvengine.kernels import dispatch
from kvengine.lane import Lane
from kvengine.policies.representation.kivi import Kivi
from kvengine.policies.retention import Retention
from kvengine.policies.selection.quest import Quest
from kvengine.session import Call
from kvengine.stack import Stack
from kvengine.stats import lane_reads, measure

DIM = 8  # of a head of `Bare`; floats, so 64 bytes of a token that is exact
QUEST = 2 * DIM * 4  # bounds of a unit


class Coded(NamedTuple):
    """Bytes of a token's codes and its own ranges; tokens of a key group, and bytes of its ranges."""

    token: int
    group: int = 1
    ranges: int = 0


KIVI = DIM // 2 * 2 + 2 * 2  # four bits; a value's scale and zero in float16
CASES = {
    "quest(budget=24, page=16) + kivi(group=32, residual=0)": Coded(KIVI, 32, 2 * DIM * 2),
    "quest(budget=24, page=4) + kivi(group=16, bits=2, residual=0)": Coded(DIM // 4 * 2 + 4, 16, 2 * DIM * 2),
    "quest(budget=24, page=16) + kivi(group=8, residual=0)": Coded(KIVI, 8, 2 * DIM * 2),
    "quest(budget=24, page=4) + quantspec(group=16, residual=0)": Coded(KIVI + DIM, 16, 2 * DIM * 2),
    "quest(budget=24, page=4) + turboquant(residual=0)": Coded(DIM // 2 * 2 + 2 * 2),
    "oracle_topk(budget=24) + kivi(group=32, residual=0)": Coded(KIVI, 32, 2 * DIM * 2),
}


def lane_of(cache: LayerCache) -> Lane:
    (part,) = cache.parts
    return part.lane


def near(lane: Lane) -> int:
    """Of the tail, all of which is read."""
    return 2 * len(lane.tail) * (2 * DIM * 4 + 4 * lane.tail.placed)


def of_slots(slots: list[list[int]], coded: Coded) -> int:
    """Of these tokens of each row."""
    groups = sum(len({slot // coded.group for slot in row}) for row in slots)
    return sum(map(len, slots)) * coded.token + groups * coded.ranges


@pytest.mark.parametrize("text", CASES)
def test_codes_of_the_tokens_chosen_and_ranges_of_their_groups(text: str) -> None:
    one, coded = Bare(text, rows=1), CASES[text]
    one.feed(110)
    sealed = 0
    for _ in range(40):
        one.feed(1)
        lane = lane_of(one.cache)
        pages, units = lane.pages, lane.units
        assert pages is not None and units is not None
        unit = pages.selection.unit
        slots = [[u * unit + i for u in row if u >= 0 for i in range(unit)] for row in units.tolist()]
        want = of_slots(slots, coded)
        if lane.saw is not None:  # some of what it read is in pages now
            sealed += 1
            more = (int((lane.reach() >= 0).sum()) - 2 * len(lane.tail)) / sum(map(len, slots))
            want = int(want * more)
        want += near(lane) + (2 * pages.units * QUEST if "quest" in text else 0)
        assert measure([one.cache]).read_per_token == want
    assert sealed


def pages_of(lane: Lane) -> int:
    """Those of 16 tokens in which the units of 4 lie that were read, of both rows, which share none."""
    return sum(len({u // 4 for u in row}) for row in lane.units.tolist())  # type: ignore[union-attr]


def test_a_page_is_read_whole_where_it_is_fetched_or_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, however many of its units are chosen: so say the tiers, and so many are decoded."""
    page, decoded, decode = 16 * KIVI + 2 * DIM * 2, list[int](), Kivi.decode
    monkeypatch.setattr(Kivi, "decode", lambda self, x: (decoded.append(len(x["k_code"])), decode(self, x))[1])
    for more in (f" + disk(device=0, host=0, folder='{tmp_path}')", ""):
        one = Bare(f"quest(budget=24, page=4) + kivi(group=16, residual=0){more}", rows=1)
        one.feed(120)
        before = measure([one.cache]).misses
        one.feed(1)
        lane = lane_of(one.cache)
        assert lane.pages is not None and lane.units is not None and bool((lane.units >= 0).all())
        assert pages_of(lane) < lane.units.numel()
        assert not more or decoded.pop() == pages_of(lane) == measure([one.cache]).misses - before
        slots = [[u * 4 + i for u in row for i in range(4)] for row in lane.units.tolist()]
        want = pages_of(lane) * page if more else of_slots(slots, Coded(KIVI, 16, 2 * DIM * 2))
        assert lane_reads(lane) == near(lane) + 2 * lane.pages.units * QUEST + want


def test_a_retention_that_turns_keys_has_pages_brought() -> None:
    """Dense ones too: a page of 16 for each unit of 4."""
    one = Bare("full", rows=1)
    one.cache = LayerCache(Stack(retention=Turned(), selection=Quest(budget=24, page=4)), 0, 1, one.cache.session)
    one.feed(120)
    one.feed(1)
    lane = lane_of(one.cache)
    assert lane.pages is not None and lane.units is not None
    want = int((lane.units >= 0).sum()) * 16 * 2 * DIM * 4
    assert lane_reads(lane) == near(lane) + 2 * lane.pages.units * QUEST + want


@dataclass(frozen=True)
class Turned(Retention):
    """Keeps all, and counts positions anew."""

    @property
    def needs_rope(self) -> bool:
        return True

    def shift(self, position: Int[Tensor, "row token"], first: Int[Tensor, "row"]) -> Int[Tensor, "row token"]:
        return torch.zeros_like(position)


def test_plain_torch_reads_what_c_reads_but_for_mixed_pages() -> None:
    for text in (*CASES, "quest(budget=24, page=4) + zipcache(block=16)"):
        one = Bare(text, rows=1)
        one.feed(120)
        one.feed(1)
        lane = lane_of(one.cache)
        assert lane.pages is not None and lane.units is not None
        fast = lane_reads(lane)
        with dispatch.torch_only():
            slow = lane_reads(lane)
        if "zipcache" not in text:
            assert slow == fast
            continue
        units, far = int((lane.units >= 0).sum()), near(lane) + 2 * lane.pages.units * QUEST
        assert slow - far == units * lane.pages.pool.page_bytes > 2 * (fast - far)


@pytest.mark.parametrize("residual", [8, 100])
def test_named_tokens_one_by_one(residual: int) -> None:
    """In pages and in a tail of which few are named, before and after some of it is sealed."""
    tokens = draw(160, sequences=2, heads=2, dim=DIM)
    cache = LayerCache(Stack.parse(f"kivi(group=16, residual={residual})"), 0, 1)
    cache.forward(*tokens.part(0, 130), Call(0.25, named=torch.arange(130)[None, :, None].expand(2, -1, -1)))
    for i in range(130, 160):
        asked = torch.tensor([[[3, 5, 17, 60, i - 1, i]], [[0, 1, 2, 3, 4, i]]])
        cache.forward(*tokens.part(i, i + 1), Call(0.25, named=asked))
        lane = lane_of(cache)
        tail, paged = len(lane.tail), i + 1 - len(lane.tail)
        rows = [row[0].tolist() for row in asked for _ in range(2)]
        far = of_slots([[at for at in row if at < paged] for row in rows], Coded(KIVI, 16, 2 * DIM * 2))
        here = sum(at >= paged for row in rows for at in row) if tail > 2 * 6 else len(rows) * tail
        assert lane_reads(lane) == far + here * (2 * DIM * 4 + 4 * lane.tail.placed)
