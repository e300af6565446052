"""The C kernel reads codes as they lie, for the layouts that the engine makes, with whatever the processor offers."""

from __future__ import annotations

import ctypes
import platform
import subprocess
from functools import cache
from pathlib import Path

import pytest
import support_kernels as oracle
import torch
from torch import Tensor

from kvengine.kernels import codecs, turboquant
from kvengine.kernels.cpu import library
from kvengine.kernels.lowrank_attention import lowrank_attention
from kvengine.kernels.page_scores import best_units, page_bounds, page_scores, top_units, units_by_share
from kvengine.kernels.page_scores.coarse import Coarse
from kvengine.kernels.paged_attention import paged_attention
from kvengine.kernels.slots import resolve, visible_to
from kvengine.kernels.state import State
from kvengine.policies.representation.quantspec import QuantSpec
from kvengine.policies.representation.turboquant import TurboQuant

pytestmark = pytest.mark.skipif("native" not in oracle.backends(), reason="no C compiler")
PAGE, ROWS, TABLE = 64, 2, 4
PROCESSORS = {
    "this one": "-march=native",
    "no matrix unit": "-mno-amx-bf16",
    "no bfloat16": "-mno-amx-bf16 -mno-avx512bf16",
    "no whole numbers": "-mno-amx-bf16 -mno-avx512vnni",
    "512 bits, by halves": "-march=x86-64-v3 -DLANES=16",
    "256 bits": "-march=x86-64-v3",
    "256 bits, products that are added": "-march=alderlake",
    "128 bits": "-march=x86-64",
}
WITHOUT = {
    "no matrix unit": "amx_bf16",
    "no bfloat16": "avx512_bf16",
    "no whole numbers": "avx512_vnni",
    "256 bits": "avx512f",
    "256 bits, products that are added": "avx_vnni",
}
"""What a processor must have for these builds to be others than its own."""
SHAPES = {
    "4 bits": (128, 4, 32, 4),
    "2 bits": (128, 2, 32, 4),
    "8 bits": (128, 8, 32, 4),
    "8 bits, narrow": (64, 8, 64, 9),
    "8 bits, wide": (256, 8, 32, 16),
    "8 bits, short groups": (128, 8, 16, 3),
    "8 bits, shorter groups": (128, 8, 8, 4),
    "8 bits, whole groups": (192, 8, 64, 5),
    "1 bit": (128, 1, 32, 4),
    "4 and 2 bits": (64, (4, 2), 32, 7),
    "narrow": (32, 4, 32, 1),
    "narrow, 2 bits": (64, 2, 64, 9),
    "wide": (256, 4, 32, 16),
    "wide, 2 bits": (256, 2, 64, 4),
    "many queries": (128, 4, 32, 24),
    "three groups": (96, 4, 32, 4),
    "short groups": (128, 4, 16, 4),
    "two nibbles": (128, "nibbles", 64, 4),
    "two nibbles, narrow": (64, "nibbles", 32, 9),
    "two nibbles, wide": (256, "nibbles", 64, 16),
    "two nibbles, short groups": (64, "nibbles", 16, 4),
    "mixed": (128, "mixed", 39, 4),
    "mixed, narrow": (64, "mixed", 20, 9),
    "mixed, wide": (256, "mixed", 39, 16),
    "mixed, 192": (192, "mixed", 1, 3),
    "mixed, none salient": (128, "mixed", 0, 4),
    "mixed, all salient": (128, "mixed", 64, 4),
    "mixed, many queries": (128, "mixed", 39, 20),
    "turned, 4 bits": (128, "turned", 4, 4),
    "turned, 3 bits": (128, "turned", 3, 4),
    "turned, 2 bits": (128, "turned", 2, 3),
    "turned, 1 bit": (128, "turned", 1, 4),
    "turned, narrow": (64, "turned", 4, 7),
    "turned, narrow, 2 bits": (64, "turned", 2, 9),
    "turned, wide": (256, "turned", 4, 16),
    "turned, wide, 2 bits": (256, "turned", 2, 4),
    "turned, 4 and 2 bits": (64, "turned", (4, 2), 4),
    "turned, wide, 1 bit": (256, "turned", 1, 5),
    "turned, 192": (192, "turned", 3, 4),
    "turned, 72": (72, "turned", 3, 4),
    "turned, 80": (80, "turned", 4, 4),
    "turned, 20": (20, "turned", 4, 4),
    "turned, many queries": (128, "turned", 3, 20),
}


@cache
def built(flag: str) -> library.Loaded:
    """The library for another processor, which this one must be able to stand in for."""
    compiler = library.compiler()
    assert compiler
    try:
        return library.Loaded(
            ctypes.CDLL(str(library._built(compiler, (*library.FLAGS, *library.OPENMP, *flag.split())))), None
        )
    except subprocess.CalledProcessError as error:
        return library.Loaded(None, error.stderr)


LATER = ("512 bits, by halves", "no bfloat16", "no whole numbers", "256 bits, products that are added", "128 bits")
"""Of layouts of the widest registers, on a processor without them: minutes to compile. The others take ten seconds each,
and what they lack, 256 bits lack too, or do in two steps."""


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) if name in LATER else name for name in PROCESSORS])
def processor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    name = request.param
    if name != "this one":
        if platform.machine() != "x86_64":
            pytest.skip("the flags are of x86-64")
        lines = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
        if name == "256 bits" and " avx2 " not in lines:
            pytest.skip("this processor has no 256 bits")
        if name in WITHOUT and f" {WITHOUT[name]} " not in lines:
            pytest.skip(f"this processor has no {WITHOUT[name]}, so this is as native")
        found = built(PROCESSORS[name])
        if found.library is None:
            pytest.skip(f"the compiler does not know {PROCESSORS[name]}")
        monkeypatch.setattr(library, "load", lambda: found)


def attended(shape: str, chosen: int | None, dtype: torch.dtype, seed: int = 0) -> tuple[State, State, State]:
    """What the kernel computes; what it must; and that with the decoded keys and values rounded to bfloat16."""
    dim, bits, group, heads = SHAPES[shape]
    rng = torch.Generator().manual_seed(heads + 100 * seed)
    k, v = torch.randn(2, ROWS * TABLE, PAGE, dim, generator=rng) + 2
    k[..., :2] *= 20  # outlying channels, as models have them
    codec = {"mixed": "zipcache", "nibbles": "quantspec", "turned": "turboquant"}.get(str(bits), "kivi")
    if bits == "nibbles":
        fields = QuantSpec(group=group).encode(k, v, torch.zeros(k.shape[:2]))
    elif bits == "turned":
        of_keys, of_values = group if isinstance(group, tuple) else (group, group)
        fields = TurboQuant(bits=of_keys, values=of_values).encode(k, v, torch.zeros(k.shape[:2]))
    elif bits == "mixed":
        fields = codecs.encode_zipcache(k, v, (4, 2), torch.rand(len(k), PAGE, generator=rng).argsort(1) < group)
    else:
        fields = codecs.encode_kivi(k, v, bits, group)  # type: ignore[arg-type]
    k, v = codecs.decode(codec, fields, dim, dim)
    table = torch.randperm(ROWS * TABLE, generator=rng).view(ROWS, TABLE).int()
    position = torch.arange(TABLE * PAGE).repeat(ROWS, 1)
    position[torch.rand(position.shape, generator=rng) < 0.2] = -1
    position[1, 37:] = -1
    units = None
    if chosen:
        all_units = TABLE * PAGE // chosen
        units = torch.stack([torch.randperm(all_units, generator=rng)[: all_units // 2 + 1] for _ in range(ROWS)])
        units[0, 3] = -1
    q = (torch.randn(ROWS, heads, 1, dim, generator=rng) * 3).to(dtype)
    got = paged_attention(
        q, fields, table, position, page=PAGE, scale=dim**-0.5, codec=codec, dim_v=dim, units=units, unit=chosen,
        want_probs=True, backend="native",
    )  # fmt: skip
    where, at = resolve(table, position, units, chosen or PAGE, PAGE)
    seen = visible_to(at, None, None, 1)

    def oracle_of(k: Tensor, v: Tensor) -> State:
        return oracle.attend(q.float(), k.flatten(0, 1)[where], v.flatten(0, 1)[where], seen, dim**-0.5)

    return got, oracle_of(k, v), oracle_of(k.bfloat16().float(), v.bfloat16().float())


@pytest.mark.parametrize("chosen", [None, 16, 1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("processor")
def test_codes_are_what_they_stand_for(shape: str, chosen: int | None) -> None:
    got, want, _ = attended(shape, chosen, torch.float32)
    oracle.close(got, want, 2e-5 if "turned" in shape else 1e-5)  # the oracle's vectors are turned in float32 too


@pytest.mark.parametrize("chosen", [None, 16, 1])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("processor")
def test_for_queries_of_bfloat16_codes_are_about_what_they_stand_for(shape: str, chosen: int | None) -> None:
    got, want, rounded = attended(shape, chosen, torch.bfloat16)
    oracle.close(got, want, max(1e-2, 2 * oracle.error(rounded.probs, want.probs)))  # type: ignore[arg-type]


@pytest.mark.parametrize("scales", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("dim", "bits", "group"),
    [(64, 4, 16), (64, 4, 64), (128, 4, 16), (128, 4, 32), (128, 4, 128), (256, 4, 16), (256, 4, 32), (256, 4, 64),
     (128, 2, 16), (128, 2, 64), (256, 2, 32), (128, 8, 32), (96, 8, 12), (128, "mixed", 39)],
)  # fmt: skip
def test_pages_that_follow_each_other_without_gaps(dim: int, bits: int | str, group: int, scales: torch.dtype) -> None:
    """Whole batches of tokens side by side, as most are: their scales and codes are read where they lie."""
    rng = torch.Generator().manual_seed(dim + group)
    page = {12: 96, 128: 128}.get(group, PAGE)
    k, v = torch.randn(2, 2 * TABLE, page, dim, generator=rng) + 1
    if bits == "mixed":
        chosen = torch.rand(len(k), page, generator=rng).argsort(1) < group
        fields = codecs.encode_zipcache(k, v, (4, 2), chosen, scale_dtype=scales)
    else:
        fields = codecs.encode_kivi(k, v, int(bits), group, scale_dtype=scales)
    codec = "zipcache" if bits == "mixed" else "kivi"
    k, v = (x.view(2, -1, dim) for x in codecs.decode(codec, fields, dim, dim))
    table, position = torch.arange(2 * TABLE).view(2, TABLE).int(), torch.arange(TABLE * page).repeat(2, 1).int()
    q = torch.randn(2, 4, 1, dim, generator=rng).bfloat16()
    got = paged_attention(
        q, fields, table, position, page=page, scale=dim**-0.5, codec=codec, dim_v=dim, backend="native"
    )
    scores = torch.einsum("rgqd,rtd->rgqt", q.float(), k) * dim**-0.5
    want = torch.einsum("rgqt,rtd->rgqd", scores.softmax(-1), v)
    assert (got.lse - scores.logsumexp(-1)).abs().max() < 1e-2
    assert (got.out - want).abs().max() < 2e-2


@pytest.mark.parametrize("shape", ["4 bits", "2 bits", "mixed", "two nibbles"])
def test_in_bfloat16_less_is_lost_than_by_rounding_decoded_keys_and_values(shape: str) -> None:
    lost, by_rounding = 0.0, 0.0
    for seed in range(20):
        got, want, rounded = attended(shape, 1, torch.bfloat16, seed)
        lost += oracle.error(got.out, want.out)
        by_rounding += oracle.error(rounded.out, want.out)
    assert lost < 0.75 * by_rounding


@pytest.mark.parametrize("bits", [2, 4, 8, "nibbles"])
@pytest.mark.usefixtures("processor")
def test_beside_an_outlying_channel_of_values_those_of_other_groups_keep_their_bits(bits: int | str) -> None:
    rng, none = torch.Generator().manual_seed(1), torch.zeros(4, PAGE)
    k, v = torch.randn(2, 4, PAGE, 128, generator=rng)
    v[..., 3] *= 1000
    codec = "quantspec" if bits == "nibbles" else "kivi"
    fields = QuantSpec(group=32).encode(k, v, none) if bits == "nibbles" else codecs.encode_kivi(k, v, int(bits), 32)
    k, v = (x.reshape(1, -1, 128) for x in codecs.decode(codec, fields, 128, 128))
    table, position = torch.arange(4)[None], torch.arange(4 * PAGE)[None]
    q, seen = torch.randn(1, 4, 1, 128, generator=rng).bfloat16(), torch.ones(1, 1, 4 * PAGE, dtype=torch.bool)
    got = paged_attention(q, fields, table, position, page=PAGE, scale=0.1, codec=codec, dim_v=128, backend="native")
    want, rounded = (oracle.attend(q, k, x, seen, 0.1).out[..., 32:] for x in (v, v.bfloat16()))
    assert oracle.error(got.out[..., 32:], want) < oracle.error(rounded, want)


@pytest.mark.usefixtures("processor")
def test_sums_of_turned_vectors_that_are_all_alike_are_in_range() -> None:
    """Every level of keys and values the largest, with one sign, as are turned queries and all weights: what whole numbers
    of 32 bits just hold."""
    x = turboquant.turned(torch.ones(128))
    fields = TurboQuant(bits=2).encode(*x.expand(2, 1, PAGE, 128).contiguous(), torch.zeros(1, PAGE))
    k, v = codecs.decode("turboquant", fields, 128, 128)
    q, table, position = x.expand(1, 4, 1, 128).bfloat16(), torch.zeros(1, 1).int(), torch.arange(PAGE).view(1, -1)
    got = paged_attention(
        q, fields, table, position, page=PAGE, scale=0.1, codec="turboquant", dim_v=128, backend="native"
    )
    oracle.close(got, oracle.attend(q.float(), k, v, torch.ones(1, 1, PAGE, dtype=torch.bool), 0.1), 1e-2)


def few_pages(codec: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Four pages with ranges in float32, and what they stand for [1, token, 128]."""
    rng, none = torch.Generator().manual_seed(1), torch.zeros(4, PAGE)
    k, v = torch.randn(2, 4, PAGE, 128, generator=rng)
    if codec == "zipcache":
        salient = torch.rand(4, PAGE, generator=rng).argsort(1) < 30
        fields = codecs.encode_zipcache(k, v, (4, 2), salient, scale_dtype=torch.float32)
    elif codec == "kivi":
        fields = codecs.encode_kivi(k, v, 4, 32, scale_dtype=torch.float32)
    else:
        fields = (QuantSpec(group=32) if codec == "quantspec" else TurboQuant(bits=4)).encode(k, v, none)
    k, v = (x.reshape(1, 4 * PAGE, 128) for x in codecs.decode(codec, fields, 128, 128))
    return dict(fields), k, v


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", ["kivi", "quantspec", "zipcache", "turboquant"])
@pytest.mark.usefixtures("processor")
def test_what_an_earlier_call_read_is_not_in_the_way(codec: str, dtype: torch.dtype) -> None:
    """Where a batch ends early, what is behind it may be no number: scales that were read before, or those of free slots."""
    fields, k, v = few_pages(codec)
    q = torch.randn(1, 4, 1, 128, generator=torch.Generator().manual_seed(2)).to(dtype)
    table, order = (
        torch.arange(4).view(1, 4).int(),
        torch.randperm(4 * PAGE, generator=torch.Generator().manual_seed(3)),
    )

    def read(fields: dict[str, Tensor], units: Tensor | None, held: int = 4 * PAGE) -> State:
        position = torch.arange(4 * PAGE).view(1, -1)
        position[:, held:] = -1
        return paged_attention(
            q, fields, table, position, page=PAGE, scale=0.1, codec=codec, dim_v=128, units=units, unit=1,
            backend="native",
        )  # fmt: skip

    def check(got: State, at: Tensor) -> None:
        want = oracle.attend(q.float(), k[:, at], v[:, at], torch.ones(1, 1, len(at), dtype=torch.bool), 0.1)
        oracle.close(got, want, 1e-2 if dtype == torch.bfloat16 else 2e-5)

    bad = {name: torch.full_like(x, torch.nan) if x.is_floating_point() else x for name, x in fields.items()}
    for many in (1, 5, 37):
        read(bad, order[None, :200])
        check(read(fields, order[None, :many]), order[:many])
    for held in (1, 20, 31):
        free = {name: x.clone() for name, x in fields.items()}
        for name in ("v_scale", "v_zero"):
            if name in free:
                free[name][0, held:] = torch.nan
        read(fields, torch.arange(32)[None])
        check(read(free, torch.arange(held)[None]), torch.arange(held))
        check(read(free, None, held), torch.arange(held))


@pytest.mark.parametrize("bits", turboquant.BITS)
@pytest.mark.usefixtures("processor")
def test_codes_of_turned_vectors_are_those_of_torch(bits: int) -> None:
    x = torch.randn(40, 128, generator=torch.Generator().manual_seed(bits))
    made = [turboquant.encode(x, bits, "least", torch.float32, backend=b) for b in ("native", "reference")]
    assert float((made[0][0] != made[1][0]).float().mean()) <= 1e-3
    torch.testing.assert_close(made[0][1], made[1][1], rtol=1e-3, atol=0)


@pytest.mark.parametrize("group", [1, 6])
@pytest.mark.usefixtures("processor")
def test_units_are_chosen_alike(group: int) -> None:
    rng = torch.Generator().manual_seed(group)
    k = torch.randn(2, 700 * 4, 72, generator=rng)
    low, high = page_bounds(k, torch.ones(k.shape[:2], dtype=torch.bool), 4)
    alive, q = torch.rand(2, 700, generator=rng) < 0.9, torch.randn(2, group, 72, generator=rng)
    got = best_units(q, low, high, alive, 60, coarse=Coarse())
    assert torch.equal(got, top_units(page_scores(q, low, high, alive, backend="reference"), 60, backend="reference"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [1, 4, 6])
@pytest.mark.usefixtures("processor")
def test_units_are_chosen_alike_by_shares(group: int, dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(group)
    mean, q = (torch.randint(-2, 3, (2, n, 64), generator=rng).to(dtype) for n in (1100, group))
    alive, far = torch.rand(2, 1100, generator=rng) < 0.9, torch.rand(2, 1100, generator=rng).half()
    given = {"coherence": far, "outliers": 0.2}
    got, want = (units_by_share(q, mean, alive, 90, 0.1, backend=b, **given) for b in ("native", "reference"))
    assert torch.equal(got, want)


@pytest.mark.parametrize("basis_in", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("u_in", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rank", [40, 33])
@pytest.mark.usefixtures("processor")
def test_low_rank_keys_lose_nothing_to_the_dtypes_of_their_factors(
    u_in: torch.dtype, basis_in: torch.dtype, rank: int
) -> None:
    """Products of numbers of 16 bits are exact in float32."""
    rng = torch.Generator().manual_seed(5)
    u, basis = (
        torch.randn(2, 90, rank, generator=rng).to(u_in),
        (torch.randn(4, rank, 96, generator=rng) / 4).to(basis_in),
    )
    v, q = torch.randn(12, 16, 32, generator=rng), torch.randn(4, 4, 1, 96, generator=rng)
    table, position = torch.arange(12).reshape(4, 3), torch.arange(48).repeat(4, 1) + 17
    inv_freq = 0.7 ** torch.arange(32.0)
    got = lowrank_attention(q, u, v, basis, inv_freq, table, position, page=16, scale=0.2, backend="native")
    exact = (x.double() for x in (q, u, v, basis, inv_freq))
    want = lowrank_attention(*exact, table, position, page=16, scale=0.2, backend="reference")
    oracle.close(got, want, 1e-5)
