"""Triton kernels without a GPU: run in the interpreter against the same oracles, and compiled for real GPUs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
SMALL = "merged or unseen or not_named or softcap_and_sinks or survivors or dead_tokens or matches_a_loop"
LIMITS = {80: 163 * 1024, 90: 227 * 1024}
"""Shared memory a block can have, in bytes."""

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this test starts the interpreter itself"),
]


def interpret(which: str) -> None:
    """Run the tests of this folder that name the Triton backend, in a process where it is interpreted."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE), "-k", which]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


def test_interpreted_on_a_few_cases() -> None:
    interpret(f"triton and ({SMALL})")


@pytest.mark.slow
def test_interpreted_on_all_cases() -> None:
    interpret("triton")


@pytest.mark.parametrize("capability", LIMITS)
def test_some_kernels_compile_ahead_of_time(capability: int) -> None:
    compiles(capability, ["units of 16", "kivi, 4 bits", "bounds", "top 128 of 8192"])


@pytest.mark.slow
@pytest.mark.parametrize("capability", LIMITS)
def test_every_kernel_compiles_ahead_of_time(capability: int) -> None:
    compiles(capability, None)


def compiles(capability: int, only: list[str] | None) -> None:
    from kvengine.kernels.gpu.ahead import cases, compile_all

    found = compile_all(capability, only)
    assert {row.case for row in found} == set(only or cases())
    for row in found:
        assert 0 < row.registers <= 255 and row.shared <= LIMITS[capability], row
        assert row.stack <= 512, row  # what spills stays in the first-level cache


def test_codes_cost_fewer_instructions_than_their_bytes_leave_time_for() -> None:
    """What a multiprocessor of an H200 issues (4 a cycle) while its 132nd of 4.2 TB/s delivers 64 tokens of 128 channels."""
    from kvengine.kernels.gpu.ahead import compile_all
    from kvengine.kernels.paged_attention.words import EACH_OF_FOUR_BITS

    per_token = 2 * 64 + 2 * 4 * 128 / 32 + 4  # codes, ranges in float16 for 32 numbers each, a position
    room = 4 * 1.755e9 * 64 * per_token / (4.2e12 / 132)
    (read,) = [row for row in compile_all(90, ["kivi, 4 bits"]) if row.kernel == "words_kernel"]
    assert 0 < 2 * read.loop * read.warps < room  # 32 tokens a turn
    assert read.registers * 32 * EACH_OF_FOUR_BITS <= 65536  # all programs run at once


def test_a_long_prompt_fits_into_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first axis of a CUDA grid holds more than 65535 programs."""
    from triton.runtime.jit import JITFunction

    from kvengine.kernels.span_attention import causal_spans
    from kvengine.kernels.span_attention.triton import span_attention

    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(JITFunction, "__getitem__", lambda self, grid: lambda *a, **k: grids.append(grid))
    q, k = torch.zeros(2, 8, 262144, 1), torch.zeros(2, 262144, 1)
    position = torch.arange(262144).expand(2, -1)
    span_attention(q, k, k, position, causal_spans(262144, 262144, k.device), 0.1, None, None, None, 128)
    assert grids[0][0] > 65535 and all(n <= 65535 for n in grids[0][1:])
