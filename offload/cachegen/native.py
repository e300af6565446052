"""Compiles rans.c on first use and calls it through ctypes, which releases the interpreter lock: chunks go in parallel.

The library is kept in the user's cache folder under the hash of source, compiler and flags, and put there by rename, so
that processes that compile at once do no harm. Without a compiler `load()` raises with the reason.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvengine.errors import CorruptBitstream, StoreError
from kvengine.offload.cachegen.reference import I16, LANES, U32
from kvengine.offload.cachegen.tables import F32, U8, U16, Tables

SOURCE = Path(__file__).with_name("rans.c")
# No contraction: a fused multiply-add would make decoded numbers differ from the reference's in the last bit.
FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-ffp-contract=off")


@cache
def load() -> ctypes.CDLL:
    """The compiled library. Raises StoreError if there is no C compiler or it fails."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise StoreError("no C compiler found (looked for $CC and cc); the numpy coder works without one")
    identity = sha256(SOURCE.read_bytes() + repr((compiler, FLAGS, platform.machine())).encode()).hexdigest()[:20]
    library = _folder() / f"rans-{identity}.so"
    if not library.exists():
        _compile(compiler, library)
    return _typed(ctypes.CDLL(str(library)))


def _folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "kvengine"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _compile(compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        built = Path(folder) / "rans.so"
        done = subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(built)], capture_output=True, text=True)
        if done.returncode:
            raise StoreError(f"{compiler} could not compile {SOURCE.name}: {done.stderr.strip()[:500]}")
        os.replace(built, library)


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    size, number, pointer = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
    for name, result, arguments in (
        ("kv_choose", size, [pointer, size, size, size, number, *[pointer] * 6]),
        ("kv_rans_encode", size, [pointer, pointer, size, size, size, *[pointer] * 4, size]),
        ("kv_rans_decode", number, [pointer, pointer, size, size, size, *[pointer] * 3, size]),
        ("kv_rebuild", size, [*[pointer] * 4, *[size] * 4, pointer, pointer, size, pointer]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _at(array: npt.NDArray[np.generic]) -> int:
    if not array.flags.c_contiguous:
        raise ValueError("the native coder takes contiguous arrays")
    return array.ctypes.data


def choose(q: I16, group: int, modes: int, tables: Tables) -> tuple[U8, U8, I16]:
    """See reference.choose."""
    kind, codes = np.empty(len(q), dtype=np.uint8), np.empty(q.shape, dtype=np.uint8)
    escapes = np.empty(q.size, dtype=np.int16)
    count = load().kv_choose(
        _at(q), *q.shape, group, modes, _at(tables.cost), _at(tables.threshold), _at(tables.radius),
        _at(kind), _at(codes), _at(escapes),
    )  # fmt: skip
    if count < 0:
        raise MemoryError("the coder has no memory for one channel")
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


def decode(table: U8, tokens: int, slots: U32, first: U32, words: U16) -> U8:
    """See reference.decode."""
    codes = np.empty((len(table), tokens), dtype=np.uint8)
    failed = load().kv_rans_decode(
        _at(codes), _at(table), *codes.shape, len(slots), _at(slots), _at(first), _at(words), len(words)
    )
    if failed:
        raise CorruptBitstream("an entropy-coded section does not end where it should")
    return codes


def rebuild(codes: U8, kind: U8, mean: I16, width: F32, group: int, shift: F32, escapes: I16) -> F32:
    """See reference.rebuild."""
    heads, tokens = len(width), codes.shape[1]
    out = np.empty((heads, tokens, len(kind) // max(heads, 1)), dtype=np.float32)
    used = load().kv_rebuild(
        _at(codes), _at(kind), _at(mean), _at(width), heads, out.shape[2], tokens, group, _at(shift),
        _at(escapes), len(escapes), _at(out),
    )  # fmt: skip
    if used == -2:
        raise MemoryError("the coder has no memory for one channel")
    if used != len(escapes):
        raise CorruptBitstream(f"a section has {len(escapes)} escapes, its codes need another number")
    return out
