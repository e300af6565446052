"""What lies further apart than 32 bits count, in little memory: pages of it are only had where they are touched.

Triton's kernels of pages are asked for it by their own tests where it is interpreted (`support_kernels.far`), and here on GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import support_kernels as oracle
import torch
from support_kernels import sparse
from torch import Tensor

from kvengine.kernels import codecs
from kvengine.kernels.attention import attention
from kvengine.kernels.causal_attention import causal_attention
from kvengine.kernels.causal_attention.native import fits as causal_fits
from kvengine.kernels.column_mass import column_mass
from kvengine.kernels.column_mass import fits as mass_fits
from kvengine.kernels.gpu import FUSED
from kvengine.kernels.lowrank_attention import lowrank_attention
from kvengine.kernels.page_scores import best_units, head_scores, log_shares, page_scores, units_by_share
from kvengine.kernels.page_scores.coarse import Coarse
from kvengine.kernels.paged_attention import paged_attention
from kvengine.kernels.put_token import put_token
from kvengine.kernels.quantise import quantise
from kvengine.kernels.span_attention import causal_spans, span_attention
from kvengine.kernels.step import Merged, Paid, step
from kvengine.kernels.verdict import verdict
from kvengine.policies.representation.quantspec import QuantSpec
from kvengine.policies.representation.turboquant import TurboQuant

TRITON = pytest.mark.skipif("triton" not in oracle.backends(), reason="Triton does not run here")
NATIVE = pytest.mark.skipif("native" not in oracle.backends(), reason="no C compiler")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
BOTH = [pytest.param("native", marks=NATIVE), pytest.param("triton", marks=TRITON)]
ON_GPU = [pytest.param("native", marks=NATIVE), pytest.param("triton", marks=[pytest.mark.gpu, TRITON, GPU])]
FAR = 9 << 28
"""Numbers: more than 2^31, and more than 2^32 bytes of 16 bits."""


def apart(x: Tensor, axis: int, far: int = FAR) -> Tensor:
    """The same, with the first and the last along an axis so far apart."""
    stride = [far // (x.shape[axis] - 1) // 64 * 64 + 64 if i == axis else n for i, n in enumerate(x.stride())]
    return sparse(tuple(x.shape), tuple(stride), x.dtype, x.device.type).copy_(x)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def alike(got: Any, want: Any) -> None:
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@NATIVE
@pytest.mark.parametrize("group", [2, 12])
@pytest.mark.parametrize(("name", "axis"), [("q", 0), ("k", 0), ("k", 1), ("v", 0), ("v", 1), ("visible", 0)])
def test_c_attends_to_rows_and_tokens(name: str, axis: int, group: int) -> None:
    seen = torch.rand(2, 2, 90, generator=torch.Generator().manual_seed(1)) < 0.7
    x = {"q": draw(2, group, 2, 64), "k": draw(2, 90, 64, seed=1), "v": draw(2, 90, 64, seed=2), "visible": seen}
    about: dict[str, Any] = dict(scale=0.2, want_probs=True, backend="native")
    alike(attention(**x | {name: apart(x[name], axis)}, **about)[:3], attention(**x, **about)[:3])


@NATIVE
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_c_reads_prompts(name: str, axis: int) -> None:
    x = {"q": draw(2, 4, 40, 64), "k": draw(2, 2, 90, 64, seed=1), "v": draw(2, 2, 90, 64, seed=2)}
    if causal_fits(**x):
        want = causal_attention(**x, scale=0.1, backend="native")
        alike([causal_attention(**x | {name: apart(x[name], axis)}, scale=0.1, backend="native")], [want])
    held, real = torch.arange(90).repeat(2, 1), torch.ones(2, 40, dtype=torch.bool)
    x = {"q": draw(2, 4, 40, 64), "k": draw(2, 90, 64, seed=1)}
    if name in x and axis < x[name].dim() - 1 and mass_fits(**x):
        other = x | {name: apart(x[name], axis)}
        given = dict(position=held, at=torch.arange(50, 90), real=real, scale=0.1, backend="native")
        alike([column_mass(**other, **given)], [column_mass(**x, **given)])  # type: ignore[arg-type]


@NATIVE
@pytest.mark.parametrize("axis", [0, 1])
def test_c_chooses_units_and_makes_codes(axis: int) -> None:
    q, low, alive = draw(2, 3, 64), draw(2, 1000, 64, seed=1), torch.ones(2, 1000, dtype=torch.bool)
    near, far = (low, low + 1), (apart(low, axis), apart(low + 1, axis))
    alike(*([page_scores(q, *x, alive, backend="native")] for x in (far, near)))
    alike(*([best_units(q, *x, alive, 60, coarse=Coarse())] for x in (far, near)))
    alike(*([head_scores(q, *x, alive, backend="native")] for x in (far, near)))
    shares: dict[str, Any] = dict(scale=0.2, first=True, reduce="mean", backend="native")
    alike(*([units_by_share(q, x[0], alive, 60, **shares)] for x in (far, near)))
    for over in ("tokens", "channels"):
        x = draw(2, 64, 64)
        alike(*(quantise(y, 4, 32, over, backend="native") for y in (apart(x, axis), x)))  # type: ignore[arg-type]


@NATIVE
@pytest.mark.parametrize("kind", ["none", "paid", "merged"])
def test_c_takes_steps_at_the_end_of_many_slots(kind: str) -> None:
    found = []
    for slots in (128, FAR // 128):
        used, fresh = slice(slots - 70, slots - 5), [draw(1, n, 1, 64, seed=n) for n in (4, 2, 1)]
        keys, values = (sparse((2, slots, 64), (slots * 64, 64, 1), torch.bfloat16) for _ in range(2))
        position, score = (sparse((2, slots), (slots, 1), dtype) for dtype in (torch.int32, torch.float32))
        keys[:, used], values[:, used] = draw(2, 65, 64), draw(2, 65, 64, seed=1)
        position[:, used], score[:, used] = torch.arange(65, dtype=torch.int32), torch.arange(65) % 7.0
        rule: Any = Paid(torch.tensor([60, 50]), torch.tensor([9, 5]), adds=True)
        rule = {"none": None, "paid": rule, "merged": Merged(rule, torch.tensor([-1.0, -1.0]), 0.5)}[kind]
        out = step(
            fresh[0], fresh[1], fresh[1].flip(3), keys, values, position, start=used.start, end=used.stop, at=65,
            holes=True, scale=0.1, rule=rule, score=score, backend="native",
        )  # fmt: skip
        found.append([out, *(x[:, used.start : used.stop + 1].clone() for x in (keys, values, position, score))])
    alike(*found)


LAYOUTS = [
    "dense",
    "kivi1",
    "kivi2",
    "kivi4",
    "kivi8",
    "quantspec",
    "zipcache",
    "turboquant2",
    "turboquant3",
    "turboquant4",
]


def encoded(layout: str) -> tuple[str, dict[str, Tensor]]:
    k, v, none = draw(4, 32, 128).float(), draw(4, 32, 128, seed=1).float(), torch.zeros(4, 32)
    if layout == "dense":
        return layout, {"k": k.bfloat16(), "v": v.bfloat16()}
    if layout == "zipcache":
        return layout, codecs.encode_zipcache(k, v, (4, 2), draw(4, 32, seed=2).argsort(1) < 19)
    if layout == "quantspec":
        return layout, dict(QuantSpec(group=32).encode(k, v, none))
    if layout[:-1] == "turboquant":
        return layout[:-1], dict(TurboQuant(bits=int(layout[-1])).encode(k, v, none))
    return layout[:-1], codecs.encode_kivi(k, v, int(layout[-1]), 32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ON_GPU)
def test_pages_are_read(backend: str, layout: str, dtype: torch.dtype) -> None:
    device, (codec, near) = oracle.device_of(backend), encoded(layout)
    if device == "cpu":  # where it takes no memory: 32 bits count the numbers of no field but a mask
        pages = (1 << 32) // min(x[0].numel() for name, x in near.items() if name != "mask")
    else:
        pages = 2 * FAR // max(x[0].nbytes for x in near.values())
    table, where = torch.tensor([[0, 1], [2, 3]]), torch.tensor([[pages - 1, pages - 3], [pages - 2, 1]])
    near, table, where = {name: x.to(device) for name, x in near.items()}, table.to(device), where.to(device)
    far = {name: sparse((pages, *x.shape[1:]), x.stride(), x.dtype, device) for name, x in near.items()}
    for name, x in near.items():
        far[name][where.flatten()] = x
    about: dict[str, Any] = dict(page=32, scale=0.1, codec=codec, dim_v=128, backend=backend)
    q, position = draw(2, 4, 1, 128, seed=3).to(device, dtype), torch.arange(64, device=device).repeat(2, 1)
    for units in (None, torch.tensor([[1, 3, 5, -1], [0, 7, 2, 6]], device=device)):
        about |= {"units": units, "unit": None if units is None else 8}
        got = paged_attention(q, far, where, position, **about)
        alike(got[:2], paged_attention(q, near, table, position, **about)[:2])


@pytest.mark.parametrize("backend", BOTH)
def test_keys_of_many_places_are_rebuilt(backend: str) -> None:
    places, device = FAR // 64, oracle.device_of(backend)
    u, basis, v = draw(2, 64, 64).to(device), draw(4, 64, 64, seed=1) / 8, draw(8, 16, 32, seed=2)
    far = sparse((2, places, 64), (places * 64, 64, 1), torch.bfloat16, device)
    far[:, places - 64 :] = u
    run = oracle.on(backend, lowrank_attention)
    found = [
        run(
            draw(4, 2, 1, 64, seed=3), x, v, basis, torch.zeros(32), torch.arange(8).view(4, 2),
            torch.arange(32).repeat(4, 1) + first, page=16, scale=0.2, backend=backend,
        )[:2]
        for x, first in ((far, places - 64), (u, 0))
    ]  # fmt: skip
    alike(*found)


def of_rows(name: str, rows: int, tokens: int) -> tuple[list[Tensor], Callable[..., Any]]:
    """Tensors [row, token, dim], and what reads them and writes some."""
    device, given = oracle.device_of("triton"), {"scale": 0.2, "backend": "triton"}
    held, q = torch.arange(tokens, device=device).repeat(rows, 1).int(), draw(rows, 2, 20, 32).to(device)
    k, v = (draw(rows, tokens, 32, seed=seed).to(device) for seed in (1, 2))
    alive, now = torch.ones(rows, tokens, dtype=torch.bool, device=device), held[0, -1:].long()
    judge = Merged(Paid(now.repeat(rows), now.repeat(rows) * 0), torch.full((rows,), -1.0, device=device), 0.5)
    mass = draw(rows, 2, tokens, seed=3).to(device).float().abs() + 1
    mass[:, :, -4], k[:, -3] = 0, k[:, -4]  # the one that goes, and the one most like it

    def put(k: Tensor, v: Tensor) -> list[Tensor]:
        put_token(q[:, 0, :1], q[:, 1, :1], k, v, None, now, slot=tokens - 1, backend="triton")
        return [k, v]

    def judged(k: Tensor, v: Tensor) -> list[Tensor]:
        verdict(judge, held, now, mass=mass, keys=k, values=v, backend="triton")
        assert bool((held[:, -4] < 0).all())
        return [held, k, v]

    return {
        "attention": ([k, v], lambda k, v: attention(q[:, :, :1], k, v, None, **given)[:2]),
        "spans": ([k, v], lambda k, v: [span_attention(q, k, v, held, causal_spans(20, tokens, k.device), **given)]),
        "mass": ([k], lambda k: [column_mass(q[:, :1], k, held, held[0, -20:], alive[:, -20:], **given)]),
        "bounds": ([k, k + 1], lambda *x: [page_scores(q[:, :, 0], *x, alive, backend="triton")]),
        "shares": ([k], lambda k: [log_shares(q[:, :, 0], k, alive, **given)]),
        "put": ([k, v], put),
        "judged": ([k, v], judged),
    }[name]


@TRITON
@pytest.mark.parametrize(
    ("name", "axis", "tokens"),
    [
        (name, axis, 70)
        for name in ("attention", "spans", "mass", "bounds", "shares", "put", "judged")
        for axis in (0, 1)
    ]
    + [("spans", 1, 300), ("mass", 1, 300)],  # those of 70 are copied before they read them
)
def test_triton_reads_and_writes_rows_and_tokens(name: str, axis: int, tokens: int) -> None:
    rows, far = (4, FAR) if tokens == 70 else (1, 2 * FAR)
    given, run = of_rows(name, rows, tokens)
    got = run(*(apart(x, axis, far) for x in given))
    alike(got, of_rows(name, rows, tokens)[1](*given))


@TRITON
def test_triton_packs_codes_whose_bits_32_bits_do_not_count() -> None:
    from kvengine.kernels.quantise.triton import pack_kernel

    device = oracle.device_of("triton")
    codes = torch.arange(1024, dtype=torch.uint8, device=device) % 16
    packed = torch.zeros(512, dtype=torch.uint8, device=device)
    pack_kernel[(1,)](codes, packed, 1 << 29, BITS=4, BLOCK=1024, **FUSED)  # the first program of many
    assert torch.equal(packed, codes[::2] | codes[1::2] << 4)


@TRITON
def test_triton_reads_masks_of_many_queries_of_many_tokens() -> None:
    rows, queries, tokens, apart = 1, 3, 20, 3 << 29
    device, rng = oracle.device_of("triton"), torch.Generator().manual_seed(0)
    seen = torch.rand(rows, queries, tokens, generator=rng) < 0.5
    held = torch.empty(0, dtype=torch.bool, device=device)
    memory = torch.UntypedStorage(2 * apart + tokens, device=device)
    held.set_(memory, 0, seen.shape, (queries * apart, apart, 1))  # type: ignore[call-overload]
    held.copy_(seen)
    q, k, v = (torch.randn(rows, *s, 16, generator=rng) for s in ((2, queries), (tokens,), (tokens,)))
    got = attention(q.to(device), k.to(device), v.to(device), held, 0.3, backend="triton")
    oracle.close(got, oracle.attend(q, k, v, seen, 0.3), 1e-5)
