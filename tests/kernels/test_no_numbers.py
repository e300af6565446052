"""What a query sees and is no number makes its answer none: attention must not pass over a model's overflow."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import support_kernels as oracle
import torch

from kvengine.kernels import turboquant
from kvengine.kernels.attention import attention
from kvengine.kernels.causal_attention import causal_attention
from kvengine.kernels.codecs import encode_kivi
from kvengine.kernels.merge_states import merge_states
from kvengine.kernels.paged_attention import paged_attention
from kvengine.kernels.quantise import dequantise, quantise
from kvengine.kernels.state import State
from kvengine.stack import Stack

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, which interprets Triton


def drawn(queries: int = 1) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(2, *shape, 32, generator=g) for shape in ((2, queries), (40,), (40,)))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("side", ["q", "k"])
@pytest.mark.parametrize("backend", oracle.backends())
def test_of_a_row(backend: str, side: str, softcap: float | None) -> None:
    """One key of a row, or its query, whose logits then are all none; with pages as without, and of the row alone."""
    q, k, v = drawn()
    (q if side == "q" else k)[0, -1, ..., 3] = math.nan
    found = oracle.on(backend, attention)(q, k, v, None, 0.2, softcap=softcap, backend=backend)
    fields = {"k": k.view(10, 8, 32), "v": v.view(10, 8, 32)}
    table = torch.arange(10, dtype=torch.int32).view(2, 5)
    place = torch.arange(40, dtype=torch.int32).expand(2, -1).contiguous()
    run = oracle.on(backend, paged_attention)
    paged = run(q, fields, table, place, page=8, scale=0.2, softcap=softcap, backend=backend)
    for state in (found, paged):
        bad = state.out.cpu().isnan().flatten(1)
        head = [True, True] if side == "k" else [False, True]
        assert state.out.cpu()[0].isnan().flatten(1).all(1).tolist() == head and not bad[1].any()


@pytest.mark.parametrize("wide", [40, 80])
@pytest.mark.parametrize("backend", oracle.backends())
def test_of_values_that_are_wider_or_narrower_than_keys(backend: str, wide: int) -> None:
    """In logits there are none: keys are widened where values were, which may leave channels that keys do not have."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, *shape, 72, generator=g).half() for shape in ((2, 1), (70,)))
    v = torch.full((2, 70, wide), math.inf).half()
    found = [oracle.on(backend, attention)(q, k, x, None, 0.2, backend=backend).lse.cpu() for x in (v, k)]
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("backend", [b for b in oracle.backends() if b != "triton"])
def test_of_a_prompt(backend: str) -> None:
    """Queries before the key do not see it."""
    q, k, v = drawn(40)
    k[0, 20, 3] = math.nan
    out = oracle.on(backend, causal_attention)(q, k[:, None], v[:, None], scale=0.2, backend=backend).cpu()
    assert out[0, 20:].isnan().all() and not out[0, :20].isnan().any() and not out[1].isnan().any()


@pytest.mark.parametrize("backend", oracle.backends())
def test_of_codes(backend: str) -> None:
    q, k, v = drawn()
    q[0, 0, 0, 3] = math.nan
    fields = encode_kivi(k.view(10, 8, 32), v.view(10, 8, 32), 4, 8)
    table = torch.arange(10, dtype=torch.int32).view(2, 5)
    place = torch.arange(40, dtype=torch.int32).expand(2, -1).contiguous()
    run = oracle.on(backend, paged_attention)
    out = run(q, fields, table, place, page=8, scale=0.2, codec="kivi", dim_v=32, backend=backend).out.cpu()
    assert out[0, 0].isnan().all() and not out[0, 1].isnan().any() and not out[1].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("side", ["q", "k", "v"])
@pytest.mark.parametrize("text", ["kivi", "kivi(bits=2)", "quantspec(group=32)", "turboquant", "zipcache(block=32)"])
@pytest.mark.parametrize("backend", oracle.backends())
def test_of_what_codes_are_of(backend: str, text: str, side: str, dtype: torch.dtype) -> None:
    """A number of a page, for all who see it, and of a query; each way in which codes are read."""
    form, g = Stack.parse(text).representation, torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*shape, 128, generator=g) for shape in ((2, 2, 1), (4, 32), (4, 32)))
    if side == "q":
        q[0, :, 0, 3] = math.nan
    else:
        (k if side == "k" else v)[1, 20, 3] = math.inf
    fields = form.encode(k, v, torch.rand(4, 32, generator=g))
    table = torch.arange(4, dtype=torch.int32).view(2, 2)
    place = torch.arange(64, dtype=torch.int32).expand(2, -1).contiguous()
    run, codec = oracle.on(backend, paged_attention), form.read_as(False)
    out = run(q.to(dtype), fields, table, place, page=32, scale=0.2, codec=codec, dim_v=128, backend=backend).out.cpu()
    found = out.isnan().any(-1).flatten(1)
    assert found[0].all() and not found[1].any()


@pytest.mark.parametrize("backend", oracle.backends())
def test_of_what_is_joined(backend: str) -> None:
    """A part without a token adds nothing; one whose logits are none does."""
    run = oracle.on(backend, merge_states)
    out, lse = torch.ones(1, 1, 1, 32), torch.zeros(1, 1, 1)
    none = State(torch.full_like(out, math.nan), torch.full_like(lse, math.nan))
    for other in (State(out, lse), State(torch.zeros_like(out), torch.full_like(lse, -math.inf))):
        for parts in ([none, other], [other, none]):
            assert run(parts, backend=backend).out.isnan().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("over", ["tokens", "channels"])
@pytest.mark.parametrize("backend", oracle.backends())
def test_of_a_group_of_codes(backend: str, over: Literal["tokens", "channels"], bad: float) -> None:
    """It has no range then, and all that it decodes to is NaN: a code would be a number like any other. Not so by tokens that
    are not held."""
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(0)).half()
    x[0, 5, 7] = x[0, 21, 45] = x[1, 9, 50] = bad  # one in a group's first numbers, one behind
    alive = torch.ones(2, 32, dtype=torch.bool)
    alive[1, 9] = False
    found = oracle.on(backend, quantise)(x, 4, 16, over, alive=alive, backend=backend)
    where = torch.zeros(2, 32, 64, dtype=torch.bool)
    where[(0, slice(16), 7) if over == "tokens" else (0, 5, slice(16))] = True
    where[(0, slice(16, 32), 45) if over == "tokens" else (0, 21, slice(32, 48))] = True
    assert torch.equal(dequantise(found, 4).cpu().isnan() & alive[..., None], where)
    want = quantise(x.masked_fill(where, 0), 4, 16, over, alive=alive, backend="reference")
    others = ~where & alive[..., None]
    assert torch.equal(dequantise(found, 4).cpu()[others], dequantise(want, 4)[others])


@pytest.mark.parametrize("form", turboquant.FORMS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("backend", oracle.backends())
def test_of_turned_codes(backend: str, bad: float, form: turboquant.Form) -> None:
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    x[3, 7], x[5] = bad, 0
    code, scale = (y.cpu() for y in oracle.on(backend, turboquant.encode)(x, 3, form, torch.float16, backend=backend))
    assert turboquant.decode(code, scale, 64).isnan().all(1).tolist() == [i == 3 for i in range(9)] and not scale[5]
