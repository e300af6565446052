"""By the library's fused kernels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kvengine.kernels.merge_states import merge_states
from kvengine.kernels.state import State


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """See `kvengine.kernels.causal_attention`."""
    before, group = k.shape[2] - q.shape[2], q.shape[1] // k.shape[1]
    rows = q.unflatten(1, (-1, group)).flatten(0, 1)
    k, v = (x.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for x in (k, v))  # for the whole group, without a copy
    return _attend(rows, k, v, before, scale).unflatten(0, (len(q), -1)).flatten(1, 2).transpose(1, 2)


def _attend(q: Tensor, k: Tensor, v: Tensor, before: int, scale: float) -> Tensor:
    """Of [row, group, query, dim], `before` tokens being earlier than the first query."""
    if before == 0:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    if not follows(q, k, v):
        sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(before)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale)
    # With the mask that one call would need, the library's kernel takes half as long again on a CPU.
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    parts = [
        run(q, k[:, :, before:], v[:, :, before:], 0.0, True, scale=scale),
        run(q, k[:, :, :before], v[:, :, :before], 0.0, False, scale=scale),
    ]
    return merge_states([State(out.float(), lse) for out, lse in parts]).out.to(q.dtype)


def follows(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether the library's kernel for CPUs, which also tells the mass behind its result, knows these tensors."""
    plain = q.is_cpu and q.shape[-1] == v.shape[-1] and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    plain = plain and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1  # it does not look, and reads neighbours
    return plain and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))
