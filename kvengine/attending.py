"""Which kernel answers, where keys and values lie side by side: a prompt's, or those that a view or a replay reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from kvengine import answers
from kvengine.kernels import dispatch
from kvengine.kernels.attention import attention
from kvengine.kernels.causal_attention import causal_attention, follows, quicker
from kvengine.kernels.dispatch import native_refusal
from kvengine.kernels.merge_states import merge_states
from kvengine.kernels.span_attention import Band, band_spans, causal_spans, pairs, span_attention
from kvengine.policies.prefill import Prefill
from kvengine.session import Call

FEW = 16
"""Queries that a GPU answers by our own kernel, where all of what is held is read."""


@dataclass
class Tally:
    """Of a prompt's (query, token) pairs, those that were computed, and all."""

    computed: float = 0.0
    every: float = 0.0

    def add(self, rows: int, begin: int, end: int, computed: float | None = None) -> None:
        """Queries `begin` to `end` of so many rows, which see all tokens up to themselves; None: all was computed."""
        every = (end * (end + 1) - begin * (begin + 1)) / 2
        self.every += rows * every
        self.computed += rows * (every if computed is None else computed)


def whole(
    q: Float[Tensor, "row group query dim"],
    k: Float[Tensor, "row token dim"],
    v: Float[Tensor, "row token dim_v"],
    visible: Bool[Tensor, "row query token"] | None,
    scale: float,
    clean: bool = False,
) -> Float[Tensor, "row group query dim_v"]:
    """Attention over everything there is, in the queries' dtype. `clean`: no slot is without a token.

    What nobody sees may hold anything, NaN included.
    """
    # On Hopper and Blackwell the library's is cuDNN's, which plans anew for every length: tens of milliseconds a token.
    few = q.is_cuda and q.shape[2] <= FEW and (visible is not None or ours(q, k, v))
    if few:
        return merge_states([attention(q, k, v, visible, scale, wait=True)], dtype=q.dtype).out.to(q.dtype)
    if (q.shape[2] == 1 or visible is not None) and not native_refusal((q, k), True):
        return attention(q, k, v, visible, scale).out.to(q.dtype)
    # The group is folded into the query axis, so that keys and values are read once for all of it. Four axes, as the
    # fused kernels want: with three, the library makes wide copies of keys and values at every call.
    r, g, n, _ = q.shape
    folded = q.flatten(1, 2)[None]
    if visible is None:
        return F.scaled_dot_product_attention(folded, k[None], v[None], scale=scale)[0].unflatten(1, (g, n))
    if not clean:  # in the library a weight of 0 meets NaN
        k, v = (x.masked_fill(~visible.any(1)[..., None], 0) for x in (k, v))
    some = visible.any(2, keepdim=True)
    mask = (visible | ~some)[:, None].expand(r, g, *visible.shape[1:]).flatten(1, 2)
    out = F.scaled_dot_product_attention(folded, k[None], v[None], attn_mask=mask[None], scale=scale)[0].unflatten(
        1, (g, n)
    )
    return out.where(some[:, None], 0)  # a query that sees nothing


def ours(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `attention` runs its Triton kernel on these."""
    wide = 0 if dispatch.beyond(k, v) else max(q.shape[-1], v.shape[-1])
    return dispatch.chosen((q, k, v), None, wide=wide) == "triton"


def causal(
    q: Float[Tensor, "row group query dim"],
    k: Float[Tensor, "row token dim"],
    v: Float[Tensor, "row token dim_v"],
    scale: float,
    position: Int[Tensor, "row token"] | None = None,
) -> Float[Tensor, "row group query dim_v"]:
    """Attention of the last tokens over all of them, each over those up to itself; a negative position is no token."""
    return causal_attention(q, k[:, None], v[:, None], scale=scale, position=position).transpose(1, 2)


def by_slot(
    q: Float[Tensor, "row group query dim"],
    k: Float[Tensor, "row token dim"],
    v: Float[Tensor, "row token dim_v"],
    position: Int[Tensor, "row token"],
    clean: bool,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Tensor, "row group"] | None = None,
    band: Band | None = None,
) -> Float[Tensor, "row group query dim_v"]:
    """Attention of the last tokens, where slots tell who sees whom. `clean`: no slot is without a token.

    A band counts positions: it needs every token in its place.
    """
    if (
        band is None
        and softcap is None
        and sinks is None
        and (follows(q, k, v) or (clean and q.shape[2] == k.shape[1]))
    ):
        return causal(q, k, v, scale, None if clean else position)
    queries, tokens = q.shape[2], k.shape[1]
    position = torch.arange(tokens, device=q.device, dtype=torch.int32).where(position >= 0, -1)
    spans = causal_spans(queries, tokens, k.device) if band is None else band_spans(queries, tokens, band)
    return span_attention(q, k, v, position, spans, scale=scale, band=band, softcap=softcap, sinks=sinks)


def chosen(
    q: Float[Tensor, "row group query dim"],
    k: Float[Tensor, "row token dim"],
    v: Float[Tensor, "row token dim_v"],
    position: Int[Tensor, "row token"],
    clean: bool,
    prefill: Prefill,
    last: int,
    call: Call,
    tally: Tally,
) -> Float[Tensor, "row group query dim_v"]:
    """Attention of the last tokens to those that a prefill method chooses. `clean`: no slot is without a token.

    `last`: of each row's queries, the last ones that read everything. Rows whose tokens are in the same slots go together,
    without the empty ones, and what was there before comes by position: so padding can change nothing, nor can the slots
    that evictions have left. What is computed is added to the `tally`.
    """
    if clean:
        return _chosen(q, k, v, position, prefill, last, call, tally)
    out, before, there = q.new_zeros(*q.shape[:3], v.shape[-1]), k.shape[1] - q.shape[2], position >= 0
    ends = [*((there[1:] != there[:-1]).any(1).nonzero()[:, 0] + 1).tolist(), len(there)]
    for start, end in zip([0, *ends], ends, strict=False):
        rows, held = slice(start, end), there[start].nonzero()[:, 0]
        asked = held[held >= before] - before
        if len(asked):
            mine = call if call.sinks is None else call._replace(sinks=call.sinks[rows])
            given = q[rows, :, asked], k[rows, held], v[rows, held], position[rows, held]
            out[rows, :, asked] = _chosen(*given, prefill, last, mine, tally)
    return out


def _chosen(
    q: Tensor, k: Tensor, v: Tensor, position: Tensor, prefill: Prefill, last: int, call: Call, tally: Tally
) -> Tensor:
    some, tokens, before = max(0, q.shape[2] - last), k.shape[1], k.shape[1] - q.shape[2]
    if before and bool((position[:, :before].diff(dim=1) < 0).any()):
        order = position[:, :before].argsort(1)
        k, v = (torch.cat([_taken(x, order), x[:, before:]], 1) for x in (k, v))
    place = torch.arange(tokens, device=k.device, dtype=torch.int32).expand(k.shape[:2])
    tally.add(len(q), tokens - q.shape[2] + some, tokens)
    whole = by_slot(q[:, :, some:], k, v, place, True, *call.constants) if some < q.shape[2] else None
    if whole is not None and not some:
        return whole
    found = answers.ask(prefill, "choose", q.detach(), k.detach(), call.scale, call.softcap)
    spans, block, columns = answers.choice(prefill, found, q, some, tokens)
    lead, held = before % block, before + some  # blocks begin before the queries
    k, v = (x[:, :held] if columns is None else torch.cat([_taken(x, columns), x[:, :held]], 1) for x in (k, v))
    spans = spans[:, : -(-(lead + some) // block)].clamp(max=k.shape[1])
    place = torch.arange(k.shape[1], device=k.device, dtype=torch.int32).expand(k.shape[:2])
    tally.add(len(q), before, held, pairs(spans, lead + some, k.shape[1], lead, block))
    q = F.pad(q[:, :, :some], (0, 0, lead, 0)) if lead else q[:, :, :some]  # which copies all of them
    options = {"scale": call.scale, "softcap": call.softcap, "sinks": call.sinks, "block": block}
    out = span_attention(q, k, v, place, spans, **options)[:, :, lead:]  # type: ignore[arg-type]
    return out if whole is None else torch.cat([out, whole], 2)


def _taken(x: Tensor, at: Tensor) -> Tensor:
    return x.gather(1, at[..., None].long().expand(-1, -1, x.shape[2]))


def causal_pays(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `causal` takes less time than `whole` with a mask."""
    return q.shape[2] > 1 and quicker(q, k[:, None], v[:, None])
