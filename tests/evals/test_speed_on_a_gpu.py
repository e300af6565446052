"""What `kvengine bench decode` measures, on a GPU: a file of its own, as such a machine may lack what the command prints by."""

from __future__ import annotations

import pytest
import torch
from support import llama

from kvengine.evals.speed.measure import WAYS, costs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_every_way_is_timed_on_a_gpu() -> None:
    ids = torch.randint(10, 90, (2, 40), generator=torch.Generator().manual_seed(0)).cuda()
    stock, *found, again = costs(llama().cuda(), ids, ["full", "quest(budget=24, page=4)"], 4, WAYS)
    assert [cost.problem for cost in (stock, *found, again)] == [""] * 8
    assert [cost.steps for cost in found] == [*WAYS, *WAYS]
    assert all(cost.ms and cost.peak and cost.held for cost in (stock, *found, again))
