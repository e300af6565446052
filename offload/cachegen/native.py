"""Compiles the C files on first use and calls them through ctypes, which releases the interpreter lock: chunks
go in parallel.

The library is kept in the user's cache folder under the hash of source, compiler and flags, and put there by rename, so
that processes that compile at once do no harm. Without a compiler `load()` raises with the reason.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kvengine.errors import CorruptBitstream, StoreError
from kvengine.kernels.cpu.library import NATIVE, cache_dir, compiler, processor, put
from kvengine.offload.cachegen.reference import I16, LANES, U32
from kvengine.offload.cachegen.tables import F32, I64, TOTAL, U8, U16, Tables

SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# No contraction: a fused multiply-add would make decoded numbers differ from the reference's in the last bit.
FLAGS = ("-O3", NATIVE, "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=off")


@cache
def load(flags: tuple[str, ...] = FLAGS) -> ctypes.CDLL:
    """The compiled library. Raises StoreError if there is no C compiler or it fails."""
    known = compiler()
    if known is None or sys.byteorder != "little":
        raise StoreError(
            "no C compiler (cc, gcc or clang) found, or a big-endian machine; the numpy coder works there too"
        )
    sources = b"".join(path.read_bytes() for path in SOURCES)
    identity = sha256(sources + repr((known, flags, processor(known, flags))).encode()).hexdigest()[:20]
    library = cache_dir() / f"rans-{identity}.so"
    if not library.exists():
        _compile([known, *flags], library)
    return _typed(ctypes.CDLL(str(library)))


def _compile(compiler: list[str], library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / "rans.so"
        command = [*compiler, *(str(path) for path in SOURCES if path.suffix == ".c"), "-o", str(built)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise StoreError(f"{compiler[0]} could not compile the cache codec: {done.stderr.strip()[:500]}")
        put(built, library)


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    size, number = ctypes.c_int64, ctypes.c_int
    kinds = {"s": size, "i": number, "p": ctypes.c_void_p}
    for name, result, arguments in (
        ("kv_choose", size, "psssi" + 6 * "p"),
        ("kv_rans_encode", size, "ppsss" + 4 * "p" + "s"),
        ("kv_rans_decode", number, "ppsss" + 3 * "p" + "s"),
        ("kv_slots", None, "psp"),
        ("kv_largest", None, "pi" + 5 * "s" + "p"),
        ("kv_to_codes", size, "pi" + 5 * "s" + "psi" + 7 * "p"),
        ("kv_from_codes", number, "ppp" + 4 * "s" + "ppps" + "pps" + "piss"),
        ("kv_split", None, "pii" + 5 * "s" + "p"),
        ("kv_merge", None, "pii" + 3 * "s" + "pss"),
        ("kv_centre", None, "psspp"),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, [kinds[letter] for letter in arguments]
    return library


def _at(array: npt.NDArray[np.generic]) -> int:
    if not array.flags.c_contiguous:
        raise ValueError("the native coder takes contiguous arrays")
    if array.size and array.flags.writeable:  # a fifth of the time, which counts for small sections
        return ctypes.addressof(ctypes.c_char.from_buffer(array.data))
    return array.ctypes.data


def choose(q: I16, group: int, modes: int, tables: Tables) -> tuple[U8, U8, I16]:
    """See reference.choose."""
    kind, codes = np.empty(len(q), dtype=np.uint8), np.empty(q.shape, dtype=np.uint8)
    escapes = np.empty(q.size, dtype=np.int16)
    count = load().kv_choose(
        _at(q), *q.shape, group, modes, _at(tables.cost), _at(tables.threshold), _at(tables.radius),
        _at(kind), _at(codes), _at(escapes),
    )  # fmt: skip
    _no_memory(count == -1)
    return kind, codes, escapes[:count].copy()


def encode(codes: U8, table: U8, freq: U16) -> tuple[U32, U16]:
    """See reference.encode."""
    cum = (np.cumsum(freq, axis=1, dtype=np.uint32) - freq).astype(np.uint16)
    state, words = np.empty(LANES, dtype=np.uint32), np.empty(codes.size, dtype=np.uint16)
    count = load().kv_rans_encode(
        _at(codes), _at(table), *codes.shape, len(freq), _at(freq), _at(cum), _at(state), _at(words), len(words)
    )
    if count < 0:
        raise ValueError("a code has no count in its table")
    return state, words[len(words) - count :].copy()


def slot_tables(freq: U16) -> U32:
    """See reference.slot_tables."""
    if (freq.sum(1, dtype=np.int64) != TOTAL).any():
        raise ValueError(f"the counts of a table sum to {TOTAL}")
    freq, slots = np.ascontiguousarray(freq), np.empty((len(freq), TOTAL), dtype=np.uint32)
    load().kv_slots(_at(freq), len(freq), _at(slots))
    return slots


def decode(table: U8, tokens: int, slots: U32, first: U32, words: U16) -> U8:
    """See reference.decode."""
    codes = np.empty((len(table), tokens), dtype=np.uint8)
    failed = load().kv_rans_decode(
        _at(codes), _at(table), *codes.shape, len(slots), _at(slots), _at(first), _at(words), len(words)
    )
    if failed:
        raise CorruptBitstream("an entropy-coded section does not end where it should")
    return codes


def largest(x: Tensor) -> F32:
    """See reference.largest."""
    x, out = _rows(x), np.empty(x.shape[0], dtype=np.float32)
    load().kv_largest(x.data_ptr(), DTYPES[x.dtype], *x.shape, *x.stride()[:2], _at(out))
    return out


def to_codes(x: Tensor, width: F32, group: int, modes: int, tables: Tables) -> tuple[U8, I16, U8, I16]:
    """See reference.to_codes."""
    x, (heads, tokens, dim) = _rows(x), x.shape
    kind, mean = np.empty(heads * dim, dtype=np.uint8), np.empty(heads * dim, dtype=np.int16)
    codes, escapes = np.empty((heads * dim, tokens), dtype=np.uint8), np.empty(x.numel(), dtype=np.int16)
    count = load().kv_to_codes(
        x.data_ptr(), DTYPES[x.dtype], heads, tokens, dim, *x.stride()[:2], _at(width), group, modes,
        _at(tables.cost), _at(tables.threshold), _at(tables.radius), _at(kind), _at(mean), _at(codes), _at(escapes),
    )  # fmt: skip
    _no_memory(count == -1)
    return kind, mean, codes, escapes[:count].copy()


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
    """See reference.from_codes. `out` must have contiguous channels."""
    failed = load().kv_from_codes(
        _at(kind), _at(mean), _at(width), *out.shape, group, _at(slots), _at(state), _at(words), len(words),
        _at(shift), _at(escapes), len(escapes), out.data_ptr(), DTYPES[out.dtype], *out.stride()[:2],
    )  # fmt: skip
    _no_memory(failed == -2)
    if failed:
        raise CorruptBitstream("a quantised section does not end where it should")


def split(x: Tensor, rotate: int) -> U8:
    """See reference.split."""
    x, (heads, tokens, dim) = _rows(x), x.shape
    planes = np.empty((x.element_size(), heads * dim, tokens), dtype=np.uint8)
    load().kv_split(x.data_ptr(), x.element_size(), rotate, *x.shape, *x.stride()[:2], _at(planes))
    return planes


def merge(planes: U8, rotate: int, out: Tensor) -> None:
    """See reference.merge. `out` must have contiguous channels."""
    load().kv_merge(_at(planes), out.element_size(), rotate, *out.shape, out.data_ptr(), *out.stride()[:2])


def centred(symbols: U8) -> tuple[U8, U8, I64]:
    """See reference.centred."""
    codes, centre, counts = symbols.copy(), np.empty(len(symbols), dtype=np.uint8), np.empty(256, dtype=np.int64)
    load().kv_centre(_at(codes), *codes.shape, _at(centre), _at(counts))
    return codes, centre, counts


def _rows(x: Tensor) -> Tensor:
    """The tensor itself if the channels of a token are contiguous, else a copy."""
    return x if x.shape[2] < 2 or x.stride(2) == 1 else x.contiguous()


def _no_memory(failed: bool) -> None:
    if failed:
        raise MemoryError("the coder has no memory for 16 channels")
