"""Column peak: the most that any of a prompt's queries pays to each token.

For the query heads g of a KV head's group, with s_it = scale q_i . k_t (capped if asked) over the tokens t that query i sees:

    peak_t  =  max over g, i of exp(s_it - lse_i),        lse_i  =  log sum_t exp(s_it)

The values take no part, and nothing of size queries times tokens is made. It is what evictions by a replay of the prompt ask
for (KVzip). In C and on a GPU they are the kernels of `column_mass`, which keep the most instead of the sum.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.kernels.column_mass import check, fits
from kvengine.kernels.dispatch import pick


def column_peak(
    q: Float[Tensor, "row group query dim"],
    k: Float[Tensor, "row token dim"],
    position: Int[Tensor, "row token"],
    at: Int[Tensor, "query"],
    real: Bool[Tensor, "row query"],
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, "row group"] | None = None,
    backend: str | None = None,
) -> Float[Tensor, "row token"]:
    """In float32. Query i is that of the token in slot `at[i]`, and sees the tokens up to that slot.

    `position`: negative where a slot holds no token, and what it holds is not used. `at`: ascending. `real`: the queries
    that count. `sinks`: a logit per query head that joins the softmax. 0 for what nobody sees. Raises KernelError on
    shapes that do not fit.
    """
    check("column_peak", q, k, position, at, real, sinks)
    if not q.numel() or not k.numel():
        return torch.zeros(k.shape[:2], dtype=torch.float32, device=q.device)
    run = pick("column_peak", (q, k), backend, fits(q, k), q.shape[3])
    return run.column_peak(q, k, position, at, real, scale, softcap, sinks)  # type: ignore[no-any-return]


__all__ = ["column_peak"]
