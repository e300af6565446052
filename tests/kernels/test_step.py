"""One decoded token: written and answered in one call, against writing it by hand and the dumb attention."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any, Literal

import pytest
import support_kernels as oracle
import torch
from torch import Tensor

from kvengine.cache import LayerCache
from kvengine.errors import KernelError
from kvengine.kernels.attention import attention
from kvengine.kernels.step import Ends, Paid, Sealed, Slots, ready, step
from kvengine.session import Call
from kvengine.stack import Stack

BACKENDS = [name for name in oracle.backends() if name != "triton"]
BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
SHAPES = [
    (1, 2, 3, 64, 64, 40),
    (2, 3, 1, 24, 40, 1),
    (1, 1, 8, 128, 16, 600),
    (3, 2, 5, 8, 8, 33),
    (1, 2, 4, 512, 512, 70),
]


def case(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The new token of every head, and slots of which some hold what nobody may read."""
    seq, heads, group, dim, dim_v, slots = shape
    rng = torch.Generator().manual_seed(slots)
    draw = lambda *size: torch.randn(*size, generator=rng).to(dtype)  # noqa: E731
    new = draw(seq, heads * group, 1, dim), draw(seq, heads, 1, dim), draw(seq, heads, 1, dim_v)
    position = torch.arange(slots, dtype=torch.int32).repeat(seq * heads, 1)
    position[torch.rand(position.shape, generator=rng) < 0.3] = -1
    return (*new, draw(seq * heads, slots, dim), draw(seq * heads, slots, dim_v), position)


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("holes", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_writes_and_attends(backend: str, holes: bool, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    q, k, v, keys, values, position = case(shape, dtype)
    start, end = shape[-1] // 5, shape[-1] - 1
    keys[:, :start] = values[:, :start] = math.nan
    if holes:
        keys[position < 0], values[position < 0] = math.nan, math.nan
    want = keys.clone(), values.clone(), position.clone()
    want[0][:, end], want[1][:, end], want[2][:, end] = k.flatten(0, 2), v.flatten(0, 2), 77
    seen = (want[2] >= 0) | torch.tensor(not holes)
    seen[:, :start] = False
    grouped = q.unflatten(1, (shape[1], -1)).flatten(0, 1)
    out = oracle.attend(grouped, want[0], want[1], seen[:, None], 0.3).out
    got = step(q, k, v, keys, values, position, start=start, end=end, at=77, holes=holes, scale=0.3, backend=backend)
    assert got.dtype == dtype and got.shape == (shape[0], 1, q.shape[1], shape[4])
    assert oracle.error(got.transpose(1, 2), out.unflatten(0, shape[:2]).flatten(1, 2)) <= BOUND[dtype]
    for mine, theirs in zip((keys, values, position), want, strict=True):
        assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))


@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 1, 24, 40, 9), *SHAPES[2:]])
@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_takes_the_place_of_one_that_leaves_the_newest(
    backend: str, fill: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Rows differ in which slot is free, in what counts as their first tokens, and in how many newest ones they keep."""
    q, k, v, keys, values, position = case(shape, dtype)
    rows, start, end = len(keys), shape[-1] // 5, shape[-1] - 1
    position[torch.arange(rows), start + torch.arange(rows) % (end - start)] = -1
    keys[position < 0], values[position < 0] = math.nan, math.nan
    first, recent = torch.arange(rows) % 3 + start, 2 + torch.arange(rows) % 4
    want, spot = [keys.clone(), values.clone(), position.clone()], []
    for r in range(rows):
        spot.append(next(s for s in range(start, end) if position[r, s] < 0) if fill else end)
        want[0][r, spot[r]], want[1][r, spot[r]] = k.flatten(0, 2)[r], v.flatten(0, 2)[r]
        want[2][r, spot[r]] = shape[-1]
    seen = want[2] >= 0
    seen[:, :start] = False
    seen[:, end:] &= not fill
    grouped = q.unflatten(1, (shape[1], -1)).flatten(0, 1)
    out = oracle.attend(grouped, want[0], want[1], seen[:, None], 0.3).out
    sealed = torch.arange(rows * 15, dtype=torch.int32).view(rows, 15)[:, :12] % (shape[-1] + 2) - 1
    sealed[0, 3:6] = start  # a unit of which nothing stays
    alive, left = torch.full((rows, 5), True)[:, :4], sealed.clone()
    for r in range(rows):
        for s in range(start, end + (not fill)):
            if first[r] <= want[2][r, s] <= shape[-1] - recent[r]:
                want[2][r, s] = -1
        left[r] = torch.tensor([-1 if first[r] <= p <= shape[-1] - recent[r] else p for p in sealed[r].tolist()])
    about: dict[str, Any] = dict(start=start, end=end, at=shape[-1], holes=True, scale=0.3, backend=backend)
    ends, again = Ends(first, recent), [keys.clone(), values.clone(), position.clone()]
    got = step(q, k, v, keys, values, position, fill=fill, rule=Sealed(ends, sealed, alive), **about)
    assert torch.equal(step(q, k, v, *again, fill=fill, rule=ends, **about), got) and torch.equal(again[2], position)
    assert torch.equal(sealed, left) and torch.equal(alive, (left >= 0).view(rows, 4, 3).any(2))
    assert bool(alive.any()) and not bool(alive.all())
    assert oracle.error(got.transpose(1, 2), out.unflatten(0, shape[:2]).flatten(1, 2)) <= BOUND[dtype]
    for mine, theirs in zip((keys, values, position), want, strict=True):
        assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", BOUND, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 1, 24, 40, 9), *SHAPES[2:]])
@pytest.mark.parametrize("reduce", ["mean", "max", "sum"])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_token_goes_for_one_that_was_paid_least(
    backend: str,
    fill: bool,
    adds: bool,
    reduce: Literal["mean", "max", "sum"],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    """Rows differ in budget and in what is recent; slots lie in no order; of tokens that are paid alike the later stay."""
    q, k, v, keys, values, position = case(shape, dtype)
    rows, start, end, at = len(keys), shape[-1] // 5, shape[-1] - 1, shape[-1] + 1
    position = position[:, torch.randperm(shape[-1], generator=torch.Generator().manual_seed(1))].contiguous()
    position[torch.arange(rows), start + torch.arange(rows) % (end - start)] = -1
    keys[:, start + 2 : start + 5] = keys[:, start + 2 : start + 3]
    keys[position < 0], values[position < 0] = math.nan, math.nan
    together = shape[1] if reduce == "mean" else 1
    score = torch.rand(rows, shape[-1], generator=torch.Generator().manual_seed(2))
    score[:, start + 2 : start + 5] = 0
    used = slice(start, end + (not fill))
    held = (position[:, used] >= 0).sum(1) + 1
    paid = Paid((held - torch.arange(rows) % 3).clamp(min=1), torch.arange(rows) % 4, reduce, adds, together)
    before = position.clone(), score.clone()
    about: dict[str, Any] = dict(start=start, end=end, at=at, holes=True, scale=0.3, backend=backend)
    out = step(q, k, v, keys, values, position, fill=fill, rule=paid, score=score, **about)
    spot = [next(s for s in range(start, end) if before[0][r, s] < 0) if fill else end for r in range(rows)]
    before[0][range(rows), spot], before[1][range(rows), spot] = at, 0
    grouped = q.unflatten(1, (shape[1], -1)).flatten(0, 1)
    seen = before[0][:, used] >= 0
    want = oracle.attend(grouped, keys[:, used], values[:, used], seen[:, None], 0.3)
    assert oracle.error(out.transpose(1, 2), want.out.unflatten(0, shape[:2]).flatten(1, 2)) <= BOUND[dtype]
    logits = (grouped[:, :, 0].double() @ keys[:, used].double().nan_to_num().mT * 0.3).masked_fill(
        ~seen[:, None], -math.inf
    )
    mass = {"mean": torch.Tensor.mean, "sum": torch.Tensor.sum, "max": torch.Tensor.amax}[reduce](logits.softmax(-1), 1)
    if together > 1:
        mass = mass.unflatten(0, (-1, together)).mean(1).repeat_interleave(together, 0)
    mass += before[1][:, used] * adds
    assert torch.equal(score[:, : used.start], before[1][:, : used.start])
    torch.testing.assert_close(score[:, used], mass.float(), rtol=1e-5, atol=1e-6)
    worth = score[:, used].masked_fill(before[0][:, used] > at - paid.recent[:, None], math.inf)
    for r in range(rows):
        each = [(float(worth[r, s]), int(before[0][r, used][s]), s) for s in range(worth.shape[1]) if seen[r, s]]
        best = sorted(each)[-int(paid.budget[r]) :]
        stays = torch.zeros_like(seen[r]).scatter_(0, torch.tensor([s for _, _, s in best]), True)
        assert torch.equal(position[r, used], before[0][r, used].masked_fill(~stays, -1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_recent_or_first_may_reach_beyond_all_positions(backend: str) -> None:
    """Who keeps everything says a large number: these have 64 bits, positions 32."""
    large = 1 << 32
    for first, recent in ((0, large), (0, large + 5), (large + 3, 4), (1 << 40, 0), (5, 1 << 62)):
        q, k, v, keys, values, position = case((1, 2, 3, 64, 64, 40), torch.float32)
        position[:] = torch.arange(40)
        rows = [torch.full((2,), x) for x in (first, recent, 9)]
        about: dict[str, Any] = dict(start=0, end=39, at=39, holes=True, scale=0.3, backend=backend)
        step(q, k, v, keys, values, position, rule=Ends(rows[0], rows[1]), **about)
        assert torch.equal(position, torch.arange(40, dtype=torch.int32).expand(2, -1))
        step(q, k, v, keys, values, position, rule=Paid(rows[2], rows[1], first=rows[0]), **about)
        if recent and not first:  # all are recent: none is better, and the later ones stay
            assert (position >= 0).nonzero()[:, 1].view(2, 9).tolist() == [list(range(31, 40))] * 2
        assert (position >= 0).sum(1).tolist() == [9, 9]


@pytest.mark.parametrize("other", ["values", "positions", "rows of positions", "scores"])
def test_what_the_c_version_would_misread_goes_to_torch(other: str) -> None:
    def given() -> dict[str, Any]:
        q, k, v, keys, values, position = case((1, 2, 3, 64, 64, 40), torch.float32)
        score = torch.zeros(2, 40)
        if other == "values":
            v, values = v.bfloat16(), values.bfloat16()
        elif other == "positions":
            position = position.long()
        elif other == "scores":
            score = score.double()
        else:
            position = torch.stack([position, position], 2)[..., 0]
        return {"q": q, "k": k, "v": v, "keys": keys, "values": values, "position": position, "score": score}

    about: dict[str, Any] = dict(start=2, end=30, at=77, holes=True, scale=0.3)
    mine, theirs = given(), given()
    assert torch.equal(step(**mine, **about), step(**theirs, **about, backend="reference"))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    with pytest.raises(KernelError, match="shapes or dtypes"):
        step(**given(), **about, backend="native")


def test_a_verdict_that_cannot_be_is_refused() -> None:
    q, k, v, keys, values, position = case((1, 2, 3, 64, 64, 40), torch.float32)
    count = torch.tensor([3, 3])
    for paid, said in (
        (Paid(count, count, "mean", together=3), "2 rows cannot judge 3 together by their mean"),
        (Paid(count, count, "max", together=2), "2 rows cannot judge 2 together by their max"),
        (Paid(count, count, adds=True), "got score=None"),
    ):
        with pytest.raises(KernelError, match=said):
            step(q, k, v, keys, values, position, start=0, end=3, at=1, holes=True, scale=1.0, rule=paid)


@pytest.mark.skipif("native" not in BACKENDS, reason="no C compiler")
@pytest.mark.parametrize("slots", [40, 1100, 5000])
def test_gives_the_bits_of_the_general_kernel(slots: int) -> None:
    """A step that can be taken back goes through the general path: both must agree to the last bit."""
    q, k, v, keys, values, position = case((1, 2, 3, 64, 64, slots), torch.float32)
    got = step(q, k, v, keys, values, position, start=3, end=slots - 1, at=9, holes=True, scale=0.125)
    grouped = q.unflatten(1, (2, -1)).flatten(0, 1)
    want = attention(grouped, keys[:, 3:], values[:, 3:], (position[:, None, 3:] >= 0), 0.125).out
    assert torch.equal(got[0, 0], want.flatten(0, 2))


def test_what_does_not_fit_is_refused() -> None:
    q, k, v, keys, values, position = case((1, 2, 3, 64, 64, 40), torch.float32)
    with pytest.raises(KernelError, match="start=0 to end=40 must lie within the 40"):
        step(q, k, v, keys, values, position, start=0, end=40, at=1, holes=True, scale=1.0)
    with pytest.raises(KernelError, match="of 2 rows and the same slots"):
        step(q, k, v, keys[:, :-1], values, position, start=0, end=3, at=1, holes=True, scale=1.0)
    for more in (
        {"holes": True},
        {"holes": False, "fill": True},
        {"holes": False, "rule": Ends(*(position[:, 0].long(),) * 2)},
    ):
        with pytest.raises(KernelError, match="need the positions"):
            step(q, k, v, keys, values, None, start=0, end=3, at=1, scale=1.0, **more)
    position[1] = 5
    with pytest.raises(KernelError, match="a free slot in every row between start=0 and end=30"):
        step(q, k, v, keys, values, position, start=0, end=30, at=1, holes=True, scale=1.0, fill=True)


@pytest.mark.skipif("native" not in BACKENDS, reason="no C compiler")
def test_only_slots_and_tokens_that_fit_are_taken() -> None:
    q, k, v, keys, values, position = case((1, 2, 3, 64, 40, 30), torch.float32)
    assert ready(keys.double(), values.double(), position) is None
    assert ready(keys[:, ::2], values, position) is None and ready(keys, values[:, ::2], None) is None
    assert ready(keys.bfloat16(), values, position) is None
    assert ready(keys, values.new_empty(2, 30, 1040), position) is None
    slots = ready(keys, values, position)
    assert slots is not None
    before, about = keys.clone(), (0, 3, 1, False, 0.2)
    wide, meta = torch.zeros(1, 6, 1, 128), torch.empty_like(q, device="meta")
    for other in [
        (q.double(), k, v), (q, k.bfloat16(), v), (q, k, v.bfloat16()), (wide[..., ::2], k, v), (wide, k, v), (meta, k, v),
        (q, k[:, :1], v), (q, k, v[..., :39]), (q, k, torch.cat([v, v])), (q.clone().requires_grad_(), k, v),
    ]:  # fmt: skip
        assert slots.step(*other, *about) is None
    assert torch.equal(keys, before)
    with torch.no_grad():
        assert slots.step(q.clone().requires_grad_(), k, v, *about) is not None
    assert not torch.equal(keys, before)


@pytest.mark.skipif("native" not in BACKENDS, reason="no C compiler")
@pytest.mark.parametrize("full", [0, 1, 2])
def test_where_one_row_has_no_free_slot_nothing_is_done(full: int) -> None:
    q, k, v, keys, values, position = case((1, 3, 2, 16, 16, 20), torch.float32)
    position[:], position[:, 7] = torch.arange(20, dtype=torch.int32), -1
    position[full, 7] = 7
    slots, before = ready(keys, values, position), [x.clone() for x in (keys, values, position)]
    assert slots is not None and slots.step(q, k, v, 2, 19, 30, True, 0.3, fill=True) is None
    assert all(torch.equal(a, b) for a, b in zip((keys, values, position), before, strict=True))
    position[full, 18] = -1
    assert slots.step(q, k, v, 2, 19, 30, True, 0.3, fill=True) is not None
    assert (position == 30).nonzero().tolist() == [[r, 18 if r == full else 7] for r in range(3)]


@pytest.mark.skipif("native" not in BACKENDS, reason="no C compiler")
def test_a_copy_of_a_lane_writes_into_slots_of_its_own() -> None:
    layer = LayerCache(Stack.parse("full"), 0, 1)
    draw = lambda n: [torch.randn(1, heads, n, 16) for heads in (4, 2, 2)]  # noqa: E731
    layer.forward(*draw(20), Call(0.25))
    layer.forward(*draw(1), Call(0.25))
    assert isinstance(layer.parts[0].lane.tail.ready, Slots)
    twin, tail = copy.deepcopy(layer), layer.parts[0].lane.tail
    before = tail.k.view(torch.int32).clone()  # as bits: free slots may hold anything, NaN included
    token = draw(1)
    got = twin.forward(*token, Call(0.25))
    assert torch.equal(tail.k.view(torch.int32), before)
    assert torch.equal(got, layer.forward(*token, Call(0.25)))
    assert pickle.loads(pickle.dumps(tail)).ready is None and isinstance(tail.ready, Slots)


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_may_be_nobodys(backend: str) -> None:
    q, k, v, *slots = case((2, 3, 1, 24, 40, 9), torch.float32)
    kept, bare = [x.clone() for x in slots], [x.clone() for x in slots[:2]]
    about: dict[str, Any] = dict(start=2, end=7, at=5, holes=False, scale=0.2, backend=backend)
    assert torch.equal(step(q, k, v, *kept, **about), step(q, k, v, *bare, None, **about))
    assert all(torch.equal(a, b) for a, b in zip(kept, bare, strict=False))


@pytest.mark.parametrize("hole", [(0, 1), (2, 8)], ids=["the first slot", "the last row's last"])
@pytest.mark.parametrize("fill", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_only_hole_is_not_seen_wherever_it_is(backend: str, fill: bool, hole: tuple[int, int]) -> None:
    q, k, v, keys, values, position = case((1, 3, 2, 16, 16, 10), torch.float32)
    position[:] = torch.arange(10)
    position[:, 4] = -1 if fill else 4  # taken by the new token
    position[hole] = -1
    keys[position < 0], values[position < 0] = math.nan, math.nan
    got = step(
        q, k, v, keys, values, position, start=1, end=9, at=10, holes=True, scale=0.3, fill=fill, backend=backend
    )
    used = slice(1, 9 + (not fill))
    grouped = q.unflatten(1, (3, -1)).flatten(0, 1)
    want = oracle.attend(grouped, keys[:, used], values[:, used], position[:, None, used] >= 0, 0.3).out
    assert int((position[:, used] < 0).sum()) == 1
    assert oracle.error(got[0, 0].unflatten(0, (3, 2)), want[:, :, 0]) <= 1e-5


LANES = ["streaming(sinks=3,recent=20)", "streaming(recent=0.4)", "streaming(recent=70)", "duo(sinks=2,recent=9)"]


@pytest.mark.parametrize("text", ["full", "snapkv(budget=24, window=4)", "keydiff(budget=0.5)", *LANES])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding_takes_this_path_and_it_changes_nothing(
    text: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = torch.Generator().manual_seed(0)
    qkv = [
        torch.randn(2, heads, 80, 16, generator=rng).to(dtype) for heads in (6, 2, 2)
    ]  # two sequences: lanes are no views
    valid = torch.ones(2, 50, dtype=torch.bool)
    valid[1, :9] = False  # ragged rows: holes
    outs: list[list[Tensor]] = []
    for used in (True, False):
        if not used:
            monkeypatch.setattr("kvengine.tail.ready", lambda *_: None)
        layer, found = LayerCache(Stack.parse(text), 0, 1), []
        for a, b in [(0, 50), *((i, i + 1) for i in range(50, 80))]:
            part = [x[:, :, a:b].contiguous() for x in qkv]
            found.append(layer.forward(*part, Call(0.25), valid if b == 50 else None))
        for part in layer.parts:
            assert (part.lane.tail.ready is not None) == (used and "native" in BACKENDS)
        outs.append(found)
        assert layer.seen == layer.parts[0].lane.seen == 80
    for mine, theirs in zip(*outs, strict=True):
        assert torch.equal(mine, theirs)
