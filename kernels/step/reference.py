"""Plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvengine.kernels.attention.reference import attention
from kvengine.kernels.best_tokens.reference import best_tokens
from kvengine.kernels.step.native import Ends, Merged, Paid, Placed, Rule, Sealed


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
    paid = rule.paid if isinstance(rule, Merged) else rule if isinstance(rule, Paid) else None
    state = attention(grouped, keys[:, used], values[:, used], visible, scale, None, None, paid is not None)
    out = state.out.to(q.dtype)
    if isinstance(rule, Sealed):
        keep_ends(rule.position, at, rule.ends)
        rule.alive.copy_((rule.position >= 0).unflatten(1, (rule.alive.shape[1], -1)).any(2))
        rule = rule.ends
    if isinstance(rule, Ends) and position is not None:
        keep_ends(position[:, used], at, rule)
    if isinstance(rule, Placed) and position is not None:
        drop_placed(position[:, used], rule)
    if paid is not None and position is not None and state.probs is not None:
        held = position[:, used]
        gone = judge(held, state.probs[:, :, 0], None if score is None else score[:, used], at, paid)
        if isinstance(rule, Merged):
            merge(keys[:, used], values[:, used], held, gone, rule)
    return out.unflatten(0, k.shape[:2]).flatten(1, 2).transpose(1, 2)


def keep_ends(held: Tensor, at: int | Tensor, rule: Ends) -> None:
    held.masked_fill_((held >= rule.first[:, None]) & (held <= at - rule.recent[:, None]), -1)


def drop_placed(held: Tensor, rule: Placed) -> None:
    there = torch.where(held < 0, held.new_full((), torch.iinfo(held.dtype).max), held).sort(1).values
    at = there.gather(1, rule.place[:, None].clamp(max=held.shape[1] - 1))
    held.masked_fill_(((held >= 0).sum(1) > rule.budget)[:, None] & (held == at), -1)


def judge(held: Tensor, received: Tensor, score: Tensor | None, at: int | Tensor, rule: Paid) -> Tensor:
    """Which tokens go, for what they `received` [row, group, slot]."""
    mass = received.amax(1) if rule.reduce == "max" else received.sum(1)
    if rule.reduce == "mean":
        mass = mass.div(received.shape[1]).unflatten(0, (-1, rule.together)).mean(1)
        mass = mass.repeat_interleave(rule.together, 0)
    if score is not None:
        mass += score if rule.adds else 0
        score.copy_(mass)
    rank = (held > at - rule.recent[:, None]).float()
    if rule.first is not None:
        rank += 2 * (held < rule.first[:, None])
    worth = torch.where(rank > 0, 1e30 * rank, mass).masked_fill(held < 0, float("-inf"))
    order = held.argsort(1)  # of equals the later tokens stay, wherever they lie
    stays = torch.empty_like(held, dtype=torch.bool).scatter_(
        1, order, best_tokens(worth.gather(1, order), rule.budget)
    )
    gone = (held >= 0) & ~stays
    held.masked_fill_(gone, -1)
    return gone


def earliest(these: Tensor, position: Tensor) -> Tensor:
    """The slot of each row's earliest token among these."""
    return position.masked_fill(~these, torch.iinfo(position.dtype).max).argmin(1)


def merge(keys: Tensor, values: Tensor, held: Tensor, gone: Tensor, rule: Merged) -> None:
    """The first token of each row that is gone goes into the one most like it. No shape follows from the data."""
    target = held >= (rule.paid.first[:, None] if rule.spares and rule.paid.first is not None else 0)
    row, lost, wide = torch.arange(len(held), device=held.device), gone.to(torch.int8).argmax(1), keys.float()
    length = wide.norm(dim=2).clamp(min=1e-12)
    cosine = (wide @ wide[row, lost][..., None])[..., 0] / (length * length[row, lost][:, None])
    cosine = cosine.masked_fill_(~(target & (held >= 0)), -2)
    like = cosine.amax(1)
    mate = earliest(cosine >= like[:, None], held)
    real, before = gone.any(1) & (like > -2), rule.threshold
    before.copy_(
        torch.where(real, torch.where(before.isnan(), like, rule.beta * like + (1 - rule.beta) * before), before)
    )
    passed = (real & (like >= before))[:, None]
    own, weight = (1, like) if rule.shrinks else (math.e, like.exp())
    whole = own + (torch.ones_like(like) if rule.shrinks else weight)
    made = []  # of both, before either is written: values may be a part of the keys
    for x in (keys, values):
        one, other = x[row, mate], x[row, lost]
        mixed = (own * one.float() + weight[:, None] * other.float()) / whole[:, None]
        made.append(torch.where(passed, mixed.to(x.dtype), one))
    keys[row, mate], values[row, mate] = made
