"""What would make the host wait for a GPU, or a shape depend on data, seen without a GPU."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[1]
aten = torch.ops.aten
WAITS = (
    aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select, aten._unique2,
    aten.unique_dim, aten.unique_consecutive,
)  # fmt: skip
INDEXES = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
STAND_IN = ("kernels/codecs.py", "reference.py")
"""Torch code that runs where a GPU runs a Triton kernel."""


def ours(file: str) -> bool:
    """Whether a file belongs to the repository: an environment may lie in its folder."""
    return file.startswith(str(ROOT)) and "site-packages" not in file and file != __file__


class Watch(TorchDispatchMode):
    """Counts operations that read a value on the host or make a shape of data, by the line that asked for them.

    `.tolist()`, `.numpy()` and `torch.tensor(...)` do not come through the dispatcher on a CPU, and are watched by name.
    Moves between devices are seen by `support_device`.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.active = False
        for name in ("tolist", "numpy"):
            patch.setattr(Tensor, name, self.noted(name, getattr(Tensor, name)))
        patch.setattr(torch, "tensor", self.noted("torch.tensor", torch.tensor))

    def __enter__(self) -> Watch:
        self.active = True
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.active = False
        super().__exit__(*error)

    def noted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.note(name)
            return original(*args, **kwargs)

        return call

    def note(self, what: str) -> None:
        if not self.active:
            return
        lines = [x for x in traceback.extract_stack() if ours(x.filename)]
        if lines and not lines[-1].filename.endswith(STAND_IN):
            self.found[f"{what} at {lines[-1].filename.removeprefix(str(ROOT))}:{lines[-1].lineno}"] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet in WAITS:
            self.note(str(packet))
        if packet in INDEXES and any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
            self.note("index by a mask")
        if packet is aten.repeat_interleave and func._overloadname == "Tensor" and kwargs.get("output_size") is None:
            self.note("repeat_interleave by a tensor")
        return func(*args, **kwargs)
