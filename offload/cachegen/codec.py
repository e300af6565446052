"""A cache's keys and values to one container and back.

A container holds one section per (chunk of tokens, layer, keys or values); each decodes alone, so chunks and layers can
be read in any order, fetched by byte range, and decoded in parallel threads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeVar

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from kvengine.errors import CorruptBitstream, IncompatibleCache
from kvengine.offload.cachegen import lossless, lossy, tables
from kvengine.offload.cachegen.coder import Backend, backend
from kvengine.offload.cachegen.levels import LEVELS, Level, resolve
from kvengine.offload.container import Container, pack, plain, read_bytes

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
T = TypeVar("T")
CHUNK = 256
SAME = ". Configuration, weights and adapters in use must be those that it was stored under; else compute it again"
MAX_CHUNK = 1 << 14


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Whose cache this is; compared field by field before anything is decoded.

    model:      fingerprint of configuration and weights
    tokenizer:  fingerprint of the tokenizer
    rope:       RoPE parameters as plain JSON; empty if keys carry none
    """

    model: str = ""
    tokenizer: str = ""
    rope: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """As it comes back from a container: a tuple as a list."""
        return {"model": self.model, "tokenizer": self.tokenizer, "rope": json.loads(json.dumps(dict(self.rope)))}


@dataclass(frozen=True)
class KV:
    """Keys and values of one sequence.

    layers:    per layer (keys, values), each [head token dim]; all have the same tokens, the rest may differ by layer
    positions: [token] position of each token, ascending or not; None counts from 0
    identity:  whose they are
    extra:     anything else worth keeping, as plain JSON
    """

    layers: Sequence[tuple[Shaped[Tensor, "_ token _"], Shaped[Tensor, "_ token _"]]]
    positions: Int[Tensor, " token"] | None = None
    identity: Identity = field(default_factory=Identity)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.layers[0][0].shape[1] if self.layers else 0

    @classmethod
    def stacked(cls, kv: Shaped[Tensor, "layer two head token dim"], **rest: Any) -> KV:
        """From one tensor [layer 2 head token dim]."""
        return cls([(layer[0], layer[1]) for layer in kv], **rest)


def encode(
    kv: KV, level: str | Level = "medium", *, chunk: int = CHUNK, threads: int = 1, using: Backend = "auto"
) -> bytes:
    """One container as bytes.

    level:    "lossless", a name in LEVELS, or a Level
    chunk:    tokens that decode together, at most 16384
    threads:  sections encoded at once

    Raises CacheError for numbers that are not finite (lossy levels) and an `extra` that is not plain JSON, ValueError for
    tensors that do not belong together, IncompatibleCache for an unknown level.
    """
    name, steps = resolve(level)
    header = _header(kv, name, steps, chunk)
    ops, layers = backend(using), len(kv.layers)

    def section(job: tuple[int, int, int]) -> bytes:
        start, layer, part = job
        piece = kv.layers[layer][part][:, start : start + chunk].detach().cpu()
        return (
            lossless.encode(piece, ops) if steps is None else lossy.encode(piece, steps.step(layer, layers, part), ops)
        )

    jobs = [(start, i, part) for start in range(0, kv.tokens, chunk) for i in range(layers) for part in (0, 1)]
    return pack(header, _parallel(section, jobs, threads))


def _header(kv: KV, name: str, steps: Level | None, chunk: int) -> dict[str, Any]:
    shapes = [(*_pair(k, v, kv.tokens), str(k.dtype).removeprefix("torch.")) for k, v in kv.layers]
    if not 1 <= chunk <= MAX_CHUNK:
        raise ValueError(f"a chunk holds 1 to {MAX_CHUNK} tokens, {chunk} were asked for")
    if len({kind for *_, kind in shapes}) > 1 or any(kind not in DTYPES for *_, kind in shapes):
        raise ValueError(f"all layers must share one dtype of {list(DTYPES)}, got {sorted({s[-1] for s in shapes})}")
    positions = torch.arange(kv.tokens) if kv.positions is None else kv.positions
    if positions.shape != (kv.tokens,):
        raise ValueError(f"{kv.tokens} tokens need as many positions, got shape {tuple(positions.shape)}")
    if positions.is_floating_point() or positions.dtype == torch.bool:
        raise ValueError(f"positions are whole numbers, not {positions.dtype}")
    return {
        "kind": "kv",
        "identity": kv.identity.as_json(),
        "level": name,
        "steps": steps and steps.as_json(),
        "tables": tables.fingerprint(),
        "dtype": shapes[0][-1] if shapes else "float32",
        "tokens": kv.tokens,
        "chunk": chunk,
        "shapes": [[*shape, len(list(same))] for shape, same in groupby(s[:-1] for s in shapes)],
        "positions": runs(positions.tolist()),
        "extra": plain(kv.extra, "extra"),
    }


def _pair(k: Tensor, v: Tensor, tokens: int) -> tuple[int, int, int]:
    """(heads, key dim, value dim) of a layer."""
    if k.ndim != 3 or v.ndim != 3 or k.shape[:2] != v.shape[:2] or k.shape[1] != tokens or k.dtype != v.dtype:
        raise ValueError(
            f"keys {tuple(k.shape)} {k.dtype} and values {tuple(v.shape)} {v.dtype} do not belong together"
        )
    return k.shape[0], k.shape[2], v.shape[2]


def runs(positions: Sequence[int]) -> list[list[int]]:
    """Positions as [first, count] of stretches that count up by one.

    >>> runs([0, 1, 2, 7, 8, 4])
    [[0, 3], [7, 2], [4, 1]]
    """
    stretches: list[list[int]] = []
    for position in positions:
        if stretches and position == sum(stretches[-1]):
            stretches[-1][1] += 1
        else:
            stretches.append([position, 1])
    return stretches


@dataclass(frozen=True)
class Layout:
    """A checked header of kind "kv": `shapes` is (heads, key dim, value dim) per layer."""

    identity: Identity
    level: str
    dtype: torch.dtype
    tokens: int
    chunk: int
    shapes: tuple[tuple[int, int, int], ...]
    positions: Tensor
    extra: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded tensors."""
        return self.tokens * self.dtype.itemsize * sum(heads * (dk + dv) for heads, dk, dv in self.shapes)

    @property
    def chunks(self) -> int:
        return -(-self.tokens // self.chunk)


def layout(container: Container) -> Layout:
    """Reads a header. Raises IncompatibleCache (other kind or tables) or CorruptBitstream (impossible values)."""
    header = container.header
    if header.get("kind") != "kv" or header.get("tables") != tables.fingerprint():
        raise IncompatibleCache(f"a container of kind {header.get('kind')!r}, tables {header.get('tables')!r}; "
                                f"this kvengine decodes kind 'kv', tables {tables.fingerprint()!r}")  # fmt: skip
    try:
        found = _layout(header, len(container.entries))
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise CorruptBitstream(f"the container's header lacks or garbles a field: {error!r}") from error
    if found.chunks * len(found.shapes) * 2 != len(container.entries):
        raise CorruptBitstream(f"{found.chunks} chunks of {len(found.shapes)} layers need other than "
                               f"{len(container.entries)} sections")  # fmt: skip
    return found


def _layout(header: Mapping[str, Any], sections: int) -> Layout:
    tokens, chunk, level = header["tokens"], header["chunk"], header["level"]
    stretches = [(_whole(first, 1 << 62, -(1 << 62)), _whole(count, tokens)) for first, count in header["positions"]]
    repeats = [(tuple(_whole(n, 1 << 20) for n in shape), _whole(times, 1 << 16)) for *shape, times in header["shapes"]]
    layers = _whole(sum(times for _, times in repeats), 1 << 16)  # without tokens no section would tell
    if layers * 2 * -(-_whole(tokens, 1 << 40) // _whole(chunk, MAX_CHUNK, 1)) != sections or (tokens and not layers):
        raise ValueError(f"{sections} sections do not match the shapes")
    if sum(count for _, count in stretches) != tokens or any(len(shape) != 3 for shape, _ in repeats):
        raise ValueError("positions or shapes do not match the tokens")
    pieces = [torch.arange(first, first + count) for first, count in stretches]
    whose = Identity(**header["identity"])
    whose.as_json()  # raises for what is none
    return Layout(
        whose, str(level), DTYPES[header["dtype"]], tokens, chunk,
        tuple((s[0], s[1], s[2]) for s, times in repeats for _ in range(times)),
        torch.cat([torch.zeros(0, dtype=torch.int64), *pieces]), dict(header["extra"]),
    )  # fmt: skip


def _whole(value: Any, most: int, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r} is not a whole number between {least} and {most}")
    return value


def decode(
    data: bytes | bytearray | memoryview | Container,
    expect: Identity | None = None,
    *,
    threads: int = 1,
    limit: int = 1 << 38,
    using: Backend = "auto",
) -> KV:
    """The cache in a container.

    expect:  raise IncompatibleCache unless the container was written for this identity
    limit:   most bytes the decoded tensors may take

    Raises CorruptBitstream for damaged bytes, IncompatibleCache for another version, identity or too big a cache.
    """
    container = data if isinstance(data, Container) else read_bytes(data)
    found = layout(container)
    check_identity(found.identity, expect)
    _check_sizes(container, found)
    if found.nbytes > limit:
        raise IncompatibleCache(f"decoding takes {found.nbytes} bytes, the limit is {limit}")
    try:
        layers = [_empty(found, layer) for layer in range(len(found.shapes))]
    except (RuntimeError, MemoryError) as error:
        raise IncompatibleCache(f"decoding takes {found.nbytes} bytes, for which there is no memory") from error

    def section(job: tuple[int, int, int]) -> None:
        chunk, layer, part = job
        piece = layers[layer][part][:, chunk * found.chunk : (chunk + 1) * found.chunk]
        decode_section(container, found, chunk, layer, part, piece, using=using)

    jobs = [(c, i, part) for c in range(found.chunks) for i in range(len(layers)) for part in (0, 1)]
    _parallel(section, jobs, threads)
    return KV(layers, found.positions, found.identity, found.extra)


def _check_sizes(container: Container, found: Layout) -> None:
    """No section may claim more channels than it has bytes, so that a small file cannot ask for a large tensor."""
    per_chunk = [heads * width for heads, *widths in found.shapes for width in widths]
    for number, (_, length, _) in enumerate(container.entries):
        if length < per_chunk[number % len(per_chunk)]:
            raise CorruptBitstream(
                f"a section of {length} bytes cannot hold {per_chunk[number % len(per_chunk)]} channels"
            )


def _empty(found: Layout, layer: int) -> tuple[Tensor, Tensor]:
    heads, dim, dim_v = found.shapes[layer]
    return (
        torch.empty(heads, found.tokens, dim, dtype=found.dtype),
        torch.empty(heads, found.tokens, dim_v, dtype=found.dtype),
    )


def decode_section(
    container: Container,
    found: Layout,
    chunk: int,
    layer: int,
    part: int,
    out: Shaped[Tensor, "head token dim"],
    *,
    using: Backend = "auto",
) -> None:
    """Writes keys (`part` 0) or values (1) of one layer and chunk into `out` (contiguous along dim), without reading
    anything else of the container. Raises CorruptBitstream."""
    data = container.section((chunk * len(found.shapes) + layer) * 2 + part)
    if found.level == "lossless":
        lossless.decode(data, out, backend(using))
    else:
        lossy.decode(data, out, backend(using))


def check_identity(found: Identity, expect: Identity | None) -> None:
    """Raises IncompatibleCache naming the first field that differs."""
    if expect is None:
        return
    for name, value in expect.as_json().items():
        if found.as_json()[name] != value:
            hint = SAME if name == "model" else ""
            raise IncompatibleCache(f"stored for {name} {found.as_json()[name]!r}, asked for {value!r}{hint}")


def _parallel(work: Callable[[tuple[int, int, int]], T], jobs: list[tuple[int, int, int]], threads: int) -> list[T]:
    if threads <= 1:
        return [work(job) for job in jobs]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, jobs))


__all__ = [
    "CHUNK",
    "KV",
    "LEVELS",
    "Identity",
    "Layout",
    "check_identity",
    "decode",
    "decode_section",
    "encode",
    "layout",
]
