"""Scripts set torch's default dtype, to load a model in half precision for instance; the engine's numbers stay what they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support import SMALL, greedy, llama, prompts

import kvengine


@pytest.fixture(params=[torch.float64, torch.bfloat16], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SMALL)
def test_the_text_is_the_same_whatever_the_default_dtype(name: str, default: torch.dtype) -> None:
    model, batch = kvengine.patch(llama(), SMALL[name]), prompts()
    want = greedy(model, batch, 8)
    torch.set_default_dtype(default)
    kvengine.unpatch(model)
    kvengine.patch(model, SMALL[name])  # what is found out of a model then is too
    assert torch.equal(greedy(model, batch, 8), want)
