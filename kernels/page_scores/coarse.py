"""An 8-bit copy of units' bounds, by which the best units are found while reading a fraction of the bytes.

The copy only rules units out: those that it leaves are scored with the true bounds, so the choice is the one that
scoring everything makes (`kvengine/kernels/cpu/coarse.c`). CPU only; on a GPU what is kept from call to call is how to launch.
"""

from __future__ import annotations

import ctypes

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.cpu import call, library
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
        *((name, I64) for name in ("coded", "code_row", "scale_row", "stride")),
        *((name, POINTER) for name in ("code", "scale", "zero")),
        *((name, I64) for name in ("from_", "count")),
        ("limits", POINTER),
        ("ids", POINTER),
        ("refined", POINTER),
    ]


class Coarse:
    """Codes of the bounds of a table's first `done` units, made when first asked for.

    Units are added behind those that are there; where a unit's bounds change, say so by `changed`. `tensors`: what it
    holds, {} before first use.
    """

    def __init__(self) -> None:
        self.done = 0
        self._refined = torch.zeros(1)  # by row
        self._tensors: dict[str, Tensor] = {}
        self._shared = False  # another refers to the tensors, so they are cloned before more is written
        self.remembered = Remembered()  # on a GPU

    def __copy__(self) -> Coarse:
        twin = object.__new__(Coarse)
        self._shared = True
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

    def clear(self) -> None:
        """Forget everything."""
        self.done, self._tensors, self._shared = 0, {}, False
        self.remembered.forget()

    def top(
        self,
        q: Float[Tensor, "row group dim"],
        low: Float[Tensor, "row unit dim"],
        high: Float[Tensor, "row unit dim"],
        alive: Bool[Tensor, "row unit"],
        count: int,
        reduce: str,
    ) -> Int[Tensor, "row chosen"]:
        """What `top_units(page_scores(...), count)` gives."""
        rows, units = alive.shape
        bounds, keep = native.bounds(q, low, high, alive, reduce)
        whole = units // BLOCK * BLOCK
        self._reserve(rows, whole, bounds.dim)
        ids, refined = torch.empty(rows, count, dtype=torch.int64), torch.empty(rows, dtype=torch.int64)
        code, scale, zero = (self._tensors[name] for name in ("code", "scale", "zero"))
        described = Call(
            exact=bounds, coded=whole, code_row=code.stride(0), scale_row=scale.stride(0), stride=code.shape[2],
            code=code.data_ptr(), scale=scale.data_ptr(), zero=zero.data_ptr(), from_=self.done, count=count,
            limits=self._tensors["limits"].data_ptr(), ids=ids.data_ptr(),
            refined=refined.data_ptr(),
        )  # fmt: skip
        loaded = library.needed()
        if self.done < whole:
            loaded.kv_code(ctypes.byref(described))
            self.done = whole
        if loaded.kv_coarse_top(ctypes.byref(described)):
            raise KernelError("the native selection kernel could not allocate its buffers")
        del keep
        self._refined = refined
        return ids

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
            "scale": torch.empty(rows, room // BLOCK, 2 * dim),
            "zero": torch.empty(rows, room // BLOCK, 2 * dim),
            "limits": torch.empty(rows, room, 2),
        }
        if not same:
            self.done = 0
        for name, per in (("code", 1), ("scale", BLOCK), ("zero", BLOCK)):
            if self.done:
                made[name][:, : self.done // per] = self._tensors[name][:, : self.done // per]
        self._tensors, self._shared = made, False
