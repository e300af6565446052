"""SnapKV against a loop that follows the paper, vote by vote."""

import pytest
import torch
from support import Bare, held
from support_retention import Case, attended, best, output, positions, probabilities, same_source

from kvengine.errors import PolicyError
from kvengine.policies.retention import snapkv
from kvengine.stack import Stack


def votes(case: Case, row: int, window: int, reduce: str) -> list[float]:
    """Of the prompt's last queries for each real token, none for the window itself."""
    pad, n = case.row(row)[3], case.length
    by_head = torch.zeros(case.group, n - pad)
    for i in range(max(pad, n - window), n):
        by_head[:, : i + 1 - pad] += probabilities(case, row, i, list(range(pad, i + 1)))
    by_head[:, max(0, n - pad - window) :] = 0
    vote = by_head.amax(0) if reduce == "max" else by_head.sum(0) if reduce == "sum" else by_head.mean(0)
    return [float(v) for v in vote]


def pooled(vote: list[float], kernel: int, pool: str) -> list[float]:
    """Beyond the ends there is nothing: zeros for an average, no candidates for a maximum."""
    half = kernel // 2
    around = [vote[max(0, j - half) : j + half + 1] for j in range(len(vote))]
    return [max(near) if pool == "max" else sum(near) / kernel for near in around]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("heads, group, pads, chunks", [(2, 2, (0, 5), 3), (3, 1, (0,), 1), (1, 4, (4, 33), 2)])
@pytest.mark.parametrize("kernel, pool, reduce", [(5, "avg", "mean"), (1, "avg", "max"), (7, "max", "sum")])
@pytest.mark.parametrize("softcap, sinks", [(None, False), (1.5, False), (None, True)])
def test_it_keeps_what_the_window_votes_for(
    heads: int,
    group: int,
    pads: tuple[int, ...],
    chunks: int,
    kernel: int,
    pool: str,
    reduce: str,
    softcap: float | None,
    sinks: bool,
) -> None:
    case = Case(heads, group, pads=pads)
    logits = torch.linspace(-1, 5, heads * group).view(heads, group)
    case.call = case.call._replace(softcap=softcap, sinks=logits if sinks else None)
    options = f"budget=11, window=4, kernel={kernel}, pool='{pool}', reduce='{reduce}'"
    layer = case.prompt(f"snapkv({options})", chunks)
    kept: dict[int, list[int]] = {}
    for row in range(case.rows):
        pad = case.row(row)[3]
        score = pooled(votes(case, row, 4, reduce), kernel, pool)
        kept[row] = best({pad + j: s for j, s in enumerate(score)}, 11, lambda p: p >= case.length - 4)
        assert positions(layer, row) == kept[row]
    for t, out in case.decode(layer):
        for row, tokens in kept.items():
            tokens.append(t)
            torch.testing.assert_close(output(case, out, row), attended(case, row, t, tokens))
            assert positions(layer, row) == tokens
    same_source(case, layer)


@pytest.mark.parametrize("kernel, pool", [(5, "avg"), (7, "max")])
def test_the_window_has_no_votes_where_a_later_turn_is_shorter(kernel: int, pool: str) -> None:
    """Three queries, a window of eight: the window's other five tokens were read before, and stay all the same."""
    case = Case(pads=(0, 5), length=60)
    layer = case.prompt(f"snapkv(budget=30, window=8, kernel={kernel}, pool='{pool}')")
    case.feed(layer, 60, 61)
    before = [positions(layer, row) for row in range(case.rows)]
    case.feed(layer, 61, 64)
    for row in range(case.rows):
        tokens = before[row] + [61, 62, 63]
        vote = torch.zeros(len(tokens))
        for i in (61, 62, 63):
            seen = [p for p in tokens if p <= i]
            vote[: len(seen)] += probabilities(case, row, i, seen).mean(0)
        vote[-8:] = 0
        score = dict(zip(tokens, pooled(vote.tolist(), kernel, pool), strict=True))
        assert positions(layer, row) == best(score, 30, lambda p: p >= 56)


@pytest.mark.parametrize("kernel, pool", [(5, "avg"), (7, "max")])
def test_padding_of_a_turn_shorter_than_the_window_votes_for_nothing(kernel: int, pool: str) -> None:
    """The second sequence has three tokens in it, beside five of padding; of a window of eight they alone are asked."""
    case = Case(pads=(0, 0), length=60)
    layer = case.prompt(f"snapkv(budget=30, window=8, kernel={kernel}, pool='{pool}')")
    before = [positions(layer, row) for row in range(case.rows)]
    case.valid[1, 60:65] = False
    case.q[1, :, 60:65] *= 50
    case.feed(layer, 60, 68)
    for row in range(2, 4):
        tokens = before[row] + [65, 66, 67]  # the last eight are the window
        vote = torch.zeros(len(tokens))
        for i in (65, 66, 67):
            seen = [p for p in tokens if p <= i]
            vote[: len(seen)] += probabilities(case, row, i, seen).mean(0)
        vote[-8:] = 0
        moved = [p + 5 if p < 60 else p for p in tokens]  # padding counts as if it had come before them
        score = dict(zip(moved, pooled(vote.tolist(), kernel, pool), strict=True))
        assert positions(layer, row) == best(score, 30, lambda p: p >= 60)


@pytest.mark.parametrize("kernel, pool", [(5, "avg"), (7, "max")])
def test_padding_between_turns_is_nobodys_neighbour(kernel: int, pool: str) -> None:
    """The second turn of one sequence is shorter, and padded on its left: pooling joins what lies on both sides."""
    case = Case(length=60)
    case.pads, case.valid = (0, 0), torch.ones(2, 80, dtype=torch.bool)
    case.q, case.k, case.v = (x.repeat(2, 1, 1, 1) for x in (case.q, case.k, case.v))
    case.valid[1, 40:47] = False
    layer = case.prompt(f"snapkv(budget=30, window=6, kernel={kernel}, pool='{pool}')", 3)
    for row in range(case.rows):
        tokens = [p for p in range(60) if case.valid[row // case.heads, p]]
        vote = torch.zeros(len(tokens))
        for i in range(54, 60):
            seen = [p for p in tokens if p <= i]
            vote[: len(seen)] += probabilities(case, row, i, seen).mean(0)
        vote[-6:] = 0
        places = range(60 - len(tokens), 60)  # without gaps, and the newest token's is that of other rows
        score = dict(zip(places, pooled(vote.tolist(), kernel, pool), strict=True))
        assert positions(layer, row) == best(score, 30, lambda p: p >= 54)


@pytest.mark.parametrize(
    "options, hint",
    [("budget=8, window=8", "exceed window=8"), ("kernel=4", "must be odd"), ("window=0", "window=0")],
)
@pytest.mark.parametrize("name", ["snapkv", "pyramidkv"])
def test_what_cannot_be(name: str, options: str, hint: str) -> None:
    with pytest.raises(PolicyError, match=hint):
        Stack.parse(f"{name}({options})")


@pytest.mark.parametrize(
    "text", ["snapkv(budget=30, window=8)", "chunkkv(budget=30, window=8)", "adakv(budget=30, window=8)"]
)
def test_rows_vote_by_themselves_where_their_logits_are_many(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 8 heads and a million tokens, with their softmax, would take twice what the heads' keys and values do."""
    asked, paid = list[slice](), snapkv._paid
    monkeypatch.setattr(snapkv, "_paid", lambda seen, keys, rows: (asked.append(rows), paid(seen, keys, rows))[1])
    valid = torch.ones(2, 90, dtype=torch.bool)
    valid[1, :20] = False
    whole, parts = (Bare(text, heads=3, rows=2) for _ in range(2))
    want = [whole.feed(90, valid), whole.feed(1)]
    assert len(asked) == 1
    monkeypatch.setattr(snapkv, "LOGITS", 3 * 2 * 8 * 90)
    found = [parts.feed(90, valid), parts.feed(1)]
    assert asked[1:] == [slice(0, 3), slice(3, 6)]
    torch.testing.assert_close(found, want)
    assert held(whole.cache) == held(parts.cache)
