"""Sequences that a prompt brings one token: alone, that would be a decoded one, and so it is taken.

Beside it the others' prompt is read. Where layers keep states it comes in parts (`kvengine.hf.ragged`), and these tokens before
all of them, in a pass by themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.readers import Resumed, Taken
from kvengine.session import Call, Parts

if TYPE_CHECKING:
    from kvengine.cache import LayerCache


def singles(cache: LayerCache, valid: Bool[Tensor, "seq token"] | None) -> Bool[Tensor, "seq"] | None:
    """The sequences that this prompt brings one token, where that matters."""
    lanes = [part.lane for part in cache.parts]
    if valid is None or not cache.seen or not any(lane.placing or lane.stack.selects for lane in lanes):
        return None
    end = cache.session.prompt_end
    if lanes[0].reading or (end is not None and cache.seen + valid.shape[1] < end):
        return None  # one of several chunks does not tell
    found = (valid.sum(1) == 1) & (lanes[0].first < lanes[0].seen)[:: lanes[0].heads]
    return found if bool(found.any()) else None


def resume(
    cache: LayerCache,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    valid: Bool[Tensor, "seq token"],
    single: Bool[Tensor, "seq"],
) -> Float[Tensor, "seq token q_head dim_v"]:
    """A prompt, beside which these sequences go on where decoding stopped."""
    theirs = single[:, None] & valid
    at = theirs.to(torch.int8).argmax(1)
    one = [x.gather(2, at[:, None, None, None].expand(-1, x.shape[1], 1, x.shape[3])) for x in (q, k, v)]
    found, steps = go_on(cache, one[0], one[1], one[2], call, single, at)
    out = cache.enter(q, k, v, call, valid & ~single[:, None], None, single)
    if cache.readers.count:
        prompt = cache.readers.moments.pop()
        cache.readers.moments.append(Resumed(Taken(steps), prompt, theirs, at))
    return torch.where(theirs[..., None, None], found, out)


def part_of(
    cache: LayerCache,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call,
    valid: Bool[Tensor, "seq token"] | None,
    single: Bool[Tensor, "seq"],
    parts: Parts,
) -> Float[Tensor, "seq token q_head dim_v"]:
    """The same where each comes in a pass of its own: the single tokens, or a part of the prompt, in which they are padding."""
    if parts.at is None:
        real = k.new_ones(len(k), k.shape[2], dtype=torch.bool) if valid is None else valid
        resumed = single if cache.seen == parts.start else None
        return cache.enter(q, k, v, call, real & ~single[:, None], None, resumed)
    out, steps = go_on(cache, q, k, v, call, single, parts.at.to(k.device))
    if cache.readers.count:
        cache.readers.moments.append(Taken(steps))
    return out


def goes_on(cache: LayerCache) -> bool:
    """Whether some have taken theirs in a pass before, and a part of the others' prompt is to come."""
    parts = cache.session.parts
    return parts is not None and parts.single is not None and parts.at is None


def go_on(
    cache: LayerCache, q: Tensor, k: Tensor, v: Tensor, call: Call, single: Bool[Tensor, "seq"], at: Int[Tensor, "seq"]
) -> tuple[Float[Tensor, "seq 1 q_head dim_v"], list[Any]]:
    """These sequences take a token, which is the prompt's token `at`. It counts as seen when that has been read.

    Also what was held at each step, if later layers will read it.
    """
    outs, recording, steps = [], cache.session.recording, cache.steps()
    cache.session.recording = False  # what comes with a prompt is not to be taken back
    for (part, grouped, rows), taken in zip(cache.each(q, call), steps, strict=True):
        mine, where = cache.by_row(single[:, None], part)[:, 0], cache.by_row(at[:, None], part)[:, 0]
        outs.append(part.lane.resume(grouped, part.pick(k), part.pick(v), mine, where, rows, taken))
    cache.session.recording = recording
    return cache.gather(q, outs), steps
