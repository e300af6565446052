"""Which of ZipCache's pages are read by the word, and which of these by width: whatever either kernel was not written for goes
another way, one condition at a time."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from kvengine.kernels import codecs

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def mixed(
    page: int = 64, salient: int = 39, dim: int = 128, dim_v: int = 128, bits: tuple[int, int] = (4, 2),
    ranges: torch.dtype = torch.float16,
) -> dict[str, Tensor]:  # fmt: skip
    chosen = torch.arange(page).expand(3, -1) < salient
    return codecs.encode_zipcache(
        torch.randn(3, page, dim), torch.randn(3, page, dim_v), bits, chosen, scale_dtype=ranges
    )


def aside(x: Tensor) -> Tensor:
    """The same, three numbers further in its memory."""
    return torch.cat([x.flatten()[:3], x.flatten()])[3:].view(x.shape)


def fits(fields: dict[str, Tensor], rows: tuple[int, int] = (4, 1), **other: Any) -> tuple[bool, bool]:
    """By the word, by width."""
    from kvengine.kernels.paged_attention import mixed, words

    page, dim, dim_v = fields["v_scale"].shape[1], fields["k_scale"].shape[2], fields["v_channel"].shape[1]
    about = {
        "page": page,
        "unit": page,
        "units": None,
        "codec": "zipcache",
        "want_probs": False,
        "dtype": torch.bfloat16,
    }
    about |= other
    q, more = torch.zeros(2, *rows, dim, dtype=about["dtype"]), (about["codec"], dim_v, about["want_probs"])
    by_word = words.fits(q, fields, about["page"], about["unit"], *more)
    return by_word, mixed.fits(q, fields, about["page"], about["units"], *more)


@pytest.mark.parametrize("page", [32, 64, 128])
def test_what_both_take(page: int) -> None:
    for rows in ((1, 1), (8, 3)):
        assert fits(mixed(page, 1), rows) == fits(mixed(page, page - 1), rows, dtype=torch.float16) == (True, True)


def test_what_one_alone_takes() -> None:
    """By the word: units, more rows, all tokens of one width, other numbers of channels."""
    assert fits(mixed(), units=torch.zeros(2, 1, dtype=torch.int64), unit=32) == (True, False)
    assert fits(mixed(), (5, 5)) == fits(mixed(), (2, 13)) == (True, False)
    for other in (
        {"salient": 0},
        {"salient": 64},
        {"dim": 64},
        {"dim_v": 64},
        {"dim": 256},
        {"dim_v": 256},
        {"page": 256},
    ):
        assert fits(mixed(**other)) == (True, False), other
    assert fits({name: x[:0] for name, x in mixed().items()})[1] is False


def test_what_neither_takes() -> None:
    assert (
        fits(mixed(), codec="kivi")
        == fits(mixed(), want_probs=True)
        == fits(mixed(), dtype=torch.float32)
        == (False,) * 2
    )
    for other in (
        {"page": 16, "salient": 9}, {"page": 48}, {"page": 96}, {"bits": (8, 2)}, {"bits": (4, 4)}, {"bits": (8, 4)}, {"dim": 32},
        {"dim_v": 32}, {"dim": 96}, {"dim_v": 96}, {"dim": 512}, {"dim_v": 512}, {"ranges": torch.float32},
    ):  # fmt: skip
        assert fits(mixed(**other)) == (False, False), other
    assert fits(mixed(), unit=16)[0] is False


@pytest.mark.parametrize("name", codecs.FIELDS["zipcache"])
def test_each_field_is_looked_at(name: str) -> None:
    """All lie from a word's first byte on, one page behind the other; ranges are float16."""
    fields = mixed()
    twice = torch.stack([fields[name], fields[name]], -1)[..., 0]
    assert fits(fields | {name: aside(fields[name])}) == fits(fields | {name: twice}) == (False, False)
    if name in ("k_scale", "k_zero", "v_scale", "v_zero"):
        assert fits(fields | {name: fields[name].bfloat16()}) == (False, False)
    if name.endswith(("high", "low")):  # of one side alone
        wide = torch.cat([fields[name]] * 2, 2)
        assert fits(fields | {name: wide}) == (False, False)
