"""A cheap view of a target's cache: chosen tokens, copied side by side, and the newest behind them.

    buffer   chosen units of the target's history | tokens since the choice, verified | drafted tokens

A draft that reads a view keeps no history of its own: what it may choose from is the target's. When a draft has been
judged, `catch_up` puts the target's keys and values in place of the drafted ones. When the choice has grown old,
`choose` makes another, with the query of the last token that was let through, which the judging pass has computed.

TriForce (arXiv:2404.11912) is this with chunk means for a selection. Differs from the official code: the choice is
renewed (theirs is made once, and generated tokens then push chosen ones out), keys are scored per KV head (theirs
needs as many KV heads as query heads), and any selection of the engine may choose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine import attending, page_answers
from kvengine.cache import LayerCache
from kvengine.errors import CacheError, UnsupportedPolicy
from kvengine.hf.cache import EngineCache
from kvengine.hf.layer import EngineLayer
from kvengine.kernels.attention import attention
from kvengine.kernels.merge_states import merge_states
from kvengine.policies._budget import tokens
from kvengine.policies.representation.dense import Dense
from kvengine.policies.retention.full import Full
from kvengine.policies.routing.uniform import Uniform
from kvengine.policies.selection import Where
from kvengine.session import Call, Session
from kvengine.stack import Stack
from kvengine.tail import Tail
from kvengine.tokens import take

Held = tuple[Tensor, Tensor, Tensor, bool]
PAGE = 16  # units that an index of the host's takes together
SLACK = 64  # tokens that a view takes after a choice before another must be made


def can_view(stack: Stack) -> bool:
    """Whether a stack only selects, so that it can read another cache's tokens."""
    return (
        stack.selects
        and isinstance(stack.retention, Full)
        and isinstance(stack.representation, Dense)
        and isinstance(stack.routing, Uniform)
    )


def complete(stack: Stack) -> bool:
    """Whether a stack keeps every token, so that a view can choose among them."""
    return isinstance(stack.retention, Full) and isinstance(stack.routing, Uniform)


class LayerView:
    """One layer of a view; has the part of `LayerCache`'s interface that a forward pass needs."""

    def __init__(self, source: LayerCache, stack: Stack, layer: int, layers: int, session: Session) -> None:
        self.source, self.stack, self.layer, self.layers, self.session = source, stack, layer, layers, session
        self.parts: list[Any] = []
        self.summary: dict[str, Tensor] = {}
        self.summarised = 0  # units of the source
        self.beside: dict[str, Any] = {}  # what a selection keeps of all units together
        self._tail: Tail | None = None
        self.covered = 0  # tokens of the source that the choice was made from
        self.seen = 0
        self.whole = False

    def prompt_tokens(self, n: int) -> int:
        """None of the next tokens are a prompt's: the source has read it."""
        return 0

    def choose(self, q: Float[Tensor, "seq q_head dim"], call: Call) -> None:
        """Choose anew among the source's tokens, for this query."""
        lane = self.source.parts[0].lane
        k, v, position, _ = lane.everything()
        index = self._index(k, q.unflatten(1, (self.source.heads, -1)).flatten(0, 1), call, lane.prompt_most)
        tail, clean, slots = Tail(k, v, scored=False), bool((index >= 0).all()), index.shape[1] + 2 * SLACK
        chosen = take(k, index), take(v, index), take(position, index, -1), torch.zeros_like(index)
        tail.replace(*chosen, clean, slots)
        self._tail, self.seen, self.covered = tail, self.source.seen, self.source.seen

    def _index(
        self, k: Float[Tensor, "row token dim"], q: Float[Tensor, "row group dim"], call: Call, prompt: int
    ) -> Int[Tensor, "row chosen"]:
        """Slots of the tokens to read: those of the chosen units, and all that are in no whole unit."""
        choice, (rows, total) = self.stack.selection, k.shape[:2]
        step = 1 if choice.steady else PAGE
        units = max(0, total - choice.room) // choice.unit // step * step
        most = (tokens(choice.reads, prompt) - (total - units * choice.unit)) // choice.unit  # type: ignore[arg-type]
        everything = torch.arange(total, device=k.device).expand(rows, total)
        if not units or most >= units:
            return everything
        self._summarise(k, units)
        page = step * choice.unit  # tokens
        where = Where(
            layer=self.layer, layers=self.layers, counts=lambda: torch.full((rows,), max(1, most), device=k.device),
            most=max(1, most), scale=call.scale, softcap=call.softcap, token=total - 1, memo=self.session.memo,
            since=total - 1, even=True,
            keys=lambda at=slice(0, units // step): k[:, at.start * page : at.stop * page], beside=self.beside,
            stamps=lambda: np.arange(units // step)[None].repeat(rows, 0),
        )  # fmt: skip
        alive = torch.ones(rows, units, dtype=torch.bool, device=k.device)
        summary = {name: x[:] for name, x in self.summary.items()}  # it may reshape what it is given
        chosen = page_answers.chosen(choice, q, summary, alive, where)
        if chosen is None:
            return everything
        chosen = chosen.sort(1).values
        slots = chosen[..., None] * choice.unit + torch.arange(choice.unit, device=k.device)
        slots = slots.masked_fill(chosen[..., None] < 0, -1).flatten(1)
        return torch.cat([slots, everything[:, units * choice.unit :]], 1)

    def _summarise(self, k: Float[Tensor, "row token dim"], units: int) -> None:
        """Remember units that have filled since the last choice."""
        unit, new = self.stack.selection.unit, units - self.summarised
        if new <= 0:
            return
        part = k[:, self.summarised * unit : units * unit].unflatten(1, (new, unit)).flatten(0, 1)
        for name, x in page_answers.summary(self.stack.selection, part, None, 1, self.summary).items():
            x = x.unflatten(0, (len(k), new))
            self.summary[name] = torch.cat([self.summary[name], x], 1) if name in self.summary else x
        self.summarised = units

    def catch_up(self, k: Float[Tensor, "seq head token dim"], v: Float[Tensor, "seq head token dim_v"]) -> None:
        """Take the target's keys and values of the tokens that it has just let through."""
        at = torch.arange(self.seen, self.seen + k.shape[2], dtype=torch.int32, device=k.device)
        self.tail.append(k.flatten(0, 1), v.flatten(0, 1), at.expand(k.shape[0] * k.shape[1], -1), True)
        self.seen += k.shape[2]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, valid: Any = None, stock: Any = None
    ) -> Float[Tensor, "seq token q_head dim_v"]:
        """Append drafted tokens, and attend to the view; the nodes of a tree only look."""
        ((part, grouped, rows),) = self.source.each(q, call)
        k, v, tree = part.pick(k), part.pick(v), self.session.tree
        n = k.shape[1] - (0 if tree is None else len(tree))
        out = [self._take(grouped[:, :, :n], k[:, :n], v[:, :n], rows)] if n else []
        if tree is not None:
            out.append(self._look(grouped[:, :, n:], k[:, n:], v[:, n:], tree, rows))
        return self.source.gather(q, [torch.cat(out, 2)])

    def quick(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Float[Tensor, "seq 1 q_head dim_v"] | None:
        """`forward` for one drafted token in one call; None if that cannot be."""
        at = self.session.place_of(self.seen, k)
        out = None if self.session.tree is not None else self.tail.step(q, k, v, at, scale)
        self.seen += out is not None
        return out

    def _take(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Float[Tensor, "row group query dim_v"]:
        at = torch.arange(self.seen, self.seen + k.shape[1], dtype=torch.int32, device=k.device)
        self.tail.append(k, v, at.expand(len(k), -1), True)
        self.seen += k.shape[1]
        k, v, position, clean = self.held()
        visible, plain = None, call.bare
        if plain and clean and attending.causal_pays(q, k, v):
            return attending.causal(q, k, v, call.scale)
        if len(at) > 1 or not clean:
            visible = (position >= 0)[:, None] & (position[:, None] <= at[:, None])
        if plain:
            return attending.whole(q, k, v, visible, call.scale, clean)
        state = attention(q, k, v, visible, call.scale, softcap=call.softcap)
        return merge_states([state], sinks=call.sinks, dtype=q.dtype).out.to(q.dtype)

    def _look(
        self, q: Tensor, k: Tensor, v: Tensor, sees: Bool[Tensor, "node node"], call: Call
    ) -> Float[Tensor, "row group query dim_v"]:
        held_k, held_v, position, _ = self.held()
        there = (position >= 0)[:, None].expand(-1, q.shape[2], -1)
        held = attention(q, held_k, held_v, there, call.scale, softcap=call.softcap)
        block = attention(q, k, v, sees.expand(len(q), -1, -1), call.scale, softcap=call.softcap)
        return merge_states([held, block], sinks=call.sinks, dtype=q.dtype).out.to(q.dtype)

    def held(self) -> Held:
        """What a query reads: keys, values, positions, and whether no position is -1."""
        return *self.tail.held()[:3], self.tail.clean

    def rollback(self, n: int) -> None:
        if n > self.seen - self.covered:
            raise CacheError(f"a view can take back the {self.seen - self.covered} tokens since its choice, not {n}")
        self.tail.end -= n
        self.seen -= n

    def check_free(self) -> None:
        """A view is never held still."""

    def commit(self) -> None:
        return None

    @property
    def tail(self) -> Tail:
        if self._tail is None:
            raise CacheError("a view has nothing to read before its first choice")
        return self._tail

    def due(self, late: int) -> bool:
        """Whether another choice must be made before so many tokens come: what follows a choice has limited room."""
        return self.seen + late - self.covered > SLACK

    def nbytes(self) -> int:
        """Bytes held beyond the source's."""
        kept = (*self.tail.tensors().values(), *self.summary.values(), *self.beside.values())
        return sum(getattr(x, "nbytes", 0) for x in kept)


class ViewCache(EngineCache):
    """A cache for the same model that reads what `stack` selects of another's tokens.

    Raises:
        UnsupportedPolicy: the stack does more than select, or the other cache does not keep every token.
    """

    def __init__(
        self, model: Any, source: EngineCache, stack: Stack, layer: Callable[..., LayerView] = LayerView
    ) -> None:
        if layer is LayerView and not (can_view(stack) and complete(source.stack)):
            raise UnsupportedPolicy(
                f"'{stack}' cannot be read as a view of a cache under '{source.stack}': a view needs a stack that "
                "selects and does nothing else, and a cache that keeps every token"
            )
        super().__init__(model, "full")
        self.choice = stack
        self.views: dict[int, LayerView] = {}  # by layer; a layer with a window is read whole
        for number, (mine, its) in enumerate(zip(self.layers, source.layers, strict=True)):
            if isinstance(its, EngineLayer):
                view = layer(its.cache, stack, number, len(self.layers), self.session)
                cast(Any, mine).cache = self.views[number] = view

    @property
    def engines(self) -> list[LayerView]:  # type: ignore[override]
        """The views, in order."""
        return [cast(Any, layer).cache for layer in self.layers if isinstance(layer, EngineLayer)]

    def nbytes(self) -> int:
        """Bytes held beyond the source's."""
        return sum(view.nbytes() for view in self.views.values())

    def read_per_pass(self) -> int:
        """Bytes of keys and values that one pass reads."""
        return sum(x.nbytes for view in self.views.values() for x in view.held()[:2])
