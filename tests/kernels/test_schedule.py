"""Where a warp waits: what a listing of compiled code says of it."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the disassembler comes with Triton")

from kvengine.kernels.gpu.schedule import Instruction, instructions, turn

LOAD, ADD = Instruction("@P0 LDG.E R2, desc[UR4][R4.64]", 2, 1, 7, 0), Instruction("FADD R1, R1, R2", 4, 7, 7, 0)
USE = ADD._replace(waits=1 << 1)


def listing(given: list[Instruction]) -> str:
    """As the disassembler writes it, between a label and a branch back to it."""
    lines = [".L_x_0:"]
    for i, x in enumerate(given):
        bits = x.stall | x.sets << 5 | x.frees << 8 | x.waits << 11
        lines += [
            f"        /*{16 * i:04x}*/                   {x.text} ;   /* 0x{i:016x} */",
            f"                                            /* 0x{bits << 41 | 0x1C0:016x} */",
        ]
    return "\n".join(lines)


def test_a_listing_is_read() -> None:
    given = [LOAD, USE, Instruction("@!P1 BRA `(.L_x_0)", 5, 7, 7, 0)]
    assert instructions(listing(given)) == given
    assert [x.name for x in given] == ["LDG", "FADD", "BRA"]


def test_what_is_used_at_once_is_waited_for() -> None:
    assert turn([LOAD, USE]) == (600 + 4, [598])
    assert turn([LOAD, *[ADD] * 100, USE]) == (600 + 4, [198])
    assert turn([LOAD, *[ADD] * 200, USE]) == (2 + 201 * 4, [])


def test_what_is_used_a_turn_later_is_not() -> None:
    assert turn([USE, LOAD, *[ADD] * 160]) == (6 + 640, [])
