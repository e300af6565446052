"""What a prompt's tokens receive: by the kernel where slots tell who sees whom, by masks elsewhere, and the same by both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from kvengine.cache import LayerCache
from kvengine.lane import Lane
from kvengine.rope import Rope
from kvengine.session import Call
from kvengine.stack import Stack

SEQUENCES, HEADS, GROUP, DIM = 2, 2, 2, 16
SMALL = "h2o(budget=24)"
STACKS = {  # and whether the kernel reads their first prompt, and those after it
    SMALL: (True, True),
    "h2o(budget=24) + kivi(bits=4, group=8, residual=8)": (True, True),
    "tova(budget=24)": (True, True),
    "zipcache(block=16)": (True, True),
    "ashape(sinks=2, local=9) + h2o(budget=24)": (True, False),
    "ashape(sinks=2, local=9, last=6) + h2o(budget=24)": (True, False),
}
CALLS = {
    "plain": Call(0.25),
    "capped": Call(0.25, 3.0),
    "sinks": Call(0.25, None, torch.tensor([[0.5, -1.0], [2.0, 0.0]])),
}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each prompt's chunk that is counted, whether the kernel did; what masks find is compared with it."""
    found: list[bool] = []
    counted, banded = Lane.column_mass, Lane.banded

    def both(self: Lane, q: Tensor, at: Tensor, real: Tensor, *more: Any) -> Float[Tensor, "row group token"]:
        got = counted(self, q, at, real, *more)
        by_slot, band = banded(self)
        with monkeypatch.context() as patch:
            patch.setattr(Lane, "banded", lambda self: (False, band))
            want = counted(self, q, at, real, *more)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)
        assert bool(got.any())
        found.append(by_slot)
        return got

    monkeypatch.setattr(Lane, "column_mass", both)
    return found


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("text", STACKS)
def test_the_kernel_finds_what_masks_do(text: str, call: str, padded: bool, compared: list[bool]) -> None:
    cache = LayerCache(Stack.parse(text), 0, 1)
    cache.session.rope = Rope(10000.0 ** -(torch.arange(DIM // 2) * 2 / DIM))
    for lengths, pad in (((37, 30), 5), ((40,), 11)):  # a prompt in chunks, and one after it
        cache.session.prompt_end = cache.seen + sum(lengths)
        for i, n in enumerate(lengths):
            qkv = [torch.randn(SEQUENCES, h, n, DIM) for h in (HEADS * GROUP, HEADS, HEADS)]
            valid = torch.ones(SEQUENCES, n, dtype=torch.bool)
            valid[1, : 0 if i else pad] = False
            cache.forward(*qkv, CALLS[call], valid if padded else None)
    first, later = STACKS[text]
    assert compared[:2] == [first, first] and compared[2:] == [later]
