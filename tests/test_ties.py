"""Of tokens that are wanted exactly as much, the later one stays, wherever in the cache it lies.

So a row is the same alone and beside longer ones, whose padding its decoded tokens replace, and held still, where they fill
other slots: of both, slots are in no order of age.
"""

import pytest
import torch
from support import Bare, held
from torch import Tensor

from kvengine.fixed import FixedLayer
from kvengine.kernels import dispatch

PROMPT, STEPS = 61, 30
STACKS = [
    "tova(budget=24)", "tova(budget=0.4, recent=3)", "h2o(budget=24)", "h2o(budget=24, average=True)",
    "d2o(budget=24)", "d2o(budget=24, form='official')", "duo(sinks=2, recent=10) + tova(budget=24)",
    "elastic(budget=24, offset=-8)", "streaming(sinks=2, recent=14)", "rkv(budget=24, buffer=7, window=4)",
]  # fmt: skip


def alike(stack: str, padding: tuple[int, ...] = (0,)) -> Bare:
    """Tokens whose queries look at all others alike, and whose values tell them apart; a row begins behind its padding."""
    bare = Bare(stack, tokens=PROMPT + 2 * STEPS)
    bare.q, bare.k = torch.zeros_like(bare.q), torch.ones_like(bare.k)
    bare.q, bare.k, bare.v = (
        torch.cat([torch.cat([x[:, :, :p] * 0, x[:, :, : x.shape[2] - p]], 2) for p in padding])
        for x in (bare.q, bare.k, bare.v)
    )
    return bare


def lived(bare: Bare, valid: Tensor | None = None, length: int = PROMPT, fixed: bool = False) -> Tensor:
    bare.feed(length, valid)
    if not fixed:
        return torch.cat([bare.feed(1) for _ in range(STEPS)], 1)
    now, outs = torch.tensor([length]), []
    layer = FixedLayer(bare.cache, STEPS, now)
    for _ in range(STEPS):
        outs.append(bare.feed(1))
        now.add_(1)
        layer.advance()
    layer.release()
    return torch.cat(outs, 1)


@pytest.mark.parametrize("text", STACKS)
def test_a_row_alone_is_the_row_of_a_batch(text: str) -> None:
    padding = (0, 20, 45)
    together = alike(text, padding)
    out = lived(together, torch.arange(PROMPT) >= torch.tensor(padding)[:, None])
    more = torch.cat([together.feed(4), *(together.feed(1) for _ in range(8))], 1)  # a second turn
    for row, pad in enumerate(padding):
        alone = alike(text)
        torch.testing.assert_close(out[row : row + 1], lived(alone, length=PROMPT - pad))
        again = torch.cat([alone.feed(4), *(alone.feed(1) for _ in range(8))], 1)
        torch.testing.assert_close(more[row : row + 1], again)
        want = [[p + pad for p in head] for head in held(alone.cache)[0]]
        assert held(together.cache)[row] == want


@pytest.mark.parametrize("text", STACKS)
@pytest.mark.parametrize("plain", [False, True], ids=["C", "torch"])
def test_held_still_it_is_as_it_was(text: str, plain: bool) -> None:
    eager, still = alike(text), alike(text)
    want = lived(eager)
    if plain:
        with dispatch.torch_only():
            got = lived(still, fixed=True)
    else:
        got = lived(still, fixed=True)
    torch.testing.assert_close(got, want)
    assert held(still.cache) == held(eager.cache)
