"""The stack `full` is the stock cache: the same token ids in every family, and nothing left behind after `unpatch`.

The families that most people use are tested always, the others by `make test-slow` and `make test-matrix`.
"""

import pytest
import torch
from families import configs

import kvengine


def greedy(model: torch.nn.Module, count: int) -> torch.Tensor:
    return model.generate(**configs.padded_batch(20), max_new_tokens=count, do_sample=False)


@pytest.mark.parametrize("name", configs.parameters())
def test_full_gives_the_stock_tokens(name: str) -> None:
    if not configs.exists(name):
        pytest.skip(f"this transformers has no {configs.FAMILIES[name].model}")
    model = configs.build(name)
    before = greedy(model, 64)
    with kvengine.patched(model, "full"):
        during = greedy(model, 64)
    assert torch.equal(during, before)
    assert torch.equal(greedy(model, 8), before[:, : 20 + 8])
