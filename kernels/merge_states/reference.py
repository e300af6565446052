"""Plain torch."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from kvengine.kernels.state import State


def merge_states(states: Sequence[State]) -> State:
    """See `kvengine.kernels.merge_states`."""
    lse = functools.reduce(torch.logaddexp, [s.lse for s in states])  # a fraction of what logsumexp takes for so few
    safe = lse.masked_fill(lse == -torch.inf, 0)
    weights = [torch.exp(s.lse - safe)[..., None] for s in states]
    parts = [torch.where(w == 0, 0, s.out * w) for w, s in zip(weights, states, strict=True)]
    return State(functools.reduce(torch.add, parts), lse)
