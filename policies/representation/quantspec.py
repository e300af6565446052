"""QuantSpec (Tiwari et al., ICML 2025, arXiv:2502.10424): eight bits as two nibbles, of which a draft reads the upper.

    upper   u = round((x - min) / s) in 0..15,           s = (max - min) / 15,    x4 = min + u s
    lower   l = round((x - x4) / (s / 16)) in -8..7,                              x8 = x4 + l s / 16

Keys are grouped per channel over tokens, values per token over channels. |x - x4| <= s/2, and |x - x8| <= s/32, but for
remainders near s/2, which the lower nibble cuts at 7: s/16 there.

A cache under `quantspec` can be judged with all eight bits and drafted on with four: one store serves both.
Speculation with `stack="quantspec", middle="quantspec(bits=4)"` does so; its text has the law of the eight-bit cache.

Effective bits: bits + 32 / group. Defaults: groups of 128 as in the paper, which are the channels of a head at most;
the newest 128 tokens exact.

Differs from the official code: pages are sealed while decoding too (its buffer is never flushed); weights stay as they
are (it drafts with four-bit weights as well); any temperature.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.kernels import codecs
from kvengine.kernels.quantise import dequantise, pack, quantise
from kvengine.policies._budget import TOGETHER, check_choice, check_count
from kvengine.policies.representation import Fields, Representation, channel_group


@dataclass(frozen=True)
class QuantSpec(Representation):
    """Two nibbles per number; a draft may read the upper ones alone.

    Args:
        bits: 8 stores both nibbles, 4 the upper ones.
        group: tokens (keys) or channels (values) that share a scale; all channels of a head that it does not divide.
        residual: the newest tokens, which stay exact. Tokens.
    """

    fine: ClassVar[tuple[str, ...]] = ("k_low", "v_low")
    bits: int = 8
    group: int = 128
    residual: int = 128

    def __post_init__(self) -> None:
        check_choice(self, bits=(self.bits, (4, 8)))
        check_count(self, least=1, most=TOGETHER, group=self.group)
        check_count(self, residual=self.residual)
        if self.group % 2:
            raise PolicyError(f"QuantSpec: group={self.group} nibbles do not fill whole bytes")

    @property
    def multiple(self) -> int:
        return self.group

    @property
    def room(self) -> int:
        return self.residual

    def read_as(self, coarse: bool) -> str:
        return "quantspec" if self.bits == 8 and not coarse else "kivi"  # upper nibbles are laid out as KIVI's codes

    def coarse_of(self, other: Representation) -> bool:
        return isinstance(other, QuantSpec) and other.bits == 8 and self == replace(other, bits=4)

    def encode(
        self,
        k: Float[Tensor, "page token dim"],
        v: Float[Tensor, "page token dim_v"],
        score: Float[Tensor, "page token"],
    ) -> Fields:
        alive = score > float("-inf")
        return {
            **self._nibbles("k", k, self.group, "tokens", alive),
            **self._nibbles("v", v, channel_group(self.group, v.shape[2]), "channels", None),
        }

    def decode(self, fields: Fields) -> tuple[Float[Tensor, "page token dim"], Float[Tensor, "page token dim_v"]]:
        dims = (fields[f"{side}_code"].shape[2] * 2 for side in "kv")
        return codecs.decode("quantspec" if "k_low" in fields else "kivi", fields, *dims)

    def _nibbles(
        self,
        side: str,
        x: Float[Tensor, "page token dim"],
        group: int,
        over: Literal["tokens", "channels"],
        alive: Bool[Tensor, "page token"] | None,
    ) -> Fields:
        upper = quantise(x, 4, group, over, alive=alive)
        found = {f"{side}_{name}": part for name, part in upper._asdict().items()}
        if self.bits == 8:
            step = codecs.spread(upper.scale, x) / 16
            rest = (x.float() - dequantise(upper, 4)) / step.clamp_min(torch.finfo(torch.float32).tiny)
            found[f"{side}_low"] = pack((rest.round().clamp(-8, 7) + 8).to(torch.uint8), 4)
        return found
