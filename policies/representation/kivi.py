"""KIVI (Liu et al., ICML 2024, arXiv:2402.02750): keys quantised per channel, values per token, asymmetric, in groups.

    key    of channel c, over a group of tokens:      code = round((k - min) / s),   s = (max - min) / (2^bits - 1)
    value  of token t, over a group of channels:      the same
    the newest `residual` tokens stay exact

Effective bits: bits + 32 / group (a scale and a minimum in float16 per group): 5.0 for 4 bits in groups of 32. For a model in
bfloat16 too: rounded to its 8 bits, a scale is off by half a step of 8-bit codes at the far end. Float16 ends at 65 504: a
minimum or a scale beyond that is kept as that. Nor has it more than multiples of 6e-8: however narrow a range is, numbers may
be off by 3e-8 for each step, which are 8e-6 for 8 bits and 5e-7 for 4.
Defaults: group 32 and residual 128 as in the paper's runs; 4 bits, as its authors advise for models with query groups.

Differs from the official code: the residual holds 128 to 159 tokens of keys and values alike (the code flushes 128 keys
at once and moves one value per step); tokens that are not held take no part in a group's range; query groups are
supported everywhere.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.kernels import codecs
from kvengine.kernels.quantise import quantise
from kvengine.policies._budget import TOGETHER, check_choice, check_count
from kvengine.policies.representation import Fields, Representation, channel_group


@dataclass(frozen=True)
class Kivi(Representation):
    """Codes of a few bits, keys grouped per channel, values per token.

    Args:
        bits: per code: 1, 2, 4 or 8.
        group: tokens (keys) or channels (values) that share a scale; all channels of a head that it does not divide.
        residual: the newest tokens, which stay exact. Tokens.
    """

    codec: ClassVar[str] = "kivi"
    bits: int = 4
    group: int = 32
    residual: int = 128

    def __post_init__(self) -> None:
        check_choice(self, bits=(self.bits, (1, 2, 4, 8)))
        check_count(self, least=1, most=TOGETHER, group=self.group)
        check_count(self, residual=self.residual)
        if self.group * self.bits % 8:
            raise PolicyError(f"Kivi: group={self.group} codes of {self.bits} bits do not fill whole bytes")

    @property
    def multiple(self) -> int:
        return self.group

    @property
    def room(self) -> int:
        return self.residual

    def encode(
        self,
        k: Float[Tensor, "page token dim"],
        v: Float[Tensor, "page token dim_v"],
        score: Float[Tensor, "page token"],
    ) -> Fields:
        key = quantise(k, self.bits, self.group, "tokens", alive=score > float("-inf"))
        value = quantise(v, self.bits, channel_group(self.group, v.shape[2]), "channels")
        return {f"{side}_{name}": x for side, q in (("k", key), ("v", value)) for name, x in q._asdict().items()}

    def decode(self, fields: Fields) -> tuple[Float[Tensor, "page token dim"], Float[Tensor, "page token dim_v"]]:
        dims = (fields[f"{side}_code"].shape[2] * 8 // self.bits for side in "kv")
        return codecs.decode("kivi", fields, *dims)
