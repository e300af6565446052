"""Single tokens and distances, against the formula pair by pair."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support_layer import draw, padded, plain, run
from support_prefill import attended, lines, read
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.kernels.span_attention import causal_spans
from kvengine.policies.prefill import vertical_slash
from kvengine.policies.prefill.vertical_slash import VerticalSlash

SMALL = VerticalSlash(vertical=5, slash=4, sinks=2, recent=2, window=16, block=8)
TEXT = "vertical_slash(vertical=5, slash=4, sinks=2, recent=2, window=16, block=8)"


def best(mass: list[float], count: int, forced: int) -> set[int]:
    order = sorted(range(len(mass)), key=lambda x: (x >= forced, -mass[x]))
    return set(order[: max(count, forced)])


def sees(q: Tensor, k: Tensor, scale: float, method: VerticalSlash = SMALL, softcap: float | None = None) -> Tensor:
    """Which tokens one head's queries [query, dim] read, those of the last of the tokens [token, dim]."""
    n, block = len(k), method.block
    vertical, slash = lines(q, k, scale, method.window, softcap)
    count = [x if isinstance(x, int) else int(x * n) for x in (method.vertical, method.slash)]
    columns, offsets = best(vertical, count[0], method.sinks), best(slash, count[1], method.recent)
    out = torch.zeros(len(q), n, dtype=torch.bool)
    for i in range(n - len(q), n):
        start = i // block * block
        for j in range(i + 1):
            window = any(start - o <= j < start - o + block for o in offsets)
            out[i - n, j] = window or (j in columns and j < start)
    return out


def test_the_official_index() -> None:
    """Of the 64 queries before token 512."""
    columns = torch.tensor([[0, 5, 90, 130, 250, 320, 400, 500]])
    runs, windows = vertical_slash.lines(columns, torch.tensor([[0, 40, 200, 300, 460]]), torch.tensor([448]), 64)
    assert sorted(t for a, b in windows[0, 0].tolist() for t in range(a, b, 64)) == [0, 148, 248, 408, 472]
    assert sorted(int(columns[0, x]) for a, b in runs[0, 0].tolist() for x in range(a, b)) == [90, 130, 320, 400]


def test_windows_that_touch_are_one() -> None:
    _, windows = vertical_slash.lines(torch.tensor([[0]]), torch.tensor([[0, 8, 9, 18]]), torch.tensor([40]), 8)
    assert windows.tolist() == [[[[31, 48], [22, 30]]]]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("queries", "tokens"), [(40, 40), (61, 61), (16, 80), (9, 61), (1, 33), (3, 61)])
@pytest.mark.parametrize(
    "method",
    [SMALL, VerticalSlash(0.2, 0.1, 0, 1, 64, 8), VerticalSlash(3, 9, 6, 1, 8, 16)],
    ids=["few", "parts", "other"],
)
def test_the_choice_is_the_papers(method: VerticalSlash, queries: int, tokens: int) -> None:
    torch.manual_seed(queries)
    q, k = torch.randn(2, 3, queries, 16), torch.randn(2, tokens, 16)
    choice = method.choose(q, k, 0.5)
    found = read(choice, queries, tokens, 3)
    for r in range(2):
        for h in range(3):
            assert torch.equal(found[3 * r + h], sees(q[r, h], k[r], 0.5, method).long())  # and nothing twice
    assert choice.columns is not None and (choice.spans[..., 1] <= choice.columns.shape[1] + tokens).all()


@pytest.mark.parametrize("softcap", [0.3, 2.0])
def test_capped_logits_choose_by_the_attention_that_they_make(softcap: float) -> None:
    """A cap changes no query's order, but how much each token and distance gets of them all."""
    torch.manual_seed(0)
    q, k = 3 * torch.randn(2, 3, 61, 16), torch.randn(2, 61, 16)
    found = read(SMALL.choose(q, k, 0.5, softcap), 61, 61, 3)
    want = [sees(q[r, h], k[r], 0.5, SMALL, softcap).long() for r in range(2) for h in range(3)]
    assert torch.equal(found, torch.stack(want))
    assert not torch.equal(found, read(SMALL.choose(q, k, 0.5), 61, 61, 3))


def test_the_prompt_of_a_model_that_caps_its_logits() -> None:
    tokens = draw(62)
    tokens.softcap = 0.3
    out = run(TEXT, tokens, 61).out
    torch.testing.assert_close(out[:, :61], attended(tokens, (61,), partial(sees, softcap=0.3)))


@pytest.mark.parametrize("at", [100, 127, 128, 300])
def test_a_column_and_a_diagonal_are_found(at: int) -> None:
    n, names = 512, torch.eye(512)
    method = VerticalSlash(vertical=8, slash=8, sinks=4, recent=4)
    k = torch.zeros(n, n)
    k[at] = 90 * names[0]
    choice = method.choose(names[:1].expand(1, 1, n, n), k[None], 1.0)
    assert at in choice.columns.tolist()[0]
    found = read(choice, n, n, 1)[0]
    assert (found[at:, at] == 1).all()
    aim = torch.arange(n) - at
    choice = method.choose(names[aim.clamp(min=0)][None, None], 90 * names[None], 1.0)
    found = read(choice, n, n, 1)[0]
    assert all(found[i, i - at] == 1 for i in range(at, n))
    assert found.sum(1).max() < 64 * 8


@pytest.mark.parametrize("cuts", [(61,), (11, 30, 61), (32, 61), (60, 61)], ids=str)
def test_each_chunk_reads_what_its_own_queries_look_at(cuts: tuple[int, ...]) -> None:
    tokens = draw(62)
    out = run(TEXT, tokens, 61, chunks=cuts[:-1]).out
    torch.testing.assert_close(out[:, :61], attended(tokens, cuts, sees))
    assert (out[:, :61] - run("full", tokens, 61).out[:, :61]).abs().max() > 1e-2
    torch.testing.assert_close(out[:, 61:], plain(tokens, 61))  # decoding reads everything


def test_padding_changes_nothing() -> None:
    tokens = draw(60)
    longer, valid = padded(tokens, 13)
    want = run(TEXT, tokens, 60).out
    torch.testing.assert_close(run(TEXT, longer, 73, valid=valid).out[:, 13:], want)


def test_greater_budgets_read_more() -> None:
    q, k = torch.randn(1, 2, 300, 16), torch.randn(1, 300, 16)
    kept = torch.zeros(2, 300, 300, dtype=torch.long)
    for vertical, slash in ((4, 3), (8, 3), (40, 3), (40, 10), (299, 10)):
        found = read(VerticalSlash(vertical, slash, 2, 2, 64, 16).choose(q, k, 1.0), 300, 300, 2)
        assert (found >= kept).all() and found.sum() > kept.sum()
        kept = found


@pytest.mark.parametrize(
    "options", [{"vertical": 90}, {"vertical": 512}, {"slash": 90}, {"slash": 1.0}, {"recent": 90}, {"sinks": 90}]
)
def test_as_many_as_there_are_is_everything(options: dict[str, int]) -> None:
    q, k = torch.randn(1, 2, 30, 16), torch.randn(1, 90, 16)
    choice = VerticalSlash(**{"vertical": 2, "slash": 2, "sinks": 1, "recent": 1, "block": 8} | options).choose(
        q, k, 1.0
    )
    assert choice.columns is None and torch.equal(choice.spans, causal_spans(34, 90, k.device, 8))


def test_one_token_less_than_everything_is_everything_but_one() -> None:
    """What the estimate then leaves out is one distance, which windows of others cover."""
    q, k = torch.randn(1, 2, 90, 16), torch.randn(1, 90, 16)
    found = read(VerticalSlash(1, 89, 0, 1, 16, 8).choose(q, k, 1.0), 90, 90, 2)
    assert torch.equal(found, torch.ones(2, 90, 90, dtype=torch.long).tril())


@pytest.mark.parametrize(
    "options",
    [{"block": 20}, {"block": 0}, {"vertical": 0}, {"slash": 1.5}, {"recent": 0}, {"window": 0}, {"sinks": -1}],
)
def test_refusals(options: dict[str, float]) -> None:
    with pytest.raises(PolicyError, match="VerticalSlash"):
        VerticalSlash(**options)
