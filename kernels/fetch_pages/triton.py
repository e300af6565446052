"""The Triton kernel: few programs, each reading whole lines of pinned host memory over the bus.

A page is read as 64-bit words whatever it holds, if its bytes allow, so that one load instruction of a warp asks for
512 bytes. The number of programs is bounded: some 32 fill the bus, and the rest of the chip is left to attention.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels.gpu import FUSED

PROGRAMS = 32
WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@triton.jit(do_not_specialize=["pages", "total"])
def fetch_kernel(host, at, out, pages, words, total, BLOCK: tl.constexpr):
    """Blocks of `BLOCK` words of the fetched pages, dealt to the programs in turn."""
    per = (words + BLOCK - 1) // BLOCK
    for block in range(tl.program_id(0), pages * per, tl.num_programs(0)):
        page, word = block // per, (block % per) * BLOCK + tl.arange(0, BLOCK)
        source = tl.load(at + page).to(tl.int64)
        there = tl.where((source >= 0) & (source < total), words, 0)
        x = tl.load(host + source * words + word, mask=word < there, other=0)
        tl.store(out + page.to(tl.int64) * words + word, x, mask=word < words)


def fetch(field: Tensor, at: Tensor, device: torch.device) -> Tensor:
    """See `kvengine.kernels.fetch_pages`. An id outside of the field gives zeros: nothing is read there."""
    out = torch.empty(len(at), *field.shape[1:], dtype=field.dtype, device=device)
    if not out.numel():
        return out
    size = field[0].numel() * field.element_size()
    word = next(w for w in WORDS if size % w.itemsize == 0)
    source, to = (x.view(len(x), -1).view(torch.uint8).view(word) for x in (field, out))
    words = size // word.itemsize
    block = min(1024, triton.next_power_of_2(words))
    programs = min(PROGRAMS, len(at) * triton.cdiv(words, block))
    fetch_kernel[(programs,)](
        source, at.contiguous(), to, len(at), words, len(field), BLOCK=block, num_warps=4, **FUSED
    )
    return out
