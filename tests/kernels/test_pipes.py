"""Which units instructions of compiled code take: against what NVIDIA's tables give of each a cycle and multiprocessor."""

from __future__ import annotations

import pytest

from kvengine.errors import KernelError
from kvengine.kernels.gpu.pipes import UNITS, taken

LANES = {
    # Results a cycle and multiprocessor, of which a warp's instruction has 32.
    "LOP3.LUT R1, R2, 0xf, RZ, 0xc0, !PT": ("ALU", 64),
    "@!P0 PRMT R1, R2, 0x4341, RZ": ("ALU", 64),
    "ISETP.GT.AND P0, PT, R1, RZ, PT": ("ALU", 64),
    "FADD R1, R2, R3": ("FMA", 128),
    "HFMA2.MMA R1, R2, R3, R4": ("FMA", 128),  # pairs, each of two results
    "@P1 IMAD.WIDE.U32 R2, R3, 0x4, R4": ("FMA", 64),
    "MUFU.EX2 R1, R2": ("XU", 16),
    "POPC R1, R2": ("XU", 16),
    "SHFL.IDX PT, R1, R2, R3, 0x1f": ("LSU", 32),
    "LDS R1, [R2]": ("LSU", 32),  # four bytes each: all banks
}


@pytest.mark.parametrize("text", LANES)
def test_an_instruction_takes_its_unit_as_long_as_its_lanes_do(text: str) -> None:
    unit, lanes = LANES[text]
    assert taken([text]) == dict.fromkeys(UNITS, 0.0) | {"issue": 1, unit: 4 * 32 / lanes}


def test_what_is_wide_goes_through_shared_memory_in_several_turns() -> None:
    texts = [
        "LDS.128 R4, [R2]",
        "LDSM.16.M88.4 R4, [R2]",
        "LDSM.16.M88 R4, [R2]",
        "LDGSTS.E.BYPASS.128 [R1], [R2]",
        "STS.U8 [R1], R2",
    ]
    assert [taken([text])["LSU"] / 4 for text in texts] == [4, 4, 1, 4, 1]


def test_halves_of_the_fma_unit_share_their_work() -> None:
    """Floats go to either half, a product of whole numbers to one of them alone, a pair of float16 to both."""
    assert taken(["FADD R1, R2, R3", "IMAD R1, R2, R3, R4"])["FMA"] == 2
    assert taken(["FADD R1, R2, R3"] * 3 + ["IMAD R1, R2, R3, R4"])["FMA"] == 4
    assert taken(["HMUL2 R1, R2, R3", "IMAD R1, R2, R3, R4"])["FMA"] == 3


def test_products() -> None:
    one = taken(["HMMA.16816.F32.BF16 R4, R8, R10, R4"])["tensor"]
    assert 4 < one < 8  # cycles of an H100's tensor core at its rate, and of an A100's
    assert taken(["HMMA.1688.F32 R4, R8, R10, R4"])["tensor"] == one / 2
    assert taken(["HGMMA.64x16x16.F32.BF16 R4, gdesc[UR4], R4"])["tensor"] == 8  # 64 x 16 x 16 products, 2048 a cycle


def test_what_only_takes_a_slot() -> None:
    texts = ["BRA `(.L_x_0)", "UIADD3 UR4, UR5, UR6, URZ", "@!UP0 ULDC.64 UR4, c[0x0][0x0]", "NOP"]
    assert taken(texts) == dict.fromkeys(UNITS, 0.0) | {"issue": 4}


def test_what_is_not_known_is_not_counted_wrong() -> None:
    with pytest.raises(KernelError, match=r"DADD.*kernels\.gpu\.pipes"):
        taken(["DADD R2, R4, R6"])
