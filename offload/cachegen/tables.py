"""Symbol statistics: 62 parametric tables shared by every model, so that a stream carries one byte per channel.

A quantised channel is well described by a zero-mean bell of some width. Two families (normal and Laplace) times 31
widths are laid down once; a channel names its table. Storing counted tables instead, as the released CacheGen code
does, costs 2 bits per element at 256-token chunks.

Codes: zigzag of the value (0, -1, 1, -2, 2 ... become 0, 1, 2, 3, 4 ...); 255 is the escape, whose value travels apart.
Probabilities are multiples of 1/4096. Encoder and decoder must agree to the last unit, so the tables are computed in
decimal arithmetic, which gives the same digits on every machine; `fingerprint` is written into each container and
compared on reading.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import cache
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BITS = 12
TOTAL = 1 << BITS
ESCAPE = 255
WIDTHS = 31
CLASSES = 2 * WIDTHS
CONSTANT = 62  # class of a channel whose values are all zero: nothing is coded
SMALLEST, RATIO = Decimal("0.1"), Decimal("1.23")  # widths 0.1 ... 49.7 steps
SUM_SCALE = 1024  # thresholds on the sum of magnitudes are integers in 1/1024 step per token

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
I64 = npt.NDArray[np.int64]
F32 = npt.NDArray[np.float32]


class Tables(NamedTuple):
    """The shared tables; class = family * WIDTHS + width.

    freq:      [class code] counts, each row sums to 4096; 0 where the class cannot code it
    cost:      [class code] length in 1/256 bit; an impossible code costs as much as escaping
    radius:    [class] largest magnitude coded without escape
    shift:     [class code] distance from the bin's middle to its centre of mass, in steps
    threshold: [WIDTHS - 1] mean magnitude (in 1/1024 step) between one width and the next
    """

    freq: U16
    cost: npt.NDArray[np.int32]
    radius: npt.NDArray[np.int16]
    shift: F32
    threshold: I64


@cache
def shared() -> Tables:
    """The tables, computed once per process (about 0.1 s)."""
    rows = [_row(family, _width(i)) for family in (_normal, _laplace) for i in range(WIDTHS)]
    freq = np.stack([row[0] for row in rows])
    shift = np.stack([row[1] for row in rows])
    radius = np.array([row[2] for row in rows], dtype=np.int16)
    return Tables(freq, code_lengths(freq), radius, shift, _thresholds())


@cache
def fingerprint() -> str:
    """Names the shared tables; part of every container's header."""
    tables = shared()
    return sha256(tables.freq.tobytes() + tables.shift.tobytes() + tables.radius.tobytes()).hexdigest()[:16]


def code_lengths(freq: U16) -> npt.NDArray[np.int32]:
    """Bits of each code times 256. Codes without a count cost an escape: its length and 16 bits."""
    counts = np.where(freq > 0, freq, freq[:, ESCAPE:]).astype(np.float64)
    cost = np.rint(256 * (BITS - np.log2(np.maximum(counts, 1)))).astype(np.int32)
    escaping = freq == 0
    escaping[:, ESCAPE] = True
    return np.asarray(cost + 16 * 256 * escaping, dtype=np.int32)


def _width(index: int) -> Decimal:
    return SMALLEST * RATIO**index


def _thresholds() -> I64:
    """Mean magnitude of a normal of each width, compared at the geometric middle between neighbours."""
    middles = [(_width(i) * _width(i + 1)).sqrt() * Decimal("0.8") for i in range(WIDTHS - 1)]
    return np.array([int(middle * SUM_SCALE) for middle in middles], dtype=np.int64)


def _row(beyond: Callable[[Decimal, Decimal], tuple[Decimal, Decimal]], width: Decimal) -> tuple[U16, F32, int]:
    """Counts, centres of mass and radius of one table; `beyond(edge, width)` gives the tail's mass and first moment."""
    radius = min(127, int(6 * width) + 2)
    with localcontext() as context:
        context.prec = 30
        edges = [beyond(Decimal(2 * k + 1) / 2, width) for k in range(radius + 1)]
    inner = 2 * (Decimal("0.5") - edges[0][0])
    masses = [inner] + [edges[k - 1][0] - edges[k][0] for k in range(1, radius + 1)]
    freq, shift = np.zeros(256, dtype=np.uint16), np.zeros(256, dtype=np.float32)
    scale = TOTAL - (2 * radius + 2)  # one count is set aside for every code and the escape
    for k, mass in enumerate(masses):
        count = 1 + int(scale * mass)
        freq[2 * k] = count
        if k:
            freq[2 * k - 1] = count
            centre = (edges[k - 1][1] - edges[k][1]) / mass - k if mass > Decimal("1e-12") else Decimal(0)
            shift[2 * k], shift[2 * k - 1] = float(centre), -float(centre)
    freq[ESCAPE] = 1 + int(2 * scale * edges[radius][0])
    freq[0] += TOTAL - int(freq.sum(dtype=np.int64))  # what rounding left over
    return freq, shift, radius


def _laplace(edge: Decimal, width: Decimal) -> tuple[Decimal, Decimal]:
    """Mass and first moment of a Laplace density of standard deviation `width` beyond `edge` > 0."""
    scale = width / Decimal(2).sqrt()
    mass = (-edge / scale).exp() / 2
    return mass, mass * (edge + scale)


def _normal(edge: Decimal, width: Decimal) -> tuple[Decimal, Decimal]:
    """Mass and first moment of a normal density of standard deviation `width` beyond `edge` > 0."""
    ratio = edge / width
    density = (-ratio * ratio / 2).exp() * Decimal("0.398942280401432677939946059934")
    return _upper_tail(ratio, density), width * density


def _upper_tail(ratio: Decimal, density: Decimal) -> Decimal:
    """1 - Phi(ratio): the series of Phi below 6, the leading term of the tail's expansion above."""
    if ratio > 6:
        return density / (ratio + 1 / ratio)
    term = total = ratio
    n = 1
    while abs(term) > Decimal("1e-27"):
        n += 2
        term = term * ratio * ratio / n
        total += term
    return max(Decimal("0.5") - density * total, Decimal(0))
