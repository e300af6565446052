"""The Triton kernels: what is there is found and copied, the rest is fetched (`fetch_pages`), and then it is kept."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels.fetch_pages import triton as fetch_pages
from kvengine.kernels.fetch_pages.triton import AT_ONCE
from kvengine.kernels.gpu import FUSED, next_power_of_2
from kvengine.kernels.gpu.again import launched_again

if TYPE_CHECKING:
    from kvengine.kernels.fetch_kept import Kept

COMPARED = 4096
"""Pairs of a page and a slot that are compared at once, at most: registers hold them."""


@launched_again
@triton.jit(do_not_specialize=["chosen"])
def recall_kernel(
    at, ids, kept, out, slot, counts, chosen, words, slots,
    PAGES: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Of a part of a row's pages: in which slot each is, -1 for none, and those found copied. `FIRST` counts them."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    s = tl.arange(0, SLOTS)
    have = tl.load(ids + row * slots + s, mask=s < slots, other=-1)
    hits, misses = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    for begin in range(part * PAGES, chosen, parts * PAGES):
        n = begin + tl.arange(0, PAGES)
        here, page = n < chosen, row * chosen + n
        want = tl.load(at + page, mask=here, other=-1)
        same = (want[:, None] == have[None, :]) & (want >= 0)[:, None]
        found = tl.max(tl.where(same, s[None, :], -1), 1)
        there = found >= 0
        if FIRST:
            tl.store(slot + page, found, mask=here)
            hits += tl.sum(there.to(tl.int64), 0)
            misses += tl.sum((here & (found < 0)).to(tl.int64), 0)
        source, to = (row * slots + found) * words, page * words
        for first in range(0, words, BLOCK):
            word = first + tl.arange(0, BLOCK)
            inside = there[:, None] & (word < words)[None, :]
            x = tl.load(kept + source[:, None] + word[None, :], mask=inside, other=0)
            tl.store(out + to[:, None] + word[None, :], x, mask=inside)
    if FIRST:
        cell = counts + (row * parts + part) * 2
        hits, misses = hits + tl.load(cell), misses + tl.load(cell + 1)
        tl.debug_barrier()
        tl.store(cell, hits)
        tl.store(cell + 1, misses)


@launched_again
@triton.jit(do_not_specialize=["chosen", "some"])
def keep_kernel(
    at, out, ids, kept, chosen, some, words, slots, PAGES: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """A part of a row's first pages, into its first slots."""
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    for begin in range(part * PAGES, some, parts * PAGES):
        n = begin + tl.arange(0, PAGES)
        here, page, place = n < some, row * chosen + n, row * slots + n
        if FIRST:
            tl.store(ids + place, tl.load(at + page, mask=here, other=-1), mask=here)
        for first in range(0, words, BLOCK):
            word = first + tl.arange(0, BLOCK)
            inside = here[:, None] & (word < words)[None, :]
            x = tl.load(out + page[:, None] * words + word[None, :], mask=inside, other=0)
            tl.store(kept + place[:, None] * words + word[None, :], x, mask=inside)


def fetch(
    kept: Kept, fields: Mapping[str, Tensor], at: Tensor, device: torch.device, remember: bool
) -> dict[str, Tensor]:
    """See `kvengine.kernels.fetch_kept`."""
    (rows, slots), at = kept.ids.shape, at.contiguous()
    chosen, grid = len(at) // rows, (rows, kept.counts.shape[1])
    slot, wide = torch.empty(len(at), dtype=torch.int32, device=device), next_power_of_2(slots)
    found = {}
    for i, (name, field) in enumerate(fields.items()):
        found[name] = torch.empty(len(at), *field.shape[1:], dtype=field.dtype, device=device)
        old, out, words, shape = shaped(kept.data[name], found[name])
        recall_kernel[grid](
            at, kept.ids, old, out, slot, kept.counts, chosen, words, slots, SLOTS=wide, FIRST=i == 0,
            **(shape | {"PAGES": min(shape["PAGES"], max(1, COMPARED // wide))}),
        )  # fmt: skip
        fetch_pages.fetch(field, at, device, found[name], slot)
    for i, name in enumerate(found if remember else ()):
        old, out, words, shape = shaped(kept.data[name], found[name])
        keep_kernel[grid](at, out, kept.ids, old, chosen, min(chosen, slots), words, slots, FIRST=i == 0, **shape)
    return found


def shaped(kept: Tensor, out: Tensor) -> tuple[Tensor, Tensor, int, dict[str, int | bool]]:
    """Both in words, how many a page has, and the shape of a launch."""
    kept, out, words, block = fetch_pages.in_words(kept, out)
    return kept, out, words, {"PAGES": max(1, AT_ONCE // block // 2), "BLOCK": block, "num_warps": 4, **FUSED}
