"""Random stacks live random lives: copied, reordered, drafted on and taken back, they read as those that only decoded."""

import copy
from random import Random
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import MIXED, SMALL, Bare, methods
from torch import Tensor

import kvengine
from kvengine.policies import catalogue
from kvengine.stack import Stack

AXES = st.lists(st.sampled_from(methods()), min_size=1, max_size=4, unique_by=lambda name: catalogue()[name])
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("decode"), st.integers(1, 20)),
        st.tuples(st.just("draft"), st.integers(1, 12)),
        st.tuples(st.just("copy"), st.integers(1, 20)),
        st.tuples(st.just("swap"), st.just(0)),
    ),
    min_size=1,
    max_size=5,
)


def swapped(one: Bare) -> None:
    """Both sequences change places, in the cache and in what is fed."""
    one.q, one.k, one.v = one.q.flip(0), one.k.flip(0), one.v.flip(0)
    one.cache.rows(torch.tensor([1, 0]))


@settings(max_examples=25)
@given(AXES, st.integers(1, 70), EVENTS)
def test_what_happens_between_tokens_leaves_no_trace(
    names: list[str], prompt: int, events: list[tuple[str, int]]
) -> None:
    try:
        text = str(Stack.parse(" + ".join(SMALL[name] for name in names)))
        lived, plain = (Bare(text, rows=2) for _ in range(2))
        lived.feed(prompt), plain.feed(prompt)
    except kvengine.errors.PolicyError:
        return
    turned = False
    for event, n in [*events, ("decode", 10)]:
        if event == "swap":
            swapped(lived)
            turned = not turned
        elif event == "draft":
            lived.cache.session.recording = True
            lived.feed(n)
            lived.back(n)
            lived.cache.commit()
            lived.cache.session.recording = False
        elif event == "copy":
            aside, lived = lived, copy.deepcopy(lived)
            for _ in range(n):
                aside.feed(1)
        else:
            for _ in range(n):
                a, b = lived.feed(1), plain.feed(1)
                torch.testing.assert_close(a.flip(0) if turned else a, b, rtol=1e-4, atol=1e-5)


DRAFTS = st.lists(
    st.tuples(st.integers(1, 9), st.booleans(), st.integers(0, 12)), min_size=1, max_size=5
)  # tokens that come in one pass, some of them padding or not, and how many of all are taken back then


@example("full", 20, [(3, True, 0), (2, False, 1)], Random(0))  # to where nothing was remembered, behind what was
@example("full", 20, [(2, False, 0), (1, True, 2)], Random(0))
@example("streaming(sinks=2, recent=20) + host", 60, [(9, False, 0)] * 3 + [(9, False, 11)], Random(0))
@example(
    SMALL["rkv"], 30, [(5, False, 0), (4, False, 3), (4, False, 0)], Random(0)
)  # before a verdict, and over it again
@example(SMALL["h2o"], 40, [(6, False, 2), (3, False, 6), (3, False, 2)], Random(0))  # twice, the second time further
@example(SMALL["kivi"], 20, [(1, False, 0), (9, False, 10), (9, False, 0)], Random(0))  # to before there were pages
@settings(max_examples=40)
@given(st.sampled_from([*SMALL.values(), *MIXED]), st.integers(20, 60), DRAFTS, st.randoms(use_true_random=False))
def test_a_draft_is_taken_back_to_any_token(
    text: str, prompt: int, drafts: list[tuple[int, bool, int]], chance: Random
) -> None:
    """Other tokens come then, in place of those taken back, padding in other rows. Against a cache that was given what stayed."""
    lived, plain = (Bare(text, rows=2) for _ in range(2))
    lived.feed(prompt), plain.feed(prompt)
    lived.cache.session.recording, stay = True, list[Tensor]()
    others = torch.Generator().manual_seed(1)  # the same again when an example is looked at again
    for n, padded, back in drafts:
        for x in (lived.q, lived.k, lived.v):
            x[:, :, lived.at :] = torch.randn(x[:, :, lived.at :].shape, generator=others)
        valid = torch.tensor([[chance.random() < 0.7 for _ in range(n)] for _ in range(2)]) if padded else None
        lived.feed(n, valid)
        stay += list((torch.ones(2, n, dtype=torch.bool) if valid is None else valid).split(1, 1))
        lived.back(back := min(back, len(stay)))
        del stay[len(stay) - back :]
    lived.cache.commit()
    lived.cache.session.recording = False
    plain.q, plain.k, plain.v = lived.q, lived.k, lived.v
    for valid in stay:
        plain.feed(1, None if bool(valid.all()) else valid)
    for a, b in zip(*([part.lane for part in one.cache.parts] for one in (lived, plain)), strict=True):
        assert (a.seen, len(a.tail), counts(a)) == (b.seen, len(b.tail), counts(b))
        for name in ("first", "begin", "prompt_length"):
            assert torch.equal(getattr(a, name), getattr(b, name)), name
        assert a.pages is None or len(a.pages.pages_in_use()) == len(b.pages.pages_in_use())
    for _ in range(6):
        torch.testing.assert_close(lived.feed(1), plain.feed(1), rtol=1e-4, atol=1e-5)


def counts(lane: Any) -> list[int]:
    """Tokens in the tail, by row."""
    found = [0] * len(lane.first)
    for n, rows in lane.lengths:
        for row in range(len(found)) if rows is None else rows.tolist():
            found[row] = n
    return found
