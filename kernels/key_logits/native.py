"""The C kernel on the CPU (`kvengine/kernels/cpu/attention.c`), which notes its scores before they are a softmax."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from kvengine.kernels.cpu import call
from kvengine.kernels.state import State


def scan(
    q: Tensor,
    fields: Mapping[str, Tensor],
    table: Tensor,
    position: Tensor,
    page: int,
    scale: float,
    codec: str,
    dim_v: int,
) -> State:
    """Attention of one query of each head, with its logits in the place of probabilities."""
    dim, table, position = q.shape[-1], call.int32(table), call.int32(position)
    return call.run(
        q[:, :, None], call.paged(codec, fields, "k", dim, page), call.paged(codec, fields, "v", dim_v, page),
        table.shape[1] * page, scale, None, None, True, as_="logits", table=table.data_ptr(), position=position.data_ptr(),
        table_row=table.stride(0), position_row=position.stride(0), page=page, unit=page,
    )  # fmt: skip


def key_logits(q: Tensor, *where: Any) -> Tensor:
    """See `kvengine.kernels.key_logits`; arguments as of `scan`."""
    return cast(Tensor, scan(q, *where).probs)[:, :, 0]
