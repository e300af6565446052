"""Plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvengine.kernels.state import State


def merge_states(states: Sequence[State]) -> State:
    """See `kvengine.kernels.merge_states`."""
    lses = torch.stack([s.lse for s in states])
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - torch.where(lse == -torch.inf, 0, lse))[..., None]
    outs = torch.stack([s.out for s in states])
    return State(torch.where(weights > 0, outs * weights, 0).sum(0), lse)
