"""One token of every row, written where only the device knows, against a loop."""

from __future__ import annotations

from typing import Any

import pytest
import support_kernels as oracle
import torch
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.put_token import Limit, put_token

BACKENDS = [x for x in oracle.backends() if x != "native"]
FREE = {"origin": None}


def slots(rows: int, n: int, dim: int, dim_v: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of larger tensors; those of odd numbers hold nothing."""
    rng = torch.Generator().manual_seed(n + dim)
    wide = {
        name: torch.randn(rows, n + 3, d, generator=rng).to(dtype) for name, d in (("keys", dim), ("values", dim_v))
    }
    position = torch.arange(n + 3, dtype=torch.int32).where(torch.arange(n + 3) % 2 == 0, -1).repeat(rows, 1)
    position[:, 1:3] = torch.tensor([7, 8])[:, None].T.int()
    if n > 1100:  # of long rows one has no free slot among the first thousand
        position[-1, :1100] = 9
    return {name: x[:, :n] for name, x in wide.items()} | {"position": position[:, :n]}


@pytest.mark.parametrize(
    "how", [{"origin": 40}, {"origin": 30, "ring": 7}, {"origin": 0, "ring": 21}, {"slot": 6}, FREE], ids=str
)
@pytest.mark.parametrize(
    "rows, n, dim, dim_v, dtype",
    [
        (3, 21, 16, 16, torch.float32),
        (1, 21, 72, 40, torch.bfloat16),
        (2, 1500, 8, 24, torch.float16),
        (2, 21, 40, 0, torch.float32),
    ],
)  # values of no channels: they are a part of the keys
@pytest.mark.parametrize("backend", BACKENDS)
def test_put_a_token_is_as_the_loop(
    backend: str, rows: int, n: int, dim: int, dim_v: int, dtype: torch.dtype, how: dict[str, Any]
) -> None:
    held, now = slots(rows, n, dim, dim_v, dtype), torch.tensor([45])
    want = {name: x.clone() for name, x in held.items()}
    k, v = torch.randn(dim, 1, rows).permute(2, 1, 0), torch.randn(rows, 1, dim_v)
    if dtype == torch.bfloat16:  # the others are not in the slots' dtype, as under autocast
        k, v = k.to(dtype), v.to(dtype)
    score, counts = torch.ones(rows, n), torch.arange(rows, dtype=torch.int32) + 9
    limit = Limit(torch.full((rows,), 60), 16, torch.zeros(rows, dtype=torch.int64))
    device = oracle.device_of(backend)
    there = {name: x.to(device) for name, x in held.items()} | {"score": score.to(device), "counts": counts.to(device)}
    bound = Limit(limit.reads.to(device), 16, limit.units.to(device))
    put_token(k.to(device), v.to(device), now=now.to(device), limit=bound, backend=backend, **there, **how)
    for row in range(rows):
        free = [i for i, place in enumerate(want["position"][row].tolist()) if place < 0][0]
        at = how.get("slot", free)
        if how.get("origin") is not None:
            at = (45 - how["origin"]) % (how.get("ring") or n)
        want["keys"][row, at], want["values"][row, at] = k[row, 0].to(dtype), v[row, 0].to(dtype)
        want["position"][row, at] = 45
        score[row, at] = 0
    for name, x in want.items():
        assert torch.equal(there[name].cpu(), x), name
    assert torch.equal(there["score"].cpu(), score)
    assert there["counts"].tolist() == [row + 10 for row in range(rows)]
    assert bound.units.tolist() == [max(1, (60 - row - 10) // 16) for row in range(rows)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_put_a_token_whose_value_is_a_part_of_its_key(backend: str) -> None:
    device = oracle.device_of(backend)
    keys, k = torch.zeros(2, 5, 24, device=device), torch.randn(2, 1, 24).to(device)
    position, counts = torch.full((2, 5), -1, dtype=torch.int32, device=device), torch.zeros(2, dtype=torch.int32)
    now = torch.tensor([3], device=device)
    put_token(k, k[..., :16], keys, keys[..., :16], position, now, counts=counts.to(device), origin=1, backend=backend)
    assert torch.equal(keys[:, 2], k[:, 0]) and not keys[:, [0, 1, 3, 4]].any()
    assert position.tolist() == [[-1, -1, 3, -1, -1]] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_limit_leaves_a_unit(backend: str) -> None:
    device = oracle.device_of(backend)
    held = {name: x.to(device) for name, x in slots(2, 9, 8, 8, torch.float32).items()}
    limit = Limit(torch.tensor([5, 40], device=device), 16, torch.zeros(2, dtype=torch.int64, device=device))
    counts = torch.tensor([30, 6], dtype=torch.int32, device=device)
    x, now = torch.ones(2, 1, 8, device=device), torch.tensor([9], device=device)
    put_token(x, x, counts=counts, now=now, origin=5, limit=limit, backend=backend, **held)
    assert limit.units.tolist() == [1, 2]


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_have_positions_of_their_own(backend: str, expanded: bool) -> None:
    """And nothing is counted. A row whose token is padding keeps its free slot."""
    device = oracle.device_of(backend)
    held = {name: x.to(device) for name, x in slots(3, 9, 8, 8, torch.float32).items()}
    before, x = held["position"].clone(), torch.ones(3, 1, 8, device=device)
    now = (
        torch.full((1, 1), 31, device=device).expand(3, 1)
        if expanded
        else torch.tensor([[31], [-1], [33]], device=device)
    )
    put_token(x, x, now=now[:, 0], backend=backend, **held)
    before[:, 3] = now[:, 0].int()
    assert torch.equal(held["position"], before)
    assert bool((held["keys"][:, 3] == 1).all()) and bool((held["values"][:, 3] == 1).all())


@pytest.mark.parametrize("backend", BACKENDS)
def test_nobody_need_keep_positions_where_the_slot_is_told(backend: str) -> None:
    device = oracle.device_of(backend)
    held = slots(3, 9, 8, 16, torch.float16)
    keys, values = held["keys"].to(device), held["values"].to(device)
    k, v = torch.randn(3, 1, 8, device=device).half(), torch.randn(3, 1, 16, device=device).half()
    put_token(k, v, keys, values, None, torch.tensor([5], device=device), slot=8, backend=backend)
    assert torch.equal(keys[:, 8], k[:, 0]) and torch.equal(values[:, 8], v[:, 0])
    assert torch.equal(keys[:, :8].cpu(), held["keys"][:, :8]) and torch.equal(
        values[:, :8].cpu(), held["values"][:, :8]
    )


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton does not run here")
@pytest.mark.parametrize("how", [FREE, {"origin": 46}, {"origin": 45 - 21}], ids=["full", "before", "behind"])
def test_triton_writes_nothing_where_there_is_no_such_slot(how: dict[str, Any]) -> None:
    """Beside a row lies the next one's memory, and nothing would tell."""
    device = oracle.device_of("triton")
    wide = {"keys": torch.zeros(3, 24, 16), "values": torch.zeros(3, 24, 8), "position": torch.full((3, 24), 9).int()}
    wide = {name: x.to(device) for name, x in (wide | {"score": torch.ones(3, 24)}).items()}
    before, held = {name: x.clone() for name, x in wide.items()}, {name: x[:, 1:22] for name, x in wide.items()}
    k, v, now = (
        torch.ones(3, 1, 16, device=device),
        torch.ones(3, 1, 8, device=device),
        torch.tensor([45], device=device),
    )
    put_token(k, v, now=now, backend="triton", **held, **how)
    assert all(torch.equal(wide[name], x) for name, x in before.items())


def test_refusals_say_why() -> None:
    held = slots(2, 9, 8, 8, torch.float32)
    x, counts, now = torch.ones(2, 1, 8), torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(KernelError, match=r"\[3, 1, 8\]"):
        put_token(torch.ones(3, 1, 8), x, counts=counts, now=now, origin=0, **held)
    with pytest.raises(KernelError, match="ring=10"):
        put_token(x, x, counts=counts, now=now, origin=0, ring=10, **held)
    with pytest.raises(KernelError, match="slot=9"):
        put_token(x, x, now=now, slot=9, **held)
    with pytest.raises(KernelError, match="a free slot.*slot=None, origin=None"):
        put_token(x, x, now=now, **held | {"position": None})
    with pytest.raises(KernelError, match="one for all rows.*origin=0, 2 in now"):
        put_token(x, x, now=now.expand(2), origin=0, **held)
