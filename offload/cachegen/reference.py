"""The codec's inner loops in numpy: what the C files compute, bit for bit, and what runs where there is no C compiler.

rANS (Duda 2013, arXiv 1311.2540) with 16 interleaved lanes: token t of a channel belongs to lane t mod 16 and all
channels of a section follow one another on the same lanes, so a row of 16 tokens shares one table. States are 32-bit
in [2^16, 2^32), words 16-bit, counts sum to 4096. The encoder runs backwards; each symbol emits at most one word, and
the decoder reads words in symbol order. Final decoder states must equal the encoder's first ones (2^16), which checks
the stream once more.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from kvengine.errors import CorruptBitstream
from kvengine.offload.cachegen.tables import BITS, CONSTANT, ESCAPE, F32, I64, SUM_SCALE, TOTAL, U8, U16, WIDTHS, Tables

LANES = 16
LIMIT = 16000
"""Numbers are at most this many steps."""
I16 = npt.NDArray[np.int16]
U32 = npt.NDArray[np.uint32]


def difference(q: I16, group: int, mode: int) -> I16:
    """Residuals [channel token] of mode 0 (the values), 1 (to the group's first token, which refers to the first of the
    group before) or 2 (to the token before). Integers, so nothing is lost and no error accumulates.

    >>> difference(np.array([[5, 6, 7, 9, 9]], dtype=np.int16), 3, 1).tolist()
    [[5, 1, 2, 4, 0]]
    """
    if mode == 0 or q.shape[1] == 0:
        return q
    if mode == 2:
        return np.diff(q, axis=1, prepend=np.zeros_like(q[:, :1]))
    anchors = q[:, ::group]
    d = q - np.repeat(anchors, group, axis=1)[:, : q.shape[1]]
    d[:, ::group] = np.diff(anchors, axis=1, prepend=np.zeros_like(anchors[:, :1]))
    return np.asarray(d)


def undo(d: I16, group: int, mode: int) -> I16:
    """The values from `difference`'s residuals."""
    if mode == 0 or d.shape[1] == 0:
        return d
    if mode == 2:
        return np.cumsum(d, axis=1, dtype=np.int16)
    anchors = np.cumsum(d[:, ::group], axis=1, dtype=np.int16)
    values = d + np.repeat(anchors, group, axis=1)[:, : d.shape[1]]
    values[:, ::group] = anchors
    return np.asarray(values)


def zigzag(v: I16) -> U8:
    """0, -1, 1, -2 ... to 0, 1, 2, 3 ...; magnitudes above 127 to ESCAPE."""
    wide = v.astype(np.int32)
    codes = np.where(wide >= 0, 2 * wide, -2 * wide - 1)
    return np.where(np.abs(wide) > 127, ESCAPE, codes).astype(np.uint8)


def unzigzag(codes: U8) -> I16:
    """Values of codes; ESCAPE gives -128, which no code means."""
    wide = codes.astype(np.int16)
    return np.where(wide & 1, -(wide + 1) // 2, wide // 2).astype(np.int16)


def cheapest(d: I16, tables: Tables) -> tuple[I64, I64]:
    """(bits * 256, class) per channel: the best of the nearest width and its two neighbours, in both families."""
    tokens = d.shape[1]
    total = np.abs(d.astype(np.int64)).sum(1)
    width = (total[:, None] * SUM_SCALE >= tables.threshold * tokens).cumprod(1).sum(1)
    codes, best = zigzag(d), np.full(len(d), np.iinfo(np.int64).max)
    chosen = np.zeros(len(d), dtype=np.int64)
    for family in range(2):
        for near in (-1, 0, 1):
            w = width + near
            kind = family * WIDTHS + np.clip(w, 0, WIDTHS - 1)
            bits = tables.cost[kind[:, None], codes].sum(1)
            better = (w >= 0) & (w < WIDTHS) & (bits < best)
            best, chosen = np.where(better, bits, best), np.where(better, kind, chosen)
    return best, chosen


def choose(q: I16, group: int, modes: int, tables: Tables) -> tuple[U8, U8, I16]:
    """Per channel the cheapest allowed mode (bit m of `modes` allows m; 0 always) and table.

    Returns (kind [channel] = mode * 64 + class, codes [channel token], escapes in channel-major order)."""
    plain = np.abs(q.astype(np.int64)).sum(1)
    best, chosen = cheapest(q, tables)
    mode, kept = np.zeros(len(q), dtype=np.int64), q.copy()
    for m in (1, 2):
        if modes >> m & 1:
            d = difference(q, group, m)
            bits, kind = cheapest(d, tables)
            better = (np.abs(d.astype(np.int64)).sum(1) < plain) & (bits < best)
            best, chosen = np.where(better, bits, best), np.where(better, kind, chosen)
            mode, kept = np.where(better, m, mode), np.where(better[:, None], d, kept)
    constant = plain == 0
    kind8 = np.where(constant, CONSTANT, mode * 64 + chosen).astype(np.uint8)
    limit = np.where(constant, 0, tables.radius[np.where(constant, 0, chosen)])
    far = np.abs(kept.astype(np.int32)) > limit[:, None]
    return kind8, np.where(far, ESCAPE, zigzag(kept)).astype(np.uint8), kept[far]


def encode(codes: U8, table: U8, freq: U16) -> tuple[U32, U16]:
    """States [16] and words of codes [channel token], channel c coded with freq[table[c]]; channels whose table does
    not exist are skipped. Raises ValueError if a code has no count."""
    cum = np.cumsum(freq, axis=1, dtype=np.uint64) - freq
    state = np.full(LANES, 1 << 16, dtype=np.uint64)
    words: list[U16] = []
    for c in np.flatnonzero(table < len(freq))[::-1]:
        f, low = freq[table[c]].astype(np.uint64), cum[table[c]]
        for start in range((codes.shape[1] - 1) // LANES * LANES, -1, -LANES):
            row = codes[c, start : start + LANES]
            state[: len(row)], emitted = _push(state[: len(row)], f[row], low[row])
            words.append(emitted)
    return state.astype(np.uint32), np.concatenate([*words[::-1], np.zeros(0, dtype=np.uint16)])


def _push(
    x: npt.NDArray[np.uint64], f: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[np.uint64], U16]:
    if not f.all():
        raise ValueError("a code has no count in its table")
    full = x >= f << np.uint64(32 - BITS)
    emitted = x[full].astype(np.uint16)
    x = np.where(full, x >> np.uint64(16), x)
    return (x // f << np.uint64(BITS)) + x % f + low, emitted


def slot_tables(freq: U16) -> U32:
    """[table 4096] what the decoder looks up: code << 24 | offset in the count << 12 | count - 1."""
    slots = np.empty((len(freq), TOTAL), dtype=np.uint32)
    for row, counts in zip(slots, freq.astype(np.int64), strict=True):
        codes = np.repeat(np.arange(256), counts)
        offset = np.arange(TOTAL) - np.repeat(np.cumsum(counts) - counts, counts)
        row[:] = codes << 24 | offset << 12 | counts[codes] - 1
    return slots


def decode(table: U8, tokens: int, slots: U32, first: U32, words: U16) -> U8:
    """Codes [channel token]. Raises CorruptBitstream if words are missing, left over or inconsistent."""
    codes = np.zeros((len(table), tokens), dtype=np.uint8)
    state, at = first.astype(np.uint64), 0
    for c in np.flatnonzero(table < len(slots)):
        for start in range(0, tokens, LANES):
            row = codes[c, start : start + LANES]
            s = slots[table[c]][state[: len(row)] & np.uint64(TOTAL - 1)].astype(np.uint64)
            row[:] = s >> np.uint64(24)
            x = ((s & np.uint64(0xFFF)) + np.uint64(1)) * (state[: len(row)] >> np.uint64(BITS))
            x += s >> np.uint64(12) & np.uint64(0xFFF)
            low = np.flatnonzero(x < 1 << 16)
            if at + len(low) > len(words):
                raise CorruptBitstream("an entropy-coded section ends too early")
            x[low] = x[low] << np.uint64(16) | words[at : at + len(low)]
            at += len(low)
            state[: len(row)] = x
    if at != len(words) or (state != 1 << 16).any():
        raise CorruptBitstream("an entropy-coded section does not end where it should")
    return codes


def largest(x: Float[Tensor, "head token dim"]) -> F32:
    """Largest magnitude of each head, 0 without numbers; not finite if any number is not."""
    wide = x.float()
    return wide.abs().amax((1, 2)).numpy() if wide.numel() else np.zeros(x.shape[0], dtype=np.float32)


def to_codes(
    x: Float[Tensor, "head token dim"], width: F32, group: int, modes: int, tables: Tables
) -> tuple[U8, I16, U8, I16]:
    """(kind, mean, codes, escapes): numbers in steps of their head's width, the rounded mean of each channel taken out,
    then `choose`."""
    heads, tokens, dim = x.shape
    s = np.clip(np.rint(x.float().numpy() / width[:, None, None]), -LIMIT, LIMIT).astype(np.int64)
    q = s.transpose(0, 2, 1).reshape(heads * dim, tokens)
    mean = (2 * q.sum(1) + tokens) // (2 * max(tokens, 1))
    kind, codes, escapes = choose((q - mean[:, None]).astype(np.int16), group, modes, tables)
    return kind, mean.astype(np.int16), codes, escapes


def from_codes(
    kind: U8,
    mean: I16,
    width: F32,
    group: int,
    slots: U32,
    state: U32,
    words: U16,
    shift: F32,
    escapes: I16,
    out: Tensor,
) -> None:
    """Decodes words and writes (value + shift + mean) * width of the head into `out` [head token dim], kept within the
    finite numbers of its type. Raises CorruptBitstream if words or escapes do not fit."""
    heads, tokens, dim = out.shape
    codes = decode(np.bitwise_and(kind, 63, dtype=np.uint8), tokens, slots, state, words)
    values, far = unzigzag(codes), codes == ESCAPE
    if int(far.sum()) != len(escapes):
        raise CorruptBitstream(f"{int(far.sum())} escapes are needed, {len(escapes)} are here")
    values[far] = escapes
    mode, centre = kind >> 6, np.zeros(codes.shape, dtype=np.float32)
    for m in (1, 2):
        values[mode == m] = undo(values[mode == m], group, m)
    direct = kind < CONSTANT  # coded without prediction
    centre[direct] = shift[kind[direct][:, None], codes[direct]]
    centre[far] = 0
    y = (values.astype(np.float32) + centre + mean[:, None].astype(np.float32)).reshape(heads, dim, tokens)
    with np.errstate(over="ignore"):
        y = (y * width[:, None, None]).transpose(0, 2, 1)
    most = torch.finfo(out.dtype).max
    out.copy_(torch.from_numpy(np.ascontiguousarray(y)).clamp_(-most, most))


def split(x: Tensor, rotate: int) -> U8:
    """Byte planes [byte head*dim token], low byte first, of the tensor's words rotated left by `rotate` bits."""
    heads, tokens, dim = x.shape
    size = x.element_size()
    raw = x.transpose(1, 2).contiguous().view(torch.int16 if size == 2 else torch.int32).numpy()
    words = raw.view(f"<u{size}").reshape(heads * dim, tokens)
    words = words << rotate | words >> (8 * size - rotate) if rotate else words
    planes = np.ascontiguousarray(words).view(np.uint8).reshape(heads * dim, tokens, size)
    return np.ascontiguousarray(planes.transpose(2, 0, 1))


def merge(planes: U8, rotate: int, out: Tensor) -> None:
    """Undoes `split` into `out` [head token dim]."""
    heads, tokens, dim = out.shape
    size = out.element_size()
    words = np.ascontiguousarray(planes.transpose(1, 2, 0)).view(f"<u{size}")[..., 0]
    words = words >> rotate | words << (8 * size - rotate) if rotate else words
    raw = torch.from_numpy(words.copy().view(f"<i{size}")).view(out.dtype)  # of one number, strides may be odd
    out.copy_(raw.reshape(heads, dim, tokens).transpose(1, 2))


def centred(symbols: U8) -> tuple[U8, U8, I64]:
    """(codes, centre, counts): each channel's most frequent byte taken from all its bytes, and counts of what is left.

    >>> codes, centre, counts = centred(np.array([[7, 9, 7]], dtype=np.uint8))
    >>> codes.tolist(), centre.tolist(), counts[:3].tolist()
    ([[0, 2, 0]], [7], [2, 0, 1])
    """
    centre = np.array([np.bincount(row, minlength=256).argmax() for row in symbols], dtype=np.uint8)
    codes = symbols - centre[:, None]
    return codes, centre, np.bincount(codes.ravel(), minlength=256).astype(np.int64)
