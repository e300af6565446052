"""The Triton kernel: a program finds where a row's best begin."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels.best_tokens import reference
from kvengine.kernels.gpu import FUSED, next_power_of_2
from kvengine.kernels.gpu.again import launched_again
from kvengine.kernels.gpu.select import MOST, best, warps


@launched_again
@triton.jit(do_not_specialize=["tokens"])
def best_kernel(score, count, keep, tokens, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, BLOCK)
    found = tl.load(score + row * tokens + t, mask=t < tokens, other=-float("inf"))
    chosen = best(found, tl.load(count + row).to(tl.int32)) & (found > -float("inf"))
    tl.store(keep + row * tokens + t, chosen, mask=t < tokens)


def best_tokens(score: Tensor, count: Tensor) -> Tensor:
    """See `kvengine.kernels.best_tokens`. More tokens than a program holds are sorted by torch."""
    rows, tokens = score.shape
    if tokens > MOST or not score.numel():
        return reference.best_tokens(score, count)
    keep = torch.empty(rows, tokens, dtype=torch.bool, device=score.device)
    block = next_power_of_2(tokens)
    best_kernel[(rows,)](
        score.to(torch.float32).contiguous(), count.contiguous(), keep, tokens, BLOCK=block, num_warps=warps(block), **FUSED
    )  # fmt: skip
    return keep
