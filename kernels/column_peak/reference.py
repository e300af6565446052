"""Plain torch, some queries at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from kvengine.kernels.column_mass.reference import blocks

NEAR = 1 << 19  # logits of all rows that a CPU keeps near while it goes over them


def column_peak(
    q: Tensor,
    k: Tensor,
    position: Tensor,
    at: Tensor,
    real: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """See `kvengine.kernels.column_peak`."""
    group = q.shape[1]
    found = torch.full(k.shape[:2], float("-inf"), dtype=torch.float32, device=q.device)
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
