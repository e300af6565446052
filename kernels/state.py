"""What a piece of attention yields, so that pieces can be joined exactly.

Softmax over the union of disjoint token sets follows from each set's own softmax and its log-sum-exp:
`out = sum_i exp(lse_i - lse) out_i` with `lse = log sum_i exp(lse_i)`. Attention operations return that pair.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from kvengine.kernels.gpu.stream import Partials


class State(NamedTuple):
    """Attention over one set of tokens. A query that sees nothing has `out` 0 and `lse` -inf."""

    out: Float[Tensor, "row group query dim_v"]
    """Softmax-weighted values, float32 (float64 if the query was)."""
    lse: Float[Tensor, "row group query"]
    """Natural log of the sum of exponentials of the scaled (and capped) scores."""
    probs: Float[Tensor, "row group query token"] | None = None
    """This set's own softmax, columns in the order the tokens were given; multiply by `exp(lse - merged.lse)` for the
    share of the whole."""
    waiting: Partials | None = None
    """On a GPU, if it was allowed to `wait`: what each program found, for `merge_states` to join with the other parts in one
    launch. Until then `out` and `lse` are empty."""


class Into(NamedTuple):
    """Where to write the output of some rows: into these of more."""

    out: Float[Tensor, "more group query dim_v"]
    """Contiguous."""
    rows: Int[Tensor, "row"]


def rescaled(part: State, whole: State) -> Float[Tensor, "row group query token"]:
    """The part's probabilities as shares of the whole. Raises TypeError if the part was computed without them."""
    if part.probs is None:
        raise TypeError("this state has no probabilities; compute it with want_probs=True")
    share = torch.exp(part.lse - whole.lse)
    return part.probs * torch.where(part.lse == -torch.inf, 0.0, share)[..., None]
