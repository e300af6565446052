"""Pools of random pages in every layout, and tables into them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvengine.kernels import codecs
from kvengine.policies.representation.turboquant import TurboQuant

PAGE, ROWS, TABLE = 32, 3, 5
LAYOUTS: dict[str, Any] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "kivi1": 1,
    "kivi2": 2,
    "kivi4": 4,
    "kivi8": 8,
    "kivi42": (4, 2),
    "zipcache": "zipcache",
    "quantspec": "quantspec",
    "turboquant3": (3, "turboquant"),
    "turboquant4": (4, "turboquant"),
}


def pool(layout: str, dim: int, dim_v: int) -> tuple[str, dict[str, Tensor], Tensor, Tensor]:
    """(codec, fields, keys, values): a pool of random pages, and what its fields stand for, in float64."""
    rng = torch.Generator().manual_seed(dim)
    k, v = (torch.randn(ROWS * TABLE + 3, PAGE, d, generator=rng) for d in (dim, dim_v))
    kind = LAYOUTS[layout]
    if isinstance(kind, torch.dtype):
        codec, fields = "dense", {"k": k.to(kind), "v": v.to(kind)}
    elif kind == "zipcache":
        salient = torch.rand(k.shape[:2], generator=rng).argsort(1) < 19
        codec, fields = "zipcache", codecs.encode_zipcache(k, v, (4, 2), salient)
    elif "turboquant" in layout:
        codec, fields = "turboquant", TurboQuant(bits=kind[0]).encode(k, v, torch.zeros(k.shape[:2]))
    elif kind == "quantspec":
        codec, fields = "quantspec", codecs.encode_kivi(k, v, 4, 8)
        low = torch.randint(256, fields["k_code"].shape, generator=rng, dtype=torch.uint8)
        fields |= {"k_low": low, "v_low": torch.randint_like(fields["v_code"], 256)}
    else:
        codec, fields = "kivi", codecs.encode_kivi(k, v, kind, 8)
    return codec, fields, *(x.double() for x in codecs.decode(codec, fields, dim, dim_v))


def rows(query: int) -> dict[str, Tensor]:
    """Tables of shuffled pages: one full row, one with missing pages, one without any; a third of the slots dead."""
    rng = torch.Generator().manual_seed(query)
    table = torch.randperm(ROWS * TABLE + 3, generator=rng)[: ROWS * TABLE].reshape(ROWS, TABLE).int()
    table[1, 2:] = -1
    table[2] = -1
    position = torch.arange(TABLE * PAGE).repeat(ROWS, 1)
    position[torch.rand(position.shape, generator=rng) < 0.3] = -1
    units = torch.stack([torch.randperm(TABLE * PAGE // 8, generator=rng)[:9] for _ in range(ROWS)])
    units[0, 4:6] = -1
    at = torch.tensor([[70], [30], [5]]) + torch.arange(query)
    return {"table": table, "position": position, "units": units, "query_position": at}
