"""The best of each row: against a loop, whatever ties."""

from __future__ import annotations

import math
import time

import pytest
import support_kernels as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvengine.errors import KernelError
from kvengine.kernels.best_tokens import best_tokens
from kvengine.kernels.page_scores import top_units

BACKENDS = oracle.backends()


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    st.lists(st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1.5, math.inf]), min_size=1, max_size=40),
    st.integers(-1, 45), st.integers(-1, 45),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_best_are_the_best_with_ties_to_the_later(backend: str, row: list[float], one: int, other: int) -> None:
    rows, counts = (row, row[::-1]), (one, other)
    got = oracle.on(backend, best_tokens)(torch.tensor(rows), torch.tensor(counts), backend=backend).cpu()
    for scores, count, kept in zip(rows, counts, got.tolist(), strict=True):
        order = sorted(range(len(scores)), key=lambda t: (-scores[t], -t))[: max(count, 0)]
        assert kept == [t in order and scores[t] > -math.inf for t in range(len(scores))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tokens", [1, 1025, 9000])
def test_rows_of_any_length(backend: str, tokens: int) -> None:
    score = torch.randn(3, 2 * tokens, generator=torch.Generator().manual_seed(tokens))[:, ::2].round(decimals=2)
    count = torch.tensor([tokens - 1, tokens // 2, 1], dtype=torch.int32)
    got = oracle.on(backend, best_tokens)(score, count, backend=backend).cpu()
    assert torch.equal(got, best_tokens(score.double(), count))  # in double precision always the reference
    assert got.sum(1).tolist() == count.tolist()


@pytest.mark.parametrize("kind", ["alike", "one far above", "beyond the range", "least numbers", "few", "steps"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_of_any_spread(backend: str, kind: str) -> None:
    """They may be counted by size, which tells some spreads apart and others not at all."""
    tokens, score = 1201, torch.randn(2, 1201, generator=torch.Generator().manual_seed(0))
    if kind == "one far above":
        score[0, 77], score[1, 5], score[1, 900:] = 3e38, math.inf, -math.inf
    if kind == "few":
        score[:, 40:] = -math.inf
    score = {"alike": 0 * score, "beyond the range": score * 1e38, "least numbers": score * 1e-44}.get(kind, score)
    score = score.round() if kind == "steps" else score
    numbers = score.tolist()
    living = [[t for t in range(tokens) if row[t] > -math.inf] for row in numbers]
    for count in (1, 50, 1199, 1201):
        kept = oracle.on(backend, best_tokens)(score, torch.tensor([count, count]), backend=backend).cpu()
        ids = oracle.on(backend, top_units)(score, count, backend=backend).tolist()
        for r, row in enumerate(numbers):
            later = sorted(living[r], key=lambda t: (-row[t], -t))[:count]
            sooner = sorted(living[r], key=lambda t: (-row[t], t))[:count]
            assert kept[r].nonzero()[:, 0].tolist() == sorted(later)
            assert ids[r] == sorted(sooner) + [-1] * (count - len(sooner))


@pytest.mark.skipif("native" not in BACKENDS, reason="no C compiler")
def test_what_is_no_number_is_not_chosen_nor_anything_else_for_it() -> None:
    score = torch.randn(1, 3000, generator=torch.Generator().manual_seed(0))
    score[0, ::9], score[0, 4::9] = math.nan, torch.tensor(-math.nan)
    for count in (1, 700, 2999):
        best = set(score.nan_to_num(-math.inf).topk(count).indices[0].tolist())
        kept = set(best_tokens(score, torch.tensor([count]), backend="native")[0].nonzero()[:, 0].tolist())
        chosen = set(top_units(score, count, backend="native")[0].tolist()) - {-1}
        assert all(found <= best and not score[0, list(found)].isnan().any() for found in (kept, chosen))


@pytest.mark.skipif("native" not in BACKENDS, reason="no C compiler")
def test_scores_that_fall_and_rise_again_take_no_longer_than_others() -> None:
    """As attention's over a long text may, highest at both ends: a quick selection's time can grow as the square."""
    tokens, many = 1 << 18, 1000
    score, began = (torch.arange(tokens) - tokens // 2).abs().float()[None], time.process_time()
    kept = best_tokens(score, torch.tensor([many]), backend="native")
    chosen = top_units(score, many, backend="native")
    assert time.process_time() - began < 1  # 20 ms; and 20 s if each pivot is the smallest of what is left
    ends = [*range(many // 2), *range(tokens - many // 2, tokens)]
    assert kept[0].nonzero()[:, 0].tolist() == ends
    assert chosen[0].tolist() == [*range(many // 2 + 1), *range(tokens - many // 2 + 1, tokens)]


def test_refusals_say_why() -> None:
    with pytest.raises(KernelError, match="score is"):
        best_tokens(torch.zeros(2, 3), torch.ones(3))
