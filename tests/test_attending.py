"""How the engine calls the attention kernels."""

from contextlib import nullcontext

import pytest
import torch

from kvengine import attending
from kvengine.kernels.attention import reference
from kvengine.kernels.dispatch import torch_only
from kvengine.policies.prefill import Prefill
from kvengine.policies.prefill.flexprefill import FlexPrefill
from kvengine.policies.prefill.vertical_slash import VerticalSlash
from kvengine.policies.prefill.xattention import XAttention
from kvengine.session import Call

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_all_there_is_is_read_by_a_fused_kernel(dtype: torch.dtype, masked: bool) -> None:
    """The library has none for three axes: it would multiply wide copies of keys and values."""
    q, k, v = (torch.randn(3, *shape, 32).to(dtype) for shape in ((2, 5), (40,), (40,)))
    visible = torch.rand(3, 5, 40) < 0.4 if masked else None
    if visible is not None:
        visible[1, 2] = False
    want = reference.attention(q.double(), k.double(), v.double(), visible, 0.3, None, None, False).out
    with torch.profiler.profile(acc_events=True) as profile:  # or torch 2.11 warns that it would keep fewer
        got = attending.whole(q, k, v, visible, 0.3)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not any("math" in event.key for event in profile.key_averages())


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_nobody_sees_may_hold_anything(dtype: torch.dtype, ours: bool, queries: int) -> None:
    """Tokens that come together behind padding, with our kernel and with the library's."""
    q, k, v = (torch.randn(2, *shape, 32).to(dtype) for shape in ((2, queries), (40,), (40,)))
    visible = (torch.arange(40) <= torch.arange(40 - queries, 40)[:, None]).repeat(2, 1, 1)
    visible[1, :, :7] = False
    want = reference.attention(q.double(), k.double(), v.double(), visible, 0.3, None, None, False).out
    k[1, :5], v[1, 2:7] = torch.nan, torch.inf
    with nullcontext() if ours else torch_only():
        got = attending.whole(q, k, v, visible, 0.3)
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_last_tokens_need_no_mask(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(3, *shape, 32).to(dtype) for shape in ((2, 5), (40,), (40,)))
    visible = (torch.arange(40) <= torch.arange(35, 40)[:, None]).expand(3, -1, -1)
    got, want = attending.causal(q, k, v, 0.3), attending.whole(q, k, v, visible, 0.3)
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert not attending.causal_pays(q[:, :, :1], k, v)  # a single query is a decoded token


CHOOSING = [VerticalSlash(5, 4, 2, 2, 16, 8), FlexPrefill(0.57, 0.25, 8, 8), XAttention(0.6, 4, 8)]


@pytest.mark.parametrize("last", [0, 5])
@pytest.mark.parametrize("prefill", CHOOSING, ids=lambda x: type(x).__name__)
def test_a_choice_is_by_position_not_by_slot(prefill: Prefill, last: int) -> None:
    """Evictions leave tokens in any order, and slots without one between them."""
    q, k, v = torch.randn(2, 3, 21, 16), torch.randn(2, 60, 16), torch.randn(2, 60, 16)
    position = (torch.arange(60, dtype=torch.int32) * 3).expand(2, -1)
    want = attending.chosen(q, k, v, position, True, prefill, last, Call(0.4), attending.Tally())
    assert (want - attending.by_slot(q, k, v, position, True, 0.4)).abs().max() > 1e-2
    slot = torch.stack([torch.cat([torch.randperm(39), torch.arange(39, 60)]) for _ in range(2)])
    row = torch.arange(2)[:, None]
    mixed = q, k[row, slot], v[row, slot], position[row, slot]
    torch.testing.assert_close(attending.chosen(*mixed, True, prefill, last, Call(0.4), attending.Tally()), want)
    where = torch.tensor([*range(4), *range(9, 65)])  # slots 4 to 8 are empty, and hold anything
    wider = [torch.full((2, 65, *x.shape[2:]), -1, dtype=x.dtype).index_copy(1, where, x) for x in mixed[1:]]
    torch.testing.assert_close(attending.chosen(q, *wider, False, prefill, last, Call(0.4), attending.Tally()), want)


@pytest.mark.parametrize("prefill", CHOOSING, ids=lambda x: type(x).__name__)
def test_the_last_queries_may_read_everything(prefill: Prefill) -> None:
    q, k, v = torch.randn(2, 3, 21, 16), torch.randn(2, 60, 16), torch.randn(2, 60, 16)
    position = torch.arange(60, dtype=torch.int32).expand(2, -1)
    tally = attending.Tally(), attending.Tally()
    all_choose, whole = (
        attending.chosen(q, k, v, position, True, prefill, n, Call(0.4), mine)
        for n, mine in zip((0, 99), tally, strict=True)
    )
    assert tally[0].computed < tally[0].every == tally[1].every == tally[1].computed
    for last in (1, 5, 20):
        found = attending.chosen(q, k, v, position, True, prefill, last, Call(0.4), attending.Tally())
        torch.testing.assert_close(found[:, :, :-last], all_choose[:, :, :-last])
        torch.testing.assert_close(found[:, :, -last:], whole[:, :, -last:])
    torch.testing.assert_close(whole, attending.by_slot(q, k, v, position, True, 0.4))
