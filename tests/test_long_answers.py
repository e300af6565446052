"""Long answers do not depend on where a tail lies: it moves to the front of its slots, again and again, or to larger ones."""

from __future__ import annotations

import pytest
import torch
from support import Bare
from torch import Tensor

from kvengine.tail import Tail
from kvengine.tokens import moved

FORM = "kivi(group=8, residual=64)"
PROMPT, TOKENS = 17, 140
STACKS = [
    FORM,
    f"h2o(budget=90) + {FORM}",
    f"streaming(sinks=2, recent=80) + {FORM}",
    "quest(budget=16, page=4) + " + FORM,
]


def elsewhere(self: Tail, more: int, spare: bool = False) -> None:
    """The oracle: new slots for every token, and none to spare."""
    s, n = self.span, len(self)
    self.keep(self.k[:, s], self.v[:, s], n + more)
    if self.placed:
        self._position = moved(self._position[:, s], n + more)
    if self.scored:
        self.score = moved(self.score[:, s], n + more)
    self.start, self.end, self.shared = 0, n, False


def answer(stack: str, valid: Tensor | None) -> Tensor:
    bare = Bare(stack, dim=16, rows=2, tokens=TOKENS)
    bare.feed(PROMPT, valid)
    return torch.cat([bare.feed(1) for _ in range(TOKENS - PROMPT)], 1)


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("stack", STACKS)
def test_an_answer_is_the_same_wherever_its_tail_lies(
    stack: str, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    valid = None if not padding else torch.arange(PROMPT) >= torch.tensor([0, padding])[:, None]
    restart, over = Tail.restart, []

    def noted(self: Tail) -> None:
        over.append(len(self) > self.start)
        restart(self)

    monkeypatch.setattr(Tail, "restart", noted)
    found = answer(stack, valid)
    assert any(over), "no tail has moved to slots that it lay in itself"
    monkeypatch.setattr(Tail, "reserve", elsewhere)
    torch.testing.assert_close(found, answer(stack, valid), rtol=1e-4, atol=1e-5)
