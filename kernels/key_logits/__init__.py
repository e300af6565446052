"""Logits of paged keys: what every query head asks of every key, where the keys lie.

    logit_gt  =  scale q_g . k_t

What choosing by true attention needs (TidalDecode's layers that choose, the oracle). Keys may be quantised
(`kvengine.kernels.codecs`); no dense copy of them is made. In C and on a GPU it is the scan of `paged_attention`, over the
narrowest values that there are.
"""

from __future__ import annotations

from collections.abc import Mapping

from jaxtyping import Float, Int
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels import codecs
from kvengine.kernels.dispatch import chosen, module
from kvengine.kernels.paged_attention import known
from kvengine.kernels.state import State

NARROW = 16
"""Channels of dense values that a scan for logits alone takes along."""


def key_logits(
    q: Float[Tensor, "row group dim"],
    fields: Mapping[str, Tensor],
    table: Int[Tensor, "row pages"],
    position: Int[Tensor, "row slot"],
    *,
    page: int,
    scale: float,
    codec: str = "dense",
    dim_v: int | None = None,
    backend: str | None = None,
) -> Float[Tensor, "row group slot"] | None:
    """In float32 (float64 if the query is); -inf where a slot holds no token, whose contents are ignored. None where plain torch
    would make a dense copy of all keys, unless `backend` asks for that.

    `fields`, `table`, `position`, `codec`, `dim_v`: see `paged_attention`. Raises KernelError on shapes that do not fit.
    """
    which = _which(q, fields, table, position, page, codec, dim_v, backend)
    if which == "reference" and backend is None:
        return None
    if codec == "dense":
        fields, dim_v = {"k": fields["k"], "v": fields["k"][..., :NARROW]}, min(NARROW, q.shape[-1])
    run = module("key_logits", which, q.device)
    return run.key_logits(q, fields, table, position, page, scale, codec, dim_v or q.shape[-1])  # type: ignore[no-any-return]


def scan(
    q: Float[Tensor, "row group dim"],
    fields: Mapping[str, Tensor],
    table: Int[Tensor, "row pages"],
    position: Int[Tensor, "row slot"],
    *,
    page: int,
    scale: float,
    codec: str,
    dim_v: int,
) -> tuple[State, Float[Tensor, "row group slot"]] | None:
    """The same together with attention, each key read once for both; None where not C reads them."""
    if _which(q, fields, table, position, page, codec, dim_v, None) != "native":
        return None
    found = module("key_logits", "native", q.device).scan(q, fields, table, position, page, scale, codec, dim_v)
    return found._replace(probs=None), found.probs[:, :, 0]


def _which(
    q: Tensor, fields: Mapping[str, Tensor], table: Tensor, position: Tensor, page: int, codec: str, dim_v: int | None,
    backend: str | None,
) -> str:  # fmt: skip
    codecs.check(codec, fields)
    rows, pages = table.shape
    if len(q) != rows or position.shape != (rows, pages * page) or (codec == "dense" and fields["k"].shape[1] != page):
        raise KernelError(
            f"for a table of {rows} rows and {pages} pages of {page}, q needs {rows} rows and position the shape "
            f"{[rows, pages * page]}; got {list(q.shape)} and {list(position.shape)}"
        )
    stored, wide = tuple(fields[name] for name in codecs.FIELDS[codec]), max(q.shape[-1], dim_v or q.shape[-1])
    return chosen((q, *stored), backend, not q.is_cuda and known(stored, codec, wide), wide)
