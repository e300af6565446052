"""Join attention over disjoint token sets into attention over their union, exactly."""

from __future__ import annotations

from collections.abc import Sequence

from kvengine.errors import KernelError
from kvengine.kernels.dispatch import pick
from kvengine.kernels.merge_states.native import fits
from kvengine.kernels.state import State


def merge_states(states: Sequence[State], *, backend: str | None = None) -> State:
    """Softmax over the union of the sets, from each set's `(out, lse)`.

    A part whose `lse` is -inf adds nothing, whatever its `out` holds. The result has no `probs`: rescale each part's
    with `kvengine.kernels.state.rescaled`. Raises KernelError for no states, or shapes that differ.
    """
    if not states:
        raise KernelError("merge_states needs at least one state")
    if len(states) == 1:
        return states[0]._replace(probs=None)
    shapes = {tuple(s.out.shape) for s in states}
    if len(shapes) > 1:
        raise KernelError(f"states to merge must share a shape [row, group, query, dim_v]; got {sorted(shapes)}")
    inputs = tuple([x for s in states for x in s[:2]])
    run = pick("merge_states", inputs, backend, fits(states))
    return run.merge_states(states)  # type: ignore[no-any-return]
