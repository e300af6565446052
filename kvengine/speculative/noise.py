"""Random numbers that depend on a key and on nothing else: not on the device, the batch, or what was drawn before.

The generator is SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") read as a
counter: the n-th number of a key is the finaliser applied to `key + n · odd constant`. torch's own generators differ
between devices, and a token drawn on one must be the token drawn on the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from kvengine.errors import ModelError

Made = Callable[[int, int, str], Tensor]
"""The noise [vocab] of a key, on a device."""
MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def key(*parts: int) -> int:
    """One 64-bit key from several integers; order matters.

    >>> key(1, 2) == key(2, 1)
    False
    """
    state = 0
    for part in parts:
        state = _mix((state ^ (part & MASK)) + GOLDEN & MASK)
    return state


def uniforms(key: int, count: int, device: torch.device | str = "cpu") -> Float64[Tensor, " count"]:
    """The first `count` numbers of a key, uniform on the open interval (0, 1), 53 bits each."""
    high = (_bits(key, count, device) >> 11) & ((1 << 53) - 1)
    # The largest would round up to 1.0, which has no logarithm of a logarithm.
    return ((high.double() + 0.5) * 2.0**-53).clamp(max=1 - 2.0**-53)


def _bits(key: int, count: int, device: torch.device | str) -> Int64[Tensor, " count"]:
    state = torch.arange(1, count + 1, device=device) * _signed(GOLDEN) + _signed(key)
    state = (state ^ _shift(state, 30)) * _signed(MIX_1)
    state = (state ^ _shift(state, 27)) * _signed(MIX_2)
    return state ^ _shift(state, 31)


def _shift(state: Int64[Tensor, " count"], by: int) -> Int64[Tensor, " count"]:
    """A logical right shift: torch's drags the sign along."""
    return (state >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _mix(state: int) -> int:
    state = (state ^ state >> 30) * MIX_1 & MASK
    state = (state ^ state >> 27) * MIX_2 & MASK
    return state ^ state >> 31


@dataclass
class Stream:
    """Independent draws one after another: the randomness of the rejection rule. No number is ever used twice.

    seed: the caller's; row: the sequence's place in the batch, so that a row's draws do not depend on the others.
    """

    seed: int
    row: int = 0
    drawn: int = field(default=0, init=False)

    def happens(self, probability: float) -> bool:
        """True with that probability (anything from 1 upwards is certain)."""
        return self._next() < probability

    def draw(self, law: Float[Tensor, " vocab"]) -> int:
        """A token from a law (non-negative, any positive sum, any floating dtype), by inverting its cumulative sum."""
        total = law.double().cumsum(-1)
        point = torch.minimum(total[-1] * self._next(), torch.nextafter(total[-1], total[-1] * 0))
        token = int(torch.searchsorted(total, point, right=True))
        if token >= len(total):
            raise ModelError(
                "the probabilities to draw from are not numbers: the model's scores overflowed, or a processor's"
            )
        return token

    def _next(self) -> float:
        self.drawn += 1
        return min(((key(1, self.seed, self.row, self.drawn) >> 11) + 0.5) * 2.0**-53, 1 - 2.0**-53)


def gumbel(key: int, vocab: int, device: str) -> Float64[Tensor, " vocab"]:
    return -torch.log(-torch.log(uniforms(key, vocab, device)))


def remembered() -> Made:
    """`gumbel` for the rows of a call: every tier asks for the same position within a round. It goes with the call: of a large
    vocabulary it is some 80 MB, on the model's device."""
    return lru_cache(maxsize=64)(gumbel)


@dataclass(frozen=True)
class Gumbel:
    """Gumbel noise for every token of the vocabulary, fixed by (seed, row, position).

    argmax(log p + noise) is a draw from p, and the same draw whoever makes it and however often.
    """

    seed: int
    row: int = 0
    made: Made = field(default=gumbel, repr=False, compare=False)  # or what is `remembered`

    def at(self, position: int, vocab: int, device: torch.device | str = "cpu") -> Float64[Tensor, " vocab"]:
        """position: index in the sequence, prompt included, of the token to draw."""
        return self.made(key(2, self.seed, self.row, position), vocab, str(device))
