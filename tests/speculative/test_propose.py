"""Drafters without a model, and laws that are made only where they are looked at."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from kvengine.errors import PolicyError
from kvengine.speculative.accept import ROOT, Draft
from kvengine.speculative.law import MEMORYLESS, Law, Text, for_row
from kvengine.speculative.propose import BLOCK, Lookup, Recycling, best, static_tree

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


def test_a_draft_of_what_came_long_ago_takes_no_more_of_the_text_than_it_says() -> None:
    """What followed the last million tokens ago would be a list of a million, for each draft of five."""
    copied = list[int]()

    class Watched(list[int]):
        def __getitem__(self, at: Any) -> Any:
            found = super().__getitem__(at)
            copied.append(len(found) if isinstance(at, slice) else 1)
            return found

    text = Text(Watched([*range(1000), 3, 4, 5]))
    draft = Lookup().propose(text, [], lambda sure: len(sure) < 5)
    assert draft.tokens == [6, 7, 8, 9, 10] and max(copied) <= 3


def test_the_largest_may_lie_behind_the_last_whole_block() -> None:
    scores = torch.arange(9.0 * BLOCK + 5)[None]
    assert best(scores, 2).tolist() == [[9 * BLOCK + 4, 9 * BLOCK + 3]]


def test_recycling_goes_as_deep_as_it_is_asked_from_the_last_token() -> None:
    memory, scores = Recycling(64), torch.zeros(2, 64)
    scores[0, 4], scores[1, 5] = 1, 1
    memory.observe([3, 4], scores)
    for depth in (1, 2):
        more = lambda sure, depth=depth: len(sure) < depth and set(sure) <= {1.0}  # noqa: E731 - a tree hedges: it is sure
        draft = memory.propose(Text([9, 9]), [3], more)  # type: ignore[arg-type]
        assert len(draft.levels) == depth and draft.tokens[0] == 4
    assert draft.tokens[8] == 5 and draft.parents[8] == 0


def test_the_static_tree_has_80_nodes_in_six_levels() -> None:
    """A node with a likelier one in place of a token on its way is never there without that one."""
    tree = static_tree(80)
    assert [sum(len(path) == depth for path in tree) for depth in range(1, 8)] == [8, 21, 25, 15, 8, 3, 0]
    assert len(set(tree)) == 80 and all(path[:-1] in {(), *tree} for path in tree)
    likelier = [(*p[:i], p[i] - 1, *p[i + 1 :]) for p in tree for i in range(len(p)) if p[i]]
    assert set(likelier) <= set(tree)


def test_a_lookup_tries_three_tokens_then_two_then_one() -> None:
    """Where no lengths are given: not four, which 9 followed; 8 and 7 followed less of it, later."""
    text = Text([6, 1, 2, 3, 9, 5, 1, 2, 3, 4, 2, 3, 8, 3, 7])
    ways = {(6, 1, 2, 3): (4, 3), (0, 1, 2, 3): (4, 3), (0, 2, 3): (8, 2), (0, 3): (7, 1)}
    for tail, (token, length) in ways.items():
        draft = Lookup().propose(text, tail, lambda sure: not sure)
        assert (draft.tokens, draft.confidence) == ([token], [length / 3])
    assert not len(Lookup().propose(text, (3, 0), lambda sure: not sure))


@pytest.mark.parametrize("nodes, vocab", [(0, 64), (81, 64), (80, 7)])
def test_trees_that_cannot_be_are_refused(nodes: int, vocab: int) -> None:
    with pytest.raises(PolicyError, match="recycling"):
        Recycling(vocab, nodes)


@pytest.mark.parametrize("most, least", [(3, 0), (1, 2)])
def test_lookups_that_cannot_be_are_refused(most: int, least: int) -> None:
    with pytest.raises(PolicyError, match="1 <= least <= most"):
        Lookup(most, least)


def found(tokens: list[int], tail: list[int], most: int, least: int, count: int) -> list[tuple[int, float]]:
    """What a search through the whole text finds, and in how large a part of the longest n-gram it is confident."""
    out: list[tuple[int, float]] = []
    while len(out) < count:
        now = [*tokens, *tail, *(token for token, _ in out)]
        for length in range(min(most, len(now)), least - 1, -1):
            ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == now[-length:]]
            if ends:
                out += [(token, length / most) for token in tokens[ends[-1] :][: count - len(out)]]
                break
        else:
            return out
    return out


@pytest.mark.parametrize("most, least", [(3, 1), (2, 2), (1, 1)])
def test_a_lookup_drafts_what_followed_when_the_same_was_said_last(most: int, least: int) -> None:
    rng = random.Random(0)
    for _ in range(20):
        lookup, text = Lookup(most, least), Text([rng.randrange(4)])
        for _ in range(12):
            tail = [rng.randrange(4) for _ in range(rng.choice([0, 0, 1, 4]))]
            count = rng.choice([1, 3, 9])
            draft = lookup.propose(text, tail, lambda sure, count=count: len(sure) < count)  # type: ignore[misc]
            want = found(text.tokens, tail, most, least, count)
            assert list(zip(draft.tokens, draft.confidence, strict=True)) == want and draft.is_chain
            text.tokens += [rng.randrange(4) for _ in range(rng.choice([0, 1, 2, 5]))]


def repeated(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that looks at the tokens: its last one is not to come again."""
    return scores.scatter(1, ids[:, -1:], -torch.inf)


MIXED = (transformers.TemperatureLogitsWarper(0.5), repeated)  # one that never looks, and one that does


@pytest.mark.parametrize("processors", [(), (repeated,), MIXED], ids=["memoryless", "looks back", "mixed"])
@pytest.mark.parametrize("draft", [TREE, CHAIN], ids=["tree", "chain"])
@pytest.mark.parametrize("greedy", [True, False])
def test_laws_on_demand_are_those_of_every_node(draft: Draft, processors: tuple[Any, ...], greedy: bool) -> None:
    """Each is what the processors make of the tokens that lead there, one after the other."""
    law, text, logits = Law(processors, greedy), Text([1, 2, 3]), torch.randn(len(draft) + 1, 16)
    tails = [[4, *draft.path(node)] for node in range(ROOT, len(draft))]
    found, together = law.laws(text, [4], draft, logits), law(text, tails, logits)
    for at, tail in enumerate(tails):
        scores = logits[at : at + 1]
        for processor in processors:
            scores = processor(torch.tensor([[*text.tokens, *tail]]), scores)
        want = F.one_hot(scores[0].argmax(), 16).float() if greedy else scores[0].softmax(-1)
        torch.testing.assert_close(found[at], want)
        torch.testing.assert_close(together[at], want)


def numbered(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that has a rule for each row of its batch of three: one token of its own is banned, and its last one."""
    assert len(ids) == len(scores) == 3
    return repeated(ids, scores.scatter(1, torch.tensor([[10], [11], [12]]), -torch.inf))


@pytest.mark.parametrize("row", range(3))
def test_a_processor_of_a_batch_is_asked_for_one_row_of_it(row: int) -> None:
    ids, scores = torch.tensor([[7, 5]]), torch.zeros(1, 16)
    out = for_row(numbered, row, 3)(ids, scores)
    assert out.shape == (1, 16) and out[0].isinf().nonzero()[:, 0].tolist() == [5, 10 + row]


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


def test_only_transformers_own_are_known_by_their_names() -> None:
    """Somebody's own of the same name may look at the tokens, and have a rule for each row."""

    class TopPLogitsWarper(transformers.LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return numbered(input_ids, scores)

    own = for_row(TopPLogitsWarper(), 1, 3)
    assert own(torch.tensor([[7, 5]]), torch.zeros(1, 16))[0].isinf().nonzero()[:, 0].tolist() == [5, 11]
    TopPLogitsWarper.__call__ = lambda self, ids, scores: repeated(ids, scores)  # type: ignore[method-assign]
    laws = Law((TopPLogitsWarper(),), greedy=False).laws(Text([1, 2]), [], CHAIN, torch.zeros(5, 16))
    assert [int(laws[at].argmin()) for at in range(5)] == [2, *CHAIN.tokens]


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
