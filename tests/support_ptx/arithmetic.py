"""What `support_ptx` computes thread by thread: PTX's arithmetic on NumPy arrays of unsigned integers (and of truths)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray
Words = {
    0: np.dtype(bool),
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
    8: np.dtype(np.uint64),
}
SIZES = {"pred": 0} | {f"{kind}{8 * size}": size for kind in "busf" for size in (1, 2, 4, 8)}
SIZES |= {"f16x2": 4, "bf16x2": 4, "bf16": 2, "s16x2": 4, "u16x2": 4}
TWO = {"f16x2": np.float16, "s16x2": np.int16, "u16x2": np.uint16}
Operation = tuple[list[int], bool, Callable[..., Array]]


def fit(x: Array, size: int, signed: bool = False) -> Array:
    """In so many bytes."""
    if x.itemsize == size or (x.dtype == bool and size == 0):
        return x
    if size == 0 or x.dtype == bool:
        raise AssertionError("a truth is no number")
    if signed and x.itemsize < size:
        return x.view(f"i{x.itemsize}").astype(f"i{size}").view(Words[size])
    return x.astype(Words[size])


def typed(x: Array, kind: str) -> Array:
    """The bits as numbers of a type; halves of two are a second dimension."""
    if kind == "pred":
        return x
    x = np.ascontiguousarray(x)
    if kind == "bf16":
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == "bf16x2":
        return (x[:, None].view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind in TWO:
        return x[:, None].view(TWO[kind])
    size, letter = SIZES[kind], "i" if kind[0] == "s" else "f" if kind[0] == "f" else "u"
    return x.view(f"{letter}{size}")


def bits(x: Array, kind: str) -> Array:
    """Numbers as a register holds them."""
    if kind == "pred":
        return x
    if kind in ("bf16", "bf16x2"):
        y = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
        y = ((y + 0x7FFF + ((y >> 16) & 1)) >> 16).astype(np.uint16)
        y = np.where(np.isnan(x), 0x7FFF, y).astype(np.uint16)
        return y if kind == "bf16" else y.view(np.uint32)[:, 0]
    size, letter = SIZES[kind], "i" if kind[0] == "s" else "f" if kind[0] == "f" else "u"
    if kind in TWO:
        return np.ascontiguousarray(x, dtype=TWO[kind]).view(np.uint32)[:, 0]
    return np.ascontiguousarray(x).astype(f"{letter}{size}").view(Words[size])


def kinds(parts: tuple[str, ...]) -> list[str]:
    return [x for x in parts if x in SIZES]


def quietly(f: Callable[..., Array]) -> Callable[..., Array]:
    def g(*args: Array) -> Array:
        with np.errstate(all="ignore"):
            return f(*args)

    return g


def plain(f: Callable[..., Array], count: int) -> Callable[[tuple[str, ...]], Operation]:
    """Arguments and result of one type."""

    def of(parts: tuple[str, ...]) -> Operation:
        (kind,) = kinds(parts)
        compute = quietly(lambda *x: bits(f(*(typed(a, kind) for a in x)), kind))
        return [SIZES[kind]] * count, kind[0] == "s", compute

    return of


def fused(a: Array, b: Array, c: Array) -> Array:
    """The product of halves and of singles is exact in twice the digits."""
    return a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)


def product(parts: tuple[str, ...]) -> Operation:
    (kind,) = kinds(parts)
    if kind[0] in "fb" and kind not in ("b32", "b64"):
        return plain(lambda a, b: a * b, 2)(parts)
    return multiplied(parts, 2)


def multiplied(parts: tuple[str, ...], count: int = 3) -> Operation:
    """mul and mad of whole numbers: .lo, .hi, .wide."""
    (kind,) = kinds(parts)
    size = SIZES[kind]
    if size == 8 and "lo" not in parts:
        raise NotImplementedError(parts)
    wide = 2 * size if "wide" in parts else size

    def compute(a: Array, b: Array, c: Array | None = None) -> Array:
        x, y = typed(a, kind), typed(b, kind)
        if size < 8:
            x, y = x.astype(np.int64), y.astype(np.int64)
        z = (x * y).view(np.uint64)
        if "hi" in parts:
            z = (z.view(np.int64) >> (8 * size)).view(np.uint64)
        z = z.astype(Words[wide])
        return z if c is None else z + c

    return [size, size, wide][:count], kind[0] == "s", quietly(compute)


def mad(parts: tuple[str, ...]) -> Operation:
    return plain(fused, 3)(parts) if kinds(parts)[0][0] == "f" else multiplied(parts)


def divided(parts: tuple[str, ...]) -> Operation:
    (kind,) = kinds(parts)
    if kind[0] == "f":
        return plain(lambda a, b: a / b, 2)(parts)
    return plain(lambda a, b: np.trunc(a / b).astype(a.dtype) if a.itemsize < 8 else _whole(a, b), 2)(parts)


def _whole(a: Array, b: Array) -> Array:
    quotient = np.abs(a) // np.abs(b)
    return np.where((a < 0) != (b < 0), -quotient, quotient) if a.dtype.kind == "i" else quotient


def remainder(a: Array, b: Array) -> Array:
    return a - _whole(a, b) * b


def shifted(left: bool) -> Callable[[tuple[str, ...]], Operation]:
    def of(parts: tuple[str, ...]) -> Operation:
        (kind,) = kinds(parts)
        most = 8 * SIZES[kind]

        def compute(a: Array, by: Array) -> Array:
            x, n = typed(a, kind), np.minimum(by, most)
            part = np.minimum(n, most - 1).astype(x.dtype)
            if left:
                return np.where(n == most, 0, a << part.view(a.dtype)).astype(a.dtype)
            gone = x >> np.array(most - 1, dtype=x.dtype) if kind[0] == "s" else np.zeros_like(x)
            return np.where(n == most, gone, x >> part).view(a.dtype)

        return [SIZES[kind], 4], kind[0] == "s", compute

    return of


def compared(parts: tuple[str, ...]) -> Operation:
    kind, how = kinds(parts)[-1], parts[0]
    by: dict[str, Any] = {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt}
    by |= {"ge": operator.ge, "lo": operator.lt, "ls": operator.le, "hi": operator.gt, "hs": operator.ge}
    size, number = SIZES[kind], kind[0] == "f" or kind == "bf16"

    def compute(a: Array, b: Array, and_: Array | None = None) -> Array:
        x, y = typed(a, kind), typed(b, kind)
        nan = np.isnan(x) | np.isnan(y) if number else np.zeros(len(x), dtype=bool)
        if how in ("num", "nan"):
            return ~nan if how == "num" else nan
        if number and how[-1] == "u" and how != "u":
            return by[how[:-1]](x, y) | nan
        return by[how](x, y) & ~nan if how != "ne" else (x != y) & ~nan

    if len(kinds(parts)) != 1 or (len(parts) > 2 and parts[1] in ("and", "or", "xor")):
        raise NotImplementedError(parts)
    return [size, size], False, compute


def chosen(parts: tuple[str, ...]) -> Operation:
    (kind,) = kinds(parts)
    return [SIZES[kind], SIZES[kind], 0], kind[0] == "s", lambda a, b, p: np.where(p, a, b)


def converted(parts: tuple[str, ...]) -> Operation:
    to, of = kinds(parts)
    whole = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}

    if to in ("f16x2", "bf16x2"):  # the first operand is the upper half
        return [4, 4], False, quietly(lambda a, b: bits(np.stack([typed(b, of), typed(a, of)], 1), to))

    def compute(a: Array) -> Array:
        x = typed(a, of)
        for name, rounded in whole.items():
            x = rounded(x) if name in parts else x
        if to[0] in "us" and x.dtype.kind == "f":  # what does not fit ends at the limits
            info = np.iinfo(f"{'i' if to[0] == 's' else 'u'}{SIZES[to]}")
            x = np.where(np.isnan(x), 0, np.clip(x.astype(np.float64), float(info.min), float(info.max)))
        if to[0] in "us" and x.dtype.kind != "f":
            return fit(a, SIZES[to], of[0] == "s")
        return bits(x, to)

    return [SIZES[of]], to[0] == "s", quietly(compute)


def looked_up(parts: tuple[str, ...]) -> Operation:
    """lop3: the table's number is the last operand."""

    def compute(a: Array, b: Array, c: Array, table: Array) -> Array:
        found = np.zeros_like(a)
        for i in range(8):
            if int(table[0]) >> i & 1:
                found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return found

    return [4, 4, 4, 4], False, compute


def permuted(parts: tuple[str, ...]) -> Operation:
    def compute(a: Array, b: Array, how: Array) -> Array:
        source = np.stack([a, b], 1).view(np.uint8)
        found = np.empty((len(a), 4), dtype=np.uint8)
        for i in range(4):
            nibble = (how >> np.uint32(4 * i)) & np.uint32(15)
            byte = source[np.arange(len(a)), (nibble & np.uint32(7)).astype(np.int64)]
            found[:, i] = np.where(nibble & np.uint32(8), np.where(byte & 0x80, 0xFF, 0), byte)
        return found.view(np.uint32)[:, 0]

    if kinds(parts) != ["b32"] or len(parts) != 1:
        raise NotImplementedError(parts)
    return [4, 4, 4], False, compute


def extracted(parts: tuple[str, ...]) -> Operation:
    (kind,) = kinds(parts)
    if SIZES[kind] != 4:
        raise NotImplementedError(parts)

    def compute(a: Array, start: Array, length: Array) -> Array:
        at, n = (start & np.uint32(255)).astype(np.uint64), (length & np.uint32(255)).astype(np.uint64)
        x = typed(a, kind).astype(np.int64).view(np.uint64)
        x = (x.view(np.int64) >> np.minimum(at, 63).view(np.int64)).view(np.uint64)
        mask = (np.uint64(1) << np.minimum(n, 32)) - np.uint64(1)
        found = x & mask
        if kind[0] == "s":
            sign = np.where(n > 0, (x >> np.maximum(n, 1).astype(np.uint64) - np.uint64(1)) & np.uint64(1), 0)
            found = np.where(sign.astype(bool), found | ~mask, found)
        return found.astype(np.uint32)

    return [4, 4, 4], kind[0] == "s", compute


def inserted(parts: tuple[str, ...]) -> Operation:
    def compute(a: Array, b: Array, start: Array, length: Array) -> Array:
        at = start.astype(np.uint64) & np.uint64(255)
        mask = ((np.uint64(1) << np.minimum(length.astype(np.uint64), 32)) - np.uint64(1)) << at
        return ((b.astype(np.uint64) & ~mask) | ((a.astype(np.uint64) << at) & mask)).astype(np.uint32)

    return [4, 4, 4, 4], False, compute


def funnelled(parts: tuple[str, ...]) -> Operation:
    left, wraps = parts[0] == "l", parts[1] == "wrap"

    def compute(low: Array, high: Array, by: Array) -> Array:
        n = (by & np.uint32(31)).astype(np.uint64) if wraps else np.minimum(by, 32).astype(np.uint64)
        both = high.astype(np.uint64) << np.uint64(32) | low
        moved = both << n >> np.uint64(32) if left else both >> n
        return moved.astype(np.uint32)

    return [4, 4, 4], False, compute


def logical(f: Callable[..., Array], count: int) -> Callable[[tuple[str, ...]], Operation]:
    return lambda parts: ([SIZES[kinds(parts)[0]]] * count, False, f)


OPERATIONS: dict[str, Callable[[tuple[str, ...]], Operation]] = {
    "add": plain(operator.add, 2), "sub": plain(operator.sub, 2), "mul": product, "fma": plain(fused, 3), "mad": mad,
    "div": divided, "rem": plain(remainder, 2), "neg": plain(operator.neg, 1), "abs": plain(np.abs, 1),
    "min": plain(np.fmin, 2), "max": plain(np.fmax, 2), "ex2": plain(np.exp2, 1), "lg2": plain(np.log2, 1),
    "sqrt": plain(np.sqrt, 1), "rsqrt": plain(lambda a: 1 / np.sqrt(a), 1), "rcp": plain(lambda a: 1 / a, 1),
    "sin": plain(np.sin, 1), "cos": plain(np.cos, 1),
    "and": logical(operator.and_, 2), "or": logical(operator.or_, 2), "xor": logical(operator.xor, 2),
    "not": logical(operator.invert, 1), "shl": shifted(True), "shr": shifted(False), "setp": compared, "selp": chosen,
    "cvt": converted, "lop3": looked_up, "prmt": permuted, "bfe": extracted, "bfi": inserted, "shf": funnelled,
    "popc": lambda parts: ([4], False, lambda a: np.bitwise_count(a).astype(np.uint32)),
}  # fmt: skip
