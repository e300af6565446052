"""Pages of codes read by the word: what `attend_kernel` would say, from a few instructions per code."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import support_kernels as oracle
import torch
from torch import Tensor

from kvengine.kernels import codecs, turboquant
from kvengine.kernels.paged_attention import paged_attention
from kvengine.kernels.slots import resolve, visible_to
from kvengine.stack import Stack

BACKENDS = oracle.backends()
ROWS, TABLE = 3, 3
WIDE = {"dim": 128, "dim_v": 128}
CASES: dict[str, dict[str, Any]] = {
    "4 bits": {},
    "ranges in bfloat16": {"ranges": torch.bfloat16},
    "2 bits, ranges in bfloat16": {"ranges": torch.bfloat16, "bits": 2, "dim": 128, "dim_v": 128, "large": True},
    "2 bits": {"bits": 2, "dim": 128, "dim_v": 128},
    "8 bits": {"bits": 8},
    "keys 4, values 2": {"bits": (4, 2), "dim_v": 128},
    "values wider": {"dim_v": 128},
    "pages of one group": {"page": 32},
    "pages of one group, 2 bits, causal": {"page": 32, "bits": 2, **WIDE, "query": 2, "seen": True, "softcap": 2.0},
    "pages of three lots": {"page": 96, "dim": 128, "dim_v": 128},
    "two pages of a block": {"page": 32, "dim": 128, "dim_v": 128, "pages": 2, "gap": True},
    "two pages of a block, an odd number, ranges in bfloat16": {
        "page": 32,
        "dim": 128,
        "dim_v": 128,
        "ranges": torch.bfloat16,
        "softcap": 2.0,
        "sinks": True,
    },
    "two pages of a block, one page, causal": {"page": 32, "dim_v": 128, "pages": 1, "query": 2, "seen": True},
    "pages of three lots, the first missing": {"page": 96, "dim": 128, "gap": True},
    "groups of two blocks": {"group": 64, "page": 128},
    "groups of two blocks, 2 bits": {"group": 64, "page": 128, "bits": 2, "dim": 128, "dim_v": 128},
    "groups of two blocks, 8 bits": {"group": 64, "page": 128, "bits": 8, "dim": 128, "dim_v": 128},
    "groups of a page, ranges in bfloat16": {"group": 128, "page": 128, "dim_v": 128, "ranges": torch.bfloat16},
    "other groups of values": {"v_group": 64, "dim": 128, "dim_v": 128},
    "8 bits, other groups of values": {"v_group": 128, "dim": 32, "dim_v": 256, "bits": 8},
    "one group of values, 2 bits": {"v_group": 256, "dim": 256, "dim_v": 256, "bits": 2},
    "small": {"k_size": 1e-3, "v_size": 1e-3},
    "small, 2 bits, ranges in bfloat16": {"k_size": 1e-3, "v_size": 1e-3, "bits": 2, **WIDE, "ranges": torch.bfloat16},
    "tiny values": {"v_size": 1e-5},
    "huge": {"k_size": 1.2e4, "v_size": 1.2e4},
    "huge, 2 bits": {"k_size": 1.2e4, "v_size": 1.2e4, "bits": 2, "dim": 128, "dim_v": 128},
    "2 bits, keys from end to end of float16": {"k_size": 6e4, "ends": True, "bits": 2, **WIDE},
    "huge, 8 bits, ranges in bfloat16": {"k_size": 1.2e4, "v_size": 1.2e4, "bits": 8, "ranges": torch.bfloat16},
    "values that grow": {"grow": True},
    "values that shrink, large ones": {"grow": True, "v_size": 1.2e4, "dim_v": 128},
    "constant channels": {"constant": True},
    "constant channels, 2 bits": {"constant": True, "bits": 2, "dim": 128, "dim_v": 128},
    "far from zero": {"shift": 30.0},
    "far below zero, pages missing": {"shift": 1000.0},
    "far below zero, the first page missing": {"shift": 1000.0, "page": 32, **WIDE, "gap": True},
    "negative scale": {"negative": True},
    "one head": {"heads": 1},
    "nine heads": {"heads": 9},
    "groups of 128": {"group": 128, "page": 128, "dim": 128, "dim_v": 128},
    "groups of 128, causal": {"group": 128, "page": 128, "dim": 128, "dim_v": 128, "query": 3, "seen": True},
    "forty rows": {"heads": 5, "query": 8, "seen": True},
    "causal": {"query": 3, "seen": True},
    "window": {"query": 2, "seen": True, "window": 50},
    "units": {"unit": 32},
    "units of two blocks": {"unit": 64, "dim": 128, "dim_v": 128},
    "units of two blocks, 2 bits, causal": {"unit": 64, "query": 2, "seen": True, "bits": 2, "dim": 128, "dim_v": 128},
    "units of half a block": {"unit": 16, "dim": 128, "dim_v": 128},
    "units of half a block, 2 bits, causal": {"unit": 16, "query": 2, "seen": True, "bits": 2, **WIDE},
    "pages of half a block, 8 bits": {"page": 16, "group": 16, "v_group": 32, "bits": 8, "heads": 9},
    "units, causal": {"unit": 32, "query": 2, "seen": True},
    "softcap and sinks": {"softcap": 2.0, "sinks": True},
    "large queries": {"large": True},
    "nibbles": {"nibbles": True, "v_group": 64},
    "nibbles, one group, ranges in bfloat16": {
        "nibbles": True,
        "ranges": torch.bfloat16,
        **{name: 128 for name in ("page", "group", "v_group", "dim", "dim_v")},
    },
    "nibbles, values wider, nine heads": {"nibbles": True, "v_group": 128, "dim": 64, "dim_v": 256, "heads": 9},
    "nibbles, forty rows": {
        "nibbles": True,
        "v_group": 64,
        "heads": 5,
        "query": 8,
        "seen": True,
        "softcap": 2.0,
        "sinks": True,
    },
    "nibbles, huge": {"nibbles": True, "v_group": 64, "k_size": 1.2e4, "v_size": 1.2e4},
    "nibbles, small values that grow": {"nibbles": True, "v_group": 64, "grow": True, "v_size": 1e-3, "k_size": 1e-3},
    "nibbles, constant channels, far from zero": {"nibbles": True, "v_group": 64, "constant": True, "shift": 30.0},
    "nibbles, units of half a block, window": {
        "nibbles": True,
        "v_group": 64,
        "unit": 16,
        "query": 2,
        "seen": True,
        "window": 50,
    },
    "turned": {"turned": True},
    "turned, 2 bits": {"turned": True, "bits": 2, "dim": 128, "dim_v": 128},
    "turned, keys 4, values 2, scales in bfloat16": {
        "turned": True,
        "bits": (4, 2),
        "dim_v": 128,
        "ranges": torch.bfloat16,
    },
    "turned, small values that grow": {"turned": True, "grow": True},
    "turned, units, window": {"turned": True, "unit": 32, "query": 2, "seen": True, "window": 50},
    "turned, pages of half a block": {"turned": True, "page": 16},
    "turned, units of half a block": {"turned": True, "unit": 16, "query": 2, "seen": True},
    "turned, single tokens, 2 bits": {"turned": True, "unit": 1, "bits": 2, "dim": 128, "dim_v": 128},
    "turned, forty rows": {"turned": True, "heads": 5, "query": 8, "seen": True, "softcap": 2.0, "sinks": True},
    "turned, large queries": {"turned": True, "large": True, "page": 32},
    "mixed": {"salient": 0.6},
    "mixed, long pages": {"salient": 0.3, "page": 128, "dim_v": 128, "heads": 9},
    "mixed, units, window": {"salient": 0.9, "unit": 32, "query": 2, "seen": True, "window": 50},
    "mixed, wide, units": {"salient": 0.6, **WIDE, "page": 32, "unit": 32},
    "mixed, all salient": {"salient": 1.0},
    "mixed, none salient": {"salient": 0.0, "softcap": 2.0},
    "mixed, by width": {"salient": 0.6, "dim": 128, "dim_v": 128},
    "mixed, by width, long pages": {"salient": 0.6, "page": 128, **WIDE, "softcap": 2.0, "sinks": True},
    "mixed, by width, one salient": {"salient": 0.04, "page": 32, **WIDE, "query": 2, "seen": True, "window": 50},
    "mixed, by width, all but one salient": {"salient": 0.99, "page": 128, "dim": 128, "dim_v": 128, "heads": 8},
    "mixed, by width, many rows": {"salient": 0.6, "dim": 128, "dim_v": 128, "heads": 5, "query": 4, "seen": True},
    "mixed, more rows": {"salient": 0.6, "dim": 128, "dim_v": 128, "heads": 5, "query": 5, "seen": True},
    "mixed, by width, huge": {"salient": 0.5, **WIDE, "k_size": 1.2e4, "v_size": 1.2e4, "negative": True},
    "mixed, by width, small": {"salient": 0.7, **WIDE, "k_size": 1e-3, "v_size": 1e-3, "heads": 1},
    "mixed, by width, tiny values": {"salient": 0.6, **WIDE, "page": 32, "v_size": 1e-9},
    "mixed, by width, queries of one channel": {"salient": 0.6, **WIDE, "page": 32, "peak": 0},
    "mixed, by width, queries of another channel": {"salient": 0.6, **WIDE, "page": 32, "peak": 2},
    "mixed, by width, values that grow": {"salient": 0.6, "dim": 128, "dim_v": 128, "grow": True},
    "mixed, by width, large queries": {"salient": 0.3, "page": 128, **WIDE, "large": True, "constant": True},
}


def case(
    *, bits: Any = 4, dim: int = 64, dim_v: int = 64, page: int = 64, group: int = 32, heads: int = 4, query: int = 1,
    seen: bool = False, window: int | None = None, unit: int | None = None, softcap: float | None = None,
    sinks: bool = False, large: bool = False, salient: float | None = None,
    ranges: torch.dtype = torch.float16, turned: bool = False, grow: bool = False, v_group: int | None = None,
    k_size: float = 1.0, v_size: float = 1.0, constant: bool = False, shift: float = 0.0, negative: bool = False,
    nibbles: bool = False, pages: int | None = None, gap: bool = False, ends: bool = False, peak: int | None = None,
) -> tuple[Tensor, dict[str, Tensor], Tensor, Tensor, dict[str, Any]]:  # fmt: skip
    """Queries, fields, table, position and options; one full row, one with missing pages, one without any."""
    rng = torch.Generator().manual_seed(dim + page)
    k, v = (torch.randn(ROWS * TABLE + 2, page, d, generator=rng) for d in (dim, dim_v))
    if grow:  # from page to page
        v = v * 10.0 ** -(torch.arange(len(v)) % 5)[:, None, None]
    if ends:
        k = k.sign()
    k, v = k * k_size + shift, v * v_size + shift
    if constant:  # for a while
        k[:, : page // 2, ::3], v[:, ::3, :32] = 3.0, -2.0
    if turned:
        k_bits, v_bits = bits if isinstance(bits, tuple) else (bits, bits)
        fields = {}
        for side, x, n in (("k", k, k_bits), ("v", v, v_bits)):
            fields[f"{side}_code"], fields[f"{side}_scale"] = turboquant.encode(x, n, "unbiased", ranges)
    elif salient is None:
        fields = codecs.encode_kivi(k, v, bits, group, scale_dtype=ranges)
        if v_group is not None:
            every = torch.nn.functional.pad(v.flatten(0, 1), (0, 0, 0, -len(v) * page % v_group))[None]
            other = codecs.encode_kivi(every[..., :16], every, bits, v_group, scale_dtype=ranges)
            own = {name: x[0, : len(v) * page] for name, x in other.items() if name.startswith("v")}
            fields |= {name: x.unflatten(0, (-1, page)) for name, x in own.items()}
        if nibbles:
            for side in "kv":
                code = fields[f"{side}_code"]
                fields[f"{side}_low"] = torch.randint(256, code.shape, generator=rng, dtype=torch.uint8)
    else:
        chosen = torch.rand(len(k), page, generator=rng).argsort(1) < round(salient * page)
        fields = codecs.encode_zipcache(k, v, (4, 2), chosen)
    q = torch.randn(ROWS, heads, query, dim, generator=rng).bfloat16() * (1e6 if large else 1)
    if peak is not None:  # counted in any other's size, that one would leave float16
        q *= torch.where(torch.arange(dim) == peak, 1, 1e-6).bfloat16()
    if ends:  # times a scale it fits into float16 only where no query counts for more than 1
        q[..., 0] = 3.9
    table = torch.randperm(len(k), generator=rng)[: ROWS * TABLE].reshape(ROWS, TABLE).int()
    table[1, 2:], table[2] = -1, -1
    if gap:
        table[0, 0] = -1
    position = torch.arange(TABLE * page, dtype=torch.int32).repeat(ROWS, 1)
    position[torch.rand(position.shape, generator=rng) < 0.3] = -1
    if pages is not None:
        table, position = table[:, :pages], position[:, : pages * page]
    size = (1e6 if large else 1) * k_size * (-1 if negative else 1) * (5 if shift else 1)
    options: dict[str, Any] = {"scale": 0.2 / size, "softcap": softcap, "window": window, "page": page}
    if unit is not None:
        units = torch.stack([torch.randperm(TABLE * page // unit, generator=rng)[:4] for _ in range(ROWS)])
        units[0, 2] = -1
        options |= {"units": units, "unit": unit}
    if seen:
        options["query_position"] = torch.tensor([[120], [30], [5]]) + torch.arange(query)
    if sinks:
        options["sinks"] = torch.randn(ROWS, heads, generator=rng)
    codec = "turboquant" if turned else "quantspec" if nibbles else "kivi" if salient is None else "zipcache"
    return q, fields, table, position, options | {"codec": codec, "dim_v": dim_v}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_words_match_the_oracle(backend: str, name: str) -> None:
    matches(backend, name)


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton does not run here")
@pytest.mark.parametrize(
    "name",
    [
        "units, causal",
        "two pages of a block, an odd number, ranges in bfloat16",
        "nibbles, units of half a block, window",
        "turned, units of half a block",
        "mixed, units, window",
        "mixed, by width, one salient",
    ],
)
def test_triton_has_a_program_for_each_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. What a program asks for ahead ends where its row does; so does memory, as the last row has all its pages."""
    monkeypatch.setattr("kvengine.kernels.gpu.stream.programs", lambda device, each: 64)
    matches("triton", name, flipped=True)


def matches(backend: str, name: str, flipped: bool = False) -> None:
    q, fields, table, position, options = case(**CASES[name])
    if flipped:  # and parts of longer rows
        table, position = (torch.nn.functional.pad(x.flip(0), (4, 0))[:, 4:] for x in (table, position))
        options |= {"query_position": options["query_position"].flip(0)} if "query_position" in options else {}
    taken(q, fields, options, "by width" in name)
    codec = options["codec"]
    pool = oracle.far(backend, fields, table)
    got = oracle.on(backend, paged_attention)(q, *pool, position, backend=backend, **options)
    page, units = options["page"], options.get("units")
    where, at = resolve(table, position, units, options.get("unit", page), page)
    visible = visible_to(at, options.get("query_position"), options["window"], q.shape[2])
    k, v = (x.double().flatten(0, 1)[where] for x in codecs.decode(codec, fields, q.shape[-1], options["dim_v"]))
    want = oracle.attend(q, k, v, visible, options["scale"], options["softcap"], options.get("sinks"))
    # Products of bfloat16 in C, of float16 on a GPU, where turned codes stand for levels to as many digits as bfloat16 has.
    bound = 5e-3 if backend == "native" or codec == "turboquant" else 2e-3
    oracle.close(got, want, 1e-2 if backend == "native" and codec == "turboquant" else bound)
    if "sinks" not in options:
        assert not got.out[(table < 0).all(1)].any()  # the row without pages


@pytest.mark.parametrize("name", ["4 bits", "two pages of a block", "nibbles", "turned", "mixed", "mixed, by width"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_words_of_a_pool_without_pages(backend: str, name: str) -> None:
    q, fields, table, position, options = case(**CASES[name])
    fields, table = {name: x[:0].clone() for name, x in fields.items()}, torch.full_like(table, -1)
    got = oracle.on(backend, paged_attention)(q, fields, table, position, backend=backend, **options)
    assert not got.out.any() and bool((got.lse == -math.inf).all())


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"page": 32},
        {"salient": 0.6},
        {"salient": 0.6, "dim": 128, "dim_v": 128},
        {"turned": True},
        {"nibbles": True, "v_group": 64},
    ],
    ids=["kivi", "pages of 32", "mixed", "by width", "turned", "nibbles"],
)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("unit", [32, 64, None])
def test_words_of_what_is_dead_may_hold_anything(backend: str, kind: dict[str, Any], unit: int | None) -> None:
    page = kind.get("page", 64)
    if unit is not None and unit > page:
        pytest.skip("no unit is more than a page")
    q, fields, table, position, options = case(**{"page": page, "unit": unit} | kind)
    position[0, :32] = -1  # a whole key group
    position[1, page : 2 * page] = -1  # a whole page
    run = oracle.on(backend, paged_attention)
    before = run(q, fields, table, position, backend=backend, **options).out
    where, at = resolve(table, position, options.get("units"), unit or page, page)
    live = torch.zeros(ROWS * TABLE + 2, page, dtype=torch.bool)
    live.flatten()[where[at >= 0]] = True
    spans = {"v_scale": 1, "v_zero": 1, "v_channel": 64}  # slots that a range is for
    spans |= {"k_scale": 1} if "turned" in kind else {}
    for name, field in fields.items():
        if field.is_floating_point():
            span = spans.get(name, 64 if "salient" in kind else 32)
            dead = ~live.unflatten(1, (-1, span)).any(2)
            field[dead[:, 0] if span >= page else dead] = math.nan
    assert torch.equal(run(q, fields, table, position, backend=backend, **options).out, before)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("bits", [4, 2])
def test_the_polynomial_goes_through_the_levels(bits: int) -> None:
    """Every code in every place of a word, in the arithmetic of float16 that a GPU does."""
    from kvengine.kernels.gpu.halves import CURVE, LINE, SIZE, place

    code, want = torch.arange(1 << bits), turboquant.levels(bits)[: 1 << bits].double()
    wide = lambda x, y, then: (x.double() * y.double() + then).half()  # noqa: E731  as one step
    for k in range(16 // bits):
        at, middle = place(k, bits, True), ((1 << bits) - 1) / 2
        eighth = 8 if bits == 4 else 1
        x = (0x6400 | code << at).to(torch.int16).view(torch.float16)
        u = wide(x, torch.tensor(1.0 / (eighth << at)), -(1024.0 / (1 << at) + middle) / eighth)
        assert torch.equal(u.double() * eighth, code - middle), "exact"
        s = u * u
        level = u * (
            wide(wide(s + CURVE.value[2], s, CURVE.value[1]), s, CURVE.value[0])
            if bits == 4
            else wide(u, u, LINE.value)
        )
        found = level.double() * SIZE[bits]
        cut = torch.cat([want.new_tensor([-torch.inf]), (want[1:] + want[:-1]) / 2, want.new_tensor([torch.inf])])
        share = torch.special.ndtr(cut).diff()  # of normal numbers
        assert float((share * (found - want) ** 2).sum().sqrt()) <= 1e-3
        assert torch.equal(found, -found.flip(0)) and float((found / want - 1).abs().max()) <= 4e-3


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_other_pages_are_read_code_by_code() -> None:
    for other in ({"group": 8}, {"unit": 8}, {"dim": 32}, {"bits": 2}, {"dim_v": 96, "group": 32}, {"v_group": 16}):
        q, fields, *_, options = case(**other)
        assert not fits(q, fields, options["page"], options.get("unit", 64), "kivi", options["dim_v"], False)
    for other in ({"v_group": 32}, {"dim_v": 32}, {"unit": 8, "v_group": 64}):
        q, fields, *_, options = case(nibbles=True, **other)
        assert not fits(q, fields, options["page"], options.get("unit", 64), "quantspec", options["dim_v"], False)
    for other in ({"bits": 3, "dim": 128}, {"bits": 1, "dim": 128}, {"dim": 32}, {"bits": 2}):
        q, fields, *_, options = case(turned=True, **other)
        assert not fits(q, fields, options["page"], options.get("unit", 64), "turboquant", options["dim_v"], False)
    q, fields, *_ = case()
    assert not fits(q.float(), fields, 64, 64, "kivi", 64, False)
    assert not fits(q, fields, 64, 64, "kivi", 64, True)
    assert not fits(q, {n: x.float() if "scale" in n else x for n, x in fields.items()}, 64, 64, "kivi", 64, False)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("bits", "dim"), [(4, 64), (4, 128), (2, 128), (8, 256)])
def test_the_policys_pages_are_read_by_the_word(bits: int, dim: int, dtype: torch.dtype) -> None:
    """As a model in this dtype stores them, with what nobody asks otherwise."""
    stack = Stack.parse(f"kivi(bits={bits})")
    k = torch.randn(3, stack.page, dim).to(dtype)
    fields = stack.representation.encode(k, k, torch.zeros(3, stack.page))
    assert fits(k[:, None, :1], fields, stack.page, stack.page, "kivi", dim, False)
    stack = Stack.parse(f"turboquant(bits={bits})" if bits < 8 else "turboquant(values=2)")
    k = torch.randn(3, stack.page, dim).to(dtype)
    fields = stack.representation.encode(k, k, torch.zeros(3, stack.page))
    assert fits(k[:, None, :1], fields, stack.page, stack.page, "turboquant", dim, False)
    if dim == 128:
        from kvengine.kernels.paged_attention import mixed

        stack = Stack.parse("zipcache")
        k = torch.randn(3, stack.page, dim).to(dtype)
        fields = stack.representation.encode(k, k, torch.zeros(3, stack.page))
        assert mixed.fits(k[:, None, :1], fields, stack.page, None, "zipcache", dim, False)
    stack = Stack.parse("quantspec")
    k = torch.randn(3, stack.page, dim).to(dtype)
    fields = stack.representation.encode(k, k, torch.zeros(3, stack.page))
    assert fits(k[:, None, :1], fields, stack.page, stack.page, "quantspec", dim, False)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("page", [4, 5])
def test_an_odd_number_of_sizes_is_not_read_by_twos(page: int) -> None:
    """What lies behind the last is not the field's."""
    x = torch.randn(3, page, 64)
    code, scale = turboquant.encode(x, 4, "unbiased", torch.float16)
    fields = {"k_code": code, "v_code": code, "k_scale": scale, "v_scale": scale}
    assert fits(x[:, None, :1].half(), fields, page, page, "turboquant", 64, False) == (page == 4)


def fits(q: Tensor, fields: dict[str, Tensor], page: int, unit: int, codec: str, dim_v: int, want_probs: bool) -> bool:
    from kvengine.kernels.paged_attention import kivi, words

    return (kivi if codec in ("kivi", "quantspec") else words).fits(q, fields, page, unit, codec, dim_v, want_probs)


def taken(q: Tensor, fields: dict[str, Tensor], options: dict[str, Any], by_width: bool) -> None:
    """A case that another kernel runs would show nothing of this one."""
    if importlib.util.find_spec("triton") is not None:
        from kvengine.kernels.paged_attention import mixed

        unit, codec = options.get("unit", options["page"]), options["codec"]
        more = options["page"], options.get("units"), codec, options["dim_v"], False
        assert mixed.fits(q, fields, *more) == by_width
        assert by_width or fits(q, fields, options["page"], unit, codec, options["dim_v"], False)
