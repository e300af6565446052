"""Attention of a few queries over contiguous keys and values, such as a row's open tail."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.dispatch import DENSE_DIM, beyond, chosen, module
from kvengine.kernels.state import State


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
    lengths: Int[Tensor, "row"] | None = None,
    position: Int[Tensor, "row token"] | None = None,
    wait: bool = False,
    backend: str | None = None,
) -> State:
    """Softmax attention; keys and values are read once for the whole query group and never copied.

    `k`, `v`: any strides along row and token (a view of preallocated slots). `visible`: which tokens each query sees
    (None: all); a token nobody sees may hold anything, NaN included. `softcap`: scores become
    `cap * tanh(score / cap)`. `sinks`: a logit per query head that joins the softmax with a zero value (as in gpt-oss);
    give it to one part only when parts are merged. `lengths` (int32): how many tokens each row has; the columns after
    these are not read. They stay on the device, so that a recorded launch may be repeated with others, and do not go
    together with `visible`; nor does `position`, which is negative where a slot holds no token. `wait`: what a GPU's programs
    find may be left for `merge_states` to join (`State.waiting`). Raises KernelError on shapes that do not fit.
    """
    _check(q, k, v, visible, lengths, position)
    contiguous = k.stride(-1) == 1 and v.stride(-1) == 1
    wide = max(k.shape[-1], v.shape[-1])
    native = contiguous and wide <= DENSE_DIM
    which = chosen((q, k, v), backend, native, 0 if beyond(k, v) else wide)
    if which == "triton":
        return module("attention", which, q.device).attention(  # type: ignore[no-any-return]
            q, k, v, visible, scale, softcap, sinks, want_probs, lengths, position, wait
        )
    if position is not None:
        visible = (position >= 0)[:, None].expand(-1, q.shape[2], -1)
    if lengths is not None:
        within = (torch.arange(k.shape[1], device=k.device) < lengths[:, None])[:, None].expand(-1, q.shape[2], -1)
        visible = within if visible is None else visible & within
    run = module("attention", which, q.device)
    return run.attention(q, k, v, visible, scale, softcap, sinks, want_probs)  # type: ignore[no-any-return]


def _check(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, lengths: Tensor | None, position: Tensor | None
) -> None:
    rows, tokens = k.shape[:2]
    if position is not None and (visible is not None or position.shape != (rows, tokens) or position.stride(-1) != 1):
        raise KernelError(
            f"position must be [row, token] = {[rows, tokens]} with its tokens next to each other, without visible; "
            f"got {list(position.shape)}"
        )
    if lengths is not None and (visible is not None or lengths.dtype != torch.int32 or lengths.shape != (rows,)):
        raise KernelError(
            f"lengths must be int32 [row] = {[rows]}, without visible; got {lengths.dtype} {list(lengths.shape)}"
        )
    if q.shape[0] != rows or v.shape[:2] != k.shape[:2] or q.shape[-1] != k.shape[-1]:
        raise KernelError(
            f"attention takes q [row, group, query, dim], k [row, token, dim], v [row, token, dim_v]; "
            f"got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}"
        )
    if visible is not None and tuple(visible.shape) != (rows, q.shape[2], tokens):
        raise KernelError(
            f"visible must be [row, query, token] = {[rows, q.shape[2], tokens]}; got {list(visible.shape)}"
        )
