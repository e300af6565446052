"""Join attention over disjoint token sets into attention over their union, exactly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.dispatch import module, pick
from kvengine.kernels.merge_states.native import fits
from kvengine.kernels.state import Into, State, rescaled


def merge_states(
    states: Sequence[State],
    *,
    sinks: Float[Tensor, "row group"] | None = None,
    dtype: torch.dtype = torch.float32,
    into: Into | None = None,
    backend: str | None = None,
) -> State:
    """Softmax over the union of the sets, from each set's `(out, lse)`.

    A part whose `lse` is -inf adds nothing, whatever its `out` holds. `sinks`: a logit per query head that joins the softmax
    with a zero value. `dtype`: of the result's `out`, where that is less than float32. `into`: more rows, of which
    these are some; they are the result's `out` then. The result has no `probs`: `received`
    tells what each part's tokens got. Parts that wait on a GPU are joined first, in one launch if they are one or two.
    Raises KernelError for no states, or shapes that differ.
    """
    if not states:
        raise KernelError("merge_states needs at least one state")
    if (waits := next((s.waiting for s in states if s.waiting is not None), None)) is not None:
        first, rest = module("merge_states", "triton", waits.parts.device).joined(states, sinks, dtype, into)
        if into is not None and first.out is into.out:
            return first  # type: ignore[no-any-return]
        states, sinks = [first, *rest], None
    if sinks is not None:
        some = states[0]
        states = [*states, State(torch.zeros_like(some.out), sinks.float()[..., None].expand_as(some.lse).contiguous())]
    if len(states) == 1:
        return _as(states[0] if states[0].probs is None else states[0]._replace(probs=None), dtype, into)
    shapes = {tuple(s.out.shape) for s in states}
    if len(shapes) > 1:
        raise KernelError(f"states to merge must share a shape [row, group, query, dim_v]; got {sorted(shapes)}")
    inputs = tuple([x for s in states for x in s[:2]])
    run = pick("merge_states", inputs, backend, fits(states))
    return _as(run.merge_states(states), dtype, into)


def received(parts: Sequence[State], whole: State) -> Float[Tensor, "row group token"]:
    """The attention that each token gets from all of a head's queries, part after part; `whole` is the parts merged.

    Raises TypeError if a part was computed without probabilities.
    """
    waits = [p.waiting is not None and p.waiting.scores is not None for p in parts]
    if all(waits):
        return module("merge_states", "triton", whole.lse.device).received(parts, whole)  # type: ignore[no-any-return]
    if any(waits):
        return torch.cat([received([part], whole) for part in parts], 2)
    return torch.cat([rescaled(part, whole) for part in parts], 3).sum(2)


def ongoing(
    part: State,
    whole: State,
    mean: Float[Tensor, "row token"],
    position: Int[Tensor, "row token"],
    at: Int[Tensor, "1"],
    judged: int | Int[Tensor, "row 1"],
) -> None:
    """Let the mean of what each token gets go on, in its place, with a query at `at`:

        mean  =  mean + (received - mean) / (at + 1 - max(position, judged - 1))

    `received` is summed over a row's heads, of one query each. `judged`: up to where what came before counts once. One launch of
    a GPU for a part that waits. Raises TypeError if the part was computed without probabilities.
    """
    if part.waiting is not None and part.waiting.scores is not None:
        module("merge_states", "triton", mean.device).ongoing(part, whole, mean, position, at, judged)
        return
    paid, seen = received([part], whole).sum(1), (at + 1) - position.clamp(min=judged - 1)
    mean.addcdiv_(paid - mean, seen)


def _as(state: State, dtype: torch.dtype, into: Into | None) -> State:
    if into is not None:
        return state._replace(out=into.out.index_copy_(0, into.rows, state.out.to(into.out.dtype)))
    # float64 stays: nothing is rounded that was not asked to be
    same = state.out.dtype == dtype or torch.finfo(dtype).bits >= 32
    return state if same else state._replace(out=state.out.to(dtype))
