"""A decoded token in one call of the C kernels, against the general path.

Where it reads sealed pages beside the tail, they give the same bits; where its attention judges, the same tokens stay.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support import Bare, every
from support_kernels import backends
from torch import Tensor

from kvengine.beside import Beside
from kvengine.cache import LayerCache
from kvengine.errors import CacheError
from kvengine.lane import Lane
from kvengine.policies.selection.quest import Quest
from kvengine.replay import rerun, tell
from kvengine.rope import Rope
from kvengine.session import Call, Session
from kvengine.stack import Stack
from kvengine.stats import measure

pytestmark = pytest.mark.skipif("native" not in backends(), reason="no C compiler")
STACKS = [
    "kivi(group=16, residual=16)",
    "kivi(bits=8, group=8, residual=8)",
    "quantspec(group=16, residual=16)",
    "turboquant(residual=16)",
    "turboquant(bits=4, values=2, residual=16) + quest(budget=40, page=8)",
    "zipcache(block=16)",
    "quest(budget=40, page=8)",
    "quest(budget=40, page=8) + kivi(group=8, residual=8)",
    "landmarks(budget=40, chunk=4, local=8)",
    "tidal(budget=24, start=0)",
    "host",
    "host + quest(budget=40, page=8)",
    "adakv(budget=40, window=4)",
    "kvzip(budget=40, chunk=32)",
    "snapkv(budget=40, window=4) + kivi(group=8, residual=8)",
    "duo(sinks=2, recent=9) + quest(budget=40, page=8) + kivi(group=8, residual=8)",
    "duo(sinks=10, recent=27) + quest(budget=24, page=8) + kivi(group=8, residual=8)",
    "streaming(sinks=2, recent=0.5) + zipcache(block=16)",
    "streaming(sinks=0, recent=30) + kivi(group=8, residual=8)",
    "streaming(sinks=5, recent=40) + landmarks(budget=24, chunk=4, local=8)",
]
SHAPES = {"GQA": (6, 2, 32, 32), "MHA": (3, 3, 16, 48), "odd": (5, 1, 24, 40), "wide": (2, 1, 512, 512)}


def talk(
    text: str, shape: str, dtype: torch.dtype, prompt: int, pad: int, steps: int
) -> tuple[list[Tensor], LayerCache]:
    """A prompt, decoded tokens that fill several pages, rows that change places, and a copy that goes on."""
    heads, kv, dim, dim_v = SHAPES[shape]
    rng = torch.Generator().manual_seed(prompt)
    sizes = ((heads, dim), (kv, dim), (kv, dim_v))
    qkv = [torch.randn(2, h, prompt + steps, d, generator=rng).to(dtype) for h, d in sizes]
    valid = torch.ones(2, prompt, dtype=torch.bool)
    valid[1, :pad] = False
    place = (2, 4) if "official" in text else (0, 2)  # which spares the first layers, and the last
    layer = LayerCache(Stack.parse(text), *place, Session(rope=Rope(torch.ones(dim // 2))))
    if "kvzip" in text:
        tell(layer, 0, prompt, valid)
    layer.forward(*(x[:, :, :prompt] for x in qkv), Call(0.2), valid if pad else None)
    rerun([layer], [tuple(qkv)], Call(0.2))
    out = []
    for i in range(prompt, prompt + steps):
        if i == prompt + steps // 3:
            layer.rows(torch.tensor([1, 0]))
        if i == prompt + steps // 2:
            layer = copy.deepcopy(layer)
        out.append(layer.forward(*(x[:, :, i : i + 1].contiguous() for x in qkv), Call(0.2)))
    return out, layer


def kinds(*shapes: str) -> list[Any]:
    """Shapes, dtypes and padding: each of the first two shapes has some of the kinds, the others are slow."""
    few = [(shapes[0], torch.float32, 7), (shapes[0], torch.bfloat16, 5), (shapes[1], torch.float32, 0)]
    every = [(s, *kind) for s in shapes for kind in ((torch.float32, 0), (torch.float32, 7), (torch.bfloat16, 5))]
    return [pytest.param(*one, marks=[] if one in few else [pytest.mark.slow]) for one in every]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("text", STACKS)
@pytest.mark.parametrize(("shape", "dtype", "pad"), kinds("GQA", "odd", "MHA", "wide"))
def test_one_call_changes_nothing(
    text: str, shape: str, dtype: torch.dtype, pad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shape == "wide" and any(name in text for name in ("kivi", "quantspec", "turboquant", "zipcache")):
        shape = "GQA"  # the C kernels read codes of 256 channels at most
    read, reading = [], Beside.reading
    monkeypatch.setattr(Beside, "reading", lambda *args: read.append(made := reading(*args)) or made)
    got, layer = talk(text, shape, dtype, 90, pad, 40)
    found = [measure([layer])]
    late = sum(part.lane.thins for part in layer.parts)  # they have no pages at first, if they keep few tokens
    every = 40 * sum(part.lane.reads for part in layer.parts)
    assert every - 20 * late <= len(read) <= every and len(read) > 0 and None not in read
    monkeypatch.setattr(Beside, "reading", lambda *_: None)
    want, slow = talk(text, shape, dtype, 90, pad, 40)
    found.append(measure([slow]))
    apart = 0.0 if SHAPES[shape][3] % 16 == 0 else 1e-6 if dtype == torch.float32 else 1e-2  # torch joins these parts
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=apart)
    assert found[0].bytes == found[1].bytes and found[0].read_per_token == found[1].read_per_token
    assert torch.equal(found[0].attended, found[1].attended) and torch.equal(found[0].held, found[1].held)
    for part, twin in zip(layer.parts, slow.parts, strict=True):
        a, b = part.lane.pages, twin.lane.pages
        assert torch.equal(a.position, b.position) and torch.equal(a.alive, b.alive) and a.clean == b.clean


@pytest.mark.parametrize("text", ["quantspec(group=8, residual=8)", "quantspec(group=16) + quest(budget=16, page=16)"])
def test_one_call_reads_coarsely_from_the_first_token_on(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is asked to, and finely from the first one that is not."""
    found = []
    for coarse, once in ((True, True), (False, True), (True, False)):
        if not once:
            monkeypatch.setattr(Beside, "reading", lambda *_: None)
        bare = Bare(text, dim=32, tokens=180)
        bare.feed(170)
        for i in range(6):
            bare.cache.session.coarse = coarse and i in (2, 3)
            found.append(bare.feed(1))
    for i, (mine, fine, want) in enumerate(zip(found[:6], found[6:12], found[12:], strict=True)):
        torch.testing.assert_close(mine, want, rtol=0, atol=1e-6)
        assert ((mine - fine).abs().max() > 1e-3) == (i in (2, 3))


ONCE = [
    "h2o(budget=20)", "h2o(budget=0.3, recent=0.2, reduce='max')", "h2o(budget=30, reduce='sum')", "tova(budget=20)",
    "tova(budget=9, recent=4)", "duo(sinks=2, recent=9) + tova(budget=0.2)",
    "d2o(budget=20)", "d2o(budget=0.3, sinks=1, recent=0.6, beta=0.2, reduce='max')", "d2o(budget=3, sinks=4)",
    "d2o(budget=20, form='official')", "duo(sinks=2, recent=9) + d2o(budget=0.4, shares='measured')",
    "elastic(budget=20, offset=-5)", "elastic(budget=0.3, offset=3, sinks=2, recent=2)",
    "duo(sinks=2, recent=9) + elastic(budget=9, offset=0)",
]  # fmt: skip


def same_tokens(mine: LayerCache, theirs: LayerCache, dtype: torch.dtype) -> None:
    """The same tokens lie in the same slots, with the same scores, keys, values and notes, to rounding."""
    about = {"rtol": 0, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
    for part, twin in zip(mine.parts, theirs.parts, strict=True):
        a, b = part.lane.tail, twin.lane.tail
        assert torch.equal(a.position[:, a.span], b.position[:, b.span])
        held = a.position[:, a.span] >= 0
        torch.testing.assert_close(a.scores(a.span)[held], b.scores(b.span)[held], **about)
        for x, y in ((a.k, b.k), (a.v, b.v)):
            torch.testing.assert_close(x[:, a.span][held], y[:, b.span][held], **about)
        assert part.lane.notes.keys() == twin.lane.notes.keys()
        for name, note in part.lane.notes.items():
            torch.testing.assert_close(note, twin.lane.notes[name], equal_nan=True, **about)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("text", every(2, ONCE))
@pytest.mark.parametrize(("shape", "dtype", "pad"), kinds("GQA", "odd", "MHA"))
@pytest.mark.parametrize("prompt", [12, 40])  # within the budget at first, and beyond it
def test_one_call_keeps_the_same_tokens(
    text: str, shape: str, dtype: torch.dtype, pad: int, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, once = [], Lane.at_once
    monkeypatch.setattr(Lane, "at_once", lambda *args: calls.append(found := once(*args)) or found)
    got, layer = talk(text, shape, dtype, prompt, pad, 40)
    assert len(calls) == 40 * len(layer.parts) and all(x is not None for x in calls)
    monkeypatch.setattr(Lane, "at_once", lambda *_: None)
    want, other = talk(text, shape, dtype, prompt, pad, 40)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-2)
    same_tokens(layer, other, dtype)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("text", [text for text in ONCE if "d2o" in text or "elastic" in text])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ahead", [0, 5])  # tokens before the draft: the first needs a slot more than the prompt left
def test_what_one_call_merged_is_taken_back(
    text: str, dtype: torch.dtype, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a draft, token by token, all is rejected, of another one half; then decoding goes on, and another turn."""
    lives = []
    for used in (True, False):
        if not used:
            monkeypatch.setattr(Lane, "at_once", lambda *_: None)
        rng = torch.Generator().manual_seed(3)
        feed = lambda n: [torch.randn(2, h, n, 32, generator=rng).to(dtype) for h in (6, 2, 2)]  # noqa: E731, B023
        layer = LayerCache(Stack.parse(text), *((2, 4) if "official" in text else (0, 1)), Session())
        layer.forward(*feed(30), Call(0.2))
        out = [layer.forward(*feed(1), Call(0.2)) for _ in range(ahead)]
        layer.session.recording = True
        before = copy.deepcopy(layer)
        for _ in range(6):
            layer.forward(*feed(1), Call(0.2))
        layer.rollback(6)
        same_tokens(layer, before, dtype)
        out += [layer.forward(*feed(1), Call(0.2)) for _ in range(4)]
        layer.rollback(2)
        layer.commit()
        layer.session.recording = False
        out += [layer.forward(*feed(n), Call(0.2)) for n in (1, 1, 12, 1, 1)]
        lives.append((out, layer))
    for mine, theirs in zip(lives[0][0], lives[1][0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5 if dtype == torch.float32 else 2e-2)
    same_tokens(lives[0][1], lives[1][1], dtype)


def test_a_gradient_that_one_call_has_merged_over_is_refused() -> None:
    """A later turn's prompt that the budget holds stays where it was read, with room for a token."""
    rng = torch.Generator().manual_seed(5)
    feed = lambda n: [torch.randn(1, h, n, 32, generator=rng) for h in (6, 2, 2)]  # noqa: E731
    session = Session(prompt_end=10)
    layer = LayerCache(Stack.parse("d2o(budget=20)"), 0, 1, session)
    layer.forward(*feed(10), Call(0.2))
    session.prompt_end = 20
    q, k, v = feed(10)
    out = layer.forward(q.requires_grad_(), k, v, Call(0.2))
    with torch.no_grad():
        layer.forward(*feed(1), Call(0.2))
    with pytest.raises(CacheError, match="has written there since"):
        out.sum().backward()


@pytest.mark.parametrize("more", ["", " + disk(device=0, host=0)"])
def test_a_token_chooses_once(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it turns out that pages cannot be read where they are, which was known only when units were chosen."""
    one, chosen, select = Bare(f"quest(budget=24, page=4){more}"), list[int](), Quest.select
    monkeypatch.setattr(Quest, "select", lambda self, *about: (chosen.append(1), select(self, *about))[1])
    one.feed(70)
    for _ in range(40):
        one.feed(1)
    assert len(chosen) == 40
