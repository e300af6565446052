"""Expected attention against its formula in float64, with the model's rotation written out as matrices."""

import math

import pytest
import torch
from support import Bare, held
from support_retention import Case, best, positions, same_source
from torch import Tensor

from kvengine.errors import UnsupportedPolicy
from kvengine.policies.retention import expected_attention
from kvengine.rope import Rope
from kvengine.session import Session

FREQUENCY = torch.tensor([1.0, 0.3, 0.05])  # of 8 channels, 6 turn


def matrix(place: int, interleaved: bool) -> Tensor:
    """The rotation to a position, written out."""
    out = torch.eye(8, dtype=torch.float64)
    for i, w in enumerate(FREQUENCY.double().tolist()):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + 3)
        c, s = math.cos(w * place), math.sin(w * place)
        out[a, a], out[a, b], out[b, a], out[b, b] = c, -s, s, c
    return out


def scores(
    case: Case,
    row: int,
    interleaved: bool,
    covariance: bool,
    values: bool,
    sinks: int,
    reduce: str = "mean",
    epsilon: float = 0.0,
) -> dict[int, float]:
    q, k, v, pad = case.row(row)
    ahead = range(case.length - pad, case.length - pad + 20)
    turn = sum(matrix(p, interleaved) for p in ahead) / len(ahead)
    tokens = list(range(pad + sinks, case.length))
    shares = []
    for g in range(case.group):
        before = torch.stack([matrix(p - pad, interleaved).T @ q[g, p].double() for p in tokens])
        mean = turn @ before.mean(0)
        spread = turn @ torch.cov(before.T, correction=0) @ turn.T
        keys, s = k[tokens].double(), case.call.scale
        logits = [s * x @ mean + (s * s / 2 * x @ spread @ x if covariance else 0) for x in keys]
        shares.append(torch.stack(logits).softmax(0))
    by_head = torch.stack(shares)
    share = by_head.amax(0) if reduce == "max" else by_head.sum(0) if reduce == "sum" else by_head.mean(0)
    share = share + epsilon
    return {p: float(share[i] * (v[p].double().norm() if values else 1)) for i, p in enumerate(tokens)} | dict.fromkeys(
        range(pad, pad + sinks), math.inf
    )


@pytest.mark.parametrize(
    "heads, group, pads, chunks, interleaved",
    [(2, 2, (0, 5), 3, True), (3, 1, (0,), 1, False), (1, 4, (4, 0), 7, False)],
)
@pytest.mark.parametrize("covariance, values", [(True, True), (False, True), (True, False)])
def test_it_keeps_what_the_formula_says(
    heads: int, group: int, pads: tuple[int, ...], chunks: int, interleaved: bool, covariance: bool, values: bool
) -> None:
    case = Case(heads, group, length=61, pads=pads, session=Session(rope=Rope(FREQUENCY, interleaved)))
    options = f"budget=20, sinks=2, horizon=20, covariance={covariance}, values={values}"
    layer = case.prompt(f"expected_attention({options})", chunks)
    for row in range(case.rows):
        assert positions(layer, row) == best(scores(case, row, interleaved, covariance, values, 2), 20)
    for _ in case.decode(layer):
        pass
    assert positions(layer, 0)[20:] == list(range(61, 81))
    same_source(case, layer)
    assert layer.parts[0].lane.notes == {}


@pytest.mark.parametrize("reduce", ["max", "sum"])
def test_the_heads_of_a_group_may_agree_otherwise(reduce: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_attention, "SPAN", 7)
    case = Case(2, 3, length=61, pads=(0, 5), session=Session(rope=Rope(FREQUENCY, True)))
    layer = case.prompt(f"expected_attention(budget=20, sinks=2, horizon=20, reduce={reduce!r})")
    for row in range(case.rows):
        assert positions(layer, row) == best(scores(case, row, True, True, True, 2, reduce), 20)


def test_with_a_large_epsilon_long_values_stay() -> None:
    case = Case(2, 3, length=61, pads=(0, 5), session=Session(rope=Rope(FREQUENCY, True)))
    found = []
    for epsilon in (0.0, 0.02):
        layer = case.prompt(f"expected_attention(budget=20, sinks=2, horizon=20, epsilon={epsilon})")
        found.append([positions(layer, row) for row in range(case.rows)])
        for row in range(case.rows):
            assert found[-1][row] == best(scores(case, row, True, True, True, 2, epsilon=epsilon), 20)
    assert all(a != b for a, b in zip(*found, strict=True))


def test_the_rotation_matters() -> None:
    """The control: queries taken as rotated give another verdict."""
    case = Case(length=61, session=Session(rope=Rope(FREQUENCY)))
    found = positions(case.prompt("expected_attention(budget=20, sinks=2, horizon=20)"), 0)
    case.session.rope = Rope(FREQUENCY * 0)
    assert positions(case.prompt("expected_attention(budget=20, sinks=2, horizon=20)"), 0) != found


def test_short_prompts() -> None:
    for length in (1, 2, 5):
        case = Case(length=length, session=Session(rope=Rope(FREQUENCY)))
        layer = case.prompt("expected_attention(budget=4, sinks=2)")
        assert len(positions(layer, 0)) == min(4, length)


@pytest.mark.parametrize(
    "policy", ["expected_attention(budget=0.06, sinks=4)", "adakv(budget=0.06, base='expected_attention')"]
)
def test_a_budget_below_the_sinks_goes_to_the_first_of_them(policy: str) -> None:
    case = Case(length=50, pads=(0, 10), session=Session(rope=Rope(FREQUENCY)))
    layer = case.prompt(policy)
    assert [positions(layer, row) for row in range(case.rows)] == [[0, 1, 2]] * 2 + [[10, 11]] * 2


def test_without_a_known_rotation_it_is_refused() -> None:
    with pytest.raises(UnsupportedPolicy, match="the model's is not known"):
        Case().prompt("expected_attention")


@pytest.mark.parametrize("more", ["", ", covariance=False", ", values=False"])
def test_tokens_are_scored_some_at_a_time(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As floats, with what is made of them on the way, a million tokens' keys would take eight times what they do."""
    most, einsum = list[int](), torch.einsum
    monkeypatch.setattr(
        torch, "einsum", lambda how, mean, keys: (most.append(keys.shape[1]), einsum(how, mean, keys))[1]
    )
    text = f"expected_attention(budget=30{more})"
    whole, parts = (Bare(text, rows=2) for _ in range(2))
    want = [whole.feed(90), whole.feed(1)]
    assert most == [90]
    monkeypatch.setattr(expected_attention, "PART", 32)
    found = [parts.feed(90), parts.feed(1)]
    assert most[1:] == [32, 32, 26]
    torch.testing.assert_close(found, want)
    assert held(whole.cache) == held(parts.cache)
