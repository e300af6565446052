"""The random numbers: as in the published generator, uniform, independent, the same everywhere."""

from __future__ import annotations

import math

import pytest
import torch

from kvengine.speculative.noise import GOLDEN, MASK, Gumbel, Stream, _bits, _mix, key, uniforms


def test_bits_are_splitmix64() -> None:
    """The first outputs for seed 1234567, as published with the reference implementation."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [value & MASK for value in _bits(1234567, 5, "cpu").tolist()] == expected
    assert [_mix(1234567 + GOLDEN * (i + 1) & MASK) for i in range(5)] == expected


@pytest.mark.parametrize("seed", [0, 1, 2**63, -5])
def test_uniform(seed: int) -> None:
    values = uniforms(key(seed), 100_000).sort().values
    ranks = torch.arange(1, 100_001) / 100_000
    assert 0 < values[0] and values[-1] < 1
    assert float((values - ranks).abs().max()) < 1.95 / math.sqrt(100_000)  # Kolmogorov-Smirnov, 0.1 %


def test_the_ends_of_the_interval_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest and the smallest of the 53 bits: noise is a logarithm of a logarithm, and has to be finite."""
    monkeypatch.setattr("kvengine.speculative.noise._bits", lambda *_: torch.tensor([-1, 0]))
    high, low = uniforms(0, 2).tolist()
    assert 0 < low < high < 1
    monkeypatch.setattr("kvengine.speculative.noise.key", lambda *_: MASK)
    assert Stream(0).happens(1.0)  # what is certain stands


def test_neighbouring_keys_are_independent() -> None:
    """Positions, rows and seeds differ by one; their noise must not."""
    columns = [uniforms(key(2, *parts), 20_000) for parts in [(0, 0, 7), (0, 0, 8), (0, 1, 7), (1, 0, 7)]]
    correlation = torch.corrcoef(torch.stack(columns)) - torch.eye(4)
    assert float(correlation.abs().max()) < 4 / math.sqrt(20_000)


def test_gumbel_draws_from_the_law() -> None:
    law = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0], dtype=torch.float64)
    draws = torch.stack([(law.log() + Gumbel(seed).at(3, 5)).argmax() for seed in range(5_000)])
    share = torch.bincount(draws, minlength=5) / 5_000
    assert float(share[4]) == 0
    assert float(((share - law) ** 2 / law.clamp_min(1e-9))[:4].sum()) * 5_000 < 21.1  # chi-square, 3 degrees, 1e-4


def test_a_stream_repeats_only_by_its_key() -> None:
    law = torch.rand(50, generator=torch.Generator().manual_seed(0))
    draws = lambda *k: [s.draw(law) for s in [Stream(*k)] for _ in range(50)]  # noqa: E731
    assert draws(1) == draws(1) and draws(1) != draws(2) and draws(1) != draws(1, 1)


def test_impossible_tokens_are_never_drawn() -> None:
    law = torch.tensor([0.0, 1e-30, 0.0, 1.0, 0.0])
    stream = Stream(0)
    assert {stream.draw(law) for _ in range(500)} == {3}
    assert {Stream(seed).draw(torch.tensor([0.0, 0.0, 1.0, 0.0])) for seed in range(500)} == {2}


@pytest.mark.parametrize(
    ("law", "at", "token"),
    [
        (torch.tensor([1.0, 1.0]), 0.75, 1),  # any positive sum
        (torch.tensor([0.5, 0.5, 0.0]), 1.0, 1),  # the largest number, rounded up
        (torch.tensor([0.0, 5e-324], dtype=torch.float64), 0.25, 1),  # the place on the line rounds to 0
        (torch.tensor([1.0] + 64 * [2.0**-25]), (1 + 2.0**-26) / (1 + 2.0**-19), 1),  # which float32 does not see
    ],
    ids=["sum", "end", "beginning", "unlikely"],
)
def test_a_draw_is_where_a_number_falls_on_the_line(
    law: torch.Tensor, at: float, token: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stream, "_next", lambda self: at)
    assert Stream(0).draw(law) == token


def test_a_streams_numbers_are_uniform_and_each_independent_of_the_one_before() -> None:
    stream, law = Stream(5), torch.ones(16)
    drawn = torch.tensor([stream.draw(law) for _ in range(2001)])
    pairs = torch.bincount(drawn[:-1] // 4 * 4 + drawn[1:] // 4, minlength=16) / 2000
    assert float(((pairs - 1 / 16) ** 2 * 16).sum()) * 2000 < 44.3  # chi-square, 15 degrees, 1e-4


def test_rows_positions_and_seeds_have_noise_of_their_own() -> None:
    noises = [Gumbel(seed, row).at(place, 4).tolist() for seed in (0, 1) for row in (0, 1) for place in (0, 1)]
    assert len({tuple(noise) for noise in noises}) == 8
