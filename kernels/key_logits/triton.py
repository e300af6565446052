"""The Triton kernel (`kvengine/kernels/paged_attention/triton.py`), which notes its scores before they are a softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from torch import Tensor

from kvengine.kernels import turboquant
from kvengine.kernels.gpu import fields as stored
from kvengine.kernels.gpu import lined
from kvengine.kernels.gpu.stream import Partials
from kvengine.kernels.paged_attention.triton import launch


def key_logits(
    q: Tensor,
    fields: Mapping[str, Tensor],
    table: Tensor,
    position: Tensor,
    page: int,
    scale: float,
    codec: str,
    dim_v: int,
) -> Tensor:
    """See `kvengine.kernels.key_logits`."""
    if codec == "turboquant":
        q = turboquant.turned(q).to(q.dtype)
    k, v = (stored.paged(codec, fields, side, dim, page) for side, dim in (("k", q.shape[-1]), ("v", dim_v)))
    found = launch(
        q[:, :, None], k, v, table.shape[1] * page, page, scale, None, None, True, wait=True, table=lined(table),
        position=lined(position),
    )  # fmt: skip
    return cast(Tensor, cast(Partials, found.waiting).scores)
