"""By the library's fused kernels."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from kvengine.kernels.merge_states import merge_states
from kvengine.kernels.state import State

QUERIES = 512
"""Queries that are taken together where some places hold no token: the mask of their own tokens is a square of that."""


def attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, there: Bool[Tensor, "seq token"] | None = None
) -> Float[Tensor, "seq query q_head dim_v"]:
    """See `kvengine.kernels.causal_attention`; `there`: whether this is a token."""
    before, group, heads = k.shape[2] - q.shape[2], q.shape[1] // k.shape[1], k.shape[1]
    rows = q.unflatten(1, (-1, group)).flatten(0, 1)
    if there is not None:
        k, v = (x.masked_fill(~there[:, None, :, None], 0) for x in (k, v))  # what is no token may hold anything
        there = there.repeat_interleave(heads, 0)
    k, v = (x.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for x in (k, v))  # for the whole group, without a copy
    if q.is_cuda and not (there is None and before == 0):
        k, v = k.contiguous(), v.contiguous()  # the library may not plan for heads that share memory
    out = _attend(rows, k, v, before, scale) if there is None else _among(rows, k, v, before, scale, there)
    return out.unflatten(0, (len(q), -1)).flatten(1, 2).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, before: int, scale: float) -> Tensor:
    """Of [row, group, query, dim], `before` tokens being earlier than the first query."""
    if before == 0:
        one = q.is_cuda and q.dtype != torch.float32  # then the fused kernels know groups
        k, v = (k[:, 0, None], v[:, 0, None]) if one else (k, v)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=one)
    if not follows(q, k, v):
        sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(before)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale)
    # With the mask that one call would need, the library's kernel takes half as long again on a CPU.
    own = _fused(q, k[:, :, before:], v[:, :, before:], scale, causal=True)
    return merge_states([own, _fused(q, k[:, :, :before], v[:, :, :before], scale)]).out.to(q.dtype)


def _among(q: Tensor, k: Tensor, v: Tensor, before: int, scale: float, there: Tensor) -> Tensor:
    """The same where some places hold no token; the mask of all queries over all places is only made if it must be."""
    if not follows(q, k, v):
        sees = there[:, None, None] & torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(before)
        some = sees.any(3, keepdim=True)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=sees | ~some, scale=scale).where(some, 0)
    out = []
    for i in range(0, q.shape[2], QUERIES):
        mine = q[:, :, i : i + QUERIES]
        start, stop = before + i, before + i + mine.shape[2]
        own = there[:, None, None, start:stop] & torch.ones(stop - start, stop - start, dtype=torch.bool).tril()
        parts = [_fused(mine, k[:, :, start:stop], v[:, :, start:stop], scale, sees=own)]
        if start:
            parts.append(_fused(mine, k[:, :, :start], v[:, :, :start], scale, sees=there[:, None, None, :start]))
        out.append(merge_states(parts).out.to(q.dtype))
    return torch.cat(out, 2)


def _fused(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool = False,
    sees: Bool[Tensor, "row 1 _ token"] | None = None,
) -> State:
    """The library's kernel for CPUs, with the mass behind its result."""
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if sees is None:
        out, lse = run(q, k, v, 0.0, causal, scale=scale)
        return State(out.float(), lse)
    mask = torch.zeros(sees.shape, dtype=q.dtype).masked_fill(~sees, float("-inf"))
    out, lse = run(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    return State(out.float(), lse.masked_fill(~sees.any(3), float("-inf")))  # of nothing it says that the mass is 1


def follows(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the library's kernel for CPUs, which also tells the mass behind its result, knows these tensors."""
    plain = q.is_cpu and q.shape[-1] == v.shape[-1] and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    plain = plain and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1  # it does not look, and reads neighbours
    return plain and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))
