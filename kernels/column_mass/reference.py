"""Plain torch, some queries at a time: also for what tells who sees whom by other rules than the kernels know."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvengine.kernels.span_attention import Band

BLOCK = 1 << 20  # logits computed at once, of a row
ON_GPU = 1 << 27  # of all rows together: half a gigabyte, where few at a time would be two queries of a long prompt


def column_mass(
    q: Tensor, k: Tensor, position: Tensor, at: Tensor, real: Tensor, scale: float, band: Band | None,
    softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `kvengine.kernels.column_mass`."""
    slot = torch.arange(k.shape[1], device=k.device)

    def sees(span: slice) -> Bool[Tensor, "row query token"]:
        there = slot[: int(at[span][-1]) + 1]  # later slots hold later tokens
        asked = at[span, None]
        seen = ((position >= 0)[:, None, : len(there)] & (there <= asked)) & real[:, span, None]
        if band is None:
            return seen
        return seen & ((there < band.first[:, None] + band.sinks)[:, None] | (asked - there < band.local))

    return masked(q, k, sees, scale, softcap, sinks)


def masked(
    q: Float[Tensor, "row group query dim"],
    k: Float[Tensor, "row token dim"],
    sees: Callable[[slice], Bool[Tensor, "row query some"]],
    scale: float,
    softcap: float | None,
    sinks: Float[Tensor, "row group"] | None,
) -> Float[Tensor, "row group token"]:
    """What each token receives, where `sees` says of some of the queries which of the first tokens they see."""
    mass = torch.zeros(*q.shape[:2], k.shape[1], dtype=torch.float32, device=q.device)
    keys = k.float().transpose(1, 2)
    for span in blocks(q, k.shape[1]):
        visible = sees(span)
        n = visible.shape[2]
        mass[:, :, :n] += columns(q[:, :, span], keys[:, :, :n], visible, scale, softcap, sinks)
    return mass


def columns(
    q: Float[Tensor, "row group query dim"],
    keys: Float[Tensor, "row dim token"],
    visible: Bool[Tensor, "row query token"],
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, "row group"] | None = None,
) -> Float[Tensor, "row group token"]:
    """The attention that each token receives, of all queries at once."""
    logits = torch.matmul(q.float().flatten(1, 2) * scale, keys).unflatten(1, q.shape[1:3])
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill_(~visible[:, None], float("-inf"))
    if sinks is None:
        return logits.softmax(-1).nan_to_num_(0.0).sum(2)  # a query that sees nothing would give nan
    more = sinks.float()[..., None, None].expand(*logits.shape[:3], 1)
    return torch.cat([logits, more], -1).softmax(-1)[..., :-1].sum(2)


def blocks(q: Tensor, tokens: int) -> list[slice]:
    """Spans of queries whose logits over `tokens` tokens fit in memory comfortably."""
    room = max(BLOCK, ON_GPU // max(1, len(q))) if q.is_cuda else BLOCK
    step = max(1, room // max(1, tokens * q.shape[1]))
    return [slice(i, min(i + step, q.shape[2])) for i in range(0, q.shape[2], step)]
