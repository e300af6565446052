"""Launches that run what Triton compiles for a GPU, on CPU tensors (`support_ptx`)."""

from __future__ import annotations

import atexit
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from support_ptx import Memory, Program
from triton.runtime.jit import JITFunction

from kvengine.kernels import dispatch
from kvengine.kernels.gpu.ahead import only_compiling

WRITTEN_OTHERWISE = (
    "lowrank_attention.triton", "paged_attention.triton", "gpu.halves", "page_scores.triton", "span_attention.triton",
)  # fmt: skip
"""Kernels that ask whether they are interpreted."""


@contextmanager
def running_compiled(capability: int) -> Iterator[list[tuple[str, int]]]:
    """Each launch is compiled for the compute capability (times ten), and run; yields names with instructions taken."""
    ran: list[tuple[str, int]] = []
    programs: dict[int, Program] = {}
    with only_compiling(capability):

        def launcher(self: Any, grid: Any) -> Callable[..., None]:
            def launch(*args: Any, **kwargs: Any) -> None:
                kernel = self.run(*args, grid=grid, warmup=True, **kwargs)
                program = programs.get(id(kernel))
                if program is None:
                    program = programs[id(kernel)] = Program(
                        kernel.asm["ptx"], kernel.metadata.num_warps, kernel.metadata.shared
                    )
                names = inspect.signature(self.fn).parameters
                bound = (
                    inspect.signature(self.fn).bind(*args, **{k: v for k, v in kwargs.items() if k in names}).arguments
                )
                flat = [x for name, x in bound.items() for x in _flat(x, kernel.src.signature[name])]
                tensors = [x for x in flat if isinstance(x, torch.Tensor)]
                given = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in flat]
                given += [0] * (len(program.types) - len(given))  # scratch memory that no kernel asks for
                size = grid(bound) if callable(grid) else grid
                ran.append((kernel.name, program.launch(size, given, Memory([*tensors, *program.tables.values()]))))

            return launch

        before, JITFunction.__getitem__ = JITFunction.__getitem__, launcher
        try:
            yield ran
        finally:
            JITFunction.__getitem__ = before


def _flat(x: Any, kind: Any) -> Iterator[Any]:
    """The arguments that are not compiled in."""
    if isinstance(kind, tuple):
        for part, of in zip(x, kind, strict=True):
            yield from _flat(part, of)
    elif kind != "constexpr":
        yield x


def run_compiled(capability: int) -> None:
    """From now on in this process (`TRITON_COMPILED=90`): CPU tensors may have the Triton backend, as where it is interpreted."""
    whole = running_compiled(capability)
    whole.__enter__()
    atexit.register(whole.__exit__, None, None, None)
    for name in WRITTEN_OTHERWISE:
        sys.modules[f"kvengine.kernels.{name}"].interpreted = lambda: False  # type: ignore[attr-defined]
    dispatch._interpreted = lambda: True
