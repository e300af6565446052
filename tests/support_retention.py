"""Layers of random numbers for the retention tests: a prompt, some decoded tokens, and what is held after each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvengine.cache import LayerCache
from kvengine.session import Call, Session
from kvengine.stack import Stack
from kvengine.stats import measure


@dataclass
class Case:
    """Random queries, keys and values of one layer: [seq, head, token, dim]."""

    heads: int = 2
    group: int = 2
    length: int = 37
    steps: int = 20
    pads: tuple[int, ...] = (0,)
    dim: int = 8
    seed: int = 0
    spread: float = 2.0  # of the logits: with narrow ones all tokens weigh the same
    layer: int = 0
    layers: int = 1
    session: Session = field(default_factory=Session)
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        b, n = len(self.pads), self.length + self.steps
        make = lambda h: torch.randn(b, h, n, self.dim, generator=random).to(self.dtype)  # noqa: E731
        self.q = make(self.heads * self.group) * self.spread
        self.k, self.v = make(self.heads), make(self.heads)
        self.valid = torch.arange(n) >= torch.tensor(self.pads)[:, None]
        self.call = Call(self.dim**-0.5)

    def row(self, row: int) -> tuple[Tensor, Tensor, Tensor, int]:
        """A row's queries [group, token, dim], keys, values [token, dim], and its padding."""
        b, h = divmod(row, self.heads)
        group = self.q[b, h * self.group : (h + 1) * self.group]
        return group.float(), self.k[b, h].float(), self.v[b, h].float(), self.pads[b]

    @property
    def rows(self) -> int:
        return self.heads * len(self.pads)

    def feed(self, layer: LayerCache, start: int, stop: int) -> Tensor:
        part = slice(start, stop)
        valid = self.valid[:, part]
        layer.session.reached = layer.layer  # here layers take all tokens one after the other, as no model does
        q, k, v = self.q[:, :, part], self.k[:, :, part], self.v[:, :, part]
        return layer.forward(q, k, v, self.call, None if bool(self.valid.all()) else valid)

    def prompt(self, policy: str, chunks: int = 1) -> LayerCache:
        """A layer that has read the prompt, in so many chunks."""
        self.session.prompt_end = self.length
        layer = LayerCache(Stack.parse(policy), self.layer, self.layers, self.session)
        edges = [self.length * i // chunks for i in range(chunks + 1)]
        for a, b in zip(edges, edges[1:], strict=False):
            self.feed(layer, a, b)
        return layer

    def decode(self, layer: LayerCache) -> Iterator[tuple[int, Tensor]]:
        """Token by token: its index, and the output."""
        for t in range(self.length, self.length + self.steps):
            yield t, self.feed(layer, t, t + 1)


def held(layer: LayerCache, row: int) -> dict[int, tuple[Tensor, Tensor]]:
    """What a row holds: position -> key, value."""
    lane = layer.parts[0].lane
    k, v, position, _ = lane.everything()
    return {int(p): (k[row, i], v[row, i]) for i, p in enumerate(position[row]) if p >= 0}


def positions(layer: LayerCache, row: int) -> list[int]:
    return sorted(held(layer, row))


def same_source(case: Case, layer: LayerCache) -> None:
    """What is kept is what came in, bit for bit; and the counts that the statistics report are those held."""
    for row in range(case.rows):
        _, k, v, pad = case.row(row)
        for p, (key, value) in held(layer, row).items():
            assert p >= pad
            assert torch.equal(key.float(), k[p]) and torch.equal(value.float(), v[p])
    counts = measure([layer]).held[0].flatten().tolist()
    assert counts == [len(held(layer, row)) for row in range(case.rows)]


def probabilities(case: Case, row: int, query: int, tokens: list[int]) -> Tensor:
    """[group, token]: what the query at this index pays to these tokens."""
    q, k, _, _ = case.row(row)
    logits, call = q[:, query] @ k[tokens].T * case.call.scale, case.call
    if call.softcap is not None:
        logits = call.softcap * (logits / call.softcap).tanh()
    if call.sinks is not None:
        logits = torch.cat([logits, call.sinks[row % case.heads][:, None]], 1)
    return logits.softmax(-1)[:, : len(tokens)]


def best(score: dict[int, float], count: int, always: Callable[[int], bool] = lambda p: False) -> list[int]:
    """The `count` best positions, those in `always` first; ties go to the later one."""
    ranked = sorted(score, key=lambda p: (always(p), score[p], p), reverse=True)
    return sorted(ranked[:count])


def attended(case: Case, row: int, query: int, tokens: list[int]) -> Tensor:
    """[group, dim]: the output of a query over these tokens."""
    return probabilities(case, row, query, tokens) @ case.row(row)[2][tokens]


def output(case: Case, out: Tensor, row: int) -> Tensor:
    """[group, dim]: a row's part of the layer's output for one token."""
    b, h = divmod(row, case.heads)
    return out[b, 0, h * case.group : (h + 1) * case.group]
