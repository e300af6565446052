"""Kernels that come in before the one before them has ended: compiled, they wait before all access to memory."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence

import pytest

COMING = ["units of 16", "bounds", "shares", "top 128 of 8192", "kivi, 4 bits", "put a token", "verdict by ends"]
ALONE = ["fetch", "fetch what is new", "compact", "quantise keys", "mass"]
"""Cases of kernels that are no part of a decode step, or run beside it."""
ACCESS = re.compile(r"(?<![\w.%])(?!cvta)[a-z]+\.\S*\bglobal")
ANYWHERE = re.compile(r"(?<![\w.%])(ld|st|atom|red)\.(?!\S*\b(param|shared|local|global|const)\b)")
WAIT = "griddepcontrol.wait"

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing is compiled by the interpreter"),
    pytest.mark.skipif("TRITON_COMPILED" in os.environ, reason="this test compiles for chips of its own"),
]


@pytest.fixture(autouse=True)
def as_written(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("jaxtyping_packages", None):
        pytest.skip("Triton compiles kernels as they are written, not what checks their signatures")


def compiled(capability: int, only: Sequence[str] | None) -> list[tuple[str, bool, str]]:
    """Kernels of some cases: each one's name, whether it may come in early, and its code."""
    from kvengine.kernels.gpu.ahead import cases, only_compiling

    found = []
    for name, call in cases().items():
        if only is None or name in only:
            with only_compiling(capability) as kernels:
                call()
            found += [(f"{name}: {k.name}", k.metadata.launch_pdl, k.asm["ptx"]) for k in kernels]
    return found


def waits_first(code: str) -> bool:
    """Whether all threads wait, as nothing branches off before, and none reads or writes what others see until then."""
    body = re.sub(r"//[^\n]*", "", code[code.index("{", code.index(".entry")) :])
    first = ACCESS.search(body)
    before, found, _ = body.partition(WAIT)
    # In scopes of inline assembly a guard would stand between the last statement and the wait.
    unguarded = not re.search(r"@!?%?\w+\s*$|\b(bra|brx|ret|exit|call)\b", before)
    return bool(found) and unguarded and first is not None and len(before) < first.start() and not ANYWHERE.search(body)


def check(capability: int, only: Sequence[str] | None) -> dict[str, bool]:
    kernels = compiled(capability, only)
    for name, early, code in kernels:
        assert waits_first(code) if early else "griddepcontrol" not in code, name
    return {name: early for name, early, _ in kernels}


def test_kernels_of_a_step_wait_before_they_read() -> None:
    assert all(check(90, COMING).values())


def test_other_kernels_do_not_come_in_early() -> None:
    assert not any(check(90, ALONE).values())


def test_older_chips_know_nothing_of_it() -> None:
    assert not any(check(80, COMING[:2]).values())


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 90])
def test_every_kernel_waits_or_is_launched_alone(capability: int) -> None:
    assert any(check(capability, None).values()) == (capability >= 90)


@pytest.mark.parametrize(
    "late",
    [
        lambda wait, read: read + wait,
        lambda wait, read: f"@%p1 {wait}{read}",
        lambda wait, read: f"@%p1 bra $L;\n{wait}{read}",
        lambda wait, read: f"{wait}ld.b32 %r1, [%rd1];\n",
        lambda wait, read: read,
    ],
)
def test_code_that_reads_early_is_found(late: object) -> None:
    """The control."""
    read, wait = "ld.global.b32 %r1, [ %rd1 + 0 ];\n", f"{WAIT}; // dummy %r2\n"
    assert waits_first(f".entry k(.param .u64 x)\n{{\nld.param.b64 %rd1, [x];\n{wait}{read}ret;\n}}")
    assert callable(late) and not waits_first(f".entry k()\n{{\n{late(wait, read)}ret;\n}}")
