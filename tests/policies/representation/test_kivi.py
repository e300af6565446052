import pytest
import torch
from support_layer import draw, plain, run

from kvengine.errors import PolicyError
from kvengine.policies.representation.kivi import Kivi


def pages() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    k = torch.randn(3, 64, 64, generator=g) * torch.linspace(0.1, 20, 64) + torch.linspace(-3, 3, 64)
    return k, torch.randn(3, 64, 32, generator=g), torch.zeros(3, 64)


def groups(x: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """The groups of each value, as a last axis."""
    return x.unflatten(axis, (-1, size)).movedim(axis + 1, -1)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_error_is_at_most_half_a_step(bits: int) -> None:
    k, v, score = pages()
    policy = Kivi(bits=bits)
    found = policy.decode(policy.encode(k, v, score))
    for x, y, axis in ((k, found[0], 1), (v, found[1], 2)):
        true, error = groups(x, axis, 32), groups((x - y).abs(), axis, 32)
        step = (true.amax(-1) - true.amin(-1)) / (2**bits - 1)
        rounding = (true.abs().amax(-1) + 2**bits * step) * 2**-10  # scale and zero are kept in half precision
        assert (error.amax(-1) <= step / 2 + rounding).all()
        assert error.mean() > step.mean() / 100  # it did quantise


def test_channels_that_the_group_does_not_divide_share_one_scale() -> None:
    v = torch.randn(2, 32, 48, generator=torch.Generator().manual_seed(3))
    fields = Kivi(bits=4).encode(torch.zeros(2, 32, 64), v, torch.zeros(2, 32))
    assert fields["v_scale"].shape == (2, 32, 1) and fields["k_scale"].shape == (2, 1, 64)
    step = (v.amax(2) - v.amin(2))[..., None] / 15
    rounding = (v.abs().amax(2, keepdim=True) + 16 * step) * 2**-10
    assert ((Kivi(bits=4).decode(fields)[1] - v).abs() <= step / 2 + rounding).all()


def test_per_channel_keys_stand_loud_channels() -> None:
    """The same keys grouped the other way, per token, are far worse: that is KIVI's point."""
    k, _, score = pages()
    policy = Kivi(bits=2)
    as_keys, as_values = policy.decode(policy.encode(k, k, score))
    quiet = slice(0, 16)
    assert ((as_keys - k)[..., quiet].norm() * 2) < (as_values - k)[..., quiet].norm()


def test_constant_groups_are_exact() -> None:
    k, v = torch.full((1, 32, 32), 2.5), torch.zeros(1, 32, 32)
    found = Kivi().decode(Kivi().encode(k, v, torch.zeros(1, 32)))
    assert torch.equal(found[0].float(), k) and torch.equal(found[1].float(), v)


@pytest.mark.parametrize("bits, more", [(2, 1.3e-7), (4, 5e-7), (8, 8e-6)])
def test_however_narrow_a_range_numbers_are_off_by_so_much_at_most(bits: int, more: float) -> None:
    """Half a step, and what steps of half precision are off below its normal numbers; which is not far more than that."""
    worst = 0.0
    for wide in torch.logspace(-8, -3, 200).tolist():
        k = torch.linspace(0, wide, 32)[None, :, None].expand(1, 32, 16).contiguous()
        found = Kivi(bits=bits).decode(Kivi(bits=bits).encode(k, k, torch.zeros(1, 32)))[0]
        worst = max(worst, float((found - k).abs().max()) - wide / (2**bits - 1) / 2)
    assert more / 2 < worst < more


def test_what_half_precision_does_not_reach_is_kept_as_its_end() -> None:
    """The lowest number of a group, that is; what lies above it within 15 steps is as near as others."""
    k = torch.stack([torch.linspace(0, 1e5, 32), torch.linspace(-8e4, -7e4, 32)], 1)[None].expand(1, 32, 2)
    found = Kivi().decode(Kivi().encode(k.contiguous(), k.contiguous(), torch.zeros(1, 32)))[0][0]
    assert (found[:, 0] - k[0, :, 0]).abs().max() <= 1e5 / 15 / 2 * 1.01 and (found[:, 1] == -65504).all()


@pytest.mark.parametrize("bits, effective", [(2, 3.0), (4, 5.0)])
def test_bytes_are_the_effective_bits(bits: int, effective: float) -> None:
    k, v = torch.randn(2, 64, 64), torch.randn(2, 64, 64)
    fields = Kivi(bits=bits).encode(k, v, torch.zeros(2, 64))
    assert sum(x.nbytes for x in fields.values()) * 8 == effective * (k.numel() + v.numel())


@pytest.mark.parametrize("prompt", [95, 96, 97, 127, 128, 129])
def test_the_newest_tokens_stay_exact(prompt: int) -> None:
    """As many as that, and fewer than a group more, with one token too few for a page as with just enough."""
    tokens = draw(prompt + 96, dim=32)
    found = run("kivi(bits=2, residual=64)", tokens, prompt).lane
    k, _, position, _ = found.tail.held()
    assert 64 <= len(found.tail) < 64 + 32 and position[0, -1] == prompt + 95
    assert torch.equal(k[0], tokens.k[0, 0, position[0].long()])


def test_blocks_do_not_depend_on_when_they_came() -> None:
    tokens = draw(200, dim=32)
    early, late = run("kivi(residual=32)", tokens, 200).lane.pages, run("kivi(residual=32)", tokens, 40).lane.pages
    assert early is not None and late is not None
    for a, b in zip(early.decoded(), late.decoded(), strict=True):
        assert torch.equal(a, b)


def test_eight_bits_are_nearly_exact() -> None:
    tokens = draw(120, dim=32)
    found = run("kivi(bits=8, residual=0)", tokens, 100)
    torch.testing.assert_close(found.out[:, -1:], plain(tokens, 119), atol=0.02, rtol=0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bits": 3}, "bits=3 must be one of"),
        ({"group": 0}, "group=0 must be"),
        ({"group": 1 << 30}, "2\\*\\*16 .65536. at most"),
        ({"group": 3, "bits": 2}, "do not fill whole bytes"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Kivi(**options)
