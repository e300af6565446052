"""The C kernel on the CPU (`kvengine/kernels/cpu/attention.c`)."""

from __future__ import annotations

from torch import Tensor

from kvengine.kernels.cpu import call
from kvengine.kernels.state import State


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
    seen = {} if visible is None else dict(
        visible=visible.data_ptr(), visible_row=visible.stride(0), visible_query=visible.stride(1),
        visible_column=visible.stride(2),
    )  # fmt: skip
    return call.run(q, call.dense(k), call.dense(v), k.shape[1], scale, softcap, sinks, want_probs, **seen)
