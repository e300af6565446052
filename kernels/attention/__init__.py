"""Attention of a few queries over contiguous keys and values, such as a row's open tail."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.dispatch import NATIVE_DIM, pick
from kvengine.kernels.state import State

NATIVE_QUERIES = 64
"""Queries per call up to which the C kernel is used; beyond, matrix multiplication wins."""


def attention(
    q: Float[Tensor, "row group query dim"],
    k: Float[Tensor, "row token dim"],
    v: Float[Tensor, "row token dim_v"],
    visible: Bool[Tensor, "row query token"] | None,
    scale: float,
    *,
    softcap: float | None = None,
    sinks: Float[Tensor, "row group"] | None = None,
    want_probs: bool = False,
    backend: str | None = None,
) -> State:
    """Softmax attention; keys and values are read once for the whole query group and never copied.

    `k`, `v`: any strides along row and token (a view of preallocated slots). `visible`: which tokens each query sees
    (None: all); a token nobody sees may hold anything, NaN included. `softcap`: scores become
    `cap * tanh(score / cap)`. `sinks`: a logit per query head that joins the softmax with a zero value (as in gpt-oss);
    give it to one part only when parts are merged. Raises KernelError on shapes that do not fit.
    """
    _check(q, k, v, visible)
    contiguous = k.stride(-1) == 1 and v.stride(-1) == 1
    native = contiguous and q.shape[2] <= NATIVE_QUERIES and max(k.shape[-1], v.shape[-1]) <= NATIVE_DIM
    run = pick("attention", (q, k, v), backend, native)
    return run.attention(q, k, v, visible, scale, softcap, sinks, want_probs)  # type: ignore[no-any-return]


def _check(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> None:
    rows, tokens = k.shape[:2]
    if q.shape[0] != rows or v.shape[:2] != k.shape[:2] or q.shape[-1] != k.shape[-1]:
        raise KernelError(
            f"attention takes q [row, group, query, dim], k [row, token, dim], v [row, token, dim_v]; "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if visible is not None and tuple(visible.shape) != (rows, q.shape[2], tokens):
        raise KernelError(
            f"visible must be [row, query, token] = {[rows, q.shape[2], tokens]}; got {list(visible.shape)}"
        )
