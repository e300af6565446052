"""The Triton kernel of `kvengine.kernels.paged_attention`, over contiguous tokens."""

from __future__ import annotations

from torch import Tensor

from kvengine.kernels.gpu import fields, lined
from kvengine.kernels.paged_attention.triton import launch
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
    lengths: Tensor | None = None,
    position: Tensor | None = None,
    wait: bool = False,
) -> State:
    """See `kvengine.kernels.attention`."""
    k, v = lined(k), lined(v)
    sides = fields.dense(k, "k"), fields.dense(v, "v")
    return launch(
        q, *sides, k.shape[1], 1, scale, softcap, sinks, want_probs, visible=visible, lengths=lengths, position=position,
        wait=wait,
    )  # fmt: skip
