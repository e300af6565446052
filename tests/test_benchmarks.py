"""Benchmarks that tables are made from still run, on as little as they can be given, and write what they promise."""

import doctest
import importlib.util
import json
import os
import subprocess
import sys
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from layout import ROOT

# Words, of which OUT is a file to be written, FOLDER the folder that it is in, and MODEL the bundled one's.
RUNS = {
    "ann": "--tokens 1024 --queries 2 --out OUT",
    "cachegen": "--tokens 1024 --out FOLDER",
    "cachegen_quality": "--contexts 1 --length 512 --out FOLDER",
    "end_to_end": "--shape tiny --lengths 512 --steps 4 --device cpu --out OUT",
    "full_vs_stock": "--rounds 1 --threads 1 --length 64 --out OUT",
    "gpu_budget": "--out OUT",
    "growth": "--lengths 2048 --threads 1 --out OUT",
    "kernels": "--device cpu --lengths 2048 --rounds 2 --cold 1 --dtypes float32 --out OUT",
    "long_answer": "--length 2048 --contexts 1 --prompt 1900 --policies streaming(recent=100) --out OUT",
    "parts": "--length 1024 --contexts 1 --parts 512 --policies snapkv(budget=512) --out OUT",
    "policies": "--lengths 2048 --threads 1 --out OUT",
    "prefill": "--lengths 1024 --out OUT",
    "prefix": "--lengths 512 --out FOLDER",
    "quality": "--questions 1 --round 1 --length 512 --policies full;kivi;quest(budget=0.5) --out FOLDER/run --results FOLDER",
    "speculate": "MODEL none FOLDER --lengths 768 --prompts 1 --new 4",
    "speculate_gammas": "MODEL none FOLDER --length 768 --prompts 2 --new 8",
}
WITH_OTHERS = {"gpu", "gpu_tune", "kinds", "kvpress_table", "peers", "plot_kernels", "where"}
"""Run by those above, by tests/test_gpu_script.py or below."""
NOT_HERE = {"evaluation", "kvpress_compare", "memory"}  # minutes each, and another environment


def test_every_script_is_known() -> None:
    assert {path.stem for path in (ROOT / "benchmarks").glob("*.py")} == {*RUNS, *WITH_OTHERS, *NOT_HERE}


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["kinds", "kvpress_table"])
def test_docstring_examples(name: str) -> None:
    assert doctest.testmod(script(name)).failed == 0


def test_sides_are_compared_pair_by_pair(tmp_path: Path) -> None:
    """And a method that was not measured now keeps its rows."""

    def cell(method: str, context: int, theirs: float, mine: float) -> dict[str, Any]:
        side = {"scores": [1.0, 0.0], "bytes": 1000, "after": 1000, "held": 8, "compress": [1.0, 1.0]}
        sides = {"kvpress": side | {"decode": [theirs] * 2}, "kvengine": side | {"decode": [mine] * 2, "bytes": 500}}
        return {"length": 64, "method": method, "removed": 0.5, "context": context, "stock": {"decode": [1.0]}, **sides}

    out, tables = tmp_path / "found.json", script("kvpress_table")
    rows = [cell(method, context, 2.0, 1.0) for method in ("a", "b") for context in range(4)]
    tables.write(rows, ["a", "b"], {"command": "c", "machine": "m"}, out)
    tables.write(
        [cell("b", context, 1.0, 2.0) for context in range(4)], ["a", "b"], {"command": "c", "machine": "m"}, out
    )
    for file in (out, tmp_path / "found_methods.json"):
        found = json.loads(file.read_text())
        assert [row["method"] for row in found["rows"]] == ["a", "b"]
        assert [row["decode_verdict"][0] for row in found["rows"]] == ["<", ">"]
        assert [row["bytes_ratio"] for row in found["rows"]] == [0.5, 0.5]
        assert {column.partition(":")[0] for column in found["columns"].values()} <= found["rows"][0].keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    places = {"OUT": out, "FOLDER": tmp_path, "MODEL": ROOT / "evals/models/tiny"}
    line = reduce(lambda text, place: text.replace(place, str(places[place])), places, RUNS[name])
    results, words = committed(), line.split()
    command = [sys.executable, "-P", str(ROOT / "benchmarks" / f"{name}.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    written = [out] if "OUT" in RUNS[name] else list(tmp_path.glob("*.json"))
    assert written and all(json.loads(path.read_text()) for path in written)
    assert committed() == results, "what is committed is another run's"


def committed() -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (ROOT / "benchmarks/results").iterdir()}
