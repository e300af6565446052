"""ChunkKV against a loop, chunk by chunk."""

import pytest
import torch
from support_retention import Case, attended, best, output, positions, probabilities, same_source

from kvengine.errors import PolicyError
from kvengine.stack import Stack


def scores(case: Case, row: int, window: int, chunk: int) -> dict[int, float]:
    """Every real token's chunk's mean vote of the prompt's last queries; the window votes, and gets no votes."""
    pad, n = case.row(row)[3], case.length
    vote = dict.fromkeys(range(pad, n), 0.0)
    for i in range(max(pad, n - window), n):
        seen = list(range(pad, i + 1))
        for j, paid in zip(seen, probabilities(case, row, i, seen).mean(0).tolist(), strict=True):
            vote[j] += paid if j < n - window else 0.0
    found = {}
    for start in range(pad, n, chunk):
        tokens = range(start, min(start + chunk, n))
        outside = [vote[j] for j in tokens if j < n - window]
        found |= dict.fromkeys(tokens, sum(outside) / max(1, len(outside)))
    return found


@pytest.mark.parametrize("heads, group, pads, chunks", [(2, 2, (0, 5), 3), (3, 1, (0,), 1), (1, 4, (4, 33), 2)])
@pytest.mark.parametrize("chunk", [1, 4, 7, 50])
def test_it_keeps_the_chunks_that_the_window_votes_for(
    heads: int, group: int, pads: tuple[int, ...], chunks: int, chunk: int
) -> None:
    case = Case(heads, group, pads=pads)
    layer = case.prompt(f"chunkkv(budget=15, window=4, chunk={chunk})", chunks)
    kept: dict[int, list[int]] = {}
    for row in range(case.rows):
        kept[row] = best(scores(case, row, 4, chunk), 15, lambda p: p >= case.length - 4)
        assert positions(layer, row) == kept[row]
    for t, out in case.decode(layer):
        for row, tokens in kept.items():
            tokens.append(t)
            torch.testing.assert_close(output(case, out, row), attended(case, row, t, tokens))
            assert positions(layer, row) == tokens
    same_source(case, layer)


def test_the_window_has_no_votes_where_a_later_turn_is_shorter() -> None:
    """Three queries, a window of eight: a chunk that it cuts is judged by its tokens outside of it alone."""
    case = Case(pads=(0, 5), length=60)
    layer = case.prompt("chunkkv(budget=30, window=8, chunk=6)")
    case.feed(layer, 60, 61)
    before = [positions(layer, row) for row in range(case.rows)]
    case.feed(layer, 61, 64)
    for row in range(case.rows):
        tokens = before[row] + [61, 62, 63]
        vote = torch.zeros(len(tokens))
        for i in (61, 62, 63):
            seen = [p for p in tokens if p <= i]
            vote[: len(seen)] += probabilities(case, row, i, seen).mean(0)
        outside = range(len(tokens) - 8)
        chunk = {c: [j for j in outside if j // 6 == c] for c in range(len(tokens) // 6 + 1)}
        score = {p: float(vote[chunk[j // 6]].mean()) if chunk[j // 6] else 0.0 for j, p in enumerate(tokens)}
        assert positions(layer, row) == best(score, 30, lambda p: p >= 56)


def test_chunks_of_one_token_are_snapkv_without_pooling() -> None:
    case = Case()
    mine = case.prompt("chunkkv(budget=15, window=4, chunk=1)")
    theirs = case.prompt("snapkv(budget=15, window=4, kernel=1)")
    assert [positions(mine, row) for row in range(2)] == [positions(theirs, row) for row in range(2)]


def test_neighbours_stay_together() -> None:
    """Though alone they would not: the control is SnapKV."""
    case = Case(heads=1, group=1, length=64)
    case.k[:, :, 22] = case.q[:, :, 60:64].mean(2) * 9  # one token that all of the window looks at
    kept = positions(case.prompt("chunkkv(budget=12, window=4, chunk=8)"), 0)
    assert kept == [*range(16, 24), *range(60, 64)]
    assert not set(range(16, 24)) <= set(positions(case.prompt("snapkv(budget=12, window=4, kernel=1)"), 0))


@pytest.mark.parametrize(
    "options, hint",
    [
        ("budget=8, window=8", "exceed window=8"),
        ("chunk=0", "chunk=0"),
        ("window=0", "window=0"),
        ("budget=0", "budget=0"),
    ],
)
def test_what_cannot_be(options: str, hint: str) -> None:
    with pytest.raises(PolicyError, match=hint):
        Stack.parse(f"chunkkv({options})")
