"""What breaks off around a recorded step is undone, or noticed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import llama, one
from test_compiled import KIVI, STEPS, at, layer, tokens

import kvengine
from kvengine.errors import CacheError
from kvengine.fixed import FixedLane, FixedLayer
from kvengine.session import Call


@pytest.mark.parametrize("text", [KIVI, f"duo(sinks=2, recent=10) + {KIVI}"])
def test_a_layer_that_cannot_be_held_goes_on_as_it_was(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where memory runs short when everything else has moved."""
    qkv = tokens()
    eager, held = layer(text, qkv), layer(text, qkv)
    pinned, lanes = FixedLane.pinned, len(held.parts)

    def short(lane: FixedLane) -> Any:
        if lane.number == lanes - 1:
            raise MemoryError
        return pinned(lane)

    monkeypatch.setattr(FixedLane, "pinned", short)
    with pytest.raises(MemoryError):
        FixedLayer(held, STEPS, torch.tensor([held.seen]))
    for i in range(STEPS):
        torch.testing.assert_close(held.forward(*at(qkv, i), Call(0.25)), eager.forward(*at(qkv, i), Call(0.25)))


def test_a_step_that_broke_off_is_noticed() -> None:
    """Control-C between two layers: the first has put the token where one was dropped, and does not count it."""
    model = llama()
    with kvengine.patched(model, "h2o(budget=24)"), torch.no_grad():
        cache, ids = kvengine.EngineCache(model), torch.ones(1, 1, dtype=torch.long)
        model(one()["input_ids"], cache=cache)
        steps = kvengine.compile_decode(model, "eager").open(cache, 4)
        steps(ids, 61 * ids)
        hook = model.model.layers[0].mlp.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            steps(ids, 62 * ids)
        hook.remove()
        with pytest.raises(CacheError, match="broke off"):
            steps(ids, 62 * ids)
        steps.close()
        with pytest.raises(CacheError, match="broke off"):
            model(ids, cache=cache)
