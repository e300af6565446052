"""Benchmarks that tables are made from still run, on as little as they can be given, and write what they promise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from layout import ROOT

pytestmark = pytest.mark.slow

# Words, of which OUT is a file to be written and FOLDER the folder that it is in.
RUNS = {
    "ann": "--tokens 1024 --queries 2 --out OUT",
    "cachegen": "--tokens 1024 --out FOLDER",
    "cachegen_quality": "--contexts 1 --length 512 --out FOLDER",
    "end_to_end": "--shape tiny --lengths 512 --steps 4 --device cpu --out OUT",
    "growth": "--lengths 2048 --threads 1 --out OUT",
    "kernels": "--device cpu --lengths 2048 --rounds 2 --cold 1 --dtypes float32 --out OUT",
    "long_answer": "--length 2048 --contexts 1 --prompt 1900 --policies streaming(recent=100) --out OUT",
    "parts": "--length 1024 --contexts 1 --parts 512 --policies snapkv(budget=512) --out OUT",
    "policies": "--lengths 2048 --threads 1 --out OUT",
    "prefill": "--lengths 1024 --out OUT",
    "prefix": "--lengths 512 --out FOLDER",
}
ELSEWHERE = {
    "evaluation", "full_vs_stock", "gpu", "gpu_budget", "gpu_tune", "kinds", "kvpress_compare", "memory", "peers", "plot_kernels",
    "quality", "speculate", "speculate_gammas", "where",
}  # fmt: skip


def test_every_script_is_known() -> None:
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py")} == {*RUNS, *ELSEWHERE}


@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    words = [{"OUT": str(out), "FOLDER": str(tmp_path)}.get(word, word) for word in RUNS[name].split()]
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / f"{name}.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    written = [out] if "OUT" in RUNS[name] else list(tmp_path.glob("*.json"))
    assert written and all(json.loads(path.read_text()) for path in written)
