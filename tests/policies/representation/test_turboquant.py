import math
from typing import get_args

import pytest
import torch
from support_layer import draw, plain, run
from torch import Tensor

from kvengine.errors import KernelError, PolicyError
from kvengine.kernels import dispatch, turboquant
from kvengine.kernels.turboquant import BITS, FORMS, UPPER, Form, decode, encode, levels, rotation, turned
from kvengine.policies.representation.turboquant import TurboQuant

DIMS = (64, 128, 80, 96, 72, 192, 576)


def vectors(n: int, dim: int, seed: int = 0) -> Tensor:
    """Some channels loud, as keys of models have them."""
    x = torch.randn(n, dim, generator=torch.Generator().manual_seed(seed)) + 0.3
    x[:, :2] *= 20
    return x


def oracle(x: Tensor, bits: int, form: Form) -> Tensor:
    """What a vector becomes, one number after the other, in float64."""
    dim, turn, level = x.shape[-1], rotation(x.shape[-1]).double(), levels(bits)[: 2**bits].double()
    out = torch.empty_like(x, dtype=torch.float64)
    for n, row in enumerate(x.double()):
        y = turn @ row
        size = y.norm() / math.sqrt(dim)
        near = torch.stack([level[(level - number / size).abs().argmin()] for number in y])
        best = {"paper": size, "least": y @ near / (near @ near), "unbiased": y @ y / (y @ near)}
        out[n] = turn.T @ (best[form] * near)
    return out


def normal_levels(bits: int) -> list[float]:
    """Lloyd's and Max's levels of a normal number: borders in the middle, levels at the mean between their borders."""
    level = torch.linspace(-3, 3, 2**bits, dtype=torch.float64)

    def density(x: Tensor) -> Tensor:
        return (-x * x / 2).exp() / math.sqrt(2 * math.pi)

    def below(x: Tensor) -> Tensor:
        return (1 + (x / math.sqrt(2)).erf()) / 2

    moved = True
    while moved:
        inner = (level[1:] + level[:-1]) / 2
        border = torch.cat([inner.new_tensor([-math.inf]), inner, inner.new_tensor([math.inf])])
        better = -(density(border[1:]) - density(border[:-1])) / (below(border[1:]) - below(border[:-1]))
        moved, level = bool((better - level).abs().max() > 1e-9), better
    return level[2 ** (bits - 1) :].tolist()


@pytest.mark.parametrize(("bits", "values", "form"), [(3, 2, "paper"), (2, None, "least"), (4, 1, "unbiased")])
def test_pages_hold_keys_and_values_as_their_options_say(bits: int, values: int | None, form: Form) -> None:
    k, v = vectors(32, 64).view(2, 16, 64), vectors(32, 80, seed=1).view(2, 16, 80)
    policy = TurboQuant(bits=bits, values=values, scale=form)
    found = policy.decode(policy.encode(k, v, torch.zeros(2, 16)))
    for x, y, n in ((k, found[0], bits), (v, found[1], values or bits)):
        want = oracle(x.flatten(0, 1), n, form).view_as(x)
        torch.testing.assert_close(y.double(), want, atol=1e-2, rtol=1e-3)  # scales are half-precision numbers


@pytest.mark.parametrize("bits", BITS)
def test_levels_are_those_of_a_normal_number(bits: int) -> None:
    assert UPPER[bits] == pytest.approx(normal_levels(bits), abs=2e-6)
    assert torch.equal(levels(bits)[: 2**bits], -levels(bits)[: 2**bits].flip(0))


@pytest.mark.parametrize("dim", DIMS)
def test_a_turn_is_its_own_inverse_and_spreads_every_channel(dim: int) -> None:
    turn = rotation(dim).double()
    assert torch.equal(turn, turn.T)
    torch.testing.assert_close(turn @ turn, torch.eye(dim, dtype=torch.float64), atol=1e-6, rtol=0)
    assert float(turn.abs().max()) < 1.5 / math.sqrt(dim)
    x, q = vectors(5, dim), vectors(5, dim, 1)
    torch.testing.assert_close((turned(x) * turned(q)).sum(-1), (x * q).sum(-1), rtol=1e-4, atol=1e-2)


def test_a_turn_is_the_same_everywhere() -> None:
    """Codes outlive the process: sessions are saved with them."""
    assert (rotation(64)[3, :8] * 8).round().int().tolist() == [-1, -1, 1, 1, -1, -1, -1, 1]
    assert (rotation(96)[5, :4] * 100).round().int().tolist() == [-10, -14, -4, 10]


def test_what_is_made_in_inference_mode_serves_gradients_too() -> None:
    with torch.inference_mode():
        turned(torch.ones(2, 40))
    x = torch.ones(2, 40, requires_grad=True)
    turned(x).sum().backward()
    assert x.grad is not None and not rotation(40).is_inference() and not levels(4).is_inference()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dim", [64, 72, 96])
def test_codes_are_the_nearest_levels_of_the_turned_vector(dim: int, bits: int, form: Form) -> None:
    x = vectors(9, dim)
    want = oracle(x, bits, form)
    for only_torch in (False, True):
        with dispatch.torch_only() if only_torch else torch.no_grad():
            found = decode(*encode(x, bits, form, torch.float32), dim)
        torch.testing.assert_close(found.double(), want, atol=1e-4, rtol=1e-4)


def test_the_forms_are_the_policys() -> None:
    assert get_args(Form) == FORMS


@pytest.mark.parametrize("dim, bits", [(24, 4), (20, 2), (8, 3), (40, 3), (12, 4)])
def test_heads_of_odd_sizes(dim: int, bits: int) -> None:
    x = vectors(7, dim)
    torch.testing.assert_close(
        decode(*encode(x, bits, "least", torch.float32), dim).double(), oracle(x, bits, "least"), atol=1e-4, rtol=1e-4
    )


def test_codes_that_fill_no_bytes_are_refused() -> None:
    with pytest.raises(KernelError, match="fill whole bytes; got bits=3 for 12 channels"):
        encode(torch.ones(2, 12), 3, "least", torch.float32)
    with pytest.raises(KernelError, match="check dim_v"):
        turboquant.width(torch.zeros(2, 9, dtype=torch.uint8), 12)


@pytest.mark.parametrize(
    "form, expected", [("paper", [0.3613, 0.1162, 0.0340, 0.0094]), ("unbiased", [0.566, 0.1315, 0.0352, 0.0093])]
)
def test_the_squared_error_is_the_papers(form: str, expected: list[float]) -> None:
    """Theorem 1's table for unit vectors: 0.36, 0.117, 0.03, 0.009; d becomes d / (1 - d) where nothing is shrunk."""
    x = torch.nn.functional.normalize(torch.randn(4000, 128, generator=torch.Generator().manual_seed(2)), dim=-1)
    error = [float((decode(*encode(x, bits, form, torch.float32), 128) - x).square().sum(-1).mean()) for bits in BITS]
    assert error == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("bits", BITS)
def test_products_with_a_query_are_not_shrunk(bits: int) -> None:
    """The paper's own scale makes them smaller, which its second stage is to mend."""
    x = torch.nn.functional.normalize(torch.randn(3000, 64, generator=torch.Generator().manual_seed(2)), dim=-1)
    q = x + 0.5 * torch.nn.functional.normalize(
        torch.randn(3000, 64, generator=torch.Generator().manual_seed(3)), dim=-1
    )
    true = (q * x).sum(-1).mean()
    ratio = {
        form: float((q * decode(*encode(x, bits, form, torch.float32), 64)).sum(-1).mean() / true) for form in FORMS
    }
    assert ratio["unbiased"] == pytest.approx(1, abs=0.002)
    assert ratio["paper"] < 1 - {1: 0.3, 2: 0.08, 3: 0.02, 4: 0.005}[bits]


def test_least_is_least() -> None:
    x = vectors(500, 64)
    error = {form: float((decode(*encode(x, 2, form, torch.float32), 64) - x).square().sum()) for form in FORMS}
    assert error["least"] < min(error["paper"], error["unbiased"])


def test_loud_channels_do_no_harm() -> None:
    """Rounded one by one without a turn, vectors with two loud channels lose far more."""
    x = vectors(500, 64)
    level = levels(4)
    size = x.square().mean(-1, keepdim=True).sqrt()
    unturned = level[(x[..., None] / size[..., None] - level).abs().argmin(-1)] * size
    error = decode(*encode(x, 4, "least", torch.float32), 64) - x
    assert float(error.square().sum()) * 10 < float((unturned - x).square().sum())


def test_nothing_stays_nothing() -> None:
    x = torch.zeros(3, 4, 64)
    for form in FORMS:
        assert not decode(*encode(x, 4, form, torch.float16), 64).any()


@pytest.mark.parametrize(
    "bits, values, effective", [(4, None, 4.125), (3, None, 3.125), (2, None, 2.125), (4, 2, 3.125)]
)
def test_bytes_are_the_effective_bits(bits: int, values: int | None, effective: float) -> None:
    k, v = torch.randn(2, 64, 128), torch.randn(2, 64, 128)
    fields = TurboQuant(bits=bits, values=values).encode(k, v, torch.zeros(2, 64))
    assert sum(x.nbytes for x in fields.values()) * 8 == effective * (k.numel() + v.numel())


@pytest.mark.parametrize("prompt", [95, 96, 97, 127, 128, 129])
def test_the_newest_tokens_stay_exact(prompt: int) -> None:
    tokens = draw(prompt + 96, dim=32)
    found = run("turboquant(bits=2, residual=64)", tokens, prompt).lane
    k, _, position, _ = found.tail.held()
    assert 64 <= len(found.tail) < 64 + found.stack.page and position[0, -1] == prompt + 95
    assert found.pages is not None and len(found.pages)
    assert torch.equal(k[0], tokens.k[0, 0, position[0].long()])


def test_a_tokens_code_does_not_depend_on_when_it_came() -> None:
    tokens = draw(400, dim=32)
    early, late = (
        run("turboquant(residual=32)", tokens, 400).lane.pages,
        run("turboquant(residual=32)", tokens, 40).lane.pages,
    )
    assert early is not None and late is not None
    for a, b in zip(early.decoded(), late.decoded(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)


def test_more_bits_err_less() -> None:
    tokens = draw(300, dim=64)
    error = [
        float((run(f"turboquant(bits={bits}, residual=0)", tokens, 200).out[:, -1:] - plain(tokens, 299)).norm())
        for bits in BITS
    ]
    assert error == sorted(error, reverse=True) and error[-1] < error[0] / 4


@pytest.mark.parametrize(
    "options, message",
    [
        ({"bits": 8}, "bits=8 must be one of 1, 2, 3, 4"),
        ({"values": 5}, "values=5 must be one of None, 1, 2, 3, 4"),
        ({"scale": "official"}, "scale='official' must be one of"),
        ({"residual": -1}, "residual"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        TurboQuant(**options)  # type: ignore[arg-type]
