"""Attention over keys rebuilt from a low-rank factor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import support_kernels as oracle
import torch
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.lowrank_attention import lowrank_attention
from kvengine.kernels.slots import resolve

PAGE, ROWS, TABLE, RANK = 16, 4, 3, 20
BACKENDS = oracle.backends()


def rotated(key: Tensor, position: int, inv_freq: Tensor, scaling: float) -> Tensor:
    """One key, channel pair by channel pair; what does not rotate is not scaled."""
    key, half = key.double().clone(), len(inv_freq)
    for i in range(half):
        angle = position * float(inv_freq[i])
        a, b = float(key[i]), float(key[i + half])
        key[i] = (a * math.cos(angle) - b * math.sin(angle)) * scaling
        key[i + half] = (b * math.cos(angle) + a * math.sin(angle)) * scaling
    return key


@pytest.mark.parametrize(("dim", "half"), [(32, 16), (32, 8), (64, 16), (96, 32), (48, 24)])
@pytest.mark.parametrize("chosen", [False, True], ids=["all", "units"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_a_loop(backend: str, chosen: bool, dim: int, half: int) -> None:
    """Rotated are the first `2 * half` channels, whole registers of them or not."""
    rng = torch.Generator().manual_seed(7)
    dim_v = 24
    u, v = torch.randn(2, 60, RANK, generator=rng), torch.randn(14, PAGE, dim_v, generator=rng)
    basis, q = torch.randn(ROWS, RANK, dim, generator=rng) / 4, torch.randn(ROWS, 3, 2, dim, generator=rng)
    table = torch.randperm(14, generator=rng)[: ROWS * TABLE].reshape(ROWS, TABLE).int()
    table[3, 1:] = -1
    position = torch.arange(TABLE * PAGE).repeat(ROWS, 1) + 3
    position[torch.rand(position.shape, generator=rng) < 0.2] = -1
    inv_freq = 1.0 / 100.0 ** (torch.arange(half) / (dim // 2))
    units = torch.tensor([[0, 5, 3, -1], [1, 2, 3, 4], [5, -1, -1, -1], [0, 1, 2, 3]]) if chosen else None
    unit = 8 if chosen else PAGE
    where, at = resolve(table, position, units, unit, PAGE)
    read = torch.zeros(14 * PAGE, dtype=torch.bool)
    read[where[at >= 0]] = True
    table, position = (torch.nn.functional.pad(x, (0, 4))[:, :-4] for x in (table, position))  # parts of longer rows
    u[:, :3], v.flatten(0, 1)[~read] = math.nan, math.nan  # what nobody reads may hold anything
    pool, table = oracle.far(backend, {"v": v}, table)
    got = oracle.on(backend, lowrank_attention)(
        q, u, pool["v"], basis, inv_freq, table, position, page=PAGE, scale=0.3, units=units, unit=unit, rope_scaling=1.3,
        want_probs=True, backend=backend,
    )  # fmt: skip
    sequence = torch.arange(ROWS)[:, None] // 2  # two heads share
    keys = u.double()[sequence, at.clamp(min=0)] @ basis.double()
    for r in range(ROWS):
        for t in range(keys.shape[1]):
            keys[r, t] = rotated(keys[r, t], int(at[r, t]), inv_freq, 1.3)
    seen = (at >= 0)[:, None].expand(-1, 2, -1)
    oracle.close(got, oracle.attend(q, keys, v.flatten(0, 1)[where], seen, 0.3), 1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str)
@pytest.mark.parametrize("rank", [48, 47, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_in_sixteen_bits(backend: str, rank: int, dtype: torch.dtype, bound: float) -> None:
    """On a GPU the rebuilt keys are rounded to these before and after they are turned; a CPU may take two columns at a time."""
    rng = torch.Generator().manual_seed(3)
    u, v, basis, q = (
        torch.randn(*shape, generator=rng).to(dtype)
        for shape in ((2, 160, rank), (10, PAGE, 64), (ROWS, rank, 64), (ROWS, 4, 1, 64))
    )
    basis, table = basis / 8, torch.arange(ROWS * 2).reshape(ROWS, 2)
    position, inv_freq = torch.arange(2 * PAGE).repeat(ROWS, 1) + 100, 0.5 ** torch.arange(32.0)
    position[2, 5:20] = -1
    given = (table, position)
    got = oracle.on(backend, lowrank_attention)(q, u, v, basis, inv_freq, *given, page=PAGE, scale=0.2, backend=backend)
    exact = (x.double() for x in (q, u, v, basis, inv_freq))
    want = lowrank_attention(*exact, *given, page=PAGE, scale=0.2, backend="reference")
    oracle.close(got, want, bound)


@pytest.mark.parametrize("chosen", [False, True], ids=["all", "units"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_without_a_table_lie_one_after_the_other(backend: str, chosen: bool) -> None:
    rng = torch.Generator().manual_seed(5)
    u, v = torch.randn(2, 60, RANK, generator=rng), torch.randn(ROWS * 2, PAGE, 16, generator=rng)
    basis, q = torch.randn(ROWS, RANK, 32, generator=rng) / 4, torch.randn(ROWS, 3, 1, 32, generator=rng)
    position, table = torch.arange(2 * PAGE).repeat(ROWS, 1), torch.arange(ROWS * 2).view(ROWS, 2)
    position[torch.rand(position.shape, generator=rng) < 0.2] = -1
    more = {"units": torch.tensor([[3, 0], [1, -1], [2, 3], [0, 1]]), "unit": 8} if chosen else {}
    run = oracle.on(backend, lowrank_attention)
    got, want = (
        run(q, u, v, basis, 0.5 ** torch.arange(16.0), which, position, page=PAGE, scale=0.3, backend=backend, **more)
        for which in (None, table)
    )
    assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


def test_refusals_say_why() -> None:
    table, position = torch.zeros(1, 1, dtype=torch.long), torch.arange(16)[None]
    q, u, v, inv_freq = torch.randn(1, 1, 8), torch.randn(1, 16, 4), torch.randn(1, 16, 8), torch.ones(4)
    with pytest.raises(KernelError, match="basis"):
        lowrank_attention(q, u, v, torch.randn(1, 3, 8), inv_freq, table, position, page=16, scale=1.0)
    with pytest.raises(KernelError, match="whole number of rows"):
        lowrank_attention(
            q, u.expand(3, -1, -1), v, torch.randn(1, 4, 8), inv_freq, table, position, page=16, scale=1.0
        )
    with pytest.raises(KernelError, match="do not fit together"):
        lowrank_attention(q, u, v, torch.randn(1, 4, 8), torch.ones(5), table, position, page=16, scale=1.0)


@pytest.mark.parametrize("places", [50, 5000, 100000, 150000])
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b != "reference"])
def test_the_angle_stays_exact_far_away(backend: str, places: int) -> None:
    """Sine and cosine of C's and of Triton's own against torch's, at rank = dim with the identity as basis."""
    rng = torch.Generator().manual_seed(places)
    u = torch.randn(1, places, 64, generator=rng)
    position = torch.arange(places - 64, places)[None]
    q, v = torch.randn(1, 2, 1, 64, generator=rng), torch.randn(4, 16, 32, generator=rng)
    inv_freq = 10000.0 ** -(torch.arange(32) / 32)
    given = (q, u, v, torch.eye(64)[None], inv_freq, torch.arange(4)[None], position)
    got, want = (oracle.on(b, lowrank_attention)(*given, page=16, scale=0.1, backend=b) for b in (backend, "reference"))
    assert oracle.error(got.out, want.out) <= 1e-5


@pytest.mark.parametrize("backend", oracle.backends())
def test_frequencies_units_and_tables_may_be_views(backend: str) -> None:
    rng = torch.Generator().manual_seed(6)
    u, basis = torch.randn(1, 90, 12, generator=rng), torch.randn(2, 12, 32, generator=rng) / 4
    v, q = torch.randn(6, 16, 32, generator=rng), torch.randn(2, 4, 1, 32, generator=rng)
    table, position = torch.arange(6).view(2, 3), torch.arange(48).repeat(2, 1)
    inv_freq, units = 0.7 ** torch.arange(16.0), torch.tensor([[5, 0, 9], [2, 11, 7]])
    run = oracle.on(backend, lowrank_attention)
    about: dict[str, Any] = dict(page=16, scale=0.2, unit=4, backend=backend)
    want = run(q, u, v, basis, inv_freq, table, position, units=units, **about)
    apart, other = torch.stack([inv_freq, inv_freq + 1], 1)[:, 0], torch.cat([units, units + 1], 1).int()[:, :3]
    for freq, chosen in ((apart, units), (inv_freq.double(), units), (inv_freq, other)):
        got = run(q, u, v, basis, freq, table, position, units=chosen, **about)
        torch.testing.assert_close((got.out, got.lse), (want.out, want.lse), atol=1e-5, rtol=0)
    others = (torch.stack([x, x + 1], 2)[..., 0] for x in (table, position))
    got = run(q, u, v, basis, inv_freq, *others, units=units, **about)
    torch.testing.assert_close((got.out, got.lse), (want.out, want.lse), atol=1e-5, rtol=0)
