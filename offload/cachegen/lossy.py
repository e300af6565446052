"""Quantised sections: keys or values of one layer and one chunk to bytes and back.

Per head one step width; per channel its mean (in steps) and a byte that names its prediction mode and its table; then
the entropy-coded codes. Prediction is between quantised integers, so a group's anchor is the reconstructed one and no
error adds to another; each channel takes the mode that measures cheapest. Integers are off by half a step at most. What is
coded without prediction is read at its bin's centre of mass: off by less than a step, and by less on average.

Differs from the released CacheGen code, which scales each token by its largest channel, never uses deltas, and counts
a table per channel and call (2.2 bits per number at 256 tokens; here 0.08).

Layout, little-endian: mean bytes `u8` (1 or 2), zero `u8`, delta group `u16`, escapes `u32`, words `u32`; width `f32`
per head; kind `u8` per channel; means; lane states `u32` (16, or as many as there are tokens); escapes `i16`; words
`u16`.
"""

from __future__ import annotations

import struct
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from kvengine.errors import CacheError, CorruptBitstream
from kvengine.offload.cachegen import coder
from kvengine.offload.cachegen.reference import LANES, LIMIT, U32
from kvengine.offload.cachegen.tables import CLASSES, CONSTANT, F32, U8, shared

HEAD = struct.Struct("<BBHII")
GROUP = 10  # tokens that share an anchor (CacheGen section 5.2)
MODES = 0b111


def encode(x: Float[Tensor, "head token dim"], step: float, ops: ModuleType, modes: int = MODES) -> bytes:
    """Bytes of one section. `step` is in spreads of each head. Raises CacheError if a number is not finite."""
    width = widths(x, step, ops)
    kind, mean, codes, escapes = ops.to_codes(x, width, GROUP, modes, shared())
    state, words = ops.encode(codes, kind & 63, shared().freq)
    narrow = "<i1" if np.abs(mean).max(initial=0) < 128 else "<i2"
    return b"".join(
        (
            HEAD.pack(np.dtype(narrow).itemsize, 0, GROUP, len(escapes), len(words)),
            width.astype("<f4").tobytes(),
            kind.tobytes(),
            mean.astype(narrow).tobytes(),
            state[: min(LANES, x.shape[1])].astype("<u4").tobytes(),
            escapes.astype("<i2").tobytes(),
            words.astype("<u2").tobytes(),
        )
    )


def widths(x: Float[Tensor, "head token dim"], step: float, ops: ModuleType) -> F32:
    """Step width per head: `step` spreads, but never so small that a number would need more than 16 bits.

    The spread is the median over (at most 64 evenly spaced) tokens of the root mean square over channels, means taken
    out: the median keeps a few large tokens, such as attention sinks, from coarsening all the others, as far as these do
    not move the means."""
    largest = torch.from_numpy(ops.largest(x))
    if not largest.isfinite().all():
        raise CacheError("KV holds inf or nan, which cannot be quantised; use the level 'lossless'")
    if x.numel() == 0:
        return np.ones(x.shape[0], dtype=np.float32)
    some = x[:, :: -(-x.shape[1] // 64)].float()
    spread = _spread(some)
    if not spread.isfinite().all():  # squares of fp32 beyond 1e19 overflow
        spread = _spread(some.double()).float()
    finite = torch.finfo(torch.float32)
    width = torch.maximum(spread * step, largest / LIMIT).clamp(finite.tiny, finite.max)
    return np.ascontiguousarray(width.numpy())


def _spread(x: Float[Tensor, "head token dim"]) -> Float[Tensor, " head"]:
    return (x - x.mean(1, keepdim=True)).square_().mean(2).sqrt_().median(1).values


def decode(data: bytes, out: Float[Tensor, "head token dim"], ops: ModuleType) -> None:
    """Writes a section's numbers into `out`. Raises CorruptBitstream for bytes `encode` does not write."""
    heads, tokens, dim = out.shape
    reader = Reader(data)
    size, zero, group, escaped, count = HEAD.unpack(reader.take(HEAD.size))
    if size not in (1, 2) or zero or group < 1:
        raise CorruptBitstream("a quantised section has an impossible head")
    width = reader.array("<f4", heads).astype(np.float32)
    kind = reader.array("u1", heads * dim).astype(np.uint8)
    mean = reader.array(f"<i{size}", heads * dim).astype(np.int16)
    state = reader.states(tokens)
    escapes, words = reader.array("<i2", escaped).astype(np.int16), reader.array("<u2", count).astype(np.uint16)
    reader.done()
    _check(kind, width)
    ops.from_codes(kind, mean, width, group, coder.shared_slots(), state, words, shared().shift, escapes, out)


def _check(kind: U8, width: F32) -> None:
    table = kind & 63
    if ((table > CONSTANT) | (kind >> 6 > 2) | ((table == CONSTANT) & (kind != CONSTANT))).any():
        raise CorruptBitstream(f"a quantised section names a table beyond {CLASSES} or an unknown mode")
    if not np.isfinite(width).all() or (width <= 0).any():
        raise CorruptBitstream("a quantised section has a step width that is not a positive number")


class Reader:
    """Takes bytes from the front; running out, or leaving some, raises CorruptBitstream."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise CorruptBitstream(f"a section of {len(self.data)} bytes ends too early")
        self.at += count
        return self.data[self.at - count : self.at]

    def array(self, kind: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
        dtype = np.dtype(kind)
        return np.frombuffer(self.take(dtype.itemsize * count), dtype=dtype)

    def states(self, tokens: int) -> U32:
        """First state of each lane; lanes beyond the tokens are idle."""
        state = np.full(LANES, 1 << 16, dtype=np.uint32)
        state[: min(LANES, tokens)] = self.array("<u4", min(LANES, tokens))
        if (state < 1 << 16).any():
            raise CorruptBitstream("a section has an impossible coder state")
        return state

    def done(self) -> None:
        if self.at != len(self.data):
            raise CorruptBitstream(f"a section has {len(self.data) - self.at} bytes too many")
