"""An open tail of latents: values are so many first channels of the keys, and held once."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from kvengine.kernels.gpu import step as gpu
from kvengine.kernels.step import Slots
from kvengine.tail import Tail
from kvengine.tokens import moved


class Nested(Tail):
    """A tail whose values are the first `inner` channels of its keys, and held once."""

    def __init__(self, inner: int, k: Tensor, v: Tensor, scored: bool = True, placed: bool = True) -> None:
        self.inner = inner
        super().__init__(k, v, scored, placed)

    @property  # type: ignore[override]
    def v(self) -> Float[Tensor, "row slot dim_v"]:
        return self.k[..., : self.inner]

    @v.setter
    def v(self, new: Tensor) -> None:
        """Nothing to keep: it is a part of the keys that come with it."""

    def keep(self, k: Tensor, v: Tensor, slots: int) -> None:
        self.k, self.ready = moved(k, slots), None

    def slots(self) -> Slots | gpu.Slots | None:
        """Not for a GPU, to which the view of the values would be another at every token."""
        return super().slots() if self.k.is_cpu else None

    def tensors(self) -> dict[str, Tensor]:
        return {name: x for name, x in super().tensors().items() if name != "v"}


def nested(tail: Tail, inner: int) -> Nested:
    """The same slots with values, so many first channels of the keys; they had none."""
    own = {name: x for name, x in vars(tail).items() if name != "v"}
    new: Nested = object.__new__(Nested)
    vars(new).update(own, inner=inner, ready=None)
    return new


def valueless(tail: Tail) -> Tail:
    """The same slots without."""
    own = {name: x for name, x in vars(tail).items() if name != "inner"}
    new: Tail = object.__new__(Tail)
    vars(new).update(own, v=tail.k[..., :0], ready=None)
    return new
