"""Where a warp waits in a kernel's loop: read out of the compiled code, on a machine without a GPU.

    python -P -m kvengine.kernels.gpu.schedule zipcache "kivi, 4 bits"

Each instruction carries how many cycles pass before the next one of its warp, and for which earlier ones, of no known duration,
it waits: 21 of its 128 bits (Jia et al., "Dissecting the NVIDIA Volta GPU architecture via microbenchmarking", 2018; unchanged up
to Hopper). So a turn of a loop can be timed, if what memory takes is assumed. It is one warp's time, alone: others fill its gaps
where there are any, and take turns with it where not. What one sees is what waits: of 32 tokens of ZipCache a warp spent 13 of 16
thousand cycles on twenty loads of two bytes, which the compiler does not ask for ahead.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvengine.kernels.gpu.ahead import cases, only_compiling
from kvengine.kernels.gpu.used import dump, inner_loops

TAKES = {"LDG": 600, "LDS": 30, "LDSM": 33, "SHFL": 25, "MUFU": 22, "REDUX": 24}
"""Cycles until a result is there: a GPU's memory under load, shared memory, other lanes. Others of no known duration: SHORT."""
READS = {"LDGSTS": 20}
"""Cycles until the registers are read that an instruction's addresses are in; others: SHORT."""
SHORT = 15
LONG = 150
"""Cycles of a wait that is worth a word."""


class Instruction(NamedTuple):
    """`stall`: cycles until the next. `sets`, `frees`: the barrier for its result, and for its operands; 7: none. `waits`: a bit
    for each barrier."""

    text: str
    stall: int
    sets: int
    frees: int
    waits: int

    @property
    def name(self) -> str:
        return re.sub(r"^@!?U?P\w+ ", "", self.text).split()[0].split(".")[0]


class Loop(NamedTuple):
    """A kernel's longest loop. `waits`: how many cycles each long wait of a turn takes."""

    case: str
    kernel: str
    warps: int
    instructions: int
    cycles: int
    waits: list[int]


def loops(capability: int, only: Sequence[str]) -> Iterator[Loop]:
    """Those of the kernels of some of the cases that are compiled ahead of time."""
    calls = cases()
    for case in only:
        with only_compiling(capability) as compiled:
            calls[case]()
        for kernel in compiled:
            yield timed(case, kernel)


def timed(case: str, kernel: Any) -> Loop:
    assembly = dump(kernel.asm["cubin"], "nvdisasm", "--print-code", "--print-instruction-encoding")
    _, found = inner_loops(assembly)
    start, end = found[0] if found else (0, 0)
    loop = instructions(assembly)[start:end]
    return Loop(case, kernel.name, kernel.metadata.num_warps, len(loop), *turn(loop))


def instructions(assembly: str) -> list[Instruction]:
    """Two lines each: the text with the lower half of the code, and the upper half."""
    found, text = [], ""
    for line in assembly.splitlines():
        if first := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);?\s+/\* 0x[0-9a-f]{16} \*/", line):
            text = first[1].strip(" ;")
        elif (second := re.match(r"\s+/\* 0x([0-9a-f]{16}) \*/", line)) and text:
            bits = int(second[1], 16) >> 41
            found.append(Instruction(text, bits & 15, bits >> 5 & 7, bits >> 8 & 7, bits >> 11 & 63))
            text = ""
    return found


def turn(loop: Sequence[Instruction]) -> tuple[int, list[int]]:
    """Cycles of a turn, once the loop runs, and its long waits."""
    done, clock, cycles, waits = [0] * 8, 0, 0, list[int]()
    for _ in range(3):
        cycles, waits = -clock, []
        for x in loop:
            wait = max(0, max((done[i] - clock for i in range(6) if x.waits >> i & 1), default=0))
            waits += [wait] if wait >= LONG else []
            clock += wait
            done[x.sets] = max(done[x.sets], clock + TAKES.get(x.name, SHORT))
            done[x.frees] = max(done[x.frees], clock + READS.get(x.name, SHORT))
            clock += max(1, x.stall)
        cycles += clock
    return cycles, waits


def main() -> None:
    """Compile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "case", nargs="+", choices=sorted(cases()), metavar="CASE", help="as kernels_aot.json names them"
    )
    parser.add_argument("--capability", type=int, default=90)
    parsed = parser.parse_args()
    for x in loops(parsed.capability, parsed.case):
        print(
            f"{x.case:30} {x.kernel:18} {x.warps} warps {x.instructions:5} instructions {x.cycles:6} cycles, waits {x.waits}"
        )


if __name__ == "__main__":
    main()
