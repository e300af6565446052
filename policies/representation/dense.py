"""Dense: keys and values as they are."""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from kvengine.policies.representation import Fields, Representation


@dataclass(frozen=True)
class Dense(Representation):
    """Keys and values as they are."""

    lossless: ClassVar[bool] = True
    codec: ClassVar[str] = "dense"
    by_slot: ClassVar[bool] = True

    def encode(
        self,
        k: Float[Tensor, "page token dim"],
        v: Float[Tensor, "page token dim_v"],
        score: Float[Tensor, "page token"],
    ) -> Fields:
        return {"k": k, "v": v}

    def decode(self, fields: Fields) -> tuple[Float[Tensor, "page token dim"], Float[Tensor, "page token dim_v"]]:
        return fields["k"], fields["v"]
