"""A prompt read once more: its tokens are fed again behind all that is held, and what they look at is evidence for keeping it.

The engine asks for it where a retention does (`Retention.replay`), when every layer has read the prompt and holds all of it
still. Whoever has the model runs the passes (`kvengine.hf.replay`); here is what a layer does with them. It answers from what
is held and what is fed, adds nothing, and notes the most that a query paid to each token of the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine import answers, attending
from kvengine.errors import CacheError
from kvengine.kernels.column_peak import column_peak
from kvengine.session import Call, Session
from kvengine.text import Again
from kvengine.tokens import in_order, narrowed, pack, take

if TYPE_CHECKING:
    from kvengine.cache import LayerCache, Stock
    from kvengine.lane import Lane

LEAST = torch.finfo(torch.float32).tiny  # of what has been repeated: 0 means that it has not
UNSEEN = (
    "'{}' reads the prompt a second time, and this cache was given keys and values without the tokens that made them. Let the "
    "patched model read the prompt: model(ids, cache=cache), or model.generate()"
)
LOST = "'{}' has lost track of which tokens it has not repeated yet; call cache.reset() and give the whole text again"


def check_known(cache: LayerCache, tokens: int) -> None:
    """Refuse a prompt that a replay could not feed again."""
    text = cache.session.text
    if cache.stack.retention.replay is not None and text.end != cache.seen + tokens:
        raise CacheError(UNSEEN.format(cache.stack))


def judge_together(session: Session) -> None:
    """All layers have read the prompt: judge those that waited, once what has to be replayed has been.

    Until then the cache counts as torn: a pass that came in between would find layers that are not judged.
    """
    lanes, seen = those_waiting(session), [seen for _, seen, _ in session.waiting]
    if session.due is None and lanes[0].retention.replay is not None:
        due, idle = answers.due(lanes[0].retention, seen), lanes[0].idle
        due = due if idle is None else due & ~idle[:: lanes[0].heads]
        if bool(due.any()):
            session.due = due
            for lane, one in zip(lanes, seen, strict=True):
                lane.repeated = torch.zeros_like(one.score, dtype=torch.float32)
            return
    conclude(session)


def those_waiting(session: Session) -> list[Lane]:
    """The lanes that wait, which their layers hold."""
    return [lane for one, _, _ in session.waiting if (lane := one()) is not None]


def conclude(session: Session) -> None:
    """Judge the layers that waited."""
    lanes, waiting, session.waiting = those_waiting(session), session.waiting, []
    divided = session.due is not None or all(measure is not None for _, _, measure in waiting)
    _, seen, measures = (list(part) for part in zip(*waiting, strict=True))
    shares: list[Tensor | None] = [None] * len(lanes)
    if session.due is not None:
        seen = [lane.scored(replace(one, repeated=lane.repeated)) for lane, one in zip(lanes, seen, strict=True)]
        measures = [lane.retention.measure(one) for lane, one in zip(lanes, seen, strict=True)]
        session.text.done(session.due)
    if divided:
        shares = list(answers.shares(lanes[0].retention, seen, measures))
    for lane, one, share in zip(lanes, seen, shares, strict=True):
        lane.repeated = None
        lane.conclude(replace(one, share=share))
    session.due = None


def answer(
    cache: LayerCache, q: Tensor, k: Tensor, v: Tensor, call: Call, again: Again
) -> Float[Tensor, "seq token q_head dim_v"]:
    """A layer's answer to a pass of a replay."""
    again = again.on(q.device)
    outs = [
        reread(part.lane, grouped, part.pick(k), part.pick(v), rows, again, notes=True)
        for part, grouped, rows in cache.each(q, call)
    ]
    cache.readers.begin(part.lane for part in cache.parts)
    if cache.readers.count:
        cache.readers.moments.append(Repeated(k, v, again))
    return cache.gather(q, outs)


def reread(
    lane: Lane,
    q: Float[Tensor, "row group query dim"],
    k: Float[Tensor, "row fed dim"],
    v: Float[Tensor, "row fed dim_v"],
    call: Call,
    again: Again,
    notes: bool,
) -> Float[Tensor, "row group query dim_v"]:
    """Attention of the last queries of what is fed, or all, to all that the lane holds, and causally to what is fed.

    `notes`: what that says is noted; it wants all queries.
    """
    held_k, held_v, position, score = lane.everything()
    valid = again.valid.repeat_interleave(lane.heads, 0)
    fed = torch.where(valid, position.shape[1], -1).to(position.dtype)
    if notes and lane.repeated is not None:
        note(lane, lane.repeated, q, k, held_k, position, score, fed, valid, call, again)
    keys = torch.cat([narrowed(lane.turned(held_k, lane.shift()), q.dtype), k], 1)
    values = torch.cat([narrowed(held_v, q.dtype), v], 1)
    return attending.by_slot(q, keys, values, torch.cat([position, fed], 1), again.full and lane.clean, *call.constants)


def note(
    lane: Lane,
    found: Float[Tensor, "row slot"],
    q: Tensor,
    k: Tensor,
    held: Tensor,
    position: Int[Tensor, "row slot"],
    score: Float[Tensor, "row slot"],
    fed: Int[Tensor, "row fed"],
    valid: Bool[Tensor, "row fed"],
    call: Call,
    again: Again,
) -> None:
    """Write down what is paid to the chunk's tokens: of attention to the row's first ones, these, and what is fed."""
    known, start, count = (x.repeat_interleave(lane.heads) for x in (again.known, again.start, again.size))
    slots = in_order(position.masked_fill(score != 0, -1))
    if bool((known > (slots >= 0).sum(1)).any()):
        raise CacheError(LOST.format(lane.stack))
    at = torch.arange(int(count.max()), device=q.device)
    column = (slots.shape[1] - known + start)[:, None] + at
    chunk = slots.gather(1, column.clamp(max=slots.shape[1] - 1)).masked_fill(at >= count[:, None], -1)
    begin = take(position, chunk[:, :1], -1)
    first = (position >= 0) & (position < lane.first[:, None] + again.sinks) & (position < begin)
    index = torch.cat([pack(first), chunk], 1)
    keys = torch.cat([narrowed(take(held, index), k.dtype), k], 1)
    slot = torch.arange(index.shape[1], keys.shape[1], device=q.device)
    places = torch.cat([index.to(fed.dtype), fed], 1)
    peak = column_peak(q, keys, places, slot, valid, scale=call.scale, softcap=call.softcap, sinks=call.sinks)
    peak = peak[:, index.shape[1] - chunk.shape[1] : index.shape[1]].clamp(min=LEAST)
    row, col = (chunk >= 0).nonzero(as_tuple=True)
    found[row, chunk[row, col]] = peak[row, col]


def tell(
    cache: LayerCache, begin: int, end: int, valid: Bool[Tensor, "seq token"] | None = None, rows: int = 1
) -> None:
    """For a layer without a model (`rerun`): the next tokens are made of their numbers among those that there are."""
    if cache.stack.retention.replay is None:
        return
    ids = torch.arange(begin, end).expand(rows if valid is None else len(valid), -1)
    mask = None if valid is None else torch.cat([valid.new_ones(len(valid), cache.seen), valid], 1)
    cache.session.text.add(cache.seen, ids, None, mask)


def rerun(layers: Sequence[LayerCache], vectors: Sequence[Sequence[Tensor]], call: Call) -> None:
    """The replay that layers without a model wait for: a repeated token has the vectors that it had.

    `vectors`: of each layer the queries [seq, q_head, token, dim], keys and values of all tokens that there are.
    """
    session, how = layers[0].session, layers[0].stack.retention.replay
    if session.due is None or how is None:
        return
    for fed in session.text.plan(how, session.due, lambda ids: ids):
        session.again = fed.again
        for layer, every in zip(layers, vectors, strict=True):
            at = fed.made_of[:, None, :, None].to(every[0].device)
            q, k, v = (x.gather(2, at.expand(len(x), x.shape[1], -1, x.shape[3])) for x in every)
            layer.forward(q, k, v, call)
        session.again = None
    conclude(session)
    session.torn = False


class Repeated:
    """A pass of a replay, for later layers that read what this one holds: they look, and say nothing."""

    def __init__(self, k: Tensor, v: Tensor, again: Again) -> None:
        self.k, self.v, self.again, self.tokens = k, v, again, k.shape[2]

    def read(
        self, cache: LayerCache, q: Tensor, call: Call, stock: Stock | None
    ) -> Float[Tensor, "seq token q_head dim_v"]:
        found = []
        for part, grouped, rows in cache.each(q, call):
            k, v = part.pick(self.k), part.pick(self.v)
            found.append(reread(part.lane, grouped, k, v, rows, self.again, notes=False))
        return cache.gather(q, found)
