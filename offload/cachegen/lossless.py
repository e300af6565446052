"""Lossless sections: any 16- or 32-bit floats to bytes and back, bit for bit (nan payloads and signed zeros included).

A float is rotated left by one bit, which puts the whole exponent of bf16 and fp32 into the top byte and the sign at the
bottom; fp16 keeps sign and exponent together in its top byte. Each byte plane is entropy-coded with counts of its own
where that pays and stored raw where it does not: mantissas are noise, exponents cost about 3 bits instead of 8.
Exponents are coded against the most frequent one of their channel.

Layout per plane, top byte first: coded `u8`; if 0 the raw bytes, else centre `u8` per channel, entries - 1 `u8`, per
entry code `u8` and count - 1 `u16`, words `u32`, lane states `u32`, words `u16`.
"""

from __future__ import annotations

import struct
from types import ModuleType

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Shaped
from torch import Tensor

from kvengine.errors import CorruptBitstream
from kvengine.offload.cachegen.lossy import Reader
from kvengine.offload.cachegen.reference import LANES
from kvengine.offload.cachegen.tables import TOTAL, U8, U16

ROTATE = {torch.bfloat16: 1, torch.float16: 0, torch.float32: 1}
SMALL = struct.Struct("<I")
COUNT = np.dtype("u1,<u2")  # a code and its count less one


def encode(x: Shaped[Tensor, "head token dim"], ops: ModuleType) -> bytes:
    """Bytes of one section."""
    return b"".join(_plane(symbols, ops) for symbols in ops.split(x, ROTATE[x.dtype])[::-1])


def _plane(symbols: U8, ops: ModuleType) -> bytes:
    coded = _coded(symbols, ops) if symbols.size else b""
    return b"\x01" + coded if 0 < len(coded) < symbols.size else b"\x00" + symbols.tobytes()


def _coded(symbols: U8, ops: ModuleType) -> bytes:
    codes, centre, counts = ops.centred(symbols)
    freq = counted(counts)
    if float(-(counts * np.log2(np.maximum(freq, 1) / TOTAL)).sum()) > 7.9 * symbols.size:
        return b""
    state, words = ops.encode(codes, np.zeros(len(codes), dtype=np.uint8), freq[None])
    if len(words) >> 32:  # more than `words` counts: a session's tensors are not divided into chunks
        return b""
    used = np.flatnonzero(freq)
    table = b"".join(struct.pack("<BH", code, freq[code] - 1) for code in used)
    lanes = state[: min(LANES, symbols.shape[1])].astype("<u4").tobytes()
    head = centre.tobytes() + bytes([len(used) - 1]) + table
    return b"".join((head, SMALL.pack(len(words)), lanes, words.astype("<u2").tobytes()))


def counted(counts: npt.NDArray[np.int64]) -> U16:
    """Counts scaled to sum 4096, none that occurs below 1.

    >>> counted(np.array([3, 1, 0, 0])).tolist()
    [3072, 1024, 0, 0]
    """
    present = counts > 0
    freq = np.where(present, np.maximum(counts * TOTAL // max(int(counts.sum()), 1), 1), 0)
    while (over := int(freq.sum()) - TOTAL) > 0:  # rare codes were lifted to 1: take it from the frequent ones
        largest = int(freq.argmax())
        freq[largest] -= min(over, int(freq[largest]) // 2)
    freq[int(freq.argmax())] += TOTAL - int(freq.sum())
    return freq.astype(np.uint16)


def decode(data: bytes, out: Shaped[Tensor, "head token dim"], ops: ModuleType) -> None:
    """Writes a section's numbers into `out`. Raises CorruptBitstream for bytes `encode` does not write."""
    heads, tokens, dim = out.shape
    reader = Reader(data)
    planes = np.empty((out.element_size(), heads * dim, tokens), dtype=np.uint8)
    for plane in planes[::-1]:
        _read_plane(reader, plane, ops)
    reader.done()
    ops.merge(planes, ROTATE[out.dtype], out)


def _read_plane(reader: Reader, plane: U8, ops: ModuleType) -> None:
    coded, (channels, tokens) = reader.take(1)[0], plane.shape
    if coded == 0:
        plane[:] = reader.array("u1", channels * tokens).reshape(channels, tokens)
        return
    if coded != 1:
        raise CorruptBitstream(f"a byte plane is stored in the unknown way {coded}")
    centre = reader.array("u1", channels).astype(np.uint8)
    freq = _read_counts(reader)
    (count,) = SMALL.unpack(reader.take(SMALL.size))
    state = reader.states(tokens)
    words = reader.array("<u2", count).astype(np.uint16)
    table = np.zeros(channels, dtype=np.uint8)
    codes = ops.decode(table, tokens, ops.slot_tables(freq), state, words)
    np.add(codes, centre[:, None], out=plane)


def _read_counts(reader: Reader) -> U16:
    entries = reader.array(COUNT, reader.take(1)[0] + 1)
    freq = np.zeros(256, dtype=np.int64)
    freq[entries["f0"]] = entries["f1"].astype(np.int64) + 1
    if len(set(entries["f0"].tolist())) != len(entries) or int(freq.sum()) != TOTAL:
        raise CorruptBitstream("a byte plane's counts do not sum to 4096")
    return freq.astype(np.uint16)[None]
