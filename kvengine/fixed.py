"""A cache held still, so that one decode step can be recorded and replayed.

A CUDA graph repeats the same launches on the same addresses with the same numbers. While a layer is held still, its
tensors neither move nor grow, and what a step counts stands in tensors that the step itself moves on:

    tail      has all its slots; those without a token have position -1, or lie beyond the count
              grows    room for every token to come          (nothing is sealed)
              fills    each token takes a slot that is free  (a retention that keeps to a limit)
              ring     the oldest page is sealed before its slots are needed again
    pages     have all their columns; those not filled yet name no page

Sealing is not part of the step. The host knows after which steps a page is full, and seals it between two replays.

A step takes a token of every row. What a row that pauses holds is put aside, and put back in the end (`pause`).
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.cache import LayerCache
from kvengine.errors import CacheError, UnsupportedPolicy
from kvengine.fixed_lane import FixedLane
from kvengine.kernels.state import Into
from kvengine.policies import name_of
from kvengine.session import HELD, Call
from kvengine.stack import Stack
from kvengine.verdicts import waits


def refusal(stack: Stack) -> str | None:
    """Why a decode step of this stack cannot be recorded; None if it can."""
    if not stack.placement.steady:
        return f"{name_of(stack.placement)!r} keeps track on the host of what lies where, or waits for it"
    if not stack.selection.steady:
        return f"{name_of(stack.selection)!r} searches an index on the host"
    return None


class FixedLayer:
    """A layer held still.

    Args:
        layer: whose prompt is read and judged.
        more: tokens that it will take.
        now: the position of the next token; whoever drives the layers moves it on.

    Raises:
        UnsupportedPolicy: a step of its stack cannot be recorded.
        CacheError: it is in the middle of a prompt or a draft, or holds nothing.
    """

    driven = False  # by who holds others too, and says which passes are steps, and when all have counted one

    def __init__(self, layer: LayerCache, more: int, now: Int[Tensor, "1"]) -> None:
        check(layer)
        self.layer, self.parts = layer, layer.parts
        before = [(part.lane, copy(part.lane.tail), copy(part.lane.pages)) for part in layer.parts]
        held = []
        try:
            for part in layer.parts:
                lane = object.__new__(FixedLane)
                vars(lane).update(vars(part.lane))
                lane.hold(more, now)
                held.append(lane)
            self.lanes = held
            first = torch.arange(layer.sequences, device=now.device)[:, None] * layer.heads
            self.places = [(first + part.index).flatten() for part in self.parts if part.index is not None]
            layer.parts = [part.of(lane) for lane, part in zip(held, self.parts, strict=True)]
            layer.fixed = self
        except BaseException:  # as where memory is short: what has moved already is as it was
            for moved, tail, pages in before:
                moved.tail, moved.pages = tail, pages
            layer.parts = self.parts
            raise

    def step(
        self, q: Float[Tensor, "seq q_head 1 dim"], k: Float[Tensor, "seq head 1 dim"], v: Float[Tensor, "seq head 1 dim_v"],
        call: Call,
    ) -> Float[Tensor, "seq 1 q_head dim_v"]:  # fmt: skip
        """Take one token of each sequence. Changes tensors in place, and nothing else."""
        if q.shape[2] != 1:
            raise CacheError(f"a cache held still takes one token of each sequence at a time, not {q.shape[2]}")
        if self.driven and not self.layer.session.stepping:
            raise CacheError(HELD)
        out, self.layer.session.torn = [], True  # until `advance` has counted the token
        whole = None
        if self.places and q.is_cuda:  # each lane's answers go to their places as they are joined
            whole = q.new_empty(q.shape[0] * self.layer.heads, q.shape[1] // self.layer.heads, 1, v.shape[-1])
        for i, (lane, (part, queries, rows)) in enumerate(zip(self.lanes, self.layer.each(q, call), strict=True)):
            lane.into = None if whole is None else Into(whole, self.places[i])
            try:
                out.append(lane.step(queries, part.pick(k), part.pick(v), None, rows))
            finally:
                lane.into = None
            lane.pin()
        return self.layer.gather(q, out if whole is None else [whole])

    def __deepcopy__(self, memo: dict[int, Any]) -> FixedLayer:
        raise CacheError(HELD)

    def advance(self) -> None:
        """After a step: count, and seal what is full."""
        self.layer.seen += 1
        for lane in self.lanes:
            lane.advance()
        if not self.driven:
            self.layer.session.torn = False

    def pause(self, rows: Bool[Tensor, "seq"]) -> None:
        """These sequences take no more tokens, whatever steps bring."""
        for lane in self.lanes:
            lane.pause(rows.repeat_interleave(lane.heads))

    def state(self) -> list[Tensor]:
        return [x for lane in self.lanes for x in lane.state()]

    def lasting(self) -> list[Tensor]:
        """Those of them that a step taken twice would change twice."""
        return [x for lane in self.lanes for x in lane.lasting()]

    def release(self) -> None:
        """Let the layer go on as it would have without."""
        for part, lane in zip(self.parts, self.lanes, strict=True):
            lane.release()
            vars(part.lane).update({name: vars(lane)[name] for name in vars(part.lane)})
        self.layer.parts, self.layer.fixed = self.parts, None


def check_kind(layer: LayerCache) -> None:
    """Refuse a layer that cannot be held still, whatever it holds or is to hold."""
    if (why := refusal(layer.stack)) is not None:
        raise UnsupportedPolicy(f"a decode step of '{layer.stack}' cannot be recorded: {why}. Decode without it")
    own = layer.stack.retention.at(layer.layer, layer.layers)
    judging = [part.lane.retention for part in layer.parts] or [own]
    if layer.readers.count and any(one.decodes and not waits(one) for one in judging):
        raise UnsupportedPolicy(
            f"a decode step of '{layer.stack}' cannot be recorded here: later layers of the model read what this one held before "
            "it judged its last token. Decode without it, or with decode=False where the policy takes that"
        )


def check(layer: LayerCache) -> None:
    check_kind(layer)
    if layer.fixed is not None or not layer.parts or not layer.ends_prompt():
        raise CacheError("only a cache that has read its prompt to the end, and is not held already, can be held still")
    if layer.session.recording or any(part.lane.marks for part in layer.parts):
        raise CacheError(
            "a cache that records states to return to (a draft) cannot be held still; call deactivate_past_recording() first"
        )
