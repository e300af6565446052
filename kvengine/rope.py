"""Rotary position embedding, as the engine needs it: keys turned to another position, and back.

Models rotate keys before the cache sees them. A method that wants them unrotated (low-rank keys), or elsewhere
(in-cache positions), turns them by a difference of positions: R(p) R(q) = R(p + q), so R(-p) undoes R(p).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Rope:
    """The model's rotation.

    Attributes:
        frequency: radians per position, one for each rotated pair.
        interleaved: whether pairs are (0, 1), (2, 3), … rather than (i, i + half).
    """

    frequency: Float[Tensor, "pair"]
    interleaved: bool = False

    def turn(self, x: Float[Tensor, "*b token dim"], by: Int[Tensor, "*#b token"]) -> Float[Tensor, "*b token dim"]:
        """`x` rotated on by `by` positions (negative: back). Only the first `2 * pair` channels turn.

        Shapes: x [..., token, dim], any float dtype; by [..., token], any integer dtype, with axes of length 1 where
        the positions are the same. Computed in fp32.
        """
        angle = by[..., None].float() * self.frequency.to(x.device)
        return self._apply(x, angle.cos(), angle.sin())

    def average(self, x: Float[Tensor, "*b dim"], by: Int[Tensor, "*#b place"]) -> Float[Tensor, "*b dim"]:
        """The mean of `x` turned by each of some numbers of positions. Computed in fp32."""
        angle = by[..., None].float() * self.frequency.to(x.device)
        return self._apply(x, angle.cos().mean(-2), angle.sin().mean(-2))

    def _apply(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n = 2 * len(self.frequency)
        a, b = self._split(x[..., :n].float())
        one, other = torch.addcmul(a * cos, b, sin, value=-1), torch.addcmul(b * cos, a, sin)
        turned = self._join(one, other).to(x.dtype)
        return turned if n == x.shape[-1] else torch.cat([turned, x[..., n:]], -1)

    def _split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.interleaved:
            return x[..., 0::2], x[..., 1::2]
        return x.chunk(2, -1)  # type: ignore[return-value]

    def _join(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([a, b], -1).flatten(-2) if self.interleaved else torch.cat([a, b], -1)
