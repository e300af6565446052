"""PyramidKV: the layers' budgets against the formula, the choice against SnapKV's, and bytes against both."""

import math

import pytest
import torch
import transformers
from families.configs import BASE, FAMILIES
from support import one, patched
from support_retention import Case, positions, same_source

import kvengine
from kvengine.errors import PolicyError
from kvengine.policies.retention.pyramidkv import PyramidKV, share
from kvengine.stats import measure


def card(b: int, others: int, beta: int, layers: int) -> list[int]:
    """The official code's layer budgets, with its whole-number step."""
    least = b // beta
    most = 2 * b - least
    if most >= others:
        most, least = others, 2 * b - others
    step = (most - least) // (layers - 1)
    return [most - i * step for i in range(layers)]


def shares(b: int, others: int, beta: float, layers: int) -> list[int]:
    whole = torch.tensor([b]), torch.tensor([others])
    return [int(share(*whole, beta, layer, layers)) for layer in range(layers)]


@pytest.mark.parametrize("b, others, beta", [(96, 5000, 20), (480, 9000, 10), (30, 37, 20), (7, 100, 4), (0, 50, 20)])
@pytest.mark.parametrize("layers", [2, 5, 32])
def test_shares_follow_the_formula_and_add_up(b: int, others: int, beta: int, layers: int) -> None:
    found, official = shares(b, others, beta, layers), card(b, others, beta, layers)
    assert sum(found) == layers * b and found[0] == official[0]
    assert all(later <= earlier + 1 for earlier, later in zip(found, found[1:], strict=False))  # rounding
    last = 2 * b - official[0]
    line = [official[0] + i * (last - official[0]) / (layers - 1) for i in range(layers)]
    assert all(abs(a - c) <= 1 for a, c in zip(found, line, strict=True))  # the official step is rounded down instead
    assert layers * b <= sum(official) <= layers * b + layers * (layers - 1) / 2


def test_one_layer_has_the_average() -> None:
    assert shares(10, 100, 20, 1) == [10]


@pytest.mark.parametrize("heads, group, pads, chunks", [(2, 2, (0, 7), 4), (3, 1, (0,), 1), (1, 4, (4, 0), 2)])
def test_each_layer_chooses_as_snapkv_with_its_share(
    heads: int, group: int, pads: tuple[int, ...], chunks: int
) -> None:
    for i in range(4):
        case = Case(heads, group, length=61, pads=pads, layer=i, layers=4, seed=i)
        layer = case.prompt("pyramidkv(budget=16, window=4, beta=3)", chunks)
        n = shares(12, 61, 3, 4)[i] + 4
        alone = case.prompt(f"snapkv(budget={n}, window=4)", chunks)
        for row in range(case.rows):
            assert len(positions(layer, row)) == n
            assert positions(layer, row) == positions(alone, row)
        same_source(case, layer)


def test_the_layers_together_hold_the_budget_in_bytes() -> None:
    layers = []
    for i in range(4):
        case = Case(length=200, layer=i, layers=4, seed=i, steps=0)
        layers.append(case.prompt("pyramidkv(budget=32, window=8) + duo(sparsity=0.0)"))
    assert int(measure(layers).held.sum()) == 4 * 2 * 32
    token = (8 + 8) * 4 + 4  # key and value, position
    assert measure(layers).bytes_held == sum(2 * (n + 8) * token for n in shares(24, 192, 20, 4))


def test_layers_with_a_window_take_no_part() -> None:
    """Gemma 3: of twelve layers only the sixth and the last see, and hold, the whole text."""
    kinds = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    options = FAMILIES["gemma3"].options | {"num_hidden_layers": 12, "layer_types": kinds}
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**BASE | options)).eval()
    cache = kvengine.EngineCache(kvengine.patch(model, "pyramidkv(budget=32, window=8)"))
    with torch.no_grad():
        model(one(200)["input_ids"], cache=cache)
    assert cache.stats().held[:, 0, 0].tolist() == [8 + n for n in shares(24, 192, 20, 2)]


def test_a_short_prompt_is_kept_whole() -> None:
    for i in range(4):
        case = Case(length=21, layer=i, layers=4)
        assert positions(case.prompt("pyramidkv(budget=33)"), 0) == list(range(21))


def test_a_budget_below_the_window_is_the_newest_tokens() -> None:
    for i in range(4):
        layer = Case(length=40, layer=i, layers=4).prompt("pyramidkv(budget=0.1, window=8)")
        assert positions(layer, 0) == [36, 37, 38, 39]


@pytest.mark.parametrize("beta", [0.9, math.inf, math.nan])
def test_no_beta_below_one_or_without_end(beta: float) -> None:
    with pytest.raises(PolicyError, match="beta="):
        PyramidKV(beta=beta)


def test_decoded_tokens_stay() -> None:
    case = Case(length=50, layer=3, layers=4)
    layer = case.prompt("pyramidkv(budget=10, window=4)")
    before = positions(layer, 0)
    for _ in case.decode(layer):
        pass
    assert positions(layer, 0) == before + list(range(50, 70))


def test_a_later_turn_within_the_budget_is_kept_whole() -> None:
    """What was generated in between is held beside what came as prompts."""
    model = patched("pyramidkv(budget=500)")
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(**one(20), cache=cache)
        for token in one(90, seed=2)["input_ids"].split(1, 1):
            model(token, cache=cache)
        model(**one(20, seed=3), cache=cache)
    assert (cache.stats().held == 130).all()


@pytest.mark.parametrize("prompt, turn", [(200, 12), (200, 60), (40, 12)])
def test_later_turns_meet_the_budget_too(prompt: int, turn: int) -> None:
    """Late layers hold few tokens then, and must not take that for a short text."""
    held = []
    for i in range(4):
        case = Case(length=prompt, layer=i, layers=4, seed=i, steps=turn + 3, pads=(0, 5))
        layer = case.prompt("pyramidkv(budget=32, window=8)")
        for a, b in ((prompt, prompt + 3), (prompt + 3, prompt + 3 + turn)):
            case.session.following = b - a == 3
            case.feed(layer, a, b)
        held.append([len(positions(layer, row)) for row in range(case.rows)])
    for row, pad in enumerate((0, 0, 5, 5)):
        assert [h[row] for h in held] == [8 + n for n in shares(24, prompt + 3 + turn - pad - 8, 20, 4)]
        assert sum(h[row] for h in held) == 4 * 32
