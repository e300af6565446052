"""How the engine calls the attention kernels."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from kvengine.kernels.attention import attention
from kvengine.kernels.dispatch import native_refusal
from kvengine.kernels.merge_states import merge_states
from kvengine.kernels.state import State, rescaled
from kvengine.session import Call

BLOCK = 1 << 20  # logits computed at once, per group of rows


def whole(
    q: Float[Tensor, "row group query dim"],
    k: Float[Tensor, "row token dim"],
    v: Float[Tensor, "row token dim_v"],
    visible: Bool[Tensor, "row query token"] | None,
    scale: float,
) -> Float[Tensor, "row group query dim_v"]:
    """Attention over everything there is, in the queries' dtype."""
    if (q.shape[2] == 1 and not native_refusal((q, k), True)) or (
        q.is_cuda and visible is not None and q.shape[2] <= 16
    ):
        return attention(q, k, v, visible, scale).out.to(q.dtype)
    # The group is folded into the query axis, so that keys and values are read once for all of it. Four axes, as the
    # fused kernels want: with three, the library makes wide copies of keys and values at every call.
    r, g, n, _ = q.shape
    folded = q.flatten(1, 2)[None]
    if visible is None:
        return F.scaled_dot_product_attention(folded, k[None], v[None], scale=scale)[0].unflatten(1, (g, n))
    some = visible.any(2, keepdim=True)
    mask = (visible | ~some)[:, None].expand(r, g, *visible.shape[1:]).flatten(1, 2)
    out = F.scaled_dot_product_attention(folded, k[None], v[None], attn_mask=mask[None], scale=scale)[0].unflatten(
        1, (g, n)
    )
    return out.where(some[:, None], 0)  # a query that sees nothing


def causal(
    q: Float[Tensor, "row group token dim"],
    k: Float[Tensor, "row token dim"],
    v: Float[Tensor, "row token dim_v"],
    scale: float,
) -> Float[Tensor, "row group token dim_v"]:
    """A whole prompt's own attention, by the library's fused kernel."""
    keys, values = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    return F.scaled_dot_product_attention(q, keys, values, is_causal=True, scale=scale)


def follows(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `causal_after` knows these tensors."""
    plain = q.is_cpu and q.shape[-1] == v.shape[-1] and q.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return plain and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))


def causal_after(
    q: Float[Tensor, "row group query dim"],
    k: Float[Tensor, "row token dim"],
    v: Float[Tensor, "row token dim"],
    scale: float,
) -> Float[Tensor, "row group query dim"]:
    """A later chunk of a prompt, on a CPU: the earlier tokens and its own as two calls that need no mask.

    With the mask that one call would need, the library's kernel takes half as long again.
    """
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    before = k.shape[1] - q.shape[2]
    keys, values = (x[:, None].expand(-1, q.shape[1], -1, -1) for x in (k, v))
    parts = [run(q, keys[:, :, before:], values[:, :, before:], 0.0, True, scale=scale)]
    if before:
        parts.append(run(q, keys[:, :, :before], values[:, :, :before], 0.0, False, scale=scale))
    return merge_states([State(out.float(), lse) for out, lse in parts]).out.to(q.dtype)


def received(parts: list[State], total: State) -> Float[Tensor, "row group token"]:
    """The attention that each token receives from these queries, part after part."""
    return torch.cat([rescaled(part, total) for part in parts], 3).sum(2)


def columns(
    q: Float[Tensor, "row group query dim"],
    keys: Float[Tensor, "row dim token"],
    visible: Bool[Tensor, "row query token"],
    call: Call,
) -> Float[Tensor, "row group token"]:
    """The attention that each token receives, summed over queries; the values take no part, so they are not read."""
    logits = torch.matmul(q.float().flatten(1, 2) * call.scale, keys).unflatten(1, q.shape[1:3])
    if call.softcap is not None:
        logits = torch.tanh(logits / call.softcap) * call.softcap
    logits = logits.masked_fill_(~visible[:, None], float("-inf"))
    if call.sinks is None:
        return logits.softmax(-1).nan_to_num_(0.0).sum(2)  # a query that sees nothing would give nan
    sinks = call.sinks.float()[..., None, None].expand(*logits.shape[:3], 1)
    return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1].sum(2)


def blocks(q: Tensor, tokens: int) -> list[slice]:
    """Spans of queries whose logits over `tokens` tokens fit in memory comfortably."""
    step = max(1, BLOCK // max(1, tokens * q.shape[1]))
    return [slice(i, min(i + step, q.shape[2])) for i in range(0, q.shape[2], step)]
