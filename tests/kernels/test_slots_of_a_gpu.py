"""A decoded token over slots as a GPU takes it (kernels/gpu/step.py): by the general way, on a CPU, what the plain version says;
and by what its launches are told apart that are remembered."""

from __future__ import annotations

from typing import Any

import pytest
import support_kernels as oracle
import torch
from torch import Tensor

from kvengine.kernels.gpu.fetched import Fetched
from kvengine.kernels.gpu.step import KINDS, Far, Known, Slots, Token
from kvengine.kernels.state import State
from kvengine.kernels.step import Ends, Merged, Paid, Placed, Sealed, step
from kvengine.saliency import running

SEQ, HEADS, GROUP, DIM, DIM_V, SLOTS = 2, 2, 3, 16, 24, 20
ROWS, START, END, AT = SEQ * HEADS, 3, 17, 50
ABOUT: dict[str, Any] = {"start": START, "end": END, "scale": 0.3}


def drawn() -> tuple[Tensor, ...]:
    """A token of every head, and slots: positions out of order, and one free slot in each row."""
    rng = torch.Generator().manual_seed(4)
    q, k, v = (
        torch.randn(SEQ, n, 1, d, generator=rng) for n, d in ((HEADS * GROUP, DIM), (HEADS, DIM), (HEADS, DIM_V))
    )
    keys, values = (torch.randn(ROWS, SLOTS, d, generator=rng) for d in (DIM, DIM_V))
    position = torch.stack([torch.randperm(AT, generator=rng)[:SLOTS] for _ in range(ROWS)]).int()
    position[torch.arange(ROWS), torch.tensor([5, 9, START, END - 1])] = -1
    return q, k, v, keys, values, position, torch.rand(ROWS, SLOTS, generator=rng)


def rules() -> dict[str, Any]:
    rows, budget = torch.ones(ROWS, dtype=torch.int64), torch.full((ROWS,), 9)
    ends, paid = Ends(4 * rows, 30 * rows), Paid(budget, 2 * rows, "mean", adds=True, first=3 * rows)
    sealed = Sealed(ends, torch.arange(16, dtype=torch.int32).repeat(ROWS, 1), torch.ones(ROWS, 4, dtype=torch.bool))
    threshold = torch.full((ROWS,), torch.nan)
    return {"none": None, "ends": ends, "sealed": sealed, "paid": paid, "merged": Merged(paid, threshold, 0.7),
            "placed": Placed(budget, 2 * rows)}  # fmt: skip


@pytest.mark.parametrize("name", rules())
@pytest.mark.parametrize("fill", [False, True])
def test_the_general_way_is_the_plain_one(name: str, fill: bool) -> None:
    q, k, v, *held = drawn()
    mine, theirs = [x.clone() for x in held], [x.clone() for x in held]
    (rule, other), slots = (rules()[name] for _ in range(2)), Slots(*mine[:3])
    at = torch.tensor([AT], dtype=torch.int32)
    got = slots.step(q, k, v, START, END, at, True, 0.3, fill, rule, None, mine[3])
    if name in ("paid", "merged", "placed") and not fill:  # as many as may be are not there yet
        assert got is None and all(torch.equal(a, b) for a, b in zip(mine, held, strict=True))
        return
    more = {"at": AT, "holes": True, "fill": fill, "rule": other, "score": theirs[3], "backend": "reference"}
    want = step(q, k, v, *theirs[:3], **ABOUT, **more)
    assert got is not None and oracle.error(got, want.double()) <= 1e-6
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert name == "none" or not torch.equal(mine[2] < 0, held[2] < 0)
    if name == "sealed":
        assert torch.equal(rule.position, other.position) and torch.equal(rule.alive, other.alive)
        assert not rule.alive[:, 1:].any() and rule.alive[:, 0].all()
    if name == "merged":
        torch.testing.assert_close(rule.threshold, other.threshold)
        assert rule.threshold.isfinite().any()


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("fetched", [False, True])
def test_beside_pages(fetched: bool, holes: bool) -> None:
    """Of pages some columns, or some units of them; what is fetched comes once."""
    q, k, v, keys, values, position, _ = drawn()
    rng = torch.Generator().manual_seed(5)
    fields = {name: torch.randn(12, 4, d, generator=rng) for name, d in (("k", DIM), ("v", DIM_V))}
    table, there = torch.arange(12).view(ROWS, 3).int(), torch.arange(12, dtype=torch.int32).repeat(ROWS, 1)
    there[1, 2] = -1
    units = torch.tensor([[0, 3], [1, 2], [-1, 0], [5, 4]])
    for chosen in (None, units):
        if fetched:
            some = units if chosen is None else chosen[:, :1]
            at = (2 * some.clamp(min=0)[..., None] + torch.arange(2)).flatten(1)
            where = there.gather(1, at).masked_fill((some < 0).repeat_interleave(2, 1), -1)
            pages = [fields[name].view(ROWS, 12, -1)[torch.arange(ROWS)[:, None], at] for name in "kv"]
            far: Any = Fetched(2).reading(lambda: (*pages, where), tuple(some.shape))  # noqa: B023
        else:
            far = Far(fields, table, there, 4, "dense", DIM_V).reading(2, chosen, 2)
            assert far.slots == (8 if chosen is None else 0) and far.unit == (4 if chosen is None else 2)
            if chosen is None:
                pages, where = [fields[name].view(ROWS, 12, -1)[:, :8] for name in "kv"], there[:, :8]
            else:
                at = (2 * units.clamp(min=0)[..., None] + torch.arange(2)).flatten(1)
                where = there.gather(1, at).masked_fill((units < 0).repeat_interleave(2, 1), -1)
                pages = [fields[name].view(ROWS, 12, -1)[torch.arange(ROWS)[:, None], at] for name in "kv"]
        mine = [keys.clone(), values.clone(), position.clone()]
        got = Slots(*mine).step(q, k, v, START, END, torch.tensor([AT]), holes, 0.3, far=far)
        used = slice(START, END + 1)
        near = mine[2][:, used] >= 0 if holes else torch.ones(ROWS, END + 1 - START, dtype=torch.bool)
        own = torch.cat([pages[0], mine[0][:, used]], 1), torch.cat([pages[1], mine[1][:, used]], 1)
        sees = torch.cat([where >= 0, near], 1)[:, None]
        want = oracle.attend(q.view(ROWS, GROUP, 1, DIM), *own, sees, 0.3).out.view(SEQ, 1, -1, DIM_V)
        assert got is not None and oracle.error(got, want) <= 1e-6
        assert torch.equal(mine[0][:, END], k.view(ROWS, DIM)) and bool((mine[2][:, END] == AT).all())


@pytest.mark.parametrize("judged", [40, torch.tensor([[9], [30], [0], [45]])], ids=["of all", "by row"])
def test_the_mean_of_what_each_token_gets_goes_on(judged: int | Tensor) -> None:
    q, k, v, keys, values, position, score = drawn()
    before = score.clone()
    got = Slots(keys, values, position).step(
        q, k, v, START, END, torch.tensor([AT]), True, 0.3, score=score, judged=judged
    )
    used = slice(START, END + 1)
    found = oracle.attend(
        q.view(ROWS, GROUP, 1, DIM), keys[:, used], values[:, used], position[:, None, used] >= 0, 0.3
    )
    assert (
        got is not None and oracle.error(got.view(ROWS, GROUP, 1, DIM_V), found.out) <= 1e-6 and found.probs is not None
    )
    before[:, END] = 0  # the token's own
    want = before.double()
    want[:, used] = running(want[:, used], found.probs.sum((1, 2)), position[:, used], torch.tensor([AT]), judged)
    torch.testing.assert_close(score.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fill", [False, True])
def test_positions_and_scores_may_be_nobodys(fill: bool) -> None:
    q, k, v, *held = drawn()
    mine, theirs = ([x.clone() for x in held[:2]] for _ in range(2))
    if fill:  # into a free slot, which positions tell
        mine, theirs = ([x.clone() for x in held[:3]] for _ in range(2))
    got = Slots(*mine, *([] if fill else [None])).step(q, k, v, START, END, torch.tensor([AT]), fill, 0.3, fill)
    more = {"at": AT, "holes": fill, "fill": fill, "backend": "reference"}
    want = step(q, k, v, *theirs, *([] if fill else [None]), **ABOUT, **more)
    assert got is not None and oracle.error(got, want.double()) <= 1e-6
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_pages_whose_keys_are_rebuilt() -> None:
    q, k, v, *held = drawn()
    pages, table = torch.zeros(12, 4, DIM_V), torch.arange(12).view(ROWS, 3).int()
    asked: list[Any] = []

    def rebuilt(*given: Any, **more: Any) -> State:
        asked.append((given, more))
        return State(torch.zeros(ROWS, GROUP, 1, DIM_V), torch.full((ROWS, GROUP, 1), -torch.inf))

    fields, units = {"v": pages, "basis": q}, torch.zeros(ROWS, 2, dtype=torch.int64)
    far = Far(fields, table, torch.arange(12).repeat(ROWS, 1), 4, "dense", DIM_V, rebuilt).reading(2, units, 2)
    mine, theirs = ([x.clone() for x in held] for _ in range(2))
    got = Slots(*mine[:3]).step(q, k, v, START, END, torch.tensor([AT]), True, 0.3, far=far)
    want = Slots(*theirs[:3]).step(q, k, v, START, END, torch.tensor([AT]), True, 0.3)
    assert got is not None and want is not None and torch.equal(got, want)
    ((grouped, values, columns, where), more) = asked.pop()
    assert (
        values is pages
        and grouped.shape == (ROWS, GROUP, 1, DIM)
        and columns.shape == (ROWS, 2)
        and where.shape == (ROWS, 8)
    )
    assert more == {"page": 4, "units": units, "unit": 2, "scale": 0.3, "wait": True}
    assert [id(x) for x in far.tensors()] == [id(x) for x in (far.table, far.position, pages, q)]
    other = Far({"k": q, "v": pages, "other": k}, table, far.position, 4, "dense", DIM_V)
    assert [id(x) for x in other.tensors()] == [id(x) for x in (table, far.position, q, pages)]


class Remembered:
    """Instead of launches: notes what they would be made again with."""

    def __init__(self, possible: bool) -> None:
        self.possible, self.asked = possible, list[Any]()

    def again(self, *about: Any) -> bool:
        self.asked.append(about)
        return self.possible


@pytest.mark.parametrize("possible", [True, False])
def test_what_launches_are_made_again_with(possible: bool) -> None:
    q, k, v, keys, values, position, score = drawn()
    slots, at, units = Slots(keys, values, position), torch.tensor([AT]), torch.zeros(ROWS, 1, dtype=torch.int64)
    fields = {"k": torch.zeros(4, 4, DIM), "v": torch.zeros(4, 4, DIM_V)}
    table, where = torch.arange(4).view(4, 1).int(), torch.arange(4, dtype=torch.int32).repeat(4, 1)
    every, some = (Far(fields, table, where, 4, "dense", DIM_V).reading(1, x, 4) for x in (None, units))
    there, merged = torch.arange(2, dtype=torch.int32).repeat(ROWS, 1), rules()["merged"]
    arriving = Fetched(2).reading(lambda: (torch.zeros(ROWS, 2, DIM), torch.zeros(ROWS, 2, DIM_V), there), (ROWS, 1))
    for given, more, pages in (
        ({}, [], 0),
        ({"far": every}, [], 4),
        ({"far": some}, [units], 0),
        ({"far": arriving}, [], 0),
        ({"rule": merged, "fill": True, "score": score}, [merged.threshold], 0),
        ({"score": score, "judged": 3}, [values[:, START:], score[:, START:]], 0),
        ({"score": score}, [], 0),
    ):
        kind = token(q=q, k=k, v=v, at=at, holes=True, **given).kind
        launches, n = Remembered(possible), END - START + (not given.get("fill"))
        slots.known[kind], slots.missed = Known(0, 99, (-1, 9), launches, ()), 5  # type: ignore[arg-type]
        before = position.clone()
        out = slots.step(q, k, v, START, END, at, True, 0.3, **given)  # type: ignore[arg-type]
        ((here, numbers, late),) = launches.asked
        want = [q, k, v, at, None, keys[:, START:], values[:, START:], position[:, START:], *more]
        told = [None if i == 4 else (x.data_ptr(), x.shape) for i, x in enumerate(here)]
        assert told == [None if x is None else (x.data_ptr(), x.shape) for x in want]
        assert numbers == (END, n, pages) and (late is None) == ("far" not in given or given["far"] is not arriving)
        assert out is not None and out.shape == (SEQ, 1, HEADS * GROUP, DIM_V)
        assert (out is here[4]) == torch.equal(position, before) == possible
        assert slots.missed == (0 if possible else 5)
        position.copy_(before)
    slots.known[token(q=q, k=k, v=v, holes=True).kind] = Known(0, END - START, (-1, 0), launches, ())  # type: ignore[arg-type]
    assert (
        slots.step(q, k, v, START, END, at, True, 0.3) is not None and len(launches.asked) == 1
    )  # it is for fewer slots


def test_only_what_fits_is_taken() -> None:
    q, k, v, keys, values, position, _ = drawn()
    slots, before, at = Slots(keys, values, position), keys.clone(), torch.tensor([AT])
    wide = torch.zeros(SEQ, HEADS * GROUP, 1, DIM + 1)
    with torch.enable_grad():
        learning = [[x.clone().requires_grad_() if x is y else x for x in (q, k, v)] for y in (q, k, v)]
        for other in (
            (q.double(), k, v), (q, k.bfloat16(), v), (q, k, v.bfloat16()), (wide, k, v), (q, k[:, :1], v), (q, k, v[..., 1:]),
            (q, torch.cat([k, k]), v), *learning,
        ):  # fmt: skip
            assert not slots.takes(*other) and slots.step(*other, START, END, at, True, 0.3) is None
        assert slots.takes(q, k, v)
        paid = rules()["paid"]  # and pages: judged are slots alone
        assert (
            slots.step(q, k, v, START, END, at, True, 0.3, True, paid, Far({}, keys, keys, 4, "dense", DIM_V)) is None
        )
        keys.requires_grad_()
        assert slots.step(q, k, v, START, END, at, True, 0.3) is None and torch.equal(keys, before)
    with torch.no_grad():
        assert slots.step(q, k, v, START, END, at, True, 0.3) is not None


def token(**other: Any) -> Token:
    q, k, v, *_ = drawn()
    plain = {
        "q": q,
        "k": k,
        "v": v,
        "at": torch.tensor([AT]),
        **ABOUT,
        "holes": False,
        "fill": False,
        "rule": None,
        "far": None,
    }
    return Token(**plain | {"score": None, "judged": None} | other)


def test_what_decides_how_a_token_is_launched() -> None:
    """And no more than that, as what is noted is for all tokens of a kind."""
    q, k, v, keys, values, position, score = drawn()
    ends, paid = rules()["ends"], rules()["paid"]
    apart = torch.stack([q, q], -1)[..., 0]
    far, units = Far({}, keys, keys, 4, "dense", DIM_V), torch.zeros(ROWS, 2, dtype=torch.int64)
    kinds = [
        token(),
        *(token(**{name: y}) for name, x in (("q", q), ("k", k), ("v", v)) for y in (x[:1], x.double())),
        token(q=apart), token(k=torch.stack([k, k], -1)[..., 0]), token(v=torch.stack([v, v], -1)[..., 0]),
        token(holes=True), token(scale=0.2), token(rule=ends), token(rule=paid), token(score=score),
        token(fill=True), token(fill=True, start=START + 1), token(judged=3), token(judged=4), token(judged=units),
        *(token(rule=Merged(paid, score, *x)) for x in ((0.7,), (0.6,), (0.7, True), (0.7, False, False))),
        *(token(rule=Sealed(ends, x, keys)) for x in (position, position[1:])),
        *(token(rule=Sealed(ends, position, x)) for x in (keys[1:], keys[:, :4])),
        token(rule=Sealed(rules()["ends"], position, keys)), token(far=far.reading(2, None, 4)),
    ]  # fmt: skip
    told = [x.kind for x in kinds]
    assert len(set(told)) == len(told)
    for other in (units, units[:, :1], units.int()):
        told.append(token(far=far.reading(2, other, 2)).kind)
    assert len(set(told)) == len(told)
    for same in ({"at": torch.tensor([9])}, {"end": END - 1}, {"start": START + 1}, {"k": k + 1}):
        assert token(**same).kind == told[0]
    assert token(rule=Sealed(ends, position, keys)).kind == token(rule=Sealed(ends, position, keys)).kind
    assert token(judged=int("1000")).kind == token(judged=int("1000")).kind
    assert token(rule=Merged(paid, score + 1, 0.7)).kind == token(rule=Merged(paid, score, 0.7)).kind
    assert token(far=far.reading(3, None, 4)).kind == token(far=far.reading(2, None, 4)).kind
    assert token(far=far.reading(3, units + 1, 2)).kind == token(far=far.reading(2, units, 2)).kind
    assert [token(fill=fill).slots for fill in (False, True)] == [END - START + 1, END - START]
    assert token(far=far.reading(3, None, 4)).pages == 12 and token().pages == 0
    named = token(rule=ends, far=far, score=score, judged=units).named
    assert all(a is b for a, b in zip(named, (ends, far, score, units), strict=True))  # by number, while these live


def test_slots_from_another_start_on() -> None:
    """As sealed tokens leave the first of them."""
    q, k, v, *held = drawn()
    mine, theirs = ([x.clone() for x in held] for _ in range(2))
    slots = Slots(*mine[:3])
    for start, end in ((3, 17), (5, 18), (3, 16), (5, 17)):
        got = slots.step(q, k, v, start, end, torch.tensor([AT]), True, 0.3)
        more = {"start": start, "end": end, "at": AT, "holes": True, "scale": 0.3, "backend": "reference"}
        want = step(q, k, v, *theirs[:3], **more)
        assert got is not None and oracle.error(got, want.double()) <= 1e-6
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_how_many_slots_a_note_is_for() -> None:
    known = Known(16, 32, (4, 8), None, ())
    assert [known.reads(n, 5) for n in (16, 17, 32, 33)] == [False, True, True, False]
    assert [known.reads(20, n) for n in (4, 5, 8, 9)] == [False, True, True, False]


def test_of_kinds_that_do_not_come_again_no_more_are_noted() -> None:
    q, k, v, keys, values, position, _ = drawn()
    slots, apart = Slots(keys, values, position), [torch.stack([x, x], -1)[..., 0] for x in (q, k, v)]
    for i in range(KINDS + 9):
        slots.step(q, k, v, START, END, torch.tensor([AT]), True, 0.1 + i)
        slots.step(q, k, v, START, END, torch.tensor([AT]), True, 0.1 + i)
        assert len(slots.known) == slots.missed == min(i + 1, KINDS)
    slots.missed = 0
    for end in (END, END - 1):
        slots.step(*apart, START, end, torch.tensor([AT]), True, 0.05)
        ((kind, known),) = (
            slots.known.items()
        )  # there was room for others; of rows that lie apart, as of those that do not
        assert kind == token(holes=True, scale=0.05).kind and known.most == end - START + 1
