"""AdaKV: heads' budgets against a loop, the choice within a head against the base's, and the bytes that are freed."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support_retention import Case, held, positions, same_source

from kvengine.cache import LayerCache
from kvengine.policies.retention.adakv import shares
from kvengine.policies.retention.snapkv import SnapKV
from kvengine.rope import Rope
from kvengine.session import Session
from kvengine.stack import Stack
from kvengine.stats import measure

BASES = {
    "snapkv": ("snapkv(budget={n}, window=4, kernel=7, pool='max')", "window=4"),
    "keydiff": ("keydiff(budget={n})", "base='keydiff'"),
    "expected_attention": ("expected_attention(budget={n})", "base='expected_attention'"),
}
FIXED = {"snapkv": 4, "keydiff": 0, "expected_attention": 4}  # what the base always keeps


def loop_shares(scores: list[list[float]], even: int, floor: float) -> list[int]:
    """Largest remainder, one token after the other."""
    ranked = sorted(((s, h, j) for h, row in enumerate(scores) for j, s in enumerate(row)), reverse=True)
    won = [0] * len(scores)
    for _, h, _ in ranked[: even * len(scores)]:
        won[h] += 1
    part = [(1 - floor) * n + floor * even for n in won]
    cap = [math.floor(p + 1e-9) for p in part]
    for h in sorted(range(len(cap)), key=lambda h: (part[h] - cap[h], h), reverse=True)[: even * len(cap) - sum(cap)]:
        cap[h] += 1
    return cap


@settings(max_examples=60)
@given(
    heads=st.integers(1, 5),
    tokens=st.integers(1, 12),
    part=st.floats(0, 1),
    floor=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_shares_add_up(heads: int, tokens: int, part: float, floor: float, seed: int) -> None:
    score = torch.rand(2 * heads, tokens, generator=torch.Generator().manual_seed(seed)) ** 3
    even = torch.full((2 * heads,), int(part * tokens))
    found = shares(score, even, floor, heads).unflatten(0, (2, heads))
    assert (found.sum(1) == heads * int(part * tokens)).all()
    assert (found <= tokens).all() and (found >= math.floor(floor * int(part * tokens) + 1e-9)).all()
    assert found[1].tolist() == loop_shares(score[heads:].tolist(), int(part * tokens), floor)


@given(seed=st.integers(0, 999), floor=st.sampled_from([0.0, 0.2, 0.5, 1.0]), even=st.integers(0, 14))
def test_what_a_head_cannot_use_goes_to_the_others(seed: int, floor: float, even: int) -> None:
    """After a first prompt heads hold different numbers of tokens."""
    random = torch.Generator().manual_seed(seed)
    there = torch.randint(0, 13, (3,), generator=random)
    score = torch.rand(3, 12, generator=random).masked_fill(torch.arange(12) >= there[:, None], float("-inf"))
    found = shares(score, torch.full((3,), even), floor, heads=3)
    assert (found <= there).all() and found.sum() == min(3 * even, there.sum())


def test_later_prompts_meet_the_budget_too() -> None:
    case = sharp(Case(heads=4, group=2, length=150))
    case.k[:, 1:] *= 0.05
    layer = case.prompt("adakv(budget=100, window=8)")
    for start, stop in ((150, 154), (154, 163), (163, 170)):
        case.feed(layer, start, stop)
        assert sum(len(positions(layer, row)) for row in range(4)) == 400


def sharp(case: Case) -> Case:
    """The first head of each sequence attends to few tokens sharply, the last to many alike."""
    case.q[:, : case.group] *= 3
    case.q[:, -case.group :] *= 0.2
    case.session.rope = Rope(torch.tensor([1.0, 0.3, 0.05]))
    return case


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("heads, group, pads, chunks", [(2, 2, (0, 9), 3), (3, 1, (0,), 1), (1, 4, (4, 0), 2)])
def test_heads_share_the_layers_budget(base: str, heads: int, group: int, pads: tuple[int, ...], chunks: int) -> None:
    case = sharp(Case(heads, group, length=93, pads=pads))
    layer = case.prompt(f"adakv(budget=24, {BASES[base][1]})", chunks)
    for b in range(len(pads)):
        rows = range(b * heads, (b + 1) * heads)
        counts = [len(positions(layer, row)) for row in rows]
        assert sum(counts) == 24 * heads and min(counts) >= FIXED[base] + int(0.2 * (24 - FIXED[base]))
        for row, n in zip(rows, counts, strict=True):  # each head keeps what the base would, with that budget
            alone = case.prompt(BASES[base][0].format(n=n), chunks)
            assert positions(layer, row) == positions(alone, row)
    if heads > 1 and base == "snapkv":
        assert len({len(positions(layer, row)) for row in range(heads)}) > 1
    same_source(case, layer)
    before = [positions(layer, row) for row in range(case.rows)]
    for _ in case.decode(layer):
        pass
    assert [positions(layer, row) for row in range(case.rows)] == [b + list(range(93, 113)) for b in before]
    same_source(case, layer)


@pytest.mark.parametrize("reduce", ["mean", "max"])
def test_counts_are_those_of_a_loop_over_snapkvs_scores(monkeypatch: pytest.MonkeyPatch, reduce: str) -> None:
    monkeypatch.setattr(SnapKV, "remembers", True)  # so that its scores can be read
    case = sharp(Case(heads=3, group=2, length=93))
    layer = case.prompt(f"adakv(budget=24, window=4, reduce={reduce!r})")
    whole = f"snapkv(budget=93, window=4, kernel=7, pool='max', reduce={reduce!r})"
    base = LayerCache(Stack.parse(whole), 0, 1, Session(prompt_end=93))
    case.feed(base, 0, 93)
    score = base.parts[0].lane.tail.held()[3]
    want = loop_shares(score[:, :89].tolist(), 20, 0.2)
    assert [len(positions(layer, row)) - 4 for row in range(3)] == want


def test_the_base_is_told_how_the_heads_of_a_group_agree() -> None:
    case, found = sharp(Case(heads=2, group=3, length=93)), []
    for reduce in ("mean", "max"):
        layer = case.prompt(f"adakv(budget=24, base='expected_attention', reduce={reduce!r})")
        found.append([positions(layer, row) for row in range(2)])
        for row, mine in enumerate(found[-1]):
            alone = case.prompt(f"expected_attention(budget={len(mine)}, reduce={reduce!r})")
            assert mine == positions(alone, row)
    assert found[0] != found[1]


def test_what_a_head_drops_is_freed() -> None:
    """Held bytes follow the sum of the heads' budgets, not the longest head's."""
    case = sharp(Case(heads=4, group=1, length=700, dim=16))
    layer = case.prompt("adakv(budget=128, window=8)")
    counts = [len(positions(layer, row)) for row in range(4)]
    assert sum(counts) == 4 * 128 and max(counts) > 1.3 * min(counts)
    stats = measure([layer])
    pages = sum(n // 16 for n in counts)
    assert stats.pages_used == pages
    payload = stats.bytes["device"]["page.k"] + stats.bytes["device"]["page.v"]
    free = stats.pages_free * 16 * (16 + 16) * 4
    assert payload - free == pages * 16 * (16 + 16) * 4
    assert free <= payload / 4
    full = case.prompt("full")
    even = measure([case.prompt("snapkv(budget=128, window=8)")]).bytes_held
    assert stats.bytes_held < 1.5 * even < measure([full]).bytes_held / 2


def test_a_budget_beyond_the_prompt_keeps_all() -> None:
    case = sharp(Case(length=40, pads=(0, 7)))
    layer = case.prompt("adakv(budget=64)")
    assert [len(held(layer, row)) for row in range(case.rows)] == [40, 40, 33, 33]
