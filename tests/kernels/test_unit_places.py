"""Where chosen units lie, against a loop."""

from __future__ import annotations

import pytest
import support_kernels as oracle
import torch

from kvengine.errors import KernelError
from kvengine.kernels.unit_places import unit_places

BACKENDS = [name for name in oracle.backends() if name != "native"]


@pytest.mark.parametrize(
    "rows, columns, page, unit, chosen", [(3, 5, 16, 4, 7), (1, 2, 24, 3, 1), (2, 9, 8, 8, 300), (2, 3, 4, 1, 12)]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_places_are_those_of_the_loop(backend: str, rows: int, columns: int, page: int, unit: int, chosen: int) -> None:
    rng, per = torch.Generator().manual_seed(rows + page), page // unit
    first = (1 << 31) - 99  # pages have so many units that 32 bits count none
    table = torch.randint(first, first + 99, (rows, columns + 2), generator=rng, dtype=torch.int32)[:, :columns]
    table[0, -1] = -1
    position = torch.randint(-1, 5000, (rows, columns * page + 3), generator=rng, dtype=torch.int32)[
        :, : columns * page
    ]
    units = torch.randint(-1, columns * per, (rows, chosen), generator=rng)
    units[-1, -1] = -1
    piece, place = oracle.on(backend, unit_places)(units, table, position, page=page, unit=unit, backend=backend)
    assert piece.dtype == torch.int64 and place.dtype == torch.int32
    for r in range(rows):
        for i, at in enumerate(units[r].tolist()):
            there = place[r, i * unit : (i + 1) * unit].tolist()
            number = int(piece[r * chosen + i])
            if at < 0:
                assert there == [-1] * unit and 0 <= number < (first + 99) * per
            else:
                assert there == position[r, at * unit : (at + 1) * unit].tolist()
                assert number == max(0, int(table[r, at // per])) * per + at % per


@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_and_positions_may_be_views(backend: str) -> None:
    rng = torch.Generator().manual_seed(4)
    table = torch.randperm(12, generator=rng).int().view(2, 6)
    position, units = torch.arange(48, dtype=torch.int32).repeat(2, 1), torch.tensor([[5, 0, 9], [2, 11, 23]])
    run = oracle.on(backend, unit_places)
    want = run(units, table, position, page=8, unit=2, backend=backend)
    others = [torch.stack([x, x + 1], 2)[..., 0] for x in (table, position)]
    got = run(units, *others, page=8, unit=2, backend=backend)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_units_are_no_places(backend: str) -> None:
    table, position = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 12, dtype=torch.int32)
    none = torch.zeros(2, 0, dtype=torch.int64)
    piece, place = oracle.on(backend, unit_places)(none, table, position, page=4, unit=2, backend=backend)
    assert piece.shape == (0,) and place.shape == (2, 0)


def test_a_table_of_another_size_is_refused() -> None:
    table, position = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, 13, dtype=torch.int32)
    with pytest.raises(KernelError, match=r"table \[2, 3\] and position \[2, 13\]"):
        unit_places(torch.zeros(2, 1, dtype=torch.int64), table, position, page=4, unit=2)
