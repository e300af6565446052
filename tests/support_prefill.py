"""Prefill methods that choose by an attention map: the map's lines, what a choice reads, and outputs, pair by pair."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from support_layer import Tokens
from torch import Tensor

from kvengine.policies.prefill import Choice


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """As Gemma 2 caps them."""
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def lines(
    q: Tensor, k: Tensor, scale: float, last: int, softcap: float | None = None
) -> tuple[list[float], list[float]]:
    """Of the attention of one head's last queries [query, dim] to tokens [token, dim]: each token's share, each distance's."""
    n, last = len(k), min(last, len(q))
    vertical, slash = [0.0] * n, [0.0] * n
    for i in range(n - last, n):
        p = capped((q[i - n].double() @ k[: i + 1].double().T) * scale, softcap).softmax(0).tolist()
        for j in range(i + 1):
            vertical[j] += p[j] / last
            slash[i - j] += p[j] / last
    return vertical, slash


def read(choice: Choice, queries: int, tokens: int, group: int) -> Tensor:
    """How often each query reads each token; [line, query, token]."""
    laid = 0 if choice.columns is None else choice.columns.shape[1]
    block, first = choice.block, (tokens - queries) // choice.block
    assert choice.spans.shape[1] == -(-tokens // block) - first
    out = torch.zeros(len(choice.spans), queries, tokens, dtype=torch.long)
    for line, of_line in enumerate(choice.spans.tolist()):
        for i in range(queries):
            at = tokens - queries + i
            for a, b in of_line[at // block - first]:
                assert b <= laid or a >= laid, "a span begins among columns and ends among tokens"
                if a < min(laid, b):
                    columns = choice.columns[line // group, a:b]
                    assert int(columns.max()) < at, "columns know no causality"
                    out[line, i].scatter_add_(0, columns, torch.ones_like(columns))
                elif a < b:
                    out[line, i, a - laid : min(b - laid, at + 1)] += 1
    return out


def attended(tokens: Tokens, cuts: tuple[int, ...], sees: Callable[[Tensor, Tensor, float], Tensor]) -> Tensor:
    """Outputs of a prompt in chunks that end at `cuts`; `sees` says which tokens one head's queries of a chunk read.

    [seq, token, q_head, dim]
    """
    q, k, v = (x[0] for x in tokens.part(0, cuts[-1]))
    outs, group = [], len(q) // len(k)
    for h in range(len(q)):
        mine, keys = q[h], k[h // group]
        masks = [sees(mine[a:b], keys[:b], tokens.scale) for a, b in zip((0, *cuts), cuts, strict=False)]
        mask = torch.cat([torch.nn.functional.pad(m, (0, cuts[-1] - m.shape[1])) for m in masks])
        scores = capped(mine @ keys.T * tokens.scale, tokens.softcap).masked_fill(~mask, -math.inf)
        outs.append(scores.softmax(1) @ v[h // group])
    return torch.stack(outs, 1)[None]
