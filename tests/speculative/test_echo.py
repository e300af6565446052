"""Cheap caches beside the target's: what they hold after a round is what the target computed, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support_spec import llama, prompt
from torch import Tensor

import kvengine
from kvengine.cache import LayerCache
from kvengine.errors import CacheError, PolicyError, UnsupportedPolicy
from kvengine.hf.cache import EngineCache
from kvengine.session import Call
from kvengine.speculative.accept import Draft
from kvengine.speculative.echo import Echo, Refresh
from kvengine.speculative.law import Text
from kvengine.speculative.session import Session
from kvengine.speculative.view import SLACK, ViewCache
from kvengine.stack import Stack

STACKS = [
    "full", "streaming(sinks=2, recent=12)", "snapkv(budget=16, window=4)", "h2o(budget=16)", "kivi(bits=4)",
    "quest(budget=24, page=4)", "duo(sparsity=0.5)", "snapkv(budget=32, window=4) + kivi",
]  # fmt: skip
CALL = Call(8**-0.5)


@pytest.fixture(scope="module")
def model() -> Any:
    return kvengine.patch(llama())


def state(layer: LayerCache) -> list[Tensor]:
    """Everything a layer holds, in the order of positions."""
    found = []
    for part in layer.parts:
        k, v, position, score = part.lane.everything()
        order = position.argsort(1)
        at = order[..., None]
        gone = (position.gather(1, order) < 0)[..., None]
        found += [k.gather(1, at.expand_as(k)).masked_fill(gone, 0), v.gather(1, at.expand_as(v)).masked_fill(gone, 0)]
        found += [position.gather(1, order), score.gather(1, order).masked_fill(gone[..., 0], 0)]
    return found


def layer(stack: str, prompt: int = 40) -> tuple[LayerCache, Any]:
    """A layer that has read a prompt, and a source of further tokens."""
    generator = torch.Generator().manual_seed(0)
    new = lambda n: [torch.randn(1, h, n, 8, generator=generator) for h in (4, 2, 2)]  # noqa: E731
    cache = LayerCache(Stack.parse(stack), 0, 2)
    cache.forward(*new(prompt), CALL)
    cache.session.recording = True
    return cache, new


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("kept", [0, 1, 3, 6])
def test_appending_six_and_keeping_some_is_appending_those(stack: str, kept: int) -> None:
    """Twice over, through a page's end, and bit for bit."""
    (drafted, new), (plain, _) = layer(stack), layer(stack)
    for _ in range(6):
        q, k, v = new(6)
        drafted.forward(q, k, v, CALL)
        drafted.rollback(6 - kept)
        drafted.commit()
        for i in range(kept):
            plain.forward(q[:, :, i : i + 1], k[:, :, i : i + 1], v[:, :, i : i + 1], CALL)
        plain.commit()
        for mine, its in zip(state(drafted), state(plain), strict=True):
            assert mine.shape == its.shape and torch.equal(mine, its)


@pytest.mark.parametrize("stack", STACKS)
def test_following_is_reading(stack: str) -> None:
    """A cache that only hears the tokens holds what one that attends holds."""
    (read, new), heard = layer(stack, 1), LayerCache(Stack.parse(stack), 0, 2)
    read, q, k, v = LayerCache(Stack.parse(stack), 0, 2), *new(40)
    read.forward(q, k, v, CALL)
    heard.follow(q, k, v, CALL)
    for cache in (read, heard):
        cache.session.recording = True
    q, k, v = new(5)
    read.forward(q, k, v, CALL)
    heard.follow(q, k, v, CALL)
    assert all(torch.equal(a, b) for a, b in zip(state(read), state(heard), strict=True))


def echo(model: Any, stack: str, ids: Tensor, **options: Any) -> tuple[Session, Echo, Text]:
    whole = Session(model, EngineCache(model, "full"))
    chosen = Stack.parse(stack)
    cache = ViewCache(model, whole.cache, chosen) if chosen.selects else EngineCache(model, chosen)
    mine = Echo(model, cache, whole=whole, refresh=Refresh(**options))
    text = Text(ids[0].tolist())
    whole.prefill(text.tokens)
    mine.prefill(text.tokens)
    return whole, mine, text


def round_(whole: Session, mine: Echo, text: Text, drafted: list[int], stand: int) -> None:
    """Draft on the echo, judge on the target, let some stand, and a token of the target's."""
    mine.feed([text.tokens[-1], *drafted[:-1]])
    whole.feed([*text.since(whole.settled, ()), *drafted])
    whole.forget(len(drafted) - stand)
    text.tokens += [*drafted[:stand], 9]
    whole.settle(text)
    mine.settle(text)


def test_verified_keys_and_values_replace_drafted_ones(model: Any) -> None:
    whole, mine, text = echo(model, "full", prompt(60))
    text.tokens.append(3)
    for stand in (2, 0, 4, 1):
        round_(whole, mine, text, [5, 6, 7, 8], stand)
        mine.ready()
        for ours, its in zip(mine.cache.engines, whole.cache.engines, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(ours.contents(), its.contents(), strict=True))
        assert mine.settled == whole.settled == len(text) - 1 == whole.cache.seen


def test_a_view_holds_the_targets_tokens(model: Any) -> None:
    whole, mine, text = echo(model, "quest(budget=24, page=4)", prompt(60), every=3, below=0.0)
    text.tokens.append(3)
    for stand in (2, 0, 4, 1, 3, 3):
        round_(whole, mine, text, [5, 6, 7, 8], stand)
        mine.ready()
        for view, its in zip(mine.cache.views.values(), whole.cache.engines, strict=True):
            k, v, position, _ = view.tail.held()
            keys, values = (x.flatten(0, 1) for x in its.contents())
            at = position.long()[..., None].expand_as(k)
            assert torch.equal(k, keys.gather(1, at)) and torch.equal(v, values.gather(1, at))
            assert position.shape[1] <= 24 + 3 * 5 and len(position[0].unique()) == position.shape[1]
            newest = torch.arange(view.covered, whole.settled)
            assert all(set(newest.tolist()) <= set(row.tolist()) for row in position)
    assert mine.refresh.choices == 3  # one for the prompt, two in six rounds


def holding(mine: Echo) -> list[Tensor]:
    if isinstance(mine.cache, ViewCache):
        return [x.clone() for view in mine.cache.views.values() for x in view.tail.held()]
    return [x.clone() for layer in mine.cache.engines for x in state(layer)]


@pytest.mark.parametrize("stack", ["full", "quest(budget=24, page=4)", "kivi(group=8, residual=8)", "h2o(budget=24)"])
def test_a_draft_left_alone_for_long_is_where_it_would_be(model: Any, stack: str) -> None:
    """Rounds without a draft cost it nothing at the time; it takes their tokens when it is drafted on, in one go."""
    at_once, late = (echo(model, stack, prompt(60), every=10_000, below=0.0) for _ in range(2))
    for whole, mine, text in (at_once, late):
        text.tokens.append(3)
        for number in range(30):
            before = holding(mine)
            whole.feed(text.since(whole.settled, ()))
            text.tokens.append(4 + number)
            whole.settle(text)
            mine.settle(text)
            if mine is at_once[1]:
                mine.ready()
            else:
                assert mine.late == number + 1 and all(map(torch.equal, before, holding(mine)))
    logits = [mine.feed([text.tokens[-1], 7]) for _, mine, text in (at_once, late)]
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)


def test_a_view_with_room_for_all_is_the_target(model: Any) -> None:
    whole, mine, text = echo(model, "quest(budget=500, page=4)", prompt(60))
    torch.testing.assert_close(mine.feed([3, 4, 5]), whole.feed([3, 4, 5]), rtol=1e-4, atol=1e-4)
    lone = Draft(tokens=[6], parents=[-1])
    torch.testing.assert_close(mine.feed_tree([], lone), whole.feed_tree([], lone), rtol=1e-4, atol=1e-4)
    tree = Draft(tokens=[6, 7, 8, 9], parents=[-1, -1, 0, 2])
    torch.testing.assert_close(mine.feed_tree([], tree), whole.feed_tree([], tree), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stack", ["quest(budget=24, page=4)", "ann(budget=24)"])  # an index is added to
def test_a_view_renews_its_choice_before_it_overflows(model: Any, stack: str) -> None:
    whole, mine, text = echo(model, stack, prompt(60), every=10_000, below=0.0)
    text.tokens.append(3)
    for _ in range(SLACK // 5 + 3):
        round_(whole, mine, text, [5, 6, 7, 8], 4)
        assert all(len(view.tail) <= 24 + SLACK + 5 for view in mine.cache.views.values())
    assert mine.refresh.choices == 2


def test_falling_acceptance_renews_the_choice() -> None:
    refresh = Refresh(every=1000, below=0.6, patience=4)
    assert not any(refresh.due(6, 6) for _ in range(50))
    assert [refresh.due(0, 6) for _ in range(3)] == [False, False, True]
    refresh.chosen()
    assert [refresh.due(0, 6) for _ in range(4)] == [False, False, False, True]
    assert Refresh(every=5).due(6, 6) is False
    assert Refresh(every=1, patience=1, below=1).due(6, 6) and Refresh(every=1, patience=1, below=0).due(6, 6)
    with pytest.raises(PolicyError, match="every=0"):
        Refresh(every=0)


@pytest.mark.parametrize("drafted", [1, 4])
def test_what_is_renewed_by_is_the_share_of_drafted_tokens_that_stand(model: Any, drafted: int) -> None:
    """Of one drafted token too: the token that a draft begins behind always stands, and is none of it."""
    whole, mine, text = echo(model, "quest(budget=24, page=4)", prompt(60), every=1000, below=0.6, patience=4)
    text.tokens.append(3)
    for stand in (drafted, drafted - 1, 0):
        share = mine.refresh.share
        round_(whole, mine, text, [5, 6, 7, 8][:drafted], stand)
        assert mine.refresh.share == pytest.approx(0.8 * share + 0.2 * stand / drafted)
    for _ in range(4):
        round_(whole, mine, text, [5, 6, 7, 8][:drafted], 0)
    mine.ready()
    assert mine.refresh.choices == 2


@pytest.mark.parametrize("stack", ["full", "quest(budget=500, page=4)", "kivi(bits=4)"])
def test_a_tree_is_read_as_its_paths(model: Any, stack: str) -> None:
    """The logits of each node are those of feeding its path, and nothing is left behind."""
    draft = Draft([5, 6, 7, 8, 9], [-1, -1, 0, 0, 2], [None] * 6, [1.0] * 5)
    one, other = (Session(model, EngineCache(model, stack)) for _ in range(2))
    for session in (one, other):
        session.prefill(prompt(40)[0].tolist())
    rows = one.feed_tree([3, 4], draft)
    assert one.open == [3, 4] and one.cache.seen == 42
    other.feed([3])
    for node in range(-1, len(draft)):
        path = [4, *draft.path(node)]
        torch.testing.assert_close(rows[node + 1], other.feed(path)[-1], rtol=1e-4, atol=1e-4)
        other.forget(len(path))
    other.feed([4])
    again = one.feed_tree([], draft)
    torch.testing.assert_close(again, rows[1:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(one.forward([3, 5]), other.forward([3, 5]), rtol=1e-5, atol=1e-5)  # a chain again


def test_what_a_view_cannot_be(model: Any) -> None:
    source = EngineCache(model, "full")
    with pytest.raises(UnsupportedPolicy, match="a view needs a stack that selects"):
        ViewCache(model, source, Stack.parse("h2o(budget=16)"))
    for stack in ("quest + kivi", "duo + quest", "snapkv + quest"):
        with pytest.raises(UnsupportedPolicy, match="selects and does nothing else"):
            ViewCache(model, source, Stack.parse(stack))
    for stack in ("h2o(budget=16)", "duo(sparsity=0.5)"):
        with pytest.raises(UnsupportedPolicy, match="keeps every token"):
            ViewCache(model, EngineCache(model, stack), Stack.parse("quest"))


CHOOSING = [
    "quest(budget=24, page=4)", "retrieval(budget=24, chunk=4)", "oracle_topk(budget=24)",
    "landmarks(budget=24, chunk=4, local=8)",
]  # fmt: skip


@pytest.mark.parametrize("prompted", [59, 60, 61, 62, 63])
@pytest.mark.parametrize("stack", CHOOSING)
def test_a_choice_is_of_the_last_query_and_within_the_budget(model: Any, stack: str, prompted: int) -> None:
    """The prompt's last token chooses what it would choose as one that was let through."""
    ids = prompt(90)[:, :prompted]
    _, mine, _ = echo(model, stack, ids)
    whole, other, text = echo(model, stack, ids[:, :-1], every=1)
    text.tokens.append(int(ids[0, -1]))
    whole.feed(text.tokens[-1:])
    text.tokens.append(5)
    whole.settle(text)
    other.settle(text)
    other.ready()
    for first, late in zip(mine.cache.views.values(), other.cache.views.values(), strict=True):
        position, wanted = first.tail.held()[2], late.tail.held()[2]
        assert torch.equal(position, wanted) and position.shape[1] <= 24
        units = (prompted - (8 if "local" in stack else 0)) // 4 * 4
        newest = torch.arange(prompted if "topk" in stack else units, prompted)  # what is in no whole unit is read
        assert all(torch.isin(newest, row).all() for row in position)


def test_only_open_tokens_can_be_taken_back(model: Any) -> None:
    session = Session(model, EngineCache(model, "full"))
    session.prefill([1, 2, 3])
    session.feed([4])
    with pytest.raises(CacheError, match="1 are open"):
        session.forget(2)
    _, mine, _ = echo(model, "quest(budget=24, page=4)", prompt(60))
    mine.feed([3, 4])
    for view in mine.cache.views.values():
        with pytest.raises(CacheError, match="take back the 2 tokens since its choice, not 3"):
            view.rollback(3)


def test_what_is_settled_is_history_and_the_last_token_is_always_missing(model: Any) -> None:
    """Nothing is kept to go back to; and a pass needs a token, though it was read before."""
    session, ids = Session(model, EngineCache(model, "h2o(budget=16)")), prompt(40)[0].tolist()
    session.prefill(ids)
    session.feed([4, 5])
    assert session.align(Text([*ids, 6]), (5, 7)) == [6, 5, 7] and (session.open, session.cache.seen) == ([], 40)
    session.feed([4, 5])
    assert session.align(Text([*ids, 4, 5]), ()) == [5] and session.open == [4]
    session.feed([5])
    session.settle(Text([*ids, 4, 5, 6]))
    assert (session.settled, session.open, session.cache.seen) == (42, [], 42)
    with pytest.raises(CacheError, match="cannot go back"):
        session.cache.rollback(1)
