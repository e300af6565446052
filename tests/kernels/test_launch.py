"""Kernels launched as on a GPU: Triton's own launcher, compiled and called, over a driver that only looks at the launch.

Neither the interpreter nor compiling ahead of time goes this way: arguments are packed, tensors' addresses asked for, and
shared memory and the grid are compared with what a chip has.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support_driver import needed, said

CASES = ["kivi, 4 bits", "bounds", "fetch"]
RUN = """
from kvengine.kernels.gpu import compiling_for
from kvengine.kernels.gpu.ahead import cases
from kvengine.kernels.gpu.stream import join_kernel
found, early = {}, {}
compiling_for.set(90)
for name, call in cases().items():
    if not given or name in given:
        before = driver_library.launched(), driver_library.launched_early()
        call()
        found[name] = driver_library.launched() - before[0]
        early[name] = driver_library.launched_early() - before[1]
x, refused = torch.zeros(4), False
options = dict(SINKS=False, BOTH=False, LENGTHS=False, LENGTHS2=False, ROWS=1, BLOCK=16, BLOCK2=16, DIM=1, BLOCK_D=1,
               SHARES=32, TIMES=1, TIMES2=1, TURNED=0, PLACED=False, enable_fp_fusion=True, PDL=False)
try:  # the control, behind our own refusal of so many blocks
    join_kernel.launch((1, 65536), *(x, x, x, x, 16, 1) * 2, *(x,) * 5, 1, 1, **options)
except RuntimeError:
    refused = True
print(json.dumps({"found": found, "early": early, "refused": refused and driver_library.not_launched() == 1}))
"""

pytestmark = needed


def launched(tmp_path: Path, only: list[str]) -> tuple[dict[str, int], dict[str, int]]:
    """How many launches each case makes, and how many of them may begin before what was launched before has ended."""
    told = said(RUN, only, tmp_path)
    assert told["refused"]
    return told["found"], told["early"]


def test_some_kernels_are_launched(tmp_path: Path) -> None:
    found, early = launched(tmp_path, CASES)
    assert set(found) == set(CASES) and all(found.values()), found
    assert early == found | {"fetch": 0}


@pytest.mark.slow
def test_every_kernel_is_launched(tmp_path: Path) -> None:
    found, _ = launched(tmp_path, [])
    assert set(CASES) < set(found) and all(found.values()), found
