"""What attention reads of chosen units: counted, found anew from the shapes, and seen by what changes when bytes do."""

from __future__ import annotations

import random

import pytest
import support_kernels as oracle
import torch
from support_pools import LAYOUTS, PAGE, ROWS, TABLE, pool, rows
from torch import Tensor

from kvengine.kernels import codecs
from kvengine.kernels.paged_attention import paged_attention
from kvengine.kernels.slots import resolve

FEW = ["kivi4", "zipcache", "quantspec", "turboquant4"]
CASES = [
    (backend, layout)
    for backend in oracle.backends()
    for layout in (FEW if backend == "triton" else [name for name in LAYOUTS if "float" not in name])
]
Parts = set[tuple[str, int, int]]
"""(field, page, which of what the page has in this field)."""


def parts_of(codec: str, fields: dict[str, Tensor], page: int, slot: int) -> Parts:
    """What a token's key and value are made from."""
    if codec == "dense" or codec == "turboquant":
        return {(name, page, slot) for name in fields}
    if codec != "zipcache":
        return {(name, page, slot // 8 if name in ("k_scale", "k_zero") else slot) for name in fields}  # groups of 8
    salient = [int(fields["mask"][page, i // 8]) >> i % 8 & 1 for i in range(PAGE)]
    narrow, which = 1 - salient[slot], "high" if salient[slot] else "low"
    number = sum(other == salient[slot] for other in salient[:slot])
    found = {(f"{side}_{which}", page, number) for side in "kv"} | {("mask", page, 0), ("v_channel", page, 0)}
    return found | {(f"{side}_{x}", page, at) for side, at in (("k", narrow), ("v", slot)) for x in ("scale", "zero")}


def wanted(codec: str, fields: dict[str, Tensor], given: dict[str, Tensor], units: Tensor, unit: int) -> list[Parts]:
    """Row by row."""
    found: list[Parts] = []
    for table, position, chosen in zip(*(x.tolist() for x in (given["table"], given["position"], units)), strict=True):
        slots = [one * unit + i for one in chosen if one >= 0 for i in range(unit)]
        there = [slot for slot in slots if position[slot] >= 0 and table[slot // PAGE] >= 0]
        found.append(set().union(*(parts_of(codec, fields, table[slot // PAGE], slot % PAGE) for slot in there)))
    return found


def chosen_units(unit: int) -> Tensor:
    units = torch.stack([torch.randperm(TABLE * PAGE // unit)[: 24 // unit + 2] for _ in range(ROWS)])
    units[0, 1] = -1
    return units


def bytes_of(codec: str, fields: dict[str, Tensor], given: dict[str, Tensor], units: Tensor, unit: int) -> int:
    where, position = resolve(given["table"], given["position"], units, unit, PAGE)
    return codecs.bytes_of(codec, fields, where, position >= 0, PAGE)


@pytest.mark.parametrize("unit", [1, 4, 16, 32])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_byte_counts_once_for_a_row(layout: str, unit: int) -> None:
    codec, fields, _, _ = pool(layout, 64, 32)
    given, units = rows(1), chosen_units(unit)
    size = {name: x.shape[-1] * x.element_size() for name, x in fields.items()}
    want = sum(size[name] for row in wanted(codec, fields, given, units, unit) for name, _, _ in row)
    assert 0 < want == bytes_of(codec, fields, given, units, unit)


def test_groups_of_tokens_that_units_straddle() -> None:
    """Units of 12 of a page of 48, groups of 16: two ranges for most."""
    codec, fields = "kivi", codecs.encode_kivi(torch.randn(2, 48, 32), torch.randn(2, 48, 32), 4, 16)
    given = {"table": torch.tensor([[1, 0]], dtype=torch.int32), "position": torch.arange(96)[None]}
    where, position = resolve(given["table"], given["position"], torch.tensor([[1, 7, 2]]), 12, 48)
    tokens = 36 * (2 * 16 + 2 * 2 * 2)  # codes; scales and zeros of values, two groups each
    groups = 3 + 1  # slots 12 to 35 of one page, 36 to 47 of the other
    assert codecs.bytes_of(codec, fields, where, position >= 0, 48) == tokens + groups * 2 * 32 * 2


@pytest.mark.parametrize("unit", [1, 8])
@pytest.mark.parametrize(("backend", "layout"), CASES)
def test_nothing_else_is_read_and_nothing_of_it_left_out(backend: str, layout: str, unit: int) -> None:
    codec, fields, _, _ = pool(layout, 64, 64)
    given, units = rows(1), chosen_units(unit)
    q = torch.randn(ROWS, 3, 1, 64, generator=torch.Generator().manual_seed(1))

    def attend(some: dict[str, Tensor]) -> Tensor:
        out: Tensor = oracle.on(backend, paged_attention)(
            q, some, given["table"], given["position"], page=PAGE, scale=0.2, codec=codec, dim_v=64, units=units, unit=unit,
            backend=backend,
        ).out  # fmt: skip
        return out.cpu()

    want, parts = attend(fields), set().union(*wanted(codec, fields, given, units, unit))
    other = {n: torch.randint_like(x, 256) if x.dtype == torch.uint8 else torch.rand_like(x) for n, x in fields.items()}
    for name, page, which in parts:
        at = page if fields[name].dim() == 2 else (page, which)
        other[name][at] = fields[name][at]
    assert torch.equal(attend(other), want)
    for field in fields:
        name, page, which = random.Random(0).choice(sorted(part for part in parts if part[0] == field))
        changed = {name: x.clone() for name, x in fields.items()}
        mine = changed[name][page] if fields[name].dim() == 2 else changed[name][page, which]
        other_mask = mine.flip(0)  # with as many salient tokens
        mine.copy_(other_mask if name == "mask" else 255 - mine if mine.dtype == torch.uint8 else 1 - mine)
        assert not torch.equal(attend(changed), want), field
