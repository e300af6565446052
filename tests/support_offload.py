"""Helpers of the offload tests: caches to encode, damage to do."""

from __future__ import annotations

import struct
import threading
from typing import Any

import torch

from kvengine.offload import container as box
from kvengine.offload.cachegen import KV


def cache(
    layers: int = 2, heads: int = 2, tokens: int = 40, dim: int = 8, dtype: Any = torch.float16, **rest: Any
) -> KV:
    """Channels of differing spread and mean, some of them drifting slowly, some constant."""
    make = torch.Generator().manual_seed(1 + tokens)
    x = torch.randn(layers, 2, heads, tokens, dim, generator=make)
    x[..., ::3] = x[..., ::3].cumsum(3) * 0.2
    x = x * torch.rand(layers, 2, heads, 1, dim, generator=make) * 3 + torch.randn(
        layers, 2, heads, 1, dim, generator=make
    )
    x[..., dim - 1 :] = 0.5
    return KV.stacked(x.to(dtype), **rest)


def stack(kv: KV) -> torch.Tensor:
    return torch.stack([torch.stack(list(pair)) for pair in kv.layers])


def deleted() -> None:
    """Waits for the threads that delete the values of caches that are gone."""
    for thread in threading.enumerate():
        if thread.name == "kvpages-delete":
            thread.join(60)


def resign(data: bytearray) -> bytes:
    """Makes every digest right again, as far as sizes make sense, so that damage reaches the decoder behind them."""
    if len(data) < box.PREAMBLE.size:
        return bytes(data)
    _, _, _, length, count, _ = box.PREAMBLE.unpack_from(data)
    data[box.PREAMBLE.size - 8 : box.PREAMBLE.size] = struct.pack("<Q", len(data))
    index = box.PREAMBLE.size + length
    front = index + box.ENTRY.size * count
    if front + 8 > len(data):
        return bytes(data)
    for i in range(count):
        offset, size, _ = box.ENTRY.unpack_from(data, index + box.ENTRY.size * i)
        mark = box.digest(bytes(data[offset : offset + size])) if offset + size <= len(data) else bytes(8)
        data[index + box.ENTRY.size * i + 16 : index + box.ENTRY.size * (i + 1)] = mark
    data[front : front + 8] = box.digest(bytes(data[:front]))
    return bytes(data)
