"""Plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvengine.kernels.attention.reference import attention
from kvengine.kernels.best_tokens.reference import best_tokens
from kvengine.kernels.step.native import Ends, Paid, Rule


def step(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor | None, start: int, end: int,
    at: int, holes: bool, scale: float, fill: bool, rule: Rule | None, score: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `kvengine.kernels.step`."""
    used, to = slice(start, end + (not fill)), torch.full((len(keys),), end)
    if fill and position is not None:
        to = start + (position[:, used] < 0).to(torch.int8).argmax(1)
    row = torch.arange(len(keys))
    keys[row, to], values[row, to] = k.flatten(0, 2), v.flatten(0, 2)
    if position is not None:
        position[row, to] = at
    if score is not None:
        score[row, to] = 0
    grouped = q.unflatten(1, (k.shape[1], -1)).flatten(0, 1)
    visible = (position[:, None, used] >= 0) if holes and position is not None else None
    state = attention(grouped, keys[:, used], values[:, used], visible, scale, None, None, isinstance(rule, Paid))
    out = state.out.to(q.dtype)
    if isinstance(rule, Ends) and position is not None:
        held = position[:, used]
        held.masked_fill_((held >= rule.first[:, None]) & (held <= at - rule.recent[:, None]), -1)
    if isinstance(rule, Paid) and position is not None and state.probs is not None:
        held, received = position[:, used], state.probs[:, :, 0]
        mass = received.amax(1) if rule.reduce == "max" else received.sum(1)
        if rule.reduce == "mean":
            mass = mass.div(received.shape[1]).unflatten(0, (-1, rule.together)).mean(1)
            mass = mass.repeat_interleave(rule.together, 0)
        if score is not None:
            mass = score[:, used] = mass + (score[:, used] if rule.adds else 0)
        mass = mass.masked_fill(held > at - rule.recent[:, None], float("inf")).masked_fill(held < 0, float("-inf"))
        held.masked_fill_(~best_tokens(mass, rule.budget), -1)
    return out.unflatten(0, k.shape[:2]).flatten(1, 2).transpose(1, 2)
