"""Blocks by share of a head's attention, against the formula pair by pair and block by block."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from support_layer import draw, padded, plain, run
from support_prefill import attended, capped, lines, read
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.kernels.span_attention import causal_spans
from kvengine.policies.prefill import _blocks
from kvengine.policies.prefill.flexprefill import FlexPrefill

# With this gamma, no few whole rows of pairs hold the share: then rounding would decide.
SMALL = FlexPrefill(gamma=0.57, tau=0.25, min_budget=8, block=8)
TEXT = "flexprefill(gamma=0.57, tau=0.25, min_budget=8, block=8)"


def fewest(mass: list[float], share: float, least: int) -> set[int]:
    """The first, the heaviest up to `least`, and then more of them until they hold the share."""
    order = sorted(range(len(mass)), key=lambda x: (x > 0, -mass[x]))
    taken = order[:least]
    for x in order[least:]:
        if sum(mass[y] for y in taken) >= share * sum(mass):
            break
        taken.append(x)
    return set(taken)


def estimates(
    q: Tensor, k: Tensor, scale: float, block: int, softcap: float | None = None
) -> tuple[list[float], list[float], float]:
    """Shares of blocks of tokens and of distances between blocks, and D."""
    n = -(-len(k) // block)
    vertical, slash = [0.0] * n, [0.0] * (n + 1)
    for x, (column, offset) in enumerate(zip(*lines(q, k, scale, block, softcap), strict=True)):
        vertical[x // block] += column
        for r in range(block):  # query r of any block looks at a token in the block so many before
            slash[(x - r + block - 1) // block] += offset / block
    middle, means = q[-block:].double().mean(0), torch.stack([x.mean(0) for x in k.double().split(block)])
    pooled = capped(means @ middle * scale, softcap).softmax(0).tolist()
    both = [(a + b) / 2 for a, b in zip(pooled, vertical, strict=True)]
    terms = [x * math.log(x / y) / 2 for mine in (pooled, vertical) for x, y in zip(mine, both, strict=True) if x]
    return vertical, slash[:n], math.sqrt(max(0.0, sum(terms)))


def sees(q: Tensor, k: Tensor, scale: float, method: FlexPrefill = SMALL, softcap: float | None = None) -> Tensor:
    """Which tokens one head's queries [query, dim] read, those of the last of the tokens [token, dim]."""
    n, block, first = len(k), method.block, (len(k) - len(q)) // method.block
    vertical, slash, distance = estimates(q, k, scale, block, softcap)
    least, blocks = -(-method.min_budget // block), len(vertical)
    aware = distance < method.tau
    columns, offsets = (fewest(mass, 0 if aware else method.gamma, least) for mass in (vertical, slash))
    kept = {(b, c) for b in range(first, blocks) for c in range(b + 1) if c in columns or b - c in offsets}
    if aware:
        pairs: dict[tuple[int, int], float] = {}
        for b in range(first, blocks):
            start = n - len(q)
            asked = q[max(0, b * block - start) : (b + 1) * block - start].double().mean(0)
            means = torch.stack([x.mean(0) for x in k.double().split(block)[: b + 1]])
            pairs |= {(b, c): p for c, p in enumerate(capped(means @ asked * scale, softcap).softmax(0).tolist())}
        held = 0.0
        for pair in sorted(pairs, key=lambda x: -pairs[x]):
            if held >= method.gamma * (blocks - first):
                break
            kept.add(pair)
            held += pairs[pair]
    at = torch.arange(n - len(q), n)[:, None]
    token = torch.arange(n)
    mask = torch.zeros(blocks, blocks, dtype=torch.bool)
    mask[tuple(zip(*kept, strict=True))] = True
    return mask[at // block, token // block] & (token <= at)


def drawn(queries: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Two rows of three heads; those of the second look at few tokens each, so that pooling misleads."""
    torch.manual_seed(queries)
    return torch.randn(2, 3, queries, 16) * torch.tensor([1.0, 4.0])[:, None, None, None], torch.randn(2, tokens, 16)


@pytest.mark.parametrize(("queries", "tokens"), [(40, 40), (61, 61), (16, 80), (9, 61), (1, 33), (3, 61)])
@pytest.mark.parametrize(
    "method",
    [SMALL, FlexPrefill(0.8, 0.0, 1, 8), FlexPrefill(0.53, 1.0, 17, 8), FlexPrefill(0.67, 0.2, 4, 16)],
    ids=["mixed", "lines", "pairs", "other"],
)
@pytest.mark.parametrize("room", [1, 1 << 22], ids=["a head at a time", "all"])
def test_the_choice_is_the_papers(
    method: FlexPrefill, queries: int, tokens: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_blocks, "NEAR", room)
    q, k = drawn(queries, tokens)
    choice = method.choose(q, k, 0.3)
    assert choice.columns is None
    found = read(choice, queries, tokens, 3)
    for r in range(2):
        for h in range(3):
            assert torch.equal(found[3 * r + h], sees(q[r, h], k[r], 0.3, method).long())


@pytest.mark.parametrize(
    "method", [FlexPrefill(0.8, 0.0, 1, 8), FlexPrefill(0.53, 1.0, 17, 8), SMALL], ids=["lines", "pairs", "mixed"]
)
def test_capped_logits_choose_by_the_attention_that_they_make(method: FlexPrefill) -> None:
    """A cap makes attention flatter, and more is needed to hold a share of it."""
    q, k = drawn(61, 61)
    found = read(method.choose(q, k, 0.6, 0.7), 61, 61, 3)
    want = [sees(q[r, h], k[r], 0.6, method, 0.7).long() for r in range(2) for h in range(3)]
    assert torch.equal(found, torch.stack(want))
    assert not torch.equal(found, read(method.choose(q, k, 0.6), 61, 61, 3))


def test_the_prompt_of_a_model_that_caps_its_logits() -> None:
    tokens = draw(62, seed=2)
    tokens.q, tokens.softcap = 4 * tokens.q, 0.7
    out = run(TEXT, tokens, 61).out[:, :61]
    torch.testing.assert_close(out, attended(tokens, (61,), partial(sees, softcap=0.7)))
    assert (out - attended(tokens, (61,), sees)).abs().max() > 1e-2


def test_both_kinds_of_head_are_met_here() -> None:
    """The control of the test above: there, a method takes heads of one kind for those of the other."""
    q, k = drawn(61, 61)
    aware = [estimates(q[r, h], k[r], 0.3, 8)[2] < SMALL.tau for r in range(2) for h in range(3)]
    assert any(aware) and not all(aware)


@pytest.mark.parametrize("away", [100, 128, 200, 255])
def test_a_column_and_a_diagonal_are_found(away: int) -> None:
    n, names = 512, torch.eye(512)
    method = FlexPrefill(gamma=0.99, tau=0.0, min_budget=1, block=64)
    k = torch.zeros(n, n)
    k[away] = 90 * names[0]
    found = read(method.choose(names[:1].expand(1, 1, n, n), k[None], 1.0), n, n, 1)[0]
    assert found[away:, away].all()
    aim = torch.arange(n) - away
    found = read(method.choose(names[aim.clamp(min=0)][None, None], 90 * names[None], 1.0), n, n, 1)[0]
    assert all(found[i, i - away] for i in range(away, n))  # also where it crosses two blocks
    assert (
        found.sum(1).max() <= 64 * 6
    )  # the first block, the own one, two on the way, and two that the last queries see


def test_pooling_is_asked_where_it_agrees() -> None:
    """Blocks of equal tokens: pooled queries say what single ones do, and two blocks of queries can look elsewhere."""
    names = torch.eye(64)
    k = (30 * names[:8]).repeat_interleave(64, 0)  # each block of tokens has a name
    aim = torch.tensor([0, 0, 1, 1, 2, 2, 5, 3])
    q = names[aim].repeat_interleave(64, 0)
    choice = FlexPrefill(gamma=0.9, tau=0.1, min_budget=1, block=64).choose(q[None, None], k[None], 1.0)
    found = read(choice, 512, 512, 1)[0][::64, ::64]
    assert all(found[b, aim[b]] for b in range(8)) and found.sum() <= 8 * 3
    lines = FlexPrefill(gamma=0.9, tau=0.0, min_budget=1, block=64).choose(q[None, None], k[None], 1.0)
    assert not read(lines, 512, 512, 1)[0][6 * 64, 5 * 64 - 64]


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


@pytest.mark.parametrize("tau", [0.0, 1.0])
def test_a_greater_gamma_reads_more_and_one_everything(tau: float) -> None:
    q, k = torch.randn(1, 2, 200, 16), torch.randn(1, 200, 16)
    kept = torch.zeros(2, 200, 200, dtype=torch.long)
    for gamma in (0.0, 0.3, 0.6, 0.8, 1.0):
        choice = FlexPrefill(gamma, tau, 1, 16).choose(q, k, 0.5)
        if gamma < 1:
            found = read(choice, 200, 200, 2)
        else:
            assert torch.equal(choice.spans, causal_spans(200, 200, k.device, 16))
            found = torch.ones(2, 200, 200, dtype=torch.long).tril()
        assert (found >= kept).all() and found.sum() > kept.sum()
        kept = found


@pytest.mark.parametrize("options", [{"min_budget": 89}, {"min_budget": 1.0}, {"block": 48}])
def test_short_prompts_are_read_whole(options: dict[str, int]) -> None:
    q, k = torch.randn(1, 2, 30, 16), torch.randn(1, 90, 16)
    method = FlexPrefill(**{"gamma": 0.1, "min_budget": 1, "block": 8} | options)
    choice = method.choose(q, k, 1.0)
    assert torch.equal(choice.spans, causal_spans(30 + 60 % method.block, 90, k.device, method.block))


@pytest.mark.parametrize("options", [{"block": 20}, {"block": 0}, {"gamma": 1.5}, {"tau": -1}, {"min_budget": 0}])
def test_refusals(options: dict[str, float]) -> None:
    with pytest.raises(PolicyError, match="FlexPrefill"):
        FlexPrefill(**options)


def test_blocks_that_neither_looks_at_are_no_distance() -> None:
    """Their shares are 0 in float32, and 0 / 0 is no number."""
    q, mean, vertical = torch.zeros(1, 1, 8, 4), torch.zeros(1, 8, 4), torch.zeros(1, 1, 8)
    q[..., 0], mean[0, 0, 0], vertical[..., 0] = 1e3, 1e3, 1
    assert SMALL.distance(q, mean, vertical, 1.0).tolist() == [[0.0]]
