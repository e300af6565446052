"""A draft that reads the target's own rows: it holds the numbers of the tokens to read, not the tokens.

What a policy reads is often a set of the target's tokens as they are: chosen units, sinks and a window, what a judgement
at the prompt's end kept. Four bytes then name a token of a row, where a copy of it takes its keys and values; the copy
lives only while a layer is being read, which is what this costs in time. Only drafted tokens are held.

Not every policy is such a set. `why_not` says so, and why.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvengine.cache import LayerCache
from kvengine.errors import CacheError
from kvengine.policies._budget import tokens
from kvengine.policies.representation.dense import Dense
from kvengine.policies.retention import Retention
from kvengine.policies.retention.full import Full
from kvengine.policies.retention.streaming import Streaming
from kvengine.policies.routing.uniform import Uniform
from kvengine.policies.selection.all import All
from kvengine.session import Call
from kvengine.speculative.view import Held, LayerView
from kvengine.stack import Stack
from kvengine.tail import Tail
from kvengine.tokens import take


def why_not(middle: Stack, stack: Stack, layers: int = 1) -> str | None:
    """Why a draft under `middle` cannot read the rows of a target under `stack`, with so many layers; None if it can."""
    r = middle.retention
    if stack.paged or not isinstance(stack.retention, Full) or not isinstance(stack.routing, Uniform):
        return f"the target under '{stack}' does not hold every token as it is, side by side"
    if not isinstance(middle.representation, Dense):
        return "its codes are not what the target stores"
    if not isinstance(middle.routing, Uniform):
        return "its heads read sets of different sizes"
    if r.merges:
        return "it merges tokens, and what it reads is then in no row of the target"
    if type(r).shift is not Retention.shift and r.needs_rope:
        return "it reads keys at other positions than the target's"
    if any(r.at(layer, layers).decodes for layer in range(layers)) and not rolls(middle):
        return "it judges while decoding, by attention that only its own passes see"
    if middle.placed:
        return "it asks for a place of its own"
    if not isinstance(r, Full) and not isinstance(middle.selection, All):
        return "it chooses among tokens that a retention has left, which nobody holds"
    return None


def rolls(stack: Stack) -> bool:
    """Whether a stack's set of tokens is a window that moves on, and sinks."""
    return isinstance(stack.retention, Streaming) and stack.retention.decode


def judged(stack: Stack) -> bool:
    """Whether a stack's set of tokens is the one that its retention keeps of a prompt."""
    return not (isinstance(stack.retention, Full) or rolls(stack))


class LayerPlaces(LayerView):
    """One layer."""

    def __init__(self, source: LayerCache, stack: Stack, *rest: Any) -> None:
        super().__init__(source, stack, *rest)
        self.index: Tensor | None = None

    def choose(self, q: Float[Tensor, "seq q_head dim"], call: Call) -> None:
        if self.stack.selects:
            k = self.source.parts[0].lane.tail.held()[0]
            grouped = q.unflatten(1, (self.source.heads, -1)).flatten(0, 1)
            self.begin(self._index(k, grouped, call, self.source.parts[0].lane.prompt_most))
        elif self.index is None or rolls(self.stack):
            self.begin(self._window())
        else:
            self.begin(self._longer(self.source.seen - self.seen))

    def begin(self, index: Int[Tensor, "row chosen"]) -> None:
        """Read these of the source's tokens, and all that come after."""
        self.index = index.to(torch.int32)
        if self._tail is None:
            self._tail = Tail(*self._rows())
        self.seen = self.covered = self.source.seen

    def catch_up(self, k: Float[Tensor, "seq head token dim"], v: Float[Tensor, "seq head token dim_v"]) -> None:
        """The source holds the tokens that it has let through: their numbers are enough."""
        longer = self._longer(k.shape[2])
        self.seen += k.shape[2]
        self.index = self._window() if rolls(self.stack) else longer

    def quick(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        """What is read does not lie together."""

    def held(self) -> Held:
        k, v = self._rows()
        mine, values, position, _ = self.tail.held()
        at = self.chosen
        keys, others = take(k, at.long()), take(v, at.long())
        return torch.cat([keys, mine], 1), torch.cat([others, values], 1), torch.cat([at, position], 1), False

    @property
    def chosen(self) -> Int[Tensor, "row chosen"]:
        if self.index is None:
            raise CacheError("a view has nothing to read before its first choice")
        return self.index

    def nbytes(self) -> int:
        return super().nbytes() + self.chosen.untyped_storage().nbytes()

    def _rows(self) -> tuple[Float[Tensor, "row token dim"], Float[Tensor, "row token dim_v"]]:
        return self.source.parts[0].lane.tail.held()[:2]

    def _longer(self, n: int) -> Int[Tensor, "row chosen"]:
        """What is read, and the next `n` tokens of the source."""
        new = torch.arange(self.seen, self.seen + n, dtype=torch.int32, device=self.chosen.device)
        return torch.cat([self.chosen, new.expand(len(self.chosen), n)], 1)

    def _window(self) -> Int[Tensor, "row chosen"]:
        """Sinks and the newest tokens; everything, where the stack drops nothing."""
        r, end = self.stack.retention, self.source.seen
        rows = len(self.source.parts[0].lane.first)
        at = torch.arange(end, dtype=torch.int32, device=self._rows()[0].device)
        if isinstance(r, Streaming):
            at = at[(at < r.sinks) | (at >= end - tokens(r.recent, self.source.parts[0].lane.prompt_most))]
        return at.expand(rows, -1)
