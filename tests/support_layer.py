"""One layer's cache on random keys and values, and plain attention to hold against it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvengine.cache import LayerCache
from kvengine.lane import Lane
from kvengine.rope import Rope
from kvengine.session import Call, Session
from kvengine.stack import Stack


@dataclass
class Tokens:
    """Queries [seq, q_head, token, dim], keys and values [seq, head, token, dim] of a sequence to come."""

    q: Tensor
    k: Tensor
    v: Tensor
    softcap: float | None = None
    sinks: Tensor | None = None  # [head, group]

    def part(self, a: int, b: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.q[:, :, a:b], self.k[:, :, a:b], self.v[:, :, a:b]

    @property
    def scale(self) -> float:
        return float(self.q.shape[-1] ** -0.5)

    def capped(self, logits: Tensor) -> Tensor:
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()


def draw(
    tokens: int,
    heads: int = 2,
    group: int = 2,
    sequences: int = 1,
    dim: int = 16,
    dim_v: int | None = None,
    seed: int = 0,
) -> Tokens:
    g = torch.Generator().manual_seed(seed)
    shapes = ((heads * group, dim), (heads, dim), (heads, dim_v or dim))
    return Tokens(*(torch.randn(sequences, h, tokens, d, generator=g) for h, d in shapes))


def plain(tokens: Tokens, token: int, seen: Tensor | None = None) -> Tensor:
    """What query `token` gives over the earlier tokens and itself, or those that `seen` [seq, head, token] allows."""
    group = tokens.q.shape[1] // tokens.k.shape[1]
    k, v = (x[:, :, : token + 1].repeat_interleave(group, 1) for x in (tokens.k, tokens.v))
    logits = tokens.capped((tokens.q[:, :, token : token + 1] @ k.transpose(2, 3)) * tokens.scale)
    if seen is not None:
        logits = logits.masked_fill(~seen.repeat_interleave(group, 1)[:, :, None], float("-inf"))
    return (logits.softmax(-1) @ v).transpose(1, 2)


@dataclass
class Run:
    cache: LayerCache
    out: Tensor  # [seq, token, q_head, dim_v], prompt and decoded tokens

    @property
    def lane(self) -> Lane:
        return self.cache.parts[0].lane


def run(
    policy: str | Stack,
    tokens: Tokens,
    prompt: int,
    *,
    layer: int = 0,
    layers: int = 1,
    session: Session | None = None,
    valid: Tensor | None = None,
    chunks: tuple[int, ...] = (),
    at_once: bool = False,
) -> Run:
    """The prompt (cut at `chunks`), then the other tokens one by one, or `at_once`, as a draft to verify comes."""
    session = session or Session(rope=rope(tokens.k.shape[-1]))
    cache = LayerCache(Stack.of(policy), layer, layers, session)
    call, outs, n = Call(tokens.scale, tokens.softcap, tokens.sinks), [], tokens.k.shape[2]
    session.prompt_end = prompt
    cuts = [0, *chunks, prompt]
    steps = list(zip(cuts, cuts[1:], strict=False))
    session_steps = [(prompt, n)] if at_once else [(i, i + 1) for i in range(prompt, n)]
    for a, b in steps + [s for s in session_steps if s[0] < s[1]]:
        session.following = a >= prompt
        outs.append(cache.forward(*tokens.part(a, b), call, None if valid is None else valid[:, a:b]))
    return Run(cache, torch.cat(outs, 1))


def rope(dim: int) -> Rope:
    return Rope(10_000.0 ** -(torch.arange(0, dim, 2) / dim))


def padded(tokens: Tokens, by: int, fill: float = 7.0) -> tuple[Tokens, Tensor]:
    """The first sequence with `by` slots of garbage before it, and which slots are tokens."""
    parts = (tokens.q, tokens.k, tokens.v)
    longer = Tokens(*(torch.cat([torch.full_like(x[:, :, :by], fill), x], 2) for x in parts))
    valid = torch.ones(len(tokens.q), longer.q.shape[2], dtype=torch.bool)
    valid[:, :by] = False
    return longer, valid


def stacked(a: Tokens, b: Tokens) -> Tokens:
    """Two equally long sequences in one batch."""
    return Tokens(*(torch.cat([x, y]) for x, y in ((a.q, b.q), (a.k, b.k), (a.v, b.v))))
