"""Tokens that a retention dropped before their page was sealed leave slots behind that hold nothing."""

import pytest
import torch
from support_layer import Run, draw, run

QUANTISED = {
    "kivi": "kivi(group=16, residual=0)",
    "quantspec": "quantspec(bits=4, group=16, residual=0)",
    "zipcache": "zipcache(high=4, low=4, block=16)",
}


def sealed_with_holes(policy: str) -> tuple[Run, torch.Tensor]:
    """Keys far from 0, as loud channels have them, of which H2O drops some before they are sealed; and those keys."""
    tokens = draw(80, dim=16)
    tokens.k += 50
    found = run(f"h2o(budget=24, recent=0.1) + {policy}", tokens, 40)
    pages = found.lane.pages
    assert pages is not None
    slots = (pages.position >= 0).unflatten(1, (-1, pages.page)).sum(2)
    assert ((slots > 0) & (slots < pages.page)).any()
    return found, tokens.k[0]


@pytest.mark.parametrize("policy", QUANTISED.values(), ids=QUANTISED)
def test_slots_without_a_token_widen_no_range(policy: str) -> None:
    found, keys = sealed_with_holes(policy)
    pages = found.lane.pages
    assert pages is not None
    k, _ = pages.decoded()
    for row, position in enumerate(pages.position):
        held = position >= 0
        true = keys[row, position[held].long()]
        step = (keys.amax() - keys.amin()) / 15
        assert ((k[row, held] - true).abs() <= step / 2 + 50 * 2**-10).all()


def test_all_salient_codes_of_a_block_are_those_of_tokens() -> None:
    """Where as many tokens are left as may be salient, all are: none of the wider codes goes to an empty slot."""
    found, keys = sealed_with_holes("zipcache(high=8, low=1, salient=0.75, block=16)")
    pages = found.lane.pages
    assert pages is not None
    k, _ = pages.decoded()
    few = 0
    for row, position in enumerate(pages.position):
        for at in range(0, len(position), pages.page):
            span = torch.arange(at, at + pages.page)[position[at : at + pages.page] >= 0]
            if len(span) and pages.page - len(span) >= 4:
                few += 1
                true = keys[row, position[span].long()]
                assert ((k[row, span] - true).abs() < 0.1).all()
    assert few
