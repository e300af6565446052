"""Everything that needs a GPU, in one run: the tests on the device, then the kernels against their peers.

    python -P benchmarks/gpu.py --out benchmarks/results

Writes `kernels_cuda.json`, `gpu_tests.txt` and `gpu_kernel_tests.txt`. Not run yet: no GPU was at hand when it was
written, and every figure for a GPU in this project is "not yet measured" until its results are committed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def run(command: list[str], log: Path | None = None) -> int:
    """Run from the repository's root; the exit status. With `log`, what it prints also goes to that file."""
    done = subprocess.run([sys.executable, "-P", *command], cwd=ROOT, capture_output=log is not None, text=True)
    if log is not None:
        log.write_text(done.stdout + done.stderr)
        print(done.stdout[-2000:])
    return done.returncode


def main() -> None:
    """Refuse to measure on red tests."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--batches", nargs="+", default=["1", "8", "32"], help="sequences")
    parser.add_argument("--lengths", nargs="+", default=["4096", "8192", "32768", "131072", "262144"], help="tokens")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing was run")
    out = args.out.resolve()
    tests = run(["-m", "pytest", "-q", "tests", "-m", "gpu"], out / "gpu_tests.txt")
    kernels = run(["-m", "pytest", "-q", "tests/kernels", "-k", "triton"], out / "gpu_kernel_tests.txt")
    if kernels or tests not in (0, 5):  # 5: no test is marked so
        sys.exit("the tests failed on this GPU; see gpu_tests.txt and gpu_kernel_tests.txt. Nothing was measured")
    shapes = ["--batches", *args.batches, "--lengths", *args.lengths, "--dtypes", "bfloat16"]
    cold = ["--rounds", "50", "--cold", str(4 << 30)]  # more than any last-level cache
    sys.exit(
        run(["benchmarks/kernels.py", "--device", "cuda", "--out", str(out / "kernels_cuda.json"), *shapes, *cold])
    )


if __name__ == "__main__":
    main()
