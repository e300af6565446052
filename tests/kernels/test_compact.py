"""Moving survivors into fewer pages."""

from __future__ import annotations

import pytest
import support_kernels as oracle
import torch

from kvengine.errors import KernelError
from kvengine.kernels.compact import compact

PAGE = 8
BACKENDS = [b for b in oracle.backends() if b != "native"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_survivors_move_in_order_and_nothing_else_changes(backend: str, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    fields = {
        "k": torch.randint(0, 200, (20, PAGE, 300), generator=rng).to(dtype),
        "v": torch.randint(0, 200, (20, PAGE, 5), generator=rng).to(dtype),
        "flag": torch.randint(0, 200, (20, PAGE), generator=rng).to(dtype),
    }
    before = {name: x.clone() for name, x in fields.items()}
    pages = torch.randperm(20, generator=rng)
    table, into = pages[:12].reshape(3, 4), pages[12:18].reshape(3, 2)
    table[1, 2:] = -1
    into[1, 1] = -1
    position = torch.randint(0, 1000, (3, 4 * PAGE), generator=rng)
    position[torch.rand(position.shape, generator=rng) < 0.6] = -1
    position[2] = -1
    device = "cuda" if backend == "triton" and torch.cuda.is_available() else "cpu"
    (pool, there), (_, free) = (oracle.far(backend, fields, x) for x in (table, into))
    moved_fields = {name: x.to(device) for name, x in pool.items()}
    got = oracle.on(backend, compact)(moved_fields, there, position, free, page=PAGE, backend=backend).cpu()
    moved_fields = {name: x[-20:] for name, x in moved_fields.items()}
    want = {name: x.clone() for name, x in before.items()}
    for r in range(3):
        live = [s for s in range(4 * PAGE) if position[r, s] >= 0 and table[r, s // PAGE] >= 0]
        assert got[r].tolist() == [int(position[r, s]) for s in live] + [-1] * (2 * PAGE - len(live))
        for rank, s in enumerate(live):
            for name in want:
                want[name][into[r, rank // PAGE], rank % PAGE] = before[name][table[r, s // PAGE], s % PAGE]
    for name in want:
        assert torch.equal(moved_fields[name].cpu(), want[name])


def test_group_scales_cannot_move_by_token() -> None:
    table, position = torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, PAGE, dtype=torch.long)
    with pytest.raises(KernelError, match="'k_scale' must be"):
        compact({"k_scale": torch.zeros(2, 1, 4)}, table, position, table + 1, page=PAGE)
