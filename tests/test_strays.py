"""Tokens that a retention leaves alone in pages of codes: they move to the tail, and nothing else changes."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import Bare, every, in_turn, llama
from support import held as positions
from support_device import pretended, there
from support_lives import Batch, Detours, part, plain
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import kvengine
from kvengine import EngineCache, saved, strays
from kvengine.cache import LayerCache
from kvengine.fixed import FixedLayer
from kvengine.lane import Lane
from kvengine.replay import tell
from kvengine.session import Call
from kvengine.stack import Stack

STACKS = [
    "tova(budget=24, recent=4) + kivi(bits=2, group=8, residual=8)",
    "h2o(budget=24, recent=0, average=True) + kivi(bits=4, group=8, residual=0)",
    "h2o(budget=24, recent=0) + zipcache(block=8)",
    "h2o(budget=24, average=True) + quantspec(group=8, residual=8)",
    "rkv(budget=20, buffer=7, window=4) + kivi(bits=4, group=8, residual=8)",
]

TURNS = [
    "snapkv(budget=24, window=4) + kivi(bits=4, group=8, residual=8)",
    "chunkkv(budget=24, window=4, chunk=4) + zipcache(block=8)",
    "adakv(budget=24, window=4) + kivi(bits=2, group=8, residual=0)",
    "keydiff(budget=24, recent=4) + quantspec(group=8, residual=8)",
    "kvzip(budget=0.4, chunk=16) + kivi(bits=4, group=8, residual=8)",
]
"""Those that judge at the end of a turn only."""


def lane_of(bare: Bare) -> Lane:
    return bare.cache.parts[0].lane


def nbytes(bare: Bare) -> int:
    """Of what the tail and the pages in use hold."""
    lane = lane_of(bare)
    slots = sum(x[:, lane.tail.span].nbytes for x in (lane.tail.k, lane.tail.v))
    return slots + (0 if lane.pages is None else len(lane.pages.pages_in_use()) * lane.pages.pool.page_bytes)


def pays(lane: Lane) -> bool:
    """Whether no page takes more than its tokens would."""
    pages = lane.pages
    assert pages is not None
    counts = (pages.position >= 0).unflatten(1, (-1, pages.page)).sum(2)[pages.table >= 0]
    token = sum(x.shape[-1] * x.element_size() for x in (lane.tail.k, lane.tail.v))
    return all(n * token >= pages.pool.page_bytes for n in counts.tolist())


def anyhow(seed: int) -> Any:
    """Other pages than would be chosen, alike for rows that are alike."""
    chance = Random(seed)

    def emptied(counts: np.ndarray, *_: Any) -> np.ndarray | None:
        call, found = chance.random(), []
        for row in counts.tolist():
            mine = Random(f"{call} {row}")
            found.append([n > 0 and mine.random() < 0.6 for n in row])
        return np.array(found) if np.any(found) else None

    return emptied


@pytest.mark.sampled(9)
@pytest.mark.parametrize("padding", [0, 51], ids=["even", "ragged"])
@pytest.mark.parametrize("stack", STACKS)
def test_answers_are_those_of_pages_with_holes(stack: str, padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever pages are given up; and if they are chosen, nothing takes more bytes for it."""
    valid = torch.ones(2, 60, dtype=torch.bool)
    valid[1, :padding] = False
    made: list[Any] = []
    for choice in (strays.emptied, anyhow(1), lambda *_: None):
        monkeypatch.setattr("kvengine.strays.emptied", choice)
        bare = Bare(stack, rows=2, tokens=210)
        out = [bare.feed(60, valid)[:, -1:], *(bare.feed(1) for _ in range(150))]
        made.append((torch.cat(out, 1), positions(bare.cache), nbytes(bare)))
    *_, (want, same, more) = made
    for got, tokens, _ in made:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert tokens == same
    assert made[0][2] <= more


@pytest.mark.sampled(8)
@pytest.mark.parametrize("padding", [0, 51], ids=["even", "ragged"])
@pytest.mark.parametrize("stack", [*TURNS, *every(2, STACKS)])
def test_verdicts_of_later_turns_are_those_of_pages_with_holes(
    stack: str, padding: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies where, neighbours are those in the text."""
    valid = torch.arange(60) >= torch.tensor([0, padding])[:, None]
    made: list[Any] = []
    for choice in (strays.emptied, anyhow(1), anyhow(2), lambda *_: None):
        monkeypatch.setattr("kvengine.strays.emptied", choice)
        bare, out, some = Bare(stack, rows=2, tokens=300), [], list[bool]()
        for turn, n in enumerate([60, 25, 7, 40, 30]):
            late = torch.arange(n) >= torch.tensor([0, n // 2 if padding else 0])[:, None]
            out.append(bare.feed(n, late if turn else valid)[:, -1:])
            out += [bare.feed(1) for _ in range(15)]
            some.append(lane_of(bare).tail.strays)
        made.append((torch.cat(out, 1), positions(bare.cache), any(some)))
    *_, (want, same, never) = made
    for got, tokens, _ in made:
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        assert tokens == same
    assert made[1][2] and made[2][2] and not never


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stack", STACKS)
def test_strays_are_in_the_models_dtype(stack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are decoded in more than bfloat16 has, and rounded once."""
    made = []
    for choice in (anyhow(1), lambda *_: None):
        monkeypatch.setattr("kvengine.strays.emptied", choice)
        bare = Bare(stack, tokens=160)
        bare.q, bare.k, bare.v = (x.bfloat16() for x in (bare.q, bare.k, bare.v))
        made.append(torch.cat([bare.feed(60)[:, -1:], *(bare.feed(1) for _ in range(100))], 1))
        assert {x.dtype for x in (bare.q, lane_of(bare).tail.k, lane_of(bare).tail.v)} == {torch.bfloat16}
    found, want = (x.float() for x in made)
    assert torch.cosine_similarity(found, want, dim=-1).median() > 0.9999


@pytest.mark.sampled(3)
@pytest.mark.parametrize("retention", ["tova(budget=96)", "h2o(budget=96)", "rkv(budget=80, buffer=16)"])
def test_bytes_do_not_become_more_than_without_codes(retention: str) -> None:
    """But for a tail's room, however long the text becomes."""
    coded, plain = (
        Bare(f"{retention}{form}", dim=32, tokens=700) for form in (" + kivi(bits=4, group=16, residual=0)", "")
    )
    most = 0
    for i in range(640):
        for one in (coded, plain):
            one.feed(1 if i else 60)
        if lane_of(coded).lengths == [(0, None)]:
            most = max(most, nbytes(coded))
    assert most and most <= 1.05 * nbytes(plain)


@pytest.mark.parametrize("retention", ["snapkv(budget=96)", "chunkkv(budget=96)", "keydiff(budget=96)"])
def test_bytes_do_not_become_more_from_turn_to_turn(retention: str) -> None:
    coded, plain = (
        Bare(f"{retention}{form}", heads=1, dim=32, tokens=2000)
        for form in (" + kivi(bits=4, group=16, residual=0)", "")
    )
    for _ in range(12):
        for one in (coded, plain):
            one.feed(150)
        room = lane_of(coded).lengths[0][0] * 2 * 32 * 4
        assert nbytes(coded) - room <= nbytes(plain)
        assert lane_of(coded).pages.pool.pages <= 2 * lane_of(coded).pages.columns  # type: ignore[union-attr]
        assert pays(lane_of(coded))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stack", STACKS)
def test_no_page_takes_more_than_its_tokens_would(stack: str) -> None:
    """Of one row, however long the text becomes; and a tail holds no more than what is open and the retention's budget."""
    bare = Bare(stack, heads=1, tokens=700)
    bare.feed(60)
    for _ in range(400):
        bare.feed(1)
        lane = lane_of(bare)
        if lane.lengths == [(lane.stack.room, None)] and lane.pages is not None:  # just sealed
            assert pays(lane)
            assert len(lane.tail) <= lane.stack.room + 27
            assert not lane.tail.strays or lane.tail.capacity == len(lane.tail) + lane.stack.page


def best_saving(counts: np.ndarray, have: np.ndarray, token: int, page: int) -> int:
    """Bytes that can be saved at most by rows that give up their emptiest pages, all up to one number of strays."""
    most = 0
    for width in range(int(have.max()), int(have.max() + counts.sum()) + 1):
        gone = 0
        for row, n in zip(counts.tolist(), have.tolist(), strict=True):
            for c in sorted(x for x in row if 0 < x * token < page):
                n += c
                gone += n <= width
        most = max(most, gone * page - len(counts) * (width - int(have.max())) * token)
    return most


@given(st.data())
def test_as_many_bytes_are_saved_as_can_be(data: Any) -> None:
    rows, columns, token, page = (data.draw(st.integers(1, n)) for n in (3, 5, 4, 20))
    each = st.lists(st.integers(0, 8), min_size=columns, max_size=columns)
    counts = np.array(data.draw(st.lists(each, min_size=rows, max_size=rows)))
    have = np.array(data.draw(st.lists(st.integers(0, 9), min_size=rows, max_size=rows)))
    found, want = strays.emptied(counts, have, token, page), best_saving(counts, have, token, page)
    if found is None:
        assert want == 0
        return
    assert (counts[found] > 0).all() and (counts[found] * token < page).all()
    width = max(int((have + (counts * found).sum(1)).max()), int(have.max()))
    assert found.sum() * page - rows * (width - have.max()) * token == want > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", STACKS)
def test_what_is_chosen_by_is_what_is_held(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of each page and those in the tail that are no longer open, and their bytes."""
    bare, inner, asked = Bare(text, tokens=300), anyhow(1), []

    def choosing(counts: np.ndarray, mine: np.ndarray, token: int, page: int) -> np.ndarray | None:
        lane = lane_of(bare)
        pages, tail = lane.pages, lane.tail
        assert pages is not None
        held = pages.position.reshape(len(counts), -1, lane.stack.page).tolist()
        used = pages.table.tolist()
        assert counts.tolist() == [
            [sum(p >= 0 for p in one) if i >= 0 else 0 for one, i in zip(*row, strict=True)]
            for row in zip(held, used, strict=True)
        ]
        oldest = lane.seen - lane.lengths[0][0]
        assert mine.tolist() == [sum(0 <= p < oldest for p in row) for row in tail.position[:, tail.span].tolist()]
        assert (token, page) == (tail.k[0, 0].nbytes + tail.v[0, 0].nbytes, pages.pool.page_bytes)
        asked.append(mine.sum())
        return inner(counts, mine, token, page)

    monkeypatch.setattr("kvengine.strays.emptied", choosing)
    bare.feed(60)
    for _ in range(150):
        bare.feed(1)
    assert any(asked)


def test_one_byte_is_saved() -> None:
    assert strays.emptied(np.array([[1, 3]]), np.array([0]), token=1, page=2) is not None
    assert strays.emptied(np.array([[2, 3]]), np.array([0]), token=1, page=2) is None


def spoken(model: Any, rows: list[int], change: Any = None) -> Tensor:
    """Logits of decoded tokens, of a turn whose rows have little or nothing to say, and of tokens behind it."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 100, (3, 120), generator=g)
    mask = torch.ones_like(ids)
    mask[1, :21] = mask[2, :30] = mask[1, 80:93] = mask[2, 80:94] = 0
    batch, out = Batch(model, len(rows)), []
    ids, mask = ids[rows], mask[rows]
    for a, b in [(0, 40), *((i, i + 1) for i in range(40, 80)), (80, 94), *((i, i + 1) for i in range(94, 120))]:
        if b - a > 1 and not (mask[:, a:b] > 0).any():
            continue
        some = slice(a, b) if len(rows) > 1 else slice(a + int((mask[0, a:b] == 0).sum()), b)
        out.append(batch.feed(ids[:, some], mask[:, some])[:, -1])
        if change is not None:
            change(batch)
    return torch.stack(out, 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", [*every(3, STACKS), *every(3, TURNS)])
def test_a_row_is_as_alone(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a turn in which rows have little or nothing to say, whatever tokens move when."""
    model = kvengine.patch(llama(), text).double()
    monkeypatch.setattr("kvengine.strays.emptied", anyhow(1))
    together = spoken(model, [0, 1, 2])
    for row in range(3):
        alone = spoken(model, [row])[0]
        torch.testing.assert_close(together[row, :41], alone[:41], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(together[row, -26:], alone[-26:], rtol=1e-3, atol=1e-3)


def has_strays(cache: EngineCache) -> bool:
    return any(part.lane.tail.strays for layer in cache.engines for part in layer.parts)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("text", "way"), in_turn([STACKS[0], STACKS[2], STACKS[4]], ["save", "draft", "swap", "copy"], 3)
)
def test_what_happens_to_a_cache_with_strays_leaves_no_trace(
    text: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = kvengine.patch(llama(), text).double(), []
    monkeypatch.setattr("kvengine.strays.emptied", anyhow(1))

    def change(batch: Batch) -> None:
        cache = batch.caches[0]
        found.append(has_strays(cache))
        if way == "save":
            saved.save(cache, tmp_path / "strays.kv", model)
            batch.caches[0] = saved.load(model, tmp_path / "strays.kv")
            assert has_strays(batch.caches[0]) == found[-1]
        elif way == "copy":
            batch.caches[0] = copy.deepcopy(cache)
            for _ in range(9):  # of which the copy is to know nothing
                model(torch.ones(3, 1, dtype=torch.long), cache=cache)
        elif way == "swap":
            order = [1, 2, 0]
            cache.reorder_cache(torch.tensor(order))
            batch.mask, batch.order = batch.mask[order], [batch.order[i] for i in order]
        else:
            cache.activate_past_recording()
            model(torch.ones(3, 11, dtype=torch.long), cache=cache)
            cache.rollback(11)
            cache.deactivate_past_recording()

    want = spoken(model, [0, 1, 2])
    often = iter(range(1000))

    def sometimes(batch: Batch) -> None:
        if not next(often) % 6:
            change(batch)

    torch.testing.assert_close(spoken(model, [0, 1, 2], sometimes), want, rtol=1e-3, atol=1e-3)
    assert any(found)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", every(2, STACKS))
def test_rows_of_which_none_has_a_page_are_saved(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their columns were others', who are gone."""
    monkeypatch.setattr(
        "kvengine.strays.emptied", lambda counts, *_: (counts > 0) & (np.arange(len(counts)) < 2)[:, None]
    )
    model = kvengine.patch(llama(), text).double()
    cache, ids = EngineCache(model), torch.randint(2, 100, (2, 120), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for piece in ids[:, :90].split(1, 1):
            model(piece, cache=cache)
        while any(part.lane.lengths[0][0] != part.lane.stack.room for one in cache.engines for part in one.parts[:1]):
            model(ids[:, cache.seen : cache.seen + 1], cache=cache)
            assert cache.seen < 119, "a page is sealed in all layers before the text ends"
        cache.batch_select_indices(torch.tensor([0]))
        saved.save(cache, tmp_path / "one.kv", model)
        other = saved.load(model, tmp_path / "one.kv")
        want, got = (model(ids[:1, -1:], cache=one).logits for one in (cache, other))
    torch.testing.assert_close(got, want)


HOLD, DIM = 45, 16


@pytest.fixture
def _anyhow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvengine.strays.emptied", anyhow(1))


def layers(text: str, padding: int) -> tuple[LayerCache, LayerCache, list[Tensor]]:
    """Two alike that have read a prompt, and decoded until they have strays; and what they are fed. With padding, also of another
    turn: then strays stand elsewhere in each row."""
    rng = torch.Generator().manual_seed(3)
    qkv = [torch.randn(2, h, 190, DIM, generator=rng) for h in (4, 2, 2)]
    made = []
    for _ in range(2):
        cache = LayerCache(Stack.parse(text), 0, 1)
        valid = None if not padding else torch.arange(61) >= torch.tensor([0, padding])[:, None]
        tell(cache, 0, 61, valid, 2)
        cache.forward(*(x[:, :, :61] for x in qkv), Call(0.25), valid)
        turn = 112 if padding else 120
        for i in range(61, turn):
            cache.forward(*(x[:, :, i : i + 1] for x in qkv), Call(0.25))
        if padding:
            valid = torch.arange(8) >= torch.tensor([6, 0])[:, None]
            tell(cache, turn, 120, valid, 2)
            cache.forward(*(x[:, :, turn:120] for x in qkv), Call(0.25), valid)
        assert cache.parts[0].lane.tail.strays
        made.append(cache)
    return made[0], made[1], qkv


@pytest.mark.sampled(8)
@pytest.mark.usefixtures("_anyhow")
@pytest.mark.parametrize("padding", [0, 51], ids=["even", "ragged"])
@pytest.mark.parametrize(("text", "stop"), in_turn(STACKS, [HOLD, 5, 0], 3))
def test_a_layer_held_still_keeps_its_strays(text: str, padding: int, stop: int) -> None:
    """Where they lie, while the oldest page of the open tokens is sealed; also those of a row that pauses, if one does."""
    eager, held, qkv = layers(text, padding)
    now, paused = torch.tensor([held.seen]), torch.zeros(2, dtype=torch.bool)
    fixed, where = FixedLayer(held, HOLD, now), []
    for i in range(120, 120 + HOLD):
        if i == 120 + stop:
            paused[1] = True
            fixed.pause(paused)
        given = [x[:, :, i : i + 1] for x in qkv]
        want = eager.forward(*given, Call(0.25), ~paused[:, None] if bool(paused.any()) else None)
        got = held.forward(*given, Call(0.25))
        now.add_(1)
        fixed.advance()
        torch.testing.assert_close(got[~paused], want[~paused], rtol=2e-4, atol=2e-5)
        where.append([(x.data_ptr(), x.shape, x.stride()) for x in fixed.state()])
    assert all(x == where[0] for x in where)
    fixed.release()
    assert positions(held) == positions(eager) and held.seen == eager.seen
    for i in range(120 + HOLD, 190):
        given = [x[:, :, i : i + 1] for x in qkv]
        want, got = (one.forward(*given, Call(0.25)) for one in (eager, held))
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    assert positions(held) == positions(eager)


@pytest.mark.sampled(5)
@pytest.mark.usefixtures("_anyhow")
@pytest.mark.parametrize("text", STACKS)
def test_a_recorded_step_knows_strays(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a list of torch operations, replayed."""
    monkeypatch.setattr("kvengine.kernels.dispatch._best", lambda inputs, native: "reference")
    eager, held, qkv = layers(text, 51)
    now, out = torch.tensor([held.seen]), []
    fixed = FixedLayer(held, HOLD, now)
    state, given = [now, *fixed.state()], [[x[:, :, i : i + 1].clone() for x in qkv] for i in range(120, 120 + HOLD)]

    def step(*given: Tensor) -> Tensor:
        out.append(fixed.step(given[0], given[1], given[2], Call(0.25)))
        now.add_(1)
        return out[0]

    graph = make_fx(step)(*given[0], *state)
    for i, new in enumerate(given):
        want, got = eager.forward(*new, Call(0.25)), graph(*new, *state) if i else out[0]
        fixed.advance()
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", every(3, STACKS))
def test_strays_on_a_gpu(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pretended one, by the kernels' references, over drafts, copies and sessions; beside the CPU, where none move."""
    model, device = llama(num_hidden_layers=1), pretended(monkeypatch)
    script = [part(kind, 2, n, n) for kind, n in (("prompt", 40), ("decode", 26), ("prompt", 3), ("decode", 14))]
    script[0].mask[1, :7] = script[2].mask[1, :1] = 0
    monkeypatch.setattr("kvengine.strays.emptied", lambda *_: None)
    with kvengine.patched(model, text):
        want = plain(model, script)
    monkeypatch.setattr("kvengine.strays.emptied", lambda counts, *_: counts > 0)
    with device, kvengine.patched(there(model), text):
        lifted = [replace(one, ids=there(one.ids), mask=there(one.mask)) for one in script]
        found = [x.cpu() for x in Detours(model, Random(1), tmp_path, chunks=False).live(lifted)]
    for one, a, b in zip(script, found, want, strict=True):
        torch.testing.assert_close(a[one.mask.bool()], b[one.mask.bool()], rtol=0, atol=1e-3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "text",
    [
        "streaming(sinks=2, recent=20) + kivi(bits=4, group=8, residual=8)",  # empties its pages whole
        "elastic(budget=24, offset=-8) + kivi(bits=4, group=8, residual=8)",  # merges anew what every prompt leaves
        STACKS[4] + " + quest(budget=8, page=4)",  # what a query reads would depend on when tokens move
        STACKS[0] + " + host",
        "h2o(budget=24) + turboquant(residual=8)",  # whose codes move as they are
        STACKS[0] + " of latents",
    ],
)
def test_who_has_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor waits for the device to know how many there could be."""
    monkeypatch.setattr("kvengine.strays.emptied", lambda *_: pytest.fail("pages were counted"))
    stack, latents = text.removesuffix(" of latents"), text.endswith("of latents")
    bare = Bare(stack, tokens=300, dim=16)
    if latents:
        bare.v, bare.cache.inner = bare.k[..., :8], 8
    bare.feed(60)
    for _ in range(200):
        bare.feed(1)
    assert lane_of(bare).pages is not None and not lane_of(bare).tail.strays
