"""What is told of launches in the interpreter (support_sanitise): each of these kernels is wrong, or looks as if it were."""

from __future__ import annotations

import os

import pytest
import torch

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="launches are watched in the interpreter"
)

if os.environ.get("TRITON_INTERPRET") == "1":
    import support_kernels  # noqa: F401 - it begins to watch
    import triton
    import triton.language as tl
    from triton.runtime.errors import InterpreterError

    @triton.jit
    def shift_kernel(x, out, by, size, BLOCK: tl.constexpr):
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + t + by, tl.load(x + t, mask=t < size, other=0), mask=t < size)

    @triton.jit
    def count_kernel(counts, BARRIER: tl.constexpr):
        count = tl.load(counts) + 1
        if BARRIER:
            tl.debug_barrier()
        tl.store(counts, count)

    @triton.jit
    def meet_kernel(out, lanes, BLOCK: tl.constexpr):
        t = tl.arange(0, BLOCK)
        tl.store(out + t // lanes, t)


def numbers(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32)


def test_triton_program_that_leaves_its_tensors_is_told() -> None:
    x, out = numbers(100), numbers(100)
    shift_kernel[(1,)](x, out, 0, 100, BLOCK=128)
    with pytest.raises(
        InterpreterError, match="shift_kernel: program 1 reads outside.* x's, of 400 bytes.*bytes 0 to 400"
    ):
        shift_kernel[(1,)](x, out, 0, 101, BLOCK=128)
    with pytest.raises(InterpreterError, match="program 1 writes outside.* out's"):
        shift_kernel[(1,)](x, out, 1, 100, BLOCK=128)


def test_triton_programs_that_meet_are_told() -> None:
    x = numbers(512)
    shift_kernel[(4,)](x, x, 0, 512, BLOCK=128)
    with pytest.raises(InterpreterError, match="a program reads what another wrote, of x"):
        shift_kernel[(3,)](x, x, 128, 384, BLOCK=128)
    with pytest.raises(InterpreterError, match="a program writes what another read, of x"):
        shift_kernel[(4,)](x[128:], x[128:], -128, 384, BLOCK=128)
    with pytest.raises(InterpreterError, match="a program writes what another wrote, of out"):
        meet_kernel[(2,)](x, 1, BLOCK=128)
    with pytest.raises(InterpreterError, match="one store writes a byte of out twice"):
        meet_kernel[(1,)](x, 2, BLOCK=128)


def test_triton_warps_that_run_ahead_are_told() -> None:
    x = numbers(512)
    count_kernel[(1,)](x, BARRIER=True)
    count_kernel[(1,)](x, BARRIER=False, num_warps=1)
    with pytest.raises(InterpreterError, match="a program writes what it read, of counts, and no barrier is between"):
        count_kernel[(1,)](x, BARRIER=False)
    with pytest.raises(InterpreterError, match="no barrier"):
        shift_kernel[(1,)](x, x, 0, 64, BLOCK=64)  # four warps hold each number twice
    with pytest.raises(InterpreterError, match="no barrier"):
        shift_kernel[(1,)](x, x, 1, 128, BLOCK=128)  # written by the thread before the one that reads it
