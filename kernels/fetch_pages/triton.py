"""The Triton kernel: few programs, each reading whole lines of pinned host memory over the bus.

A page is read as 64-bit words whatever it holds, if its bytes allow, so that one load instruction of a warp asks for
512 bytes. The number of programs is bounded: some 32 fill the bus, and the rest of the chip is left to attention. An answer of
the bus takes microseconds, in which each program has 8 KiB on their way: of short pages, several.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels.gpu import FUSED, cdiv, next_power_of_2
from kvengine.kernels.gpu.again import launched_again

PROGRAMS, AT_ONCE = 32, 1024
"""Programs at most, and words that each has on their way."""
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@launched_again
@triton.jit(do_not_specialize=["pages", "total"])
def fetch_kernel(
    host, at, known, out, pages, words, total, PAGES: tl.constexpr, BLOCK: tl.constexpr, KNOWN: tl.constexpr
):  # fmt: skip
    """Blocks of `BLOCK` words of PAGES fetched pages, dealt to the programs in turn. `KNOWN`: but those that `known` has."""
    per = (words + BLOCK - 1) // BLOCK
    for block in range(tl.program_id(0), (pages + PAGES - 1) // PAGES * per, tl.num_programs(0)):
        page, word = block // per * PAGES + tl.arange(0, PAGES), (block % per) * BLOCK + tl.arange(0, BLOCK)
        source = tl.load(at + page, mask=page < pages, other=-1).to(tl.int64)
        there, inside = (source >= 0) & (source < total), (word < words)[None, :]
        wanted = page < pages
        if KNOWN:
            wanted = wanted & (tl.load(known + page, mask=wanted, other=0) < 0)
        there, inside = there & wanted, wanted[:, None] & inside
        x = tl.load(host + source[:, None] * words + word[None, :], mask=there[:, None] & inside, other=0)
        to = out + page.to(tl.int64)[:, None] * words + word[None, :]
        tl.store(to, x, mask=inside)


def fetch(
    field: Tensor, at: Tensor, device: torch.device, out: Tensor | None = None, known: Tensor | None = None
) -> Tensor:
    """See `kvengine.kernels.fetch_pages`. An id outside of the field gives zeros: nothing is read there.

    `out`: where to. `known`: int32 for each page, which stays as it is in `out` unless this is negative.
    """
    out = torch.empty(len(at), *field.shape[1:], dtype=field.dtype, device=device) if out is None else out
    if not out.numel():
        return out
    source, to, words, block = in_words(field, out)
    several = AT_ONCE // block
    programs = min(PROGRAMS, cdiv(len(at), several) * cdiv(words, block))
    fetch_kernel[(programs,)](
        source, at.contiguous(), at if known is None else known, to, len(at), words, len(field), PAGES=several, BLOCK=block,
        KNOWN=known is not None, num_warps=4, **FUSED,
    )  # fmt: skip
    return out


def in_words(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, int, int]:
    """Both as the widest words that a page is made of, how many a page has, and how many of one are moved at once."""
    size = a[0].numel() * a.element_size()
    word = next(w for w in WORDS if size % w.itemsize == 0)
    a, b = (x.view(len(x), -1).view(torch.uint8).view(word) for x in (a, b))
    return a, b, size // word.itemsize, min(AT_ONCE, next_power_of_2(size // word.itemsize))
