"""Launch a kernel again, without what Triton does at every launch: 15 to 40 microseconds of the host, of which 5 remain.

To find what it compiled for such arguments, Triton looks at each of them, writes the options out as text, compares the
globals that the kernel reads with what they were, and calls empty lists of hooks. Here one key finds it, which tells
arguments apart at least as finely as Triton's: a tensor by dtype and by where it lies within 16 bytes, a number by its type
and its value (of one that is not specialised, whether 32 bits hold it), constants by name and value. What is not found, or
not known to be safe, Triton launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction, KernelInterface

from kvengine.errors import KernelError
from kvengine.kernels.gpu import Note, noting

KNOWN = ("3.6.", "3.7.", "3.8.", "3.9.")
"""The releases of Triton whose launchers are called: how is nobody's interface."""
TOGETHER = not triton.__version__.startswith("3.6.")
"""Whether these are the launchers of Triton 3.7 and later: one function for all kernels, which takes a kernel's arguments as one
tuple, behind how they are to be read."""
SIDE = 65535
"""Blocks that CUDA takes in the second and the third direction of a launch; in the first it is 2^31 - 1."""
MOST = 512
"""Kinds of arguments that are remembered of a kernel: numbers that change at every launch should be none of those specialised,
and if one is, memory does not grow with it."""
PLAIN = {Tensor, int, float, bool, type(None)}


class Ready(NamedTuple):
    """What was compiled, and how to launch it."""

    run: Callable[..., None]
    how: tuple[Any, ...]
    constants: tuple[None, ...]
    """Of constants, which are compiled in, launchers only count that they are there."""
    compiled: Any
    """Kept: with it Triton gives back the kernel."""


def start(ready: Ready, grid: tuple[int, int, int], stream: int, given: Sequence[Any]) -> None:
    """Launch it with these arguments."""
    if TOGETHER:
        ready.run(*grid, stream, *ready.how, (*given, *ready.constants))
    else:
        ready.run(*grid, stream, *ready.how, *given, *ready.constants)


def launched_again(kernel: Any) -> Any:
    """The kernel, launched as before: `kernel[grid](...)`. By Triton alone where it is interpreted, or Triton is another."""
    known = isinstance(kernel, JITFunction) and triton.__version__.startswith(KNOWN)
    return Again(kernel) if known else Noted(kernel)


class Noted:
    """A kernel whose launches are noted, if somebody wants to make them again (`kvengine.kernels.gpu.launches`)."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        if max(grid[1:], default=0) > SIDE:
            raise KernelError(
                f"{self.kernel.__name__} would be launched in {' x '.join(map(str, grid))} blocks, and CUDA takes {SIDE} in all "
                "directions but the first: give fewer sequences at once, or a shorter text"
            )
        return partial(self.launch, grid)

    def launch(self, grid: tuple[int, ...], /, *given: Any, **named: Any) -> None:
        self.kernel[grid](*given, **named)
        self.note(grid, given, named)

    def note(self, grid: tuple[int, ...], given: tuple[Any, ...], named: dict[str, Any], ready: Any = None) -> None:
        if (notes := noting.get()) is not None:
            notes.append(Note(self, grid, given, named, ready))


class Again(Noted):
    """A kernel, and how to launch what was compiled for arguments that came before."""

    def __init__(self, kernel: Any) -> None:
        super().__init__(kernel)
        constant = [p.is_constexpr for p in kernel.params]
        self.given = constant.index(True) if True in constant else len(constant)  # so many are not known by name
        self.ordered = all(constant[self.given :])
        self.any_value = [p.num for p in kernel.params[: self.given] if p.do_not_specialize]
        self.ready: dict[tuple[Any, ...], Ready] = {}

    def launch(self, grid: tuple[int, ...], /, *given: Any, **named: Any) -> None:
        if len(given) != self.given or watched():
            super().launch(grid, *given, **named)
            return
        device = driver.active.get_current_device()
        key = (device, *self.kind(given), *named, *named.values())
        ready = self.ready.get(key)
        if ready is None:
            self.remember(key, self.kernel[grid](*given, **named), given, named)
        else:
            start(ready, whole(grid), driver.active.get_current_stream(device), given)
        self.note(grid, given, named, self.ready.get(key))

    def kind(self, given: tuple[Any, ...]) -> list[Any]:
        """What of the arguments decides what is compiled: of each its type, and then what Triton asks of that."""
        types = [type(x) for x in given]
        seen = [x if type(x) is not Tensor else _lies(x) if x.data_ptr() % 16 else x.dtype for x in given]
        for i in self.any_value:
            if types[i] is int and -(1 << 31) <= given[i] < 1 << 31:
                seen[i] = None
        return types + seen

    def remember(self, key: tuple[Any, ...], compiled: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        """How to launch it, unless there is something about it or its arguments that Triton's launches look at anew."""
        from triton.backends.nvidia.driver import CudaLauncher
        from triton.compiler import CompiledKernel

        if type(compiled) is not CompiledKernel or type(launcher := compiled.run) is not CudaLauncher:
            return  # none was launched, or it is compiled meanwhile, or runs elsewhere
        constants = self.kernel.params[self.given :]
        every = self.ordered and all(p.name in named for p in constants)  # nothing by default
        scratch = launcher.global_scratch_size or launcher.profile_scratch_size
        if not every or scratch or self.kernel.pre_run_hooks or not PLAIN.issuperset(map(type, given)):
            return
        if len(self.ready) >= MOST:
            self.ready.clear()
        first = compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl
        told: tuple[Any, ...] = (compiled.packed_metadata, None, None, None)  # no hooks, and nothing to tell them
        scratches = None, None
        if TOGETHER:
            told = *told, *scratches, launcher.arg_annotations, launcher.kernel_signature
        else:
            told = *scratches, *told
        self.ready[key] = Ready(launcher.launch, (*first, *told), (None,) * len(constants), compiled)


def whole(grid: tuple[int, ...]) -> tuple[int, int, int]:
    """A grid in all three dimensions."""
    x, y, z = (*grid, 1, 1)[:3]
    return x, y, z


def _lies(x: Tensor) -> tuple[Any, int]:
    """Of a tensor that does not begin at a multiple of 16 bytes."""
    return x.dtype, x.data_ptr() % 16


def watched() -> bool:
    """Whether launches are to be profiled or checked, which Triton does, or somebody only compiles or counts."""
    runtime = knobs.runtime
    if JITFunction.__getitem__ is not KernelInterface.__getitem__:
        return True
    try:
        hooks = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls or runtime.add_stages_inspection_hook
    except AttributeError:  # another kind of hook, or none
        return True
    return bool(hooks or runtime.debug or knobs.compilation.instrumentation_mode)
