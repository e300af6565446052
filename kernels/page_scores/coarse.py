"""An 8-bit copy of units' bounds, by which the best units are found while reading a fraction of the bytes.

The copy only rules units out: those that it leaves are scored with the true bounds, so the choice is the one that
scoring everything makes (`kvengine/kernels/cpu/coarse.c`). CPU only; on a GPU what is kept from call to call is how to launch.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.cpu import call, library
from kvengine.kernels.dispatch import watched
from kvengine.kernels.page_scores import native
from kvengine.kernels.page_scores.remembered import Remembered

BLOCK = 64
"""Units that share a scale per channel. Mirrors coarse.c."""
LEAST = 512
"""Units below which scoring them all is no slower."""
POINTER, I64 = ctypes.c_void_p, ctypes.c_int64


class Call(ctypes.Structure):
    """Mirrors coarse.c."""

    _fields_ = [
        ("exact", native.Bounds),
        ("given", POINTER),
        *((name, I64) for name in ("given_dtype", "given_dim", "given_row", "given_head")),
        *((name, I64) for name in ("coded", "code_row", "scale_row", "stride")),
        *((name, POINTER) for name in ("code", "scale", "zero")),
        *((name, I64) for name in ("from_", "count")),
        ("limits", POINTER),
        ("ids", POINTER),
        ("refined", POINTER),
    ]


class Ready:
    """A choice described to C, made again while the bounds lie where they lay and the queries are of one kind."""

    def __init__(self, kind: tuple[Any, ...], described: Call, most: int) -> None:
        self.kind, self.described = kind, described
        self.most = most  # threads
        self.exact, self.where, self.run = described.exact, ctypes.byref(described), library.needed().kv_coarse_top
        self.shape = described.exact.rows, described.count

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """None, to who copies what holds this: a copy has bounds of its own, and describes those."""
        return type(None), ()

    def choose(self, q: Tensor) -> Int[Tensor, "row chosen"]:
        ids = torch.empty(self.shape, dtype=torch.int32)
        described = self.described
        described.given, described.ids = q.data_ptr(), ids.data_ptr()
        self.exact.threads = min(torch.get_num_threads(), self.most)
        if self.run(self.where):
            raise KernelError("the native selection kernel could not allocate its buffers")
        return ids


def kind_of(q: Tensor, low: Tensor, high: Tensor, alive: Tensor, count: int, reduce: str) -> tuple[Any, ...]:
    """What a description depends on."""
    return (
        low.data_ptr(), high.data_ptr(), alive.data_ptr(), count, reduce, q.shape, q.stride(), q.dtype, low.shape, low.stride(),
        low.dtype, high.shape, high.stride(), high.dtype, alive.shape, alive.stride(),
    )  # fmt: skip


class Coarse:
    """Codes of the bounds of a table's first `done` units, made when first asked for.

    Units are added behind those that are there; where a unit's bounds change, say so by `changed`. `tensors`: what it
    holds, {} before first use.
    """

    def __init__(self) -> None:
        self.done = 0
        self._refined = torch.zeros(1, dtype=torch.int64)  # by row
        self._tensors: dict[str, Tensor] = {}
        self._shared = False  # another refers to the tensors, so they are cloned before more is written
        self._ready: Ready | None = None
        self.remembered = Remembered()  # on a GPU

    def __copy__(self) -> Coarse:
        twin = object.__new__(Coarse)
        self._shared, self._ready = True, None
        twin.__dict__.update(self.__dict__)
        return twin

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self._tensors

    @property
    def refined(self) -> float:
        """Units per row whose true bounds the last choice read."""
        return float(self._refined.float().mean())

    def reads(self, units: int, exact: int) -> int:
        """Bytes that the next choice among `units` reads, about; `exact`: those of the true bounds of all."""
        if not self.done:
            return exact
        code, scale = self._tensors["code"], self._tensors["scale"]
        coded = self.done * (code[0, 0].nbytes + 2 * scale[0, 0].nbytes // BLOCK) * len(code)
        return coded + int(self.refined * exact / units)

    def changed(self, first: int) -> None:
        """Units from `first` on have other bounds than before, or may be alive where they were not."""
        self.done = min(self.done, first // BLOCK * BLOCK)

    def clear(self, moved: bool = True) -> None:
        """Forget everything; how to launch only if what the launches name has `moved`."""
        self.done, self._tensors, self._shared, self._ready = 0, {}, False, None
        if moved:
            self.remembered.forget()

    def again(
        self,
        q: Float[Tensor, "row group dim"],
        low: Float[Tensor, "row unit dim"],
        high: Float[Tensor, "row unit dim"],
        alive: Bool[Tensor, "row unit"],
        count: int,
        reduce: str,
    ) -> Int[Tensor, "row chosen"] | None:
        """`top`, where nothing but the queries is other than at the last one: a fraction of the host's time. Else None."""
        ready = self._ready
        if ready is None or self.done != ready.described.coded or watched((q, low, high)):
            return None
        return ready.choose(q) if kind_of(q, low, high, alive, count, reduce) == ready.kind else None

    def top(
        self,
        q: Float[Tensor, "row group dim"],
        low: Float[Tensor, "row unit dim"],
        high: Float[Tensor, "row unit dim"],
        alive: Bool[Tensor, "row unit"],
        count: int,
        reduce: str,
    ) -> Int[Tensor, "row chosen"]:
        """What `top_units(page_scores(...), count)` gives, as int32."""
        self._ready = None  # what it describes may be replaced, and then this may break off
        rows, units = alive.shape
        alive = alive if alive.stride(-1) == 1 else alive.contiguous()
        q = q if q.stride(-1) == 1 else q.contiguous()
        bounds, whole = native.of(q, low, high, alive, reduce), units // BLOCK * BLOCK
        self._reserve(rows, whole, bounds.dim)
        self._refined = torch.empty(rows, dtype=torch.int64)
        code, scale, zero, limits = (self._tensors[name] for name in ("code", "scale", "zero", "limits"))
        described = Call(
            exact=bounds, given_dtype=call.DTYPES[q.dtype], given_dim=q.shape[2], given_row=q.stride(0), given_head=q.stride(1),
            coded=whole, code_row=code.stride(0), scale_row=scale.stride(0), stride=code.shape[2], code=code.data_ptr(),
            scale=scale.data_ptr(), zero=zero.data_ptr(), from_=self.done, count=count, limits=limits.data_ptr(),
            refined=self._refined.data_ptr(),
        )  # fmt: skip
        if self.done < whole:
            library.needed().kv_code(ctypes.byref(described))
            self.done = whole
        self._ready = Ready(kind_of(q, low, high, alive, count, reduce), described, call.most(2 * low.numel()))
        return self._ready.choose(q)

    def _reserve(self, rows: int, units: int, dim: int) -> None:
        """Room for so many units, an eighth more than asked if there is none."""
        held = self._tensors.get("code")
        wide = call.up(2 * dim, 64)
        same = held is not None and held.shape[0] == rows and held.shape[2] == wide
        if held is not None and same and held.shape[1] >= units:
            if self._shared and self.done < units:
                self._tensors, self._shared = {name: x.clone() for name, x in self._tensors.items()}, False
            return
        room = BLOCK * -(-(units + units // 8) // BLOCK)
        made = {
            "code": torch.empty(rows, room, wide, dtype=torch.uint8),
            "scale": torch.empty(rows, room // BLOCK, 2 * dim, dtype=torch.float32),
            "zero": torch.empty(rows, room // BLOCK, 2 * dim, dtype=torch.float32),
            "limits": torch.empty(rows, room, 2, dtype=torch.float32),
        }
        if not same:
            self.done = 0
        for name, per in (("code", 1), ("scale", BLOCK), ("zero", BLOCK)):
            if self.done:
                made[name][:, : self.done // per] = self._tensors[name][:, : self.done // per]
        self._tensors, self._shared = made, False
