"""QuantSpec's nibbles: a worked group, error bounds, and what a coarse read leaves out."""

from __future__ import annotations

import pytest
import torch
from support_layer import draw, plain, run
from support_spec import llama, prompt
from torch import Tensor

import kvengine
from kvengine.errors import PolicyError
from kvengine.hf.cache import EngineCache
from kvengine.policies.representation.dense import Dense
from kvengine.policies.representation.quantspec import QuantSpec
from kvengine.speculative.accept import Draft
from kvengine.speculative.law import Text
from kvengine.speculative.report import footprint
from kvengine.speculative.session import Guest, Session

GROUP = torch.tensor([-1, -0.4, 0, 0.13, 0.37, 0.5, 0.88, 2.0])


def coded(k: Tensor, bits: int = 8, group: int = 8) -> tuple[dict[str, Tensor], QuantSpec]:
    codec = QuantSpec(bits=bits, group=group)
    return codec.encode(k, k.clone(), torch.zeros(k.shape[:2])), codec


def test_golden_group() -> None:
    """Along tokens: scale 0.2; four bits, then eight. 0.5 is a tie between two upper nibbles and cut on either side."""
    k = GROUP[None, :, None].expand(1, 8, 2).contiguous()
    fields, codec = coded(k)
    upper = {name: x for name, x in fields.items() if not name.endswith("low")}
    four, eight = codec.decode(upper)[0][0, :, 0], codec.decode(fields)[0][0, :, 0]
    sure = [0, 1, 2, 3, 4, 6, 7]
    expected = torch.tensor([-1, -0.4, 0, 0.2, 0.4, 0.8, 2]), torch.tensor([-1, -0.4, 0, 0.125, 0.375, 0.875, 2])
    torch.testing.assert_close(four[sure], expected[0], rtol=0, atol=2e-3)  # the scale is a half-precision number
    torch.testing.assert_close(eight[sure], expected[1], rtol=0, atol=2e-3)
    assert abs(float(eight[5]) - 0.5) < 0.2 / 16 + 2e-3


def test_constant_groups_leave_nothing_to_the_lower_nibbles() -> None:
    k = torch.full((1, 8, 8), 2.5)
    fields, codec = coded(k)
    assert all(torch.equal(x, k) for x in codec.decode(fields))
    assert all((fields[name] == 8 + 8 * 16).all() for name in codec.fine)


def test_a_query_reads_both_nibbles() -> None:
    """What comes out is as near as eight bits are, ten times nearer than by four."""
    tokens = draw(97)
    off = [
        (run(f"quantspec(bits={bits}, group=8, residual=0)", tokens, 96).out[:, -1:] - plain(tokens, 96))
        for bits in (4, 8)
    ]
    assert off[0].norm() > 10 * off[1].norm() > 0


def test_values_share_a_scale_with_their_group_of_channels() -> None:
    """The first eight channels are as exact as if the others were not a hundred times as large."""
    v = torch.randn(3, 8, 24, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1.0, 100, 100]
    ).repeat_interleave(8)
    fields, codec = coded(v)
    step = (v[..., :8].amax(2) - v[..., :8].amin(2)) / 15
    assert ((codec.decode(fields)[1] - v)[..., :8].abs() <= step[..., None] / 16 + 4e-3).all()
    assert fields["v_scale"].numel() == 3 * 8 * 3


@pytest.mark.parametrize("group", [8, 32])
def test_error_bounds(group: int) -> None:
    k = torch.randn(5, 32, 64, generator=torch.Generator().manual_seed(0))
    fields, codec = coded(k, group=group)
    upper = {name: x for name, x in fields.items() if not name.endswith("low")}
    step = fields["k_scale"].float().repeat_interleave(group, 1)
    slack = 1e-3 * k.abs().max()
    assert bool(((codec.decode(upper)[0] - k).abs() <= step / 2 + slack).all())
    assert bool(((codec.decode(fields)[0] - k).abs() <= step / 16 + slack).all())
    left, error = (k - codec.decode(upper)[0]) / step * 16, (k - codec.decode(fields)[0]).abs() / step * 32
    assert bool((error[left <= 7.5] <= 1.001).all()) and bool((left < -7.5).any()) and bool((left > 7.5).any())
    assert float(((codec.decode(fields)[1] - k).abs()).mean()) < float(((codec.decode(upper)[1] - k).abs()).mean()) / 10


def test_four_bits_store_the_upper_nibbles_of_eight() -> None:
    k = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(1))
    eight, four = coded(k)[0], coded(k, bits=4)[0]
    assert set(eight) - set(four) == set(QuantSpec.fine)
    assert all(torch.equal(x, eight[name]) for name, x in four.items())
    assert QuantSpec(bits=4).coarse_of(QuantSpec()) and not QuantSpec(bits=4, group=64).coarse_of(QuantSpec())
    assert not any(QuantSpec(bits=b).coarse_of(other) for b in (4, 8) for other in (QuantSpec(bits=4), Dense()))
    with pytest.raises(PolicyError, match="bits"):
        QuantSpec(bits=2)


@pytest.mark.parametrize("more", ["", " + disk", " + quest(budget=16, page=4)", " + quest(budget=16, page=4) + disk"])
def test_a_guest_reads_what_a_four_bit_cache_holds_and_leaves_nothing(more: str) -> None:
    """Where pages are read in place, and where they, or some of them, are fetched and decoded."""
    model = kvengine.patch(llama())
    ids = prompt(90)[0].tolist()
    options = "group=8, residual=8"
    host = Session(model, EngineCache(model, f"quantspec({options}){more}"))
    guest = Guest(model, host.cache, whole=host)
    four, eight = (Session(model, EngineCache(model, f"quantspec(bits={b}, {options}){more}")) for b in (4, 8))
    for session in (host, guest, four, eight):
        session.prefill(ids)
    text = Text([*ids, 7])
    for tail in ([], [8, 9, 10], [8, 3], [8, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]):
        new = guest.align(text, tail)
        mine, expected = guest.feed(new), four.feed(four.align(text, tail))[-len(new) :]
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)
        assert "disk" in more or footprint(guest)[1] == footprint(four)[1]  # where it reads the rest with them
    tree = Draft([1, 2], [-1, -1], [None] * 3, [1.0] * 2)
    guest.feed_tree([], tree)
    assert host.align(text, [8, 3]) == [7, 8, 3] and guest.open == [] and host.cache.seen == 90
    torch.testing.assert_close(host.feed([7, 8, 3]), eight.feed([7, 8, 3]), rtol=1e-4, atol=1e-4)


def test_groups_fill_whole_bytes() -> None:
    with pytest.raises(PolicyError, match="group=31 nibbles do not fill whole bytes"):
        QuantSpec(group=31)
    with pytest.raises(PolicyError, match="group=0 must be"):
        QuantSpec(group=0)
