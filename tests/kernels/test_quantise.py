"""Packing, and the group-wise quantiser."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import support_kernels as oracle
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvengine.errors import KernelError
from kvengine.kernels import codecs, dispatch, turboquant
from kvengine.kernels.quantise import WIDTHS, dequantise, laid, pack, quantise, unpack
from kvengine.stack import Stack

BACKENDS = [b for b in oracle.backends() if b != "native"]


@given(st.sampled_from(WIDTHS), st.integers(1, 9), st.integers(1, 5), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
@pytest.mark.parametrize("backend", BACKENDS)
def test_packing_is_little_endian_and_reversible(backend: str, bits: int, size: int, rows: int, seed: int) -> None:
    codes = torch.randint(0, 2**bits, (rows, size * 8), generator=torch.Generator().manual_seed(seed)).byte()
    packed = oracle.on(backend, pack)(codes, bits, backend=backend).cpu()
    assert torch.equal(unpack(packed, bits), codes)
    for row, got in zip(codes.tolist(), packed.tolist(), strict=True):
        number = sum(code << (bits * i) for i, code in enumerate(row))
        assert list(number.to_bytes(len(row) * bits // 8, "little")) == got


@pytest.mark.parametrize("over", ["tokens", "channels"])
@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_error_is_half_a_step(backend: str, scale_dtype: torch.dtype, bits: int, over: str) -> None:
    x = torch.randn(2, 24, 40, generator=torch.Generator().manual_seed(1)) * 3 + 1
    x[0, :8, 3] = 2.5  # constant groups have scale 0
    got = oracle.on(backend, quantise)(x, bits, 8, over, scale_dtype=scale_dtype, backend=backend)
    back = dequantise(got, bits).cpu()
    axis = 1 if over == "tokens" else 2
    groups = x.unflatten(axis, (-1, 8))
    step = ((groups.amax(axis + 1) - groups.amin(axis + 1)) / (2**bits - 1)).repeat_interleave(8, axis)
    slack = x.abs().max() * torch.finfo(scale_dtype).eps * 4
    assert ((x - back).abs() <= step / 2 + slack).all()
    assert torch.allclose(got.scale.cpu().float().repeat_interleave(8, axis), step, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("over", ["tokens", "channels"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_dead_tokens_do_not_widen_a_group(backend: str, over: str) -> None:
    x = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(1))
    alive = torch.ones(2, 16, dtype=torch.bool)
    alive[0, 3:5] = alive[1, 8:] = False
    run = oracle.on(backend, quantise)
    clean = run(x, 4, 8, over, alive=alive, backend=backend)
    x[~alive] = math.nan
    poisoned = run(x, 4, 8, over, alive=alive, backend=backend)
    assert torch.equal(dequantise(poisoned, 4).cpu()[alive], dequantise(clean, 4).cpu()[alive])
    assert poisoned.scale.isfinite().all() and poisoned.zero.isfinite().all()


@pytest.mark.parametrize("over", ["tokens", "channels"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_halves_between_two_codes_go_to_the_even_one(backend: str, over: Literal["tokens", "channels"]) -> None:
    """They are common in half precision, and every backend must seal the same page."""
    x = torch.tensor([0.0, 15.0, *(i + 0.5 for i in range(14))]).to(torch.bfloat16)
    x = x.expand(1, 16, 16) if over == "channels" else x[:, None].expand(1, 16, 16)
    found = oracle.on(backend, quantise)(x.contiguous(), 4, 16, over, backend=backend)
    assert torch.equal(dequantise(found, 4).cpu().float(), x.float().round())


@pytest.mark.parametrize(("size", "shift"), [(3.0, 0.0), (1e-6, 0.0), (3.0, 1000.0), (1e5, 0.0)])
@pytest.mark.parametrize(("over", "group"), [("tokens", 12), ("channels", 3), ("channels", 24), ("channels", 80)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranges_are_rounded_before_codes_are_made(
    backend: str, over: Literal["tokens", "channels"], group: int, size: float, shift: float
) -> None:
    """So codes are of what is stored, and within bounds; of groups that are no powers of two, and of numbers beyond float16's."""
    x = torch.randn(2, 36, 240, generator=torch.Generator().manual_seed(3)) * size + shift
    got = oracle.on(backend, quantise)(x, 4, group, over, backend=backend)
    axis = 1 if over == "tokens" else 2
    parts = x.unflatten(axis, (-1, group))
    low, high = parts.amin(axis + 1), parts.amax(axis + 1)
    scale = ((high - low) / 15).clamp(max=65504).half().float().repeat_interleave(group, axis)
    zero = low.clamp(-65504, 65504).half().float().repeat_interleave(group, axis)
    want = ((x - zero) / torch.where(scale > 0, scale, 1)).clamp(0, 15).round() * scale + zero
    assert float((dequantise(got, 4).cpu() != want).float().mean()) <= 1e-3


NATIVE = pytest.mark.skipif("native" not in oracle.backends(), reason="no C compiler")
HALVES = [torch.float32, torch.bfloat16, torch.float16]


@NATIVE
@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from(WIDTHS), st.sampled_from(["tokens", "channels"]), st.integers(1, 5), st.integers(1, 4),
    st.sampled_from([16, 48, 80, 256]), st.sampled_from([1, 3, 32]), st.sampled_from(HALVES), st.sampled_from(HALVES),
    st.sampled_from([1e-6, 1.0, 900.0]), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_c_makes_the_same_bits(
    bits: int, over: Literal["tokens", "channels"], rows: int, parts: int, dim: int, group: int, dtype: torch.dtype,
    scale_dtype: torch.dtype, size: float, dead: bool, seed: int,
) -> None:  # fmt: skip
    rng = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, parts * group, dim + 5, generator=rng) * size).to(dtype)[..., 2:-3]
    x[0, 0] = 2.5  # a group of the channels, or all there is of one over tokens
    alive = torch.rand(rows, parts * group, generator=rng) < 0.6 if dead else None
    group = group if over == "tokens" else 16 if dim == 80 else dim // (dim // 16 if bits < 4 else 1)
    if alive is not None:
        x = x.masked_fill(~alive[..., None], math.nan)
    want, got = (
        quantise(x, bits, group, over, alive=alive, scale_dtype=scale_dtype, backend=b) for b in ("reference", "native")
    )
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)


@NATIVE
@pytest.mark.parametrize("over", ["tokens", "channels"])
@pytest.mark.parametrize("bits", WIDTHS)
def test_beyond_the_last_code_there_is_none(bits: int, over: Literal["tokens", "channels"]) -> None:
    """A zero that is rounded in bfloat16 is steps away from the lowest number."""
    x = 1001.8 + 3 * torch.rand(2, 32, 32, generator=torch.Generator().manual_seed(bits))
    made = [quantise(x, bits, 16, over, scale_dtype=torch.bfloat16, backend=b) for b in ("reference", "native")]
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
    assert bool((x - 1000 > (2**bits - 0.5) * made[0].scale.float().max()).any()) and 1000 in made[0].zero


@NATIVE
@pytest.mark.parametrize("over", ["tokens", "channels"])
def test_c_takes_views(over: Literal["tokens", "channels"]) -> None:
    """Channels with others between them, and rows that share who is alive."""
    x = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(1))[..., ::2]
    alive = torch.rand(1, 32, generator=torch.Generator().manual_seed(2)) < 0.6
    made = [quantise(x, 4, 16, over, alive=alive.expand(3, 32), backend=b) for b in ("reference", "native")]
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@NATIVE
@pytest.mark.parametrize("scale_dtype", HALVES, ids=str)
@pytest.mark.parametrize("codec", ["kivi", "quantspec", "zipcache"])
def test_c_reads_pages_as_torch_does(codec: str, scale_dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(3)
    k, v = torch.randn(5, 40, 80, generator=rng), torch.randn(5, 40, 32, generator=rng)
    for bits in ((4, 2), (8, 1), (1, 4)):
        if codec == "zipcache":
            salient = torch.rand(5, 40, generator=rng).argsort(1) < 11
            fields = codecs.encode_zipcache(k, v, bits, salient, scale_dtype=scale_dtype)
        else:
            fields = codecs.encode_kivi(k, v, 4 if codec == "quantspec" else bits, 8, scale_dtype=scale_dtype)
            fields |= {f"{side}_low": torch.randint(0, 256, (5, 40, x.shape[2] // 2), generator=rng).byte()
                       for side, x in (("k", k), ("v", v))}  # fmt: skip
        got = codecs.decode(codec, fields, 80, 32)
        with dispatch.torch_only():
            want = codecs.decode(codec, fields, 80, 32)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    empty = {name: x[:0] for name, x in fields.items()}
    assert [list(x.shape) for x in codecs.decode(codec, empty, 80, 32)] == [[0, 40, 80], [0, 40, 32]]


def test_more_bits_err_less() -> None:
    x = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(2))
    errors = [float((dequantise(quantise(x, b, 32, "tokens"), b) - x).pow(2).mean()) for b in WIDTHS]
    assert errors == sorted(errors, reverse=True) and errors[-1] < 1e-4 < errors[0]


def test_zipcache_pages_keep_salient_tokens_better() -> None:
    rng = torch.Generator().manual_seed(4)
    k, v = (
        torch.randn(3, 32, 64, generator=rng),
        torch.randn(3, 32, 48, generator=rng) * torch.rand(48, generator=rng) * 9,
    )
    salient = torch.rand(3, 32, generator=rng).argsort(1) < 12
    fields = codecs.encode_zipcache(k, v, (4, 2), salient)
    for x, back in zip((k, v), codecs.decode("zipcache", fields, 64, 48), strict=True):
        high, low = ((x - back)[some].pow(2).mean() for some in (salient, ~salient))
        assert high < low / 4
    assert fields["k_high"].shape == (3, 12, 32) and fields["v_low"].shape == (3, 20, 12)


def test_refusals_say_why() -> None:
    x = torch.randn(1, 16, 8)
    with pytest.raises(KernelError, match="must divide the 16 tokens"):
        quantise(x, 4, 5, "tokens")
    with pytest.raises(KernelError, match="bits=3"):
        quantise(x, 3, 8, "tokens")
    with pytest.raises(KernelError, match="'tokens' or 'channels'"):
        quantise(x, 4, 8, "keys")  # type: ignore[arg-type]
    uneven = torch.ones(2, 16, dtype=torch.bool)
    uneven[0, 3] = False
    with pytest.raises(KernelError, match="as many salient tokens"):
        codecs.encode_zipcache(x.expand(2, -1, -1), x.expand(2, -1, -1), (4, 2), uneven)
    with pytest.raises(KernelError, match="check dim_v"):
        codecs.width(torch.zeros(1, 1, 24, dtype=torch.uint8), 64)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # by numpy, which interprets
@pytest.mark.parametrize("form", range(len(turboquant.FORMS)))
@pytest.mark.parametrize(("bits", "dim"), [(4, 64), (3, 72), (3, 96), (2, 128), (1, 80)])
@pytest.mark.parametrize("backend", oracle.backends())
def test_turned_codes_are_those_of_torch(backend: str, bits: int, dim: int, form: int) -> None:
    """Of a few vectors more than a program takes, of zeros, and of what is not finite. Sums are not taken in one order: a number
    on a middle may go to either side."""
    if backend == "native" and not laid(dim):
        pytest.skip("C makes codes of whole registers")
    x = torch.randn(70, dim, generator=torch.Generator().manual_seed(bits)) * torch.logspace(-9, 4, 70)[:, None]
    x[33], x[68, 3], x[69, 5] = 0, math.inf, math.nan
    name = turboquant.FORMS[form]
    run = oracle.on(backend, turboquant.encode)
    code, scale = (y.cpu() for y in run(x, bits, name, torch.float32, backend=backend))
    want, size = turboquant.encode(x, bits, name, torch.float32, backend="reference")
    assert code.shape == want.shape and scale.shape == size.shape and not scale[33].any()
    assert float((code != want)[:68].float().mean()) <= 1e-3 and scale[68:].isnan().all()
    torch.testing.assert_close(scale, size, rtol=1e-3, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "text", ["kivi(bits=2, group=16)", "kivi(bits=8)", "quantspec", "turboquant(bits=4)", "zipcache"]
)
@pytest.mark.parametrize("dims", [(64, 64), (576, 512), (36, 24)], ids=str)
def test_tokens_by_themselves_are_decoded_as_in_their_pages(text: str, dims: tuple[int, int]) -> None:
    form, pages, generator = Stack.parse(text).representation, 5, torch.Generator().manual_seed(0)
    page, codec = max(32, form.multiple), form.read_as(False)
    k, v = (torch.randn(pages, page, dim, generator=generator) for dim in dims)
    fields = form.encode(k, v, torch.rand(pages, page, generator=generator))
    whole = [x.flatten(0, 1) for x in codecs.decode(codec, fields, *dims)]
    for run in (1, 8, page):
        first = torch.randint(0, pages * page // run, (3, 7), generator=generator) * run
        where = (first[..., None] + torch.arange(run)).flatten(1)
        for got, want in zip(codecs.gather(codec, fields, where, run, page, *dims), whole, strict=True):
            torch.testing.assert_close(got, want[where], rtol=1e-5, atol=1e-6)
