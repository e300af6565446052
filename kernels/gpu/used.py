"""What a compiled Triton kernel uses: registers, shared memory, instructions."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton


class Compiled(NamedTuple):
    """One kernel as compiled for one call."""

    case: str
    kernel: str
    target: str
    registers: int
    """Per thread, of 255."""
    stack: int
    """Bytes per thread spilled to local memory."""
    shared: int
    """Bytes per block."""
    warps: int
    instructions: int
    loop: int
    """Instructions of the longest loop that holds no other; each warp issues them once a turn."""
    second: int
    """Of the next longest one."""


def report(case: str, kernel: Any, capability: int) -> Compiled:
    """What this one uses, by the tools that come with Triton."""
    usage = dump(kernel.asm["cubin"], "cuobjdump", "--dump-resource-usage")
    used = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", usage)}
    count, loops = inner_loops(dump(kernel.asm["cubin"], "nvdisasm", "--print-code"))
    longest, second, *_ = (*(end - start for start, end in loops), 0, 0)
    return Compiled(
        case, kernel.name, f"sm_{capability}", used["REG"], used["STACK"], kernel.metadata.shared,
        kernel.metadata.num_warps, count, longest, second,
    )  # fmt: skip


def dump(cubin: bytes, tool: str, *options: str) -> str:
    """What one of the tools that come with Triton says."""
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, *options, file.name], check=True, capture_output=True, text=True).stdout


def inner_loops(assembly: str) -> tuple[int, list[tuple[int, int]]]:
    """How many instructions there are, and where loops that hold no other start and end, the longest first: what lies between a
    label and a branch back to it."""
    count, labels, loops = 0, dict[str, int](), list[tuple[int, int]]()
    for line in assembly.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = count
        elif re.match(r"\s+/\*[0-9a-f]{4,}\*/", line):
            count += 1
            back = re.search(r"BRA\b.*?(\.L_x_\d+)", line)
            if back and back[1] in labels:
                loops.append((labels[back[1]], count))
    # What jumps back into a loop from behind its end is no loop: code for a warp whose lanes have parted.
    loops = [a for a in loops if not any(b[0] < a[0] < b[1] < a[1] for b in loops)]
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return count, sorted((a for a in inner if a[1] - a[0] > 1), key=lambda a: a[0] - a[1])
