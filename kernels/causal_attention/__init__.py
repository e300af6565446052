"""Attention of a text's last tokens over all of it, each over those up to itself: how a prompt is read.

Nothing is masked by a tensor, and what a query does not see is not computed, but for the edges of blocks.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.causal_attention import native, reference
from kvengine.kernels.causal_attention.reference import follows
from kvengine.kernels.cpu import library
from kvengine.kernels.dispatch import chosen

FAR = 8 << 20
"""Bytes of a head's keys and values in float32 up to which the C version was measured to be faster on a processor with a
matrix unit: 8192 tokens of 128 channels. On one without (AMD Zen 4) it was at every length tried, to 32768: 1.22 times."""


def causal_attention(
    q: Float[Tensor, "seq q_head query dim"],
    k: Float[Tensor, "seq head token dim"],
    v: Float[Tensor, "seq head token dim_v"],
    *,
    scale: float,
    position: Int[Tensor, "seq token"] | None = None,
    backend: str | None = None,
) -> Float[Tensor, "seq query q_head dim_v"]:
    """Query i of n is that of token `token - n + i`, and sees the tokens up to that one; 0 where that is none.

    `position`: negative where there is no token, whatever memory holds there; None: everywhere is one. Any strides;
    the result's dtype is the queries'. The library's fused kernels do this, on a CPU in two calls where there are
    earlier tokens; on a CPU with AVX2 or AVX-512 C does it in less time than they take: in bfloat16 where there is no
    matrix unit, and in float32 up to `FAR`, or at all lengths where pairs of bfloat16 are multiplied. `backend` is
    "reference" or "native". Raises KernelError on shapes that do not fit.
    """
    placed = position is None or position.shape == (len(k), k.shape[2])
    if q.shape[2] > k.shape[2] or q.shape[1] % k.shape[1] or k.shape[:3] != v.shape[:3] or not placed:
        raise KernelError(
            "causal_attention needs keys and values of the same tokens, the queries of the last of them, and as many query "
            f"heads as a multiple of KV heads; got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
            + ("" if position is None else f", with positions {list(position.shape)}")
        )
    known = native.fits(q, k, v) and (backend is not None or near(k, v))
    where = "reference" if q.is_cuda and backend is None else chosen((q, k, v), backend, known)
    if where == "triton":
        raise KernelError("backend='triton': causal_attention has no Triton version; leave backend=None")
    if where == "native":
        return native.attention(q, k, v, scale, position)
    return reference.attention(q, k, v, scale, None if position is None else position >= 0)


def quicker(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the C version runs on these, and faster than the library's."""
    return q.is_cpu and native.fits(q, k, v) and near(k, v) and chosen((q, k, v), None) == "native"


def near(k: Tensor, v: Tensor) -> bool:
    """Whether a head's keys and values, which the C version knows, are few enough for it to be faster than the library."""
    few = k.shape[2] * (k.shape[3] + v.shape[3]) * 4 <= FAR
    return few or k.dtype != torch.float32 or bool(library.needed().kv_causal_halves())


__all__ = ["causal_attention", "follows", "quicker"]
