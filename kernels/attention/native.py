"""The C kernel on the CPU (`kvengine/kernels/cpu/attention.c`); several queries that see everything go to torch's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvengine.kernels.cpu import call
from kvengine.kernels.state import State

QUERIES = 64
"""Read together. More of them would not find their scores in the nearer caches."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    want_probs: bool,
) -> State:
    """See `kvengine.kernels.attention`."""
    rows, group, queries, dim = q.shape
    plain = visible is None and softcap is None and sinks is None and not want_probs
    if plain and queries > 1 and k.shape[1] and dim == v.shape[-1] and q.dtype == k.dtype == v.dtype == torch.float32:
        run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = run(q.flatten(1, 2)[None], k[None], v[None], scale=scale)
        return State(out[0].unflatten(1, (group, queries)), lse[0].unflatten(1, (group, queries)))
    if queries > QUERIES:
        some = [slice(i, i + QUERIES) for i in range(0, queries, QUERIES)]
        parts = [
            attention(q[:, :, s], k, v, None if visible is None else visible[:, s], scale, softcap, sinks, want_probs)
            for s in some
        ]
        return State(*(None if x[0] is None else torch.cat(x, 2) for x in zip(*parts, strict=True)))  # type: ignore[arg-type]
    seen: dict[str, Any] = {} if visible is None else dict(
        visible=visible.data_ptr(), visible_row=visible.stride(0), visible_query=visible.stride(1),
        visible_column=visible.stride(2),
    )  # fmt: skip
    return call.run(q, call.dense(k), call.dense(v), k.shape[1], scale, softcap, sinks, want_probs, **seen)
