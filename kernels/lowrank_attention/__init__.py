"""Attention over keys kept as a low-rank factor, rebuilt while they are read (ShadowKV, arXiv 2410.21465).

Keys before rotation are nearly low-rank: `k ~ u @ basis` with `u` [token, rank] shared by the heads of a sequence and
a basis [rank, dim] per KV head. Rotation mixes with position, so a read gathers the rows of `u` of the chosen tokens,
multiplies by the row's basis, rotates each key at its true position, and attends. `u` is addressed by position: the heads
of a sequence may hold its tokens in different pages, or different ones of them.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.dispatch import NATIVE_DIM, chosen, pick
from kvengine.kernels.state import State

LANES = 16
NATIVE_QUERIES = 64
"""Queries per call up to which the C kernel is used."""
NATIVE_RANK = 1024
"""Widest factor that its buffers hold."""


def lowrank_attention(
    q: Float[Tensor, "row group query dim"] | Float[Tensor, "row group dim"],
    u: Float[Tensor, "seq place rank"],
    v: Float[Tensor, "v_pages page dim_v"],
    basis: Float[Tensor, "row rank dim"],
    inv_freq: Float[Tensor, " half"],
    table: Int[Tensor, "row pages"] | None,
    position: Int[Tensor, "row slot"],
    *,
    page: int,
    scale: float,
    units: Int[Tensor, "row chosen"] | None = None,
    unit: int | None = None,
    rope_scaling: float = 1.0,
    want_probs: bool = False,
    wait: bool = False,
    backend: str | None = None,
) -> State:
    """Softmax attention over rebuilt keys.

    `table`, `position`, `units`, `unit`: as in `paged_attention`; without a table the rows' pages lie one after the other.
    `u`: of the token at each position of a sequence, to which belong `row / seq` rows one after the other. `inv_freq`: rotary
    frequencies in radians per position; the first `2 * half` channels rotate, channel `i` with `i + half` (the Llama
    convention). `rope_scaling`: factor on cosine and sine (YaRN's attention factor). Rotation is computed in float32.
    `wait`: as in `paged_attention`.
    Raises KernelError on shapes that do not fit.
    """
    if q.dim() == 3:
        q = q[:, :, None]
    unit = page if unit is None else unit
    pages = len(v) // max(1, len(q)) if table is None else table.shape[1]
    _check(q, u, basis, inv_freq, pages, position, unit, page)
    inputs, native = (q, u, v, basis), fits(q, u, v, basis, inv_freq)
    which = chosen(inputs, backend, native)
    if table is None and which != "triton":
        table = torch.arange(len(v), dtype=torch.int32, device=q.device).view(len(q), -1)
    run, more = pick("lowrank_attention", inputs, which, native), (wait,) if which == "triton" else ()
    return run.lowrank_attention(  # type: ignore[no-any-return]
        q, u, v, basis, inv_freq, table, position, page, scale, units, unit, rope_scaling, want_probs, *more
    )


def fits(q: Tensor, u: Tensor, v: Tensor, basis: Tensor, inv_freq: Tensor) -> bool:
    """Whether the C version knows these shapes: whole registers of channels, values as wide as it has buffers."""
    whole = q.shape[-1] % LANES == 0 and 2 * inv_freq.shape[0] <= q.shape[-1]
    small = q.shape[-2] <= NATIVE_QUERIES and max(q.shape[-1], v.shape[-1]) <= NATIVE_DIM and u.shape[-1] <= NATIVE_RANK
    return whole and small and u.is_contiguous() and v.is_contiguous() and basis.is_contiguous()


def _check(
    q: Tensor, u: Tensor, basis: Tensor, inv_freq: Tensor, pages: int, position: Tensor, unit: int, page: int
) -> None:
    rows, dim = q.shape[0], q.shape[-1]
    if tuple(basis.shape) != (rows, u.shape[-1], dim) or not len(u) or rows % len(u):
        raise KernelError(
            f"u must be [sequence, token, rank] and basis [{rows}, rank, {dim}], with a whole number of rows for each "
            f"sequence; got {list(u.shape)}, {list(basis.shape)}"
        )
    if position.shape != (rows, pages * page) or page % unit or 2 * inv_freq.shape[0] > dim:
        raise KernelError(
            f"for {rows} rows of {pages} pages, page={page} and dim={dim}: position {list(position.shape)}, "
            f"unit={unit} and inv_freq {list(inv_freq.shape)} do not fit together"
        )
