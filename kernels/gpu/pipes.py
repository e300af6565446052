"""Which units of a multiprocessor the instructions of a compiled kernel take, and for how long: read out of the compiled code.

    python -P benchmarks/gpu_budget.py --out benchmarks/results/gpu_budget.json

A quarter of a Hopper multiprocessor issues one instruction of a warp a cycle, but few of its units take one that often:

    issue     every instruction, one slot
    ALU       16 lanes: integers but for their products, logic, shifts, bytes, comparisons, choices, halves packed; 2 cycles
    FMA       32 lanes in two halves: float32, and pairs of float16, which take both halves; products of integers run in one of
              them, 2 cycles
    tensor    a product of 16 x 8 x 16: 2048 products, at 63 % of 512 a cycle, as what is not asked for by four warps together
              does not reach the rest (Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via
              Microbenchmarking", 2024)
    LSU       what goes to memory, shared memory and other lanes: one unit for all four quarters, 128 bytes a cycle, so that each
              such 128 bytes are four cycles of a quarter
    XU        4 lanes: exponentials, reciprocals, bits counted, whole numbers of other formats; 8 cycles

Rates are those of NVIDIA's CUDA C++ Programming Guide ("Throughput of Native Arithmetic Instructions", compute capability 9.0),
units those of its Nsight Compute documentation ("Pipelines"); that pairs of float16 take both halves of FMA its forum says
(https://forums.developer.nvidia.com/t/separate-cuda-core-pipeline-for-fp16-and-fp32/302018/7). Left out: conflicts in shared
memory, operands that products of four warps read there, the uniform datapath, branches. So a figure here is the least that a
kernel takes, and no measurement.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvengine.errors import KernelError

UNITS = ("issue", "ALU", "FMA", "tensor", "LSU", "XU")
PRODUCT = 2048 / (512 * 0.63)
"""Cycles of 16 x 8 x 16."""

ALU = frozenset(
    "BMSK CS2R F2FP FMNMX FSEL FSET FSETP HMNMX2 HSET2 HSETP2 I2FP IABS IADD3 ISETP LEA LOP3 MOV P2R PLOP3 PRMT R2P R2UR SEL "
    "SGXT SHF VABSDIFF VIADD VIADDMNMX VIMNMX VOTE".split()
)
FLOAT, PAIR, WHOLE = (
    frozenset(["FADD", "FFMA", "FMUL"]),
    frozenset(["HADD2", "HFMA2", "HMUL2"]),
    frozenset(["IMAD", "IMUL"]),
)
MEMORY = frozenset("LDG LDGSTS LDL LDS STG STL STS".split())
XU = frozenset("BREV F2F F2I FLO I2F MUFU POPC REDUX".split())
ELSEWHERE = frozenset(
    "ACQBULK BAR BRA BREAK BSSY BSYNC DEPBAR ENDCOLLECTIVE EXIT FENCE LDC LDGDEPBAR MEMBAR NOP PREEXIT S2R S2UR WARPGROUP "
    "WARPSYNC YIELD".split()
)
"""What takes a slot, and none of the units above."""


def taken(instructions: Iterable[str]) -> dict[str, float]:
    """Cycles of a quarter of a multiprocessor, of each of its `UNITS`, that one warp's instructions (`LOP3.LUT R1, ...`) take.

    Raises `KernelError` for an instruction that is not known here, as it would be counted wrong.
    """
    cycles, heavy = dict.fromkeys(UNITS, 0.0), 0
    for text in instructions:
        name = re.sub(r"^@!?U?P\w+ ", "", text).split()[0].rstrip(";")
        kind = name.split(".")[0]
        cycles["issue"] += 1
        if kind in ALU:
            cycles["ALU"] += 2
        elif kind in FLOAT | PAIR | WHOLE:
            cycles["FMA"] += 1
            heavy += 0 if kind in FLOAT else 1 if kind in PAIR else 2
        elif kind in XU:
            cycles["XU"] += 8
        elif kind in ("HMMA", "HGMMA"):
            cycles["tensor"] += _product(name)
        elif kind in MEMORY or kind in ("LDSM", "STSM", "SHFL"):
            cycles["LSU"] += 4 * _lines(name)
        elif kind not in ELSEWHERE and not re.match(r"U[A-Z]", kind):
            raise KernelError(f"{name}: not known which unit runs this; name it in {__name__}")
    return cycles | {"FMA": max(cycles["FMA"], heavy)}


def _product(name: str) -> float:
    """Of `HMMA.16816...`, a warp's own, or of a quarter of `HGMMA.64x16x16...`, which four warps ask for together."""
    if wide := re.match(r"HGMMA\.64x(\d+)x", name):
        return int(wide[1]) / 2
    return PRODUCT if name.startswith("HMMA.16816.") or ".TF32" in name else PRODUCT / 2


def _lines(name: str) -> int:
    """How often 128 bytes go through: what lanes ask for, up to 16 bytes each, or how many matrices of 128 bytes."""
    last = name.rsplit(".", 1)[1] if "." in name else ""
    if name.startswith(("LDSM", "STSM")):
        return int(last) if last in ("2", "4") else 1
    return {"64": 2, "128": 4}.get(last, 1)
