"""Lines of an attention map, pair by pair."""

from __future__ import annotations

import pytest
import torch
from support_prefill import lines

from kvengine.policies.prefill import _blocks, _lines


@pytest.mark.parametrize("held", [1, 400, 1 << 20], ids=["a head", "some heads", "all rows"])
@pytest.mark.parametrize(
    ("queries", "tokens", "last"), [(40, 40, 16), (9, 61, 64), (1, 33, 8), (20, 20, 64), (1, 1, 4)]
)
def test_shares_are_those_of_pairs(
    queries: int, tokens: int, last: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_blocks, "NEAR", held * 2 * min(last, queries))
    q, k = torch.randn(3, 4, queries, 16), torch.randn(3, tokens, 16)
    vertical, slash = _lines.shares(q, k, 0.4, last)
    for r in range(3):
        for h in range(4):
            wanted = lines(q[r, h], k[r], 0.4, last)
            for found, want in zip((vertical, slash), wanted, strict=True):
                torch.testing.assert_close(found[r, h], torch.tensor(want), rtol=1e-4, atol=1e-6)


def test_means_are_of_the_vectors_that_are_there() -> None:
    x = torch.randn(2, 13, 4, dtype=torch.float64)
    found = _blocks.means(x, 5, 3)
    want = [x[:, :2].mean(1), x[:, 2:7].mean(1), x[:, 7:12].mean(1), x[:, 12:].mean(1)]
    torch.testing.assert_close(found, torch.stack(want, 1).float())
