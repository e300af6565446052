"""TurboQuant (Zandieh et al., 2025, arXiv:2504.19874): vectors are turned at random, then rounded number by number.

    y      =  R k / |k|                                      (R: signs, a Hadamard transform, signs; for values alike)
    code   =  the level nearest to y sqrt(dim),              levels: Lloyd's and Max's for a normal number
    key    ~  scale R^T level[code],                         scale = |k| / <R k / |k|, level[code]>
    the newest `residual` tokens stay exact

Turned, every number of a vector is nearly normal, whatever the model's outlier channels; so tokens are coded one by one
and need no ranges: bits + 16 / dim per number, 4.125 for 4 bits and heads of 128 (KIVI: 5.0). Keys are turned as they
are cached, after the model's own rotation. With the scale above, a decoded key's product with any query is right on
average over rotations. (The paper's own scale, |k| / sqrt(dim), shrinks all logits, by 12 % at 2 bits.) Of unit
vectors, the squared error is 0.13, 0.035 and 0.009 for 2, 3 and 4 bits, with the paper's scale 0.117, 0.034 and 0.009.

Differs from the paper: no second stage. It spends a bit on the signs of a random projection of what is left (QJL), to
make products unbiased; the scale does that for no bit, and the signs' noise has been seen to hurt attention by those who
serve models with it. No channels with more bits than others ("2.5 bits"). Heads whose size is no power of two are turned
by a Hartley transform as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kvengine.kernels import codecs, turboquant
from kvengine.policies._budget import check_choice, check_count
from kvengine.policies.representation import Fields, Representation


@dataclass(frozen=True)
class TurboQuant(Representation):
    """Codes of a few bits for turned vectors, one scale per token and head.

    Args:
        bits: per code, 1 to 4.
        values: bits per code of values; None: as many as of keys. Values bear fewer.
        residual: the newest tokens, which stay exact. Tokens.
        scale: "unbiased": products with a query are right on average; "least" for the least squared error, or "paper".
    """

    codec: ClassVar[str] = "turboquant"
    by_slot: ClassVar[bool] = True
    bits: int = 4
    values: int | None = None
    residual: int = 128
    scale: turboquant.Form = "unbiased"

    def __post_init__(self) -> None:
        check_choice(self, bits=(self.bits, turboquant.BITS), values=(self.values, (None, *turboquant.BITS)))
        check_choice(self, scale=(self.scale, ("unbiased", "least", "paper")))
        check_count(self, residual=self.residual)

    @property
    def room(self) -> int:
        return self.residual

    def encode(
        self,
        k: Float[Tensor, "page token dim"],
        v: Float[Tensor, "page token dim_v"],
        score: Float[Tensor, "page token"],
    ) -> Fields:
        found = {}
        for side, x, bits in (("k", k, self.bits), ("v", v, self.values or self.bits)):
            found[f"{side}_code"], found[f"{side}_scale"] = turboquant.encode(x, bits, self.scale, torch.float16)
        return found

    def decode(self, fields: Fields) -> tuple[Float[Tensor, "page token dim"], Float[Tensor, "page token dim_v"]]:
        bits = self.bits, self.values or self.bits
        dims = (fields[f"{side}_code"].shape[2] * 8 // n for side, n in zip("kv", bits, strict=True))
        return codecs.decode("turboquant", fields, *dims)
