"""Where the outputs of a layer's lanes go."""

from __future__ import annotations

import pytest
import torch

from kvengine.heads import Heads, in_head_order
from kvengine.lane import Lane


@pytest.mark.parametrize(
    "shares", [[[0, 1], [2, 3, 4]], [[3, 4], [0, 1, 2]], [[0, 3], [1, 2, 4]], [[2], [4], [0, 1], [3]]], ids=str
)
def test_outputs_of_lanes_go_to_their_heads(shares: list[list[int]]) -> None:
    whole, parts = torch.randn(2, 5, 3, 4), []
    nobody = Lane.__new__(Lane)  # nothing is asked of it
    for heads in shares:
        run = slice(heads[0], heads[-1] + 1) if heads[-1] - heads[0] == len(heads) - 1 else None
        parts.append(Heads(nobody, torch.tensor(heads), run))
    assert torch.equal(in_head_order(parts, [part.pick(whole) for part in parts], 2, 5), whole)
