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
