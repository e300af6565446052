"""Keys and values near the end of float16's numbers, which codes may decode to more than."""

import pytest
import torch
from support_layer import Tokens, draw, run

from kvengine.session import Call


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("retention", ["full", "elastic(budget=40, offset=-8)"])
def test_a_later_prompt_reads_numbers(retention: str, side: str) -> None:
    """They are read in its dtype; what a merging retention makes of them is kept in that."""
    policy = f"{retention} + turboquant(residual=0, bits=2)"
    tokens = draw(141)
    x = tokens.k if side == "k" else tokens.v
    x[:, :, :64] = 65_000 * x[:, :, :64].clamp(-1, 1)
    tokens.q *= 1e-5 if side == "k" else 1
    half = Tokens(*(x.half() for x in (tokens.q, tokens.k, tokens.v)))
    before = run(policy, Tokens(half.q[:, :, :101], half.k[:, :, :101], half.v[:, :, :101]), 64)
    before.cache.session.prompt_end, before.cache.session.following = 141, False
    assert before.cache.forward(*half.part(101, 141), Call(tokens.scale)).isfinite().all()


def test_low_rank_coordinates_may_be_beyond_it() -> None:
    """Each is of all heads together, and the rank that loses nothing."""
    tokens = draw(101)
    tokens.k[:, :, :64] *= 15_000
    tokens.q *= 1e-4
    half = Tokens(*(x.half() for x in (tokens.q, tokens.k, tokens.v)))
    before = run("lowrank(rank=32)", half, 64)
    assert (before.lane.pages.joint.fields["basis"].abs() > 1).any()  # type: ignore[union-attr]
    torch.testing.assert_close(before.out, run("full", half, 64).out, atol=4e-3, rtol=4e-3)
    before.cache.session.prompt_end, before.cache.session.following = 121, False
    assert before.cache.forward(*half.part(81, 101), Call(tokens.scale)).isfinite().all()
