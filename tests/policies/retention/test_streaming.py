"""StreamingLLM with both rules of positions, against attention over re-indexed keys."""

import pytest
import torch
from support_retention import Case, attended, output, positions, same_source

import kvengine
from kvengine.errors import UnsupportedPolicy
from kvengine.policies.retention.streaming import Streaming
from kvengine.rope import Rope
from kvengine.session import Session
from kvengine.stack import Stack

FREQUENCY = torch.tensor([1.0, 0.3, 0.05, 0.01])


def rotated(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The case's queries and keys turned to their positions in place; returns them as they were before."""
    q, k = case.q.clone(), case.k.clone()
    rope = case.session.rope
    at = torch.arange(k.shape[2]) - torch.tensor(case.pads)[:, None, None]
    case.q, case.k = rope.turn(q, at.expand(q.shape[:3])), rope.turn(k, at.expand(k.shape[:3]))
    return q, k


def kept(pad: int, newest: int, sinks: int, recent: int) -> list[int]:
    return [p for p in range(pad, newest + 1) if p < pad + sinks or p > newest - recent]


def reindexed(case: Case, raw: tuple[torch.Tensor, torch.Tensor], row: int, tokens: list[int]) -> torch.Tensor:
    """As the official code does it: keys before rotation, turned to their index in the cache; the query is the last."""
    b, h = divmod(row, case.heads)
    rope, index = case.session.rope, torch.arange(len(tokens))
    q = raw[0][b, h * case.group : (h + 1) * case.group, tokens[-1]]
    k = rope.turn(raw[1][b, h, tokens], index)
    logits = rope.turn(q, torch.full((case.group,), len(tokens) - 1)) @ k.T * case.call.scale
    return logits.softmax(-1) @ case.v[b, h, tokens]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("heads, group, pads, chunks", [(2, 2, (0, 6), 3), (3, 1, (0,), 1), (1, 4, (4, 0), 2)])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("store", ["", " + kivi(bits=8, group=8, residual=8)"])
def test_in_cache_positions(
    heads: int, group: int, pads: tuple[int, ...], chunks: int, interleaved: bool, store: str
) -> None:
    case = Case(heads, group, pads=pads, steps=40, session=Session(rope=Rope(FREQUENCY, interleaved)))
    raw = rotated(case)
    layer = case.prompt(f"streaming(sinks=3, recent=9, positions='in-cache'){store}", chunks)
    exact = dict(rtol=1e-4, atol=1e-5) if not store else dict(rtol=0.05, atol=0.05)
    apart = 0.0
    for t, out in case.decode(layer):
        for row in range(case.rows):
            tokens = [*kept(case.row(row)[3], t - 1, 3, 9), t]
            torch.testing.assert_close(output(case, out, row), reindexed(case, raw, row, tokens), **exact)
            apart = max(apart, float((output(case, out, row) - attended(case, row, t, tokens)).abs().max()))
            assert positions(layer, row) == kept(case.row(row)[3], t, 3, 9)
    assert apart > 0.1  # the control: true positions give something else
    if not store:
        same_source(case, layer)


def test_a_later_turn_reads_with_the_gap_as_well() -> None:
    case = Case(steps=12, session=Session(rope=Rope(FREQUENCY)))
    raw = rotated(case)
    layer = case.prompt("streaming(sinks=3, recent=9, positions='in-cache')")
    case.session.prompt_end = 49
    out = case.feed(layer, 37, 49)
    for row in range(case.rows):
        for i, t in enumerate(range(37, 49)):
            tokens = [*kept(0, 36, 3, 9), *range(37, t + 1)]
            torch.testing.assert_close(
                output(case, out[:, i : i + 1], row), reindexed(case, raw, row, tokens), rtol=1e-4, atol=1e-5
            )


def test_in_cache_positions_from_the_first_tokens_on() -> None:
    """While nothing is dropped they are the true ones."""
    case = Case(length=5, steps=20, pads=(0, 2), session=Session(rope=Rope(FREQUENCY)))
    raw = rotated(case)
    layer = case.prompt("streaming(sinks=3, recent=9, positions='in-cache')")
    for t, out in case.decode(layer):
        for row in range(case.rows):
            tokens = [*kept(case.row(row)[3], t - 1, 3, 9), t]
            want = reindexed(case, raw, row, tokens)
            torch.testing.assert_close(output(case, out, row), want, rtol=1e-4, atol=1e-5)
            if t < 12:
                torch.testing.assert_close(attended(case, row, t, tokens), want, rtol=1e-4, atol=1e-5)


def test_sinks_alone_have_no_gap() -> None:
    """A row that holds no more than them, beside one whose sinks are turned forward by what it dropped."""
    position = torch.tensor([[0, 1, 2, 9, 10], [4, 5, -1, -1, -1]], dtype=torch.int32)
    found = Streaming(sinks=3, recent=2, positions="in-cache").shift(position, torch.tensor([0, 4]))
    assert found is not None and found.tolist() == [[6, 6, 6, 0, 0], [0] * 5]


@pytest.mark.parametrize("pads, chunks", [((0,), 1), ((0, 6), 3)])
@pytest.mark.parametrize("recent", [9, 0.25])
def test_true_positions(pads: tuple[int, ...], chunks: int, recent: int | float) -> None:
    case = Case(pads=pads)
    layer = case.prompt(f"streaming(sinks=3, recent={recent})", chunks)
    for t, out in case.decode(layer):
        for row in range(case.rows):
            pad = case.row(row)[3]
            tokens = [*kept(pad, t - 1, 3, 9 if recent == 9 else (37 - pad) // 4), t]
            torch.testing.assert_close(output(case, out, row), attended(case, row, t, tokens))
    same_source(case, layer)


def test_a_selection_ranks_keys_as_they_are_stored() -> None:
    with pytest.raises(UnsupportedPolicy, match="turns keys when they are read"):
        Stack.parse("streaming(positions='in-cache') + quest")


def test_without_a_known_rotation_the_session_says_so() -> None:
    case = Case()
    layer = case.prompt("streaming(sinks=3, recent=9, positions='in-cache')")
    with pytest.raises(kvengine.errors.CacheError, match="knows no rotation"):
        next(case.decode(layer))


def test_judging_the_prompt_only() -> None:
    """What stays of the prompt is what the method keeps at its end; what comes later all stays."""
    case = Case(heads=2, group=2, pads=(0, 6))
    usual, layer = (
        case.prompt("streaming(sinks=3, recent=9)"),
        case.prompt("streaming(sinks=3, recent=9, decode=False)"),
    )
    before = [positions(layer, row) for row in range(case.rows)]
    assert before == [positions(usual, row) for row in range(case.rows)] and len(before[0]) == 12
    length = layer.seen
    for t, out in case.decode(layer):
        for row in range(case.rows):
            tokens = before[row] + list(range(length, t + 1))
            assert positions(layer, row) == tokens
            torch.testing.assert_close(output(case, out, row), attended(case, row, t, tokens))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("pads", [(0,), (0, 5)])
@pytest.mark.parametrize(
    "store", ["kivi(bits=4, group=8, residual=8)", "turboquant(residual=8)", "quest(budget=24, page=4)"]
)
def test_it_keeps_the_same_tokens_from_pages(pads: tuple[int, ...], store: str) -> None:
    """Those that have been sealed are dropped when they leave the newest, as those of the tail are."""
    case = Case(length=40, steps=70, pads=pads)
    layer = case.prompt(f"streaming(sinks=3, recent=30) + {store}", 2)
    for t, _ in case.decode(layer):
        for row in range(case.rows):
            assert positions(layer, row) == kept(case.row(row)[3], t, 3, 30)
    assert layer.parts[0].lane.pages is not None
