"""Column mass: the attention that each token receives from a prompt's queries, summed over these.

For query head g of a KV head's group, with s_it = scale q_i . k_t (capped if asked) over the tokens t that query i sees:

    mass_gt  =  sum over queries i of exp(s_it - lse_i),        lse_i  =  log sum_t exp(s_it)

The values take no part, and nothing of size queries times tokens is made. It is what evictions by accumulated attention
ask for (H2O, D2O, elastic), and a representation's probes.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.column_mass.native import fits
from kvengine.kernels.column_mass.reference import blocks, columns, masked
from kvengine.kernels.dispatch import pick
from kvengine.kernels.span_attention import Band


def column_mass(
    q: Float[Tensor, "row group query dim"],
    k: Float[Tensor, "row token dim"],
    position: Int[Tensor, "row token"],
    at: Int[Tensor, "query"],
    real: Bool[Tensor, "row query"],
    *,
    scale: float,
    band: Band | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, "row group"] | None = None,
    backend: str | None = None,
) -> Float[Tensor, "row group token"]:
    """In float32. Query i is that of the token in slot `at[i]`, and sees the tokens up to that slot.

    `position`: negative where a slot holds no token, and what it holds is not used. `at`: ascending; any of the slots, so
    that some of a prompt's queries can be asked alone. `real`: the queries that count; what is not one gives nothing, as
    does one that sees nothing. `band`: also hides what is outside of it, by slot. `sinks`: a logit per query head that
    joins the softmax. Raises KernelError on shapes that do not fit.
    """
    check("column_mass", q, k, position, at, real, sinks)
    rows, group, _, dim = q.shape
    if not q.numel() or not k.numel():
        return torch.zeros(rows, group, k.shape[1], dtype=torch.float32, device=q.device)
    native = (backend is not None or pays(q, k)) and fits(q, k)
    run = pick("column_mass", (q, k), backend, native, dim)
    return run.column_mass(q, k, position, at, real, scale, band, softcap, sinks)  # type: ignore[no-any-return]


def check(name: str, q: Tensor, k: Tensor, position: Tensor, at: Tensor, real: Tensor, sinks: Tensor | None) -> None:
    """Raises KernelError, which names the operation, if the shapes do not fit."""
    rows, group, queries, dim = q.shape
    if k.shape[::2] != (rows, dim) or position.shape != k.shape[:2] or at.shape != (queries,):
        raise KernelError(
            f"{name} takes q [row, group, query, dim], k [row, token, dim], position [row, token] and at [query]; got "
            f"{[list(x.shape) for x in (q, k, position, at)]}"
        )
    if real.shape != (rows, queries) or (sinks is not None and sinks.shape != (rows, group)):
        what = [list(x.shape) for x in (real, sinks) if x is not None]
        raise KernelError(f"{name} takes real [{rows}, {queries}] and sinks [{rows}, {group}]; got {what}")


def pays(q: Tensor, k: Tensor) -> bool:
    """Whether the C version, where it runs, is faster: not for one query in float32, which it computes with as with eight."""
    return q.shape[2] > 1 or k.dtype != torch.float32


__all__ = ["blocks", "check", "column_mass", "columns", "fits", "masked", "pays"]
