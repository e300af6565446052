"""Column peak: the most that any of a prompt's queries pays to each token.

For the query heads g of a KV head's group, with s_it = scale q_i . k_t (capped if asked) over the tokens t that query i sees:

    peak_t  =  max over g, i of exp(s_it - lse_i),        lse_i  =  log sum_t exp(s_it)

The values take no part. It is what evictions by a replay of the prompt ask for (KVzip). Plain torch on every device: some
queries at a time, so that nothing of size queries times tokens is made.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.column_mass.reference import blocks

NEAR = 1 << 19  # logits of all rows that a CPU keeps near while it goes over them


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
) -> Float[Tensor, "row token"]:
    """In float32. Query i is that of the token in slot `at[i]`, and sees the tokens up to that slot.

    `position`: negative where a slot holds no token, and what it holds is not used. `at`: ascending. `real`: the queries
    that count. `sinks`: a logit per query head that joins the softmax. 0 for what nobody sees. Raises KernelError on
    shapes that do not fit.
    """
    rows, group, queries, dim = q.shape
    if k.shape[::2] != (rows, dim) or position.shape != k.shape[:2] or at.shape != (queries,):
        raise KernelError(
            f"column_peak takes q [row, group, query, dim], k [row, token, dim], position [row, token] and at [query]; got "
            f"{[list(x.shape) for x in (q, k, position, at)]}"
        )
    if real.shape != (rows, queries) or (sinks is not None and sinks.shape != (rows, group)):
        what = [list(x.shape) for x in (real, sinks) if x is not None]
        raise KernelError(f"column_peak takes real [{rows}, {queries}] and sinks [{rows}, {group}]; got {what}")
    found = torch.full(k.shape[:2], float("-inf"), device=q.device)
    none = position < 0
    holes, every = bool(none.any()), bool(real.all())
    keys = k.float().masked_fill(none[..., None], 0).transpose(1, 2)
    slot, ends = torch.arange(k.shape[1], device=k.device), at.tolist()
    for span in spans(q, k.shape[1]):
        first, end = ends[span.start], ends[span.stop - 1] + 1  # later slots hold later tokens
        some = q[:, :, span].float() * scale
        some = some if every else some.masked_fill(~real[:, None, span, None], 0)
        logits = torch.matmul(some.flatten(1, 2), keys[..., :end]).unflatten(1, (group, -1))
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if holes:
            logits.masked_fill_(none[:, None, None, :end], float("-inf"))
        late = (slot[first + 1 : end] > at[span, None]) | none[:, None, first + 1 : end]
        logits[..., first + 1 :].masked_fill_(late[:, None], float("-inf"))
        lse = logits.logsumexp(-1)
        if sinks is not None:
            lse = torch.logaddexp(lse, sinks.float()[..., None])
        lse = lse.masked_fill(~real[:, None, span] | lse.isneginf(), float("inf"))  # they see nothing, or do not count
        found[:, :end] = torch.maximum(found[:, :end], logits.sub_(lse[..., None]).amax((1, 2)))
    return found.exp_()


def spans(q: Tensor, tokens: int) -> list[slice]:
    """Queries that are taken together."""
    if q.is_cuda:
        return blocks(q, tokens)
    step = max(8, NEAR // (q.shape[0] * q.shape[1] * tokens))
    return [slice(i, min(i + step, q.shape[2])) for i in range(0, q.shape[2], step)]


__all__ = ["column_peak"]
