"""Attention over pages: every layout, random tables, chosen units, on every backend that runs here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import support_kernels as oracle
import torch
from support_pools import LAYOUTS, PAGE, ROWS, TABLE, pool, rows
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels import codecs
from kvengine.kernels.paged_attention import paged_attention
from kvengine.kernels.paged_attention.native import Described
from kvengine.kernels.slots import resolve, visible_to

BACKENDS = oracle.backends()
READS = {
    "all": (),
    "units": ("units",),
    "causal": ("query_position",),
    "window": ("query_position", "window"),
    "window of units": ("units", "query_position", "window"),
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_the_oracle(backend: str, layout: str, read: str) -> None:
    dim, dim_v, query = (64, 64, 1) if read in ("all", "units") else (72, 40, 3)
    codec, fields, k, v = pool(layout, dim, dim_v)
    given = rows(query)
    options: dict[str, Any] = {name: given[name] for name in ("units", "query_position") if name in READS[read]}
    options |= {"unit": 8} if "units" in options else {}
    options |= {"window": 40} if "window" in READS[read] else {}
    q = torch.randn(ROWS, 3, query, dim, generator=torch.Generator().manual_seed(1))
    got = oracle.on(backend, paged_attention)(
        q, *oracle.far(backend, fields, given["table"]), given["position"], page=PAGE, scale=0.2, codec=codec, dim_v=dim_v,
        want_probs=True, backend=backend, **options,
    )  # fmt: skip
    where, at = resolve(given["table"], given["position"], options.get("units"), options.get("unit", PAGE), PAGE)
    seen = visible_to(at, options.get("query_position"), options.get("window"), query)
    want = oracle.attend(q, k.flatten(0, 1)[where], v.flatten(0, 1)[where], seen, 0.2)
    oracle.close(got, want, 1e-5 if backend != "triton" or codec != "dense" else oracle.TRITON.get(layout, 1e-5))
    assert not got.out[2].any()  # the row without pages


@pytest.mark.parametrize("layout", ["float32", "bfloat16", "kivi4", "zipcache", "turboquant4"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_wide_heads(backend: str, layout: str) -> None:
    """As the global layers of Gemma 4 have them."""
    codec, fields, k, v = pool(layout, 512, 512)
    given, rng = rows(7), torch.Generator().manual_seed(2)
    q, used = (
        torch.randn(ROWS, 3, 7, 512, generator=rng),
        {"units": given["units"], "query_position": given["query_position"]},
    )
    if backend == "native" and codec != "dense":
        pytest.skip("C decodes codes of narrower heads")
    got = oracle.on(backend, paged_attention)(
        q, fields, given["table"], given["position"], page=PAGE, scale=0.05, codec=codec, dim_v=512, unit=8, backend=backend,
        **used,
    )  # fmt: skip
    where, at = resolve(given["table"], given["position"], given["units"], 8, PAGE)
    want = oracle.attend(
        q, k.flatten(0, 1)[where], v.flatten(0, 1)[where], visible_to(at, used["query_position"], None, 7), 0.05
    )
    oracle.close(got, want, 1e-5 if backend != "triton" or codec != "dense" else oracle.TRITON.get(layout, 1e-5))


@pytest.mark.parametrize("unit", [1, 4, 32])
@pytest.mark.parametrize("backend", BACKENDS)
def test_units_of_any_size(backend: str, unit: int) -> None:
    codec, fields, k, v = pool("float32", 32, 32)
    given = rows(1)
    units = torch.stack([torch.randperm(TABLE * PAGE // unit)[: 160 // unit - 1] for _ in range(ROWS)])
    units[0, 2] = -1
    q = torch.randn(ROWS, 4, 32)  # three axes: one query
    stored = oracle.far(backend, fields, given["table"])
    got = oracle.on(backend, paged_attention)(
        q, *stored, given["position"], page=PAGE, scale=0.2, units=units, unit=unit, backend=backend
    )
    where, at = resolve(given["table"], given["position"], units, unit, PAGE)
    want = oracle.attend(q[:, :, None], k.flatten(0, 1)[where], v.flatten(0, 1)[where], (at >= 0)[:, None], 0.2)
    oracle.close(got, want, 1e-5)


@pytest.mark.parametrize("layout", ["float32", "kivi4", "zipcache", "turboquant4"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_named_may_hold_anything(backend: str, layout: str) -> None:
    codec, fields, _, _ = pool(layout, 64, 64)
    given = rows(1)
    q = torch.randn(ROWS, 2, 64)
    run = oracle.on(backend, paged_attention)

    def attend() -> Tensor:
        state = run(
            q, fields, given["table"], given["position"], page=PAGE, scale=0.2, units=given["units"], unit=8,
            codec=codec, backend=backend,
        )  # fmt: skip
        return state.out

    before = attend()
    where, at = resolve(given["table"], given["position"], given["units"], 8, PAGE)
    live = torch.zeros(fields[codecs.FIELDS[codec][0]].shape[0] * PAGE, dtype=torch.bool)
    live[where[at >= 0]] = True
    for field in fields.values():
        if field.is_floating_point() and field.shape[1] == PAGE:  # addressed by slot
            field.flatten(0, 1)[~live] = math.nan
        elif field.is_floating_point():  # by page, or by group of tokens
            dead = ~live.unflatten(0, (len(field), -1)).any(1)
            field[dead] = math.nan
    assert torch.equal(attend(), before)


@pytest.mark.parametrize("unit", [None, 64, 32])
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_of_whole_blocks(backend: str, unit: int | None) -> None:
    rng = torch.Generator().manual_seed(8)
    k, v = (torch.randn(8, 128, 64, generator=rng).bfloat16() for _ in "kv")
    table = torch.tensor([[5, 0, 3], [7, 2, -1], [-1, -1, -1]], dtype=torch.int32)
    position = torch.arange(3 * 128, dtype=torch.int32).repeat(3, 1)
    position[torch.rand(position.shape, generator=rng) < 0.3] = -1
    units = None if unit is None else torch.tensor([[3, 0, 5], [1, -1, 2], [0, 1, 2]])
    v.flatten(0, 1)[resolve(table, position, None, 128, 128)[0][0][position[0] < 0]] = math.nan
    q, at = torch.randn(3, 4, 2, 64, generator=rng).bfloat16(), torch.tensor([[290, 300], [10, 200], [3, 4]])
    stored = oracle.far(backend, {"k": k, "v": v}, table)
    got = oracle.on(backend, paged_attention)(
        q,
        *stored,
        position,
        page=128,
        scale=0.2,
        units=units,
        unit=unit,
        query_position=at,
        window=200,
        backend=backend,
    )
    where, seen = resolve(table, position, units, unit or 128, 128)
    want = oracle.attend(q, *(x.flatten(0, 1)[where] for x in (k, v)), visible_to(seen, at, 200, 2), 0.2)
    oracle.close(got, want, oracle.TRITON["bfloat16"])


@pytest.mark.skipif("native" not in BACKENDS, reason="no C compiler")
@pytest.mark.parametrize("unit", [None, 8, 1])
@pytest.mark.parametrize("dim", [64, 576])
def test_many_rows_over_pages_with_gaps(dim: int, unit: int | None) -> None:
    """Runs of tokens that follow each other are read in place, the others are gathered: no dead one is touched."""
    rng = torch.Generator().manual_seed(dim)
    k, v = (torch.randn(6, 64, dim, generator=rng).bfloat16() for _ in "kv")
    table = torch.tensor([[5, 0, 3], [4, 2, -1]], dtype=torch.int32)
    position = torch.arange(3 * 64, dtype=torch.int32).repeat(2, 1)
    position[0, torch.rand(192, generator=rng) < 0.3] = -1
    units = None if unit is None else torch.rand(2, 192 // unit, generator=rng).argsort(1)[:, : 128 // unit]
    for row in range(2):
        dead = resolve(table, position, None, 64, 64)[0][row][position[row] < 0]
        k.flatten(0, 1)[dead] = v.flatten(0, 1)[dead] = math.nan
    for window in (None, 50):
        q, at = torch.randn(2, 4, 9, dim, generator=rng).bfloat16(), torch.arange(120, 129).repeat(2, 1)
        got = paged_attention(
            q, {"k": k, "v": v}, table, position, page=64, scale=dim**-0.5, units=units, unit=unit, query_position=at,
            window=window, backend="native",
        )  # fmt: skip
        where, seen = resolve(table, position, units, unit or 64, 64)
        want = oracle.attend(q, *(x.flatten(0, 1)[where] for x in (k, v)), visible_to(seen, at, window, 9), dim**-0.5)
        oracle.close(got, want, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("unit", [None, 8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_values_that_are_a_part_of_the_keys(backend: str, unit: int | None, dtype: torch.dtype) -> None:
    """As a pool of latents holds them: views of the keys' first channels."""
    rng, given = torch.Generator().manual_seed(3), rows(1)
    given = {"table": given["table"], "position": given["position"]}
    k = torch.randn(ROWS * TABLE + 3, PAGE, 96, generator=rng).to(dtype)
    q = torch.randn(ROWS, 6, 1, 96, generator=rng).to(dtype)
    units = None if unit is None else torch.rand(ROWS, TABLE * PAGE // unit, generator=rng).argsort(1)[:, :9]
    for v in (k[..., :64], k.mT.contiguous().mT[..., :64]):
        which = None if backend == "native" and v.stride(2) > 1 else backend  # C wants channels side by side
        got = oracle.on(backend, paged_attention)(
            q, {"k": k, "v": v}, **given, page=PAGE, scale=0.1, units=units, unit=unit, backend=which
        )
        where, seen = resolve(given["table"], given["position"], units, unit or PAGE, PAGE)
        want = oracle.attend(q, *(x.flatten(0, 1)[where] for x in (k, v)), seen[:, None] >= 0, 0.1)
        oracle.close(got, want, {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype])


@pytest.mark.parametrize("unit", [None, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dead_latents_may_hold_anything(backend: str, unit: int | None) -> None:
    """In whole blocks, whose tokens are read before anybody knows which of them are dead."""
    rng = torch.Generator().manual_seed(4)
    k, q = torch.randn(8, 64, 96, generator=rng).bfloat16(), torch.randn(2, 20, 1, 96, generator=rng).bfloat16()
    table = torch.tensor([[6, 0, 3], [7, 2, -1]])
    position = torch.arange(192).repeat(2, 1)
    position[torch.rand(position.shape, generator=rng) < 0.4] = -1
    units = None if unit is None else torch.tensor([[2, 0], [1, -1]])
    where, at = resolve(table, position, units, unit or 64, 64)
    live = torch.zeros(8 * 64, dtype=torch.bool)
    live[where[at >= 0]] = True
    want = oracle.attend(q, *(x.flatten(0, 1)[where] for x in (k, k[..., :64])), at[:, None] >= 0, 0.1)
    k.flatten(0, 1)[~live] = math.nan
    held, table = oracle.far(backend, {"k": k}, table)
    got = oracle.on(backend, paged_attention)(
        q,
        held | {"v": held["k"][..., :64]},
        table,
        position,
        page=64,
        scale=0.1,
        units=units,
        unit=unit,
        backend=backend,
    )
    oracle.close(got, want, 1e-2)


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton does not run here")
@pytest.mark.parametrize("unit", [None, 16])
@pytest.mark.parametrize("latents", [False, True])
def test_triton_has_a_program_for_each_block(latents: bool, unit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. What a program asks for ahead ends where its row does; so does memory, as the last row has all its pages."""
    monkeypatch.setattr("kvengine.kernels.gpu.stream.programs", lambda device, each: 64)
    rng = torch.Generator().manual_seed(4)
    k, q = torch.randn(8, 64, 96, generator=rng).bfloat16(), torch.randn(2, 4, 1, 96, generator=rng).bfloat16()
    v = k[..., :64] if latents else torch.randn(8, 64, 64, generator=rng).bfloat16()
    table = torch.tensor([[0, 0, 6, -1, 3], [0, 0, 7, 2, 4]])[:, 2:]
    position = torch.arange(196).repeat(2, 1)[:, 4:]
    position[torch.rand(position.shape, generator=rng) < 0.4] = -1
    units = None if unit is None else torch.rand(2, 192 // unit, generator=rng).argsort(1)[:, : 128 // unit]
    where, at = resolve(table, position, units, unit or 64, 64)
    want = oracle.attend(q, *(x.flatten(0, 1)[where] for x in (k, v)), at[:, None] >= 0, 0.1)
    got = oracle.on("triton", paged_attention)(
        q, {"k": k, "v": v}, table, position, page=64, scale=0.1, units=units, unit=unit, backend="triton"
    )
    oracle.close(got, want, 1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_softcap_and_sinks(backend: str) -> None:
    codec, fields, k, v = pool("float32", 32, 32)
    given = rows(1)
    q, sinks = torch.randn(ROWS, 2, 1, 32), torch.randn(ROWS, 2)
    got = oracle.on(backend, paged_attention)(
        q, fields, given["table"], given["position"], page=PAGE, scale=1.0, softcap=2.0, sinks=sinks, backend=backend
    )
    where, at = resolve(given["table"], given["position"], None, PAGE, PAGE)
    seen = (at >= 0)[:, None]
    want = oracle.attend(q, k.flatten(0, 1)[where], v.flatten(0, 1)[where], seen, 1.0, softcap=2.0, sinks=sinks)
    oracle.close(got, want, 1e-5)


@pytest.mark.parametrize("tokens", [40, 64])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_whose_first_token_only_some_queries_see(backend: str, tokens: int) -> None:
    codec, fields, k, v = pool("float32", 32, 32)
    q, table = torch.randn(1, 3, 2, 32, generator=torch.Generator().manual_seed(6)), torch.tensor([[4, 1]])
    position, at = torch.arange(64)[None], torch.tensor([[39, 40]])
    position[:, tokens:] = -1
    got = oracle.on(backend, paged_attention)(
        q, fields, table, position, page=PAGE, scale=0.3, query_position=at, window=40, backend=backend
    )
    where, there = resolve(table, position, None, PAGE, PAGE)
    seen = visible_to(there, at, 40, 2)
    assert seen[0, :, 0].tolist() == [True, False]
    oracle.close(got, oracle.attend(q, k.flatten(0, 1)[where], v.flatten(0, 1)[where], seen, 0.3), 1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pool_without_pages(backend: str) -> None:
    fields = {"k": torch.empty(0, PAGE, 16), "v": torch.empty(0, PAGE, 16)}
    for pages in (0, 2):
        table, position = torch.full((2, pages), -1), torch.full((2, pages * PAGE), -1)
        got = oracle.on(backend, paged_attention)(
            torch.randn(2, 2, 16), fields, table, position, page=PAGE, scale=1.0, backend=backend
        )
        assert not got.out.any() and (got.lse == -math.inf).all()


def test_refusals_say_why() -> None:
    _, fields, _, _ = pool("float32", 32, 32)
    given = rows(1)
    q = torch.randn(ROWS, 2, 32)
    with pytest.raises(KernelError, match="must divide the page"):
        paged_attention(q, fields, given["table"], given["position"], page=PAGE, scale=1.0, unit=5)
    with pytest.raises(KernelError, match="position the shape"):
        paged_attention(q, fields, given["table"], given["position"][:, 1:], page=PAGE, scale=1.0)
    with pytest.raises(KernelError, match="Did you mean 'kivi'"):
        paged_attention(q, fields, given["table"], given["position"], page=PAGE, scale=1.0, codec="kivy")
    with pytest.raises(KernelError, match="missing"):
        paged_attention(q, fields, given["table"], given["position"], page=PAGE, scale=1.0, codec="kivi")
    with pytest.raises(KernelError, match="query_position"):
        paged_attention(q, fields, given["table"], given["position"], page=PAGE, scale=1.0, window=4)
    with pytest.raises(KernelError, match=f"units must be .row, chosen. with {ROWS} rows"):
        paged_attention(
            q, fields, given["table"], given["position"], page=PAGE, scale=1.0, unit=8, units=given["units"][:1]
        )
    with pytest.raises(KernelError, match=f"k must be .pages, {PAGE}, 16. for these queries"):
        paged_attention(q[..., :16], fields, given["table"], given["position"], page=PAGE, scale=1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tables_positions_and_units_may_be_views(backend: str) -> None:
    """Of wider numbers, or with others between theirs."""
    rng = torch.Generator().manual_seed(8)
    k, v = torch.randn(2, 6, 16, 32, generator=rng)
    q, table = torch.randn(2, 3, 1, 32, generator=rng), torch.randperm(6, generator=rng).view(2, 3)
    position, units = torch.arange(48).repeat(2, 1), torch.tensor([[5, 0, 9], [2, 11, 7]])
    run = oracle.on(backend, paged_attention)
    about: dict[str, Any] = dict(page=16, scale=0.2, codec="dense", dim_v=32, backend=backend)
    for chosen in (None, units):
        want = run(q, {"k": k, "v": v}, table.int(), position.int(), units=chosen, unit=4, **about)
        for dtype in (torch.int32, torch.int64):
            views = [
                None if x is None else torch.stack([x, x + 1], 2).to(dtype)[..., 0] for x in (table, position, chosen)
            ]
            got = run(q, {"k": k, "v": v}, *views[:2], units=views[2], unit=4, **about)
            assert torch.equal(got.out, want.out) and torch.equal(got.lse, want.lse)


@pytest.mark.skipif("native" not in BACKENDS, reason="no C compiler")
def test_units_that_were_converted_are_kept_for_as_long_as_they_are_described() -> None:
    fields, table, position = (
        {"k": torch.zeros(3, 16, 32), "v": torch.zeros(3, 16, 32)},
        torch.arange(3),
        torch.arange(48),
    )
    pages = Described("dense", fields, table[None], position[None], 16, 32, 32)
    pages.reading(torch.tensor([[5, 0, 9]]), 4)
    assert pages.units.tolist() == [[5, 0, 9]] and pages.call.units == pages.units.data_ptr()
    assert (pages.call.unit, pages.call.chosen, pages.call.columns) == (4, 3, 12)
    pages.reading(None, 4)
    assert (pages.call.units, pages.call.chosen, pages.call.columns) == (None, 0, 48)
