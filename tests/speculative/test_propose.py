"""Drafters without a model, and laws that are made only where they are looked at."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from kvengine.speculative.accept import ROOT, Draft
from kvengine.speculative.law import MEMORYLESS, Law, Text
from kvengine.speculative.propose import BLOCK, Recycling, best

TREE = Draft([5, 6, 7, 8], [ROOT, ROOT, 0, 2], [None] * 5, [1.0] * 4)
CHAIN = Draft.chain([5, 6, 7, 8], [None] * 4)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(8, 40 * BLOCK), st.integers(1, 8), st.integers(0, 1 << 30))
def test_best_is_topk(rows: int, vocab: int, count: int, seed: int) -> None:
    scores = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(best(scores, count), scores.topk(count, -1).indices)


def test_recycling_remembers_what_followed_last() -> None:
    memory, scores = Recycling(64, nodes=9), torch.zeros(3, 64)
    for row, token in enumerate((11, 12, 13)):
        scores[row, token] = 1
    memory.observe([3, 4, 3], scores)  # token 3 twice: the later counts
    draft = memory.propose(Text([9, 3]), [], lambda sure: len(sure) < 2)
    assert draft.tokens[0] == 13 and len(draft) == 8 and draft.levels == (8,)  # 13's own successors are not known


def repeated(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that looks at the tokens: its last one is not to come again."""
    return scores.scatter(1, ids[:, -1:], -torch.inf)


@pytest.mark.parametrize("processors", [(), (repeated,)], ids=["memoryless", "looks back"])
@pytest.mark.parametrize("draft", [TREE, CHAIN], ids=["tree", "chain"])
@pytest.mark.parametrize("greedy", [True, False])
def test_laws_on_demand_are_those_of_every_node(draft: Draft, processors: tuple[Any, ...], greedy: bool) -> None:
    law, text, logits = Law(processors, greedy), Text([1, 2, 3]), torch.randn(len(draft) + 1, 16)
    tails = [[4, *draft.path(node)] for node in range(ROOT, len(draft))]
    found = law.laws(text, [4], draft, logits)
    for at, row in enumerate(law(text, tails, logits)):
        torch.testing.assert_close(found[at], row)


BUILT: dict[str, tuple[Any, ...]] = {
    "EpsilonLogitsWarper": (0.05,), "EtaLogitsWarper": (0.05,), "InfNanRemoveLogitsProcessor": (),
    "MinPLogitsWarper": (0.3,), "SuppressTokensLogitsProcessor": ([3, 4],), "TemperatureLogitsWarper": (0.5,),
    "TopHLogitsWarper": (0.5,), "TopKLogitsWarper": (3,), "TopPLogitsWarper": (0.5,), "TypicalLogitsWarper": (0.5,),
}  # fmt: skip


def test_what_is_said_never_to_look_at_the_tokens_does_not() -> None:
    """All positions of a draft are given to these at once, without the tokens before them."""
    assert set(BUILT) == MEMORYLESS
    scores, ids = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)), torch.arange(3).repeat(3, 5)
    for name, arguments in BUILT.items():
        found = getattr(transformers, name)(*arguments)(torch.zeros(3, 1, dtype=torch.long), scores.clone())
        for row in range(3):
            alone = getattr(transformers, name)(*arguments)(ids[row : row + 1], scores[row : row + 1].clone())
            torch.testing.assert_close(found[row], alone[0])


def test_no_law_is_made_where_nobody_looks() -> None:
    seen = []

    def counting(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids[0].tolist())
        return scores

    laws = Law((counting,)).laws(Text([1, 2]), [], TREE, torch.randn(5, 16))
    assert laws[0] is laws[0] and laws[3].argmax() >= 0
    assert seen == [[1, 2], [1, 2, 5, 7]]


def test_a_text_is_its_padding_its_tokens_and_a_tail_however_it_grows() -> None:
    """Tails come and go, and what has been noted of the text is moved when there is no room left."""
    rng = random.Random(0)
    text = Text([5, 6, 7], [9, 9])
    for _ in range(60):
        tail = [rng.randrange(2, 99) for _ in range(rng.choice([0, 1, 2, 30]))]
        assert text.ids(tail).tolist() == [[9, 9, *text.tokens, *tail]]
        every, start = [*text.tokens, *tail], rng.randrange(len(text) + len(tail) + 1)
        assert text.since(start, tail) == every[start:]
        text.tokens += tail[: rng.choice([0, 1, 3])]
    assert len(text) > 30
