"""TOVA against a loop that follows the paper, token by token."""

import pytest
import torch
from support_retention import Case, attended, best, output, positions, probabilities, same_source

from kvengine.policies import load
from kvengine.policies.retention.tova import TOVA


def verdict(case: Case, rows: list[int], tokens: list[int], query: int, budget: int, recent: int = 0) -> list[int]:
    """What all heads of a sequence keep: the mean over heads and group decides."""
    paid = torch.stack([probabilities(case, row, query, tokens).mean(0) for row in rows]).mean(0)
    return best(dict(zip(tokens, paid.tolist(), strict=True)), budget, lambda p: p > query - recent)


@pytest.mark.parametrize("heads, group, pads, chunks", [(2, 2, (0, 5), 3), (3, 1, (0,), 1), (1, 4, (4, 0), 2)])
@pytest.mark.parametrize("recent", [0, 3])
def test_it_keeps_what_the_newest_query_attends_to(
    heads: int, group: int, pads: tuple[int, ...], chunks: int, recent: int
) -> None:
    case = Case(heads, group, pads=pads)
    layer = case.prompt(f"tova(budget=11, recent={recent})", chunks)
    want: dict[int, list[int]] = {}
    for b, pad in enumerate(pads):
        rows = list(range(b * heads, (b + 1) * heads))
        want[b] = verdict(case, rows, list(range(pad, case.length)), case.length - 1, 11, recent)
        assert all(positions(layer, row) == want[b] for row in rows)
    for t, out in case.decode(layer):
        for b in want:
            rows = list(range(b * heads, (b + 1) * heads))
            for row in rows:
                torch.testing.assert_close(output(case, out, row), attended(case, row, t, [*want[b], t]))
            want[b] = verdict(case, rows, [*want[b], t], t, 11, recent)
            assert all(positions(layer, row) == want[b] for row in rows)
    same_source(case, layer)


def test_heads_that_disagree_get_one_verdict() -> None:
    """Alone, each head would keep something else: the layer's verdict is not theirs."""
    case = Case(heads=2, group=1)
    layer = case.prompt("tova(budget=6)")
    alone = [verdict(case, [row], list(range(case.length)), case.length - 1, 6) for row in (0, 1)]
    assert positions(layer, 0) == positions(layer, 1)
    assert alone[0] != alone[1]


def test_while_it_fits_nothing_goes() -> None:
    case = Case(length=5, steps=20, pads=(0, 2))
    layer = case.prompt("tova(budget=12)")
    for t, _ in case.decode(layer):
        assert positions(layer, 0) == list(range(t + 1)) or len(positions(layer, 0)) == 12
        assert len(positions(layer, 2)) == min(12, t + 1 - 2)


def test_the_recent_are_part_of_the_budget() -> None:
    case = Case()
    layer = case.prompt("tova(budget=5, recent=5)")
    assert positions(layer, 0) == list(range(32, 37))


@pytest.mark.parametrize("budget", [5, 0.2])
def test_more_recent_than_fit_are_the_newest(budget: int | float) -> None:
    case = Case(pads=(0, 5), steps=20)
    layer = case.prompt(f"tova(budget={budget}, recent=30)")
    for t, _ in case.decode(layer):
        for row in range(case.rows):
            count = 5 if budget == 5 else (case.length - case.row(row)[3]) // 5
            assert positions(layer, row) == list(range(t + 1 - count, t + 1))


@pytest.mark.parametrize("ruled", [True, False])
def test_of_equals_the_later_stay_wherever_they_lie(ruled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded tokens take slots that became free. Also where no kernel knows the rule, as for methods built on this one."""
    if not ruled:
        monkeypatch.setattr(TOVA, "rule", lambda *_: None)
    case = Case(pads=(0, 5))
    case.q *= 0
    layer = case.prompt("tova(budget=8)")
    for t, _ in case.decode(layer):
        assert all(positions(layer, row) == list(range(t - 7, t + 1)) for row in range(case.rows))


def test_its_name() -> None:
    assert load("tova")[0] == "retention"


def test_judging_the_prompt_only_h2o() -> None:
    """What stays of the prompt is what the method keeps at its end; what comes later all stays."""
    case = Case(heads=2, group=2, pads=(0, 6))
    usual, layer = case.prompt("h2o(budget=12)"), case.prompt("h2o(budget=12, decode=False)")
    before = [positions(layer, row) for row in range(case.rows)]
    assert before == [positions(usual, row) for row in range(case.rows)] and len(before[0]) == 12
    length = layer.seen
    for t, out in case.decode(layer):
        for row in range(case.rows):
            tokens = before[row] + list(range(length, t + 1))
            assert positions(layer, row) == tokens
            torch.testing.assert_close(output(case, out, row), attended(case, row, t, tokens))


def test_judging_the_prompt_only() -> None:
    """What stays of the prompt is what the method keeps at its end; what comes later all stays."""
    case = Case(heads=2, group=2, pads=(0, 6))
    usual, layer = case.prompt("tova(budget=12)"), case.prompt("tova(budget=12, decode=False)")
    before = [positions(layer, row) for row in range(case.rows)]
    assert before == [positions(usual, row) for row in range(case.rows)] and len(before[0]) == 12
    length = layer.seen
    for t, out in case.decode(layer):
        for row in range(case.rows):
            tokens = before[row] + list(range(length, t + 1))
            assert positions(layer, row) == tokens
            torch.testing.assert_close(output(case, out, row), attended(case, row, t, tokens))
