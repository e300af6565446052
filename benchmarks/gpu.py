"""Everything that needs a GPU, in one run: the tests on the device, the kernels against their peers, prompts, a whole model, a
layer under every policy.

    python -P benchmarks/gpu.py --out benchmarks/results
    python -P benchmarks/gpu.py --only kernels --out ...    one part; parts: tests, kernels, prefill, model, tune, growth
    python -P benchmarks/gpu.py --only targets --out ...    what is reached, of files that were brought together (no GPU)
    python -P benchmarks/gpu.py --dry --out DRY              the same on a CPU, small: to see that every part runs

Writes `gpu_tests.txt`, `gpu_kernel_tests.txt`, `kernels_cuda.json`, `prefill_cuda.json`, `end_to_end.json`, what kernels and
model should reach: `gpu_targets.json`, which launches would be faster: `gpu_tune.json`, and a layer's steps: `gpu_batch_8.json`,
`gpu_growth.json`. Each file grows as its part runs, so a run that is cut off keeps what it found, and what the targets speak
of is measured before the rest. `kernels` and `model` take shapes that do not fit into the device's memory out, and name them. A
case, a candidate or a peer that fails or is missing is named too, and the others go on. Where a command may last only minutes,
give each part its own: by estimate `tests` take four, most of them for compiling, `kernels` six, `prefill` one, `model` seven,
`tune` two and `growth` six, on 16 cores. `--minutes` ends a script that takes longer, so that one that hangs leaves the others
their time. `--batches` and `--contexts` divide the longer two further; each such run wants an `--out` of its own, as it writes
its files anew.

What must be there: torch with CUDA, triton, transformers, numpy, safetensors, jaxtyping (and its wadler-lindig), pytest
and hypothesis; matplotlib for a picture, pytest-xdist to compile the tests' kernels on several cores, and pytest-timeout to
end a test whose kernel does not. No other dependency of the package is imported by any part (a test sees to that), so on a
machine with these nothing needs to be carried, and the package is installed by `pip install --no-deps --no-build-isolation
-e .` (setuptools >= 77). flash-attn and flashinfer are compared with where they are installed.

The results that are committed were measured part by part, on one H200; docs/gpu.md says of which commit, and what was not run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
LONG = 131072
PARTS = ("tests", "kernels", "prefill", "model", "tune", "growth")
KERNELS, PREFILL, MODEL = "kernels_cuda.json", "prefill_cuda.json", "end_to_end.json"
COLUMNS = {
    "decoding": "case", "batch": "batch", "tokens": "length", "ms": "ms:.3f", "GB/s": "gb_per_s:.0f",
    "× stock": "over_sdpa:.2f", "× our dense": "over_full:.2f", "× by bytes": "byte_ratio:.1f",
}  # fmt: skip
MOST_FAILURES = "40"
MARK = "pytest.mark." + "gpu"
SEVERAL = ["full", "lowrank(rank=160) + landmarks(budget=2048) + host(fields=('v',))", "shadowkv(budget=2048)",
           "quest(budget=2048)", "kivi(bits=4)"]  # fmt: skip
"""What a layer of eight sequences is measured with: among others ShadowKV, without and with what the last step has read."""
DRY = {
    "kernels": ["--device", "cpu", "--lengths", "2048", "--dtypes", "bfloat16", "--rounds", "2", "--cold", "1"],
    "prefill": ["--lengths", "512"],
    "model": ["--device", "cpu", "--shape", "tiny", "--lengths", "96", "--steps", "2", "--fuse"],
    "tune": ["--dry"],
    "growth": ["--lengths", "256", "--stacks", *SEVERAL],
}


def run(command: list[str], log: Path | None = None, minutes: float | None = None) -> int:
    """Run from the repository's root; the exit status. With `log`, what it prints goes to that file. What takes longer than
    `minutes` is ended."""
    print("$ python -P", shlex.join(command), flush=True)
    words, limit = [sys.executable, "-P", *command], None if minutes is None else 60 * minutes
    with contextlib.nullcontext() if log is None else log.open("w") as file:
        both = {} if file is None else {"stdout": file, "stderr": subprocess.STDOUT}
        try:
            status = subprocess.run(words, cwd=ROOT, timeout=limit, **both).returncode
        except subprocess.TimeoutExpired:
            status = 124
            print(f"ended after {minutes:g} minutes; what it has found is kept", flush=True)
    if log is not None:
        print(log.read_text()[-2000:], flush=True)
    return status


def tests(out: Path, dry: bool, minutes: float | None = None) -> None:
    """Refuse to measure on red tests. In a dry run they are only collected."""
    how = ["-q", "-p", "no:randomly", "-p", "no:benchmark", "-W", "default", *(["--collect-only"] if dry else [])]
    if not dry:
        how += ["--tb", "short", "--maxfail", MOST_FAILURES]  # what failed is printed at the end, which must be reached
        if importlib.util.find_spec("pytest_timeout"):  # a kernel that never ends cannot be interrupted: its process is
            how += ["--timeout", "240", "--timeout-method", "thread"]
        if importlib.util.find_spec("xdist"):
            how += ["-n", str(min(12, os.cpu_count() or 1))]  # most of the time goes into compiling
    marked = [str(p.relative_to(ROOT)) for p in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in p.read_text()]
    device = run(["-m", "pytest", *how, *marked, "-m", "gpu"], out / "gpu_tests.txt", minutes)
    without = "--ignore=tests/kernels/test_triton.py"  # the interpreter and other targets: nothing of this device
    known = ["-m", "pytest", *how, "tests/kernels", "-k", "triton", without]
    kernels = run(known, out / "gpu_kernel_tests.txt", minutes)
    fine = (0, 5) if dry else (0,)  # 5: nothing was collected
    if device not in fine or kernels not in fine:
        sys.exit(
            "the tests failed on this GPU; see gpu_tests.txt and gpu_kernel_tests.txt. Nothing was measured: "
            "--only kernels model measures all the same"
        )


def measure(out: Path, args: argparse.Namespace) -> None:
    """Run the benchmarks."""
    cold = ["--rounds", "50", "--cold", str(1 << 30)]  # many times what any last-level cache holds
    shapes = ["--device", "cuda", "--batches", *args.batches, "--lengths", *args.lengths, "--dtypes", "bfloat16", *cold]
    model = ["--device", "cuda", "--lengths", args.contexts]
    prompts = ["--device", "cuda", "--lengths", f"8192,32768,{LONG}"]
    layer, several = ["--device", "cuda", "--lengths", f"{LONG}"], ["--device", "cuda", "--lengths", "122880"]
    several += ["--batch", "8", "--budget", "2048", "--stacks", *SEVERAL]
    parts = [
        ("kernels", "kernels", KERNELS, shapes),
        ("prefill", "prefill", PREFILL, prompts),
        ("model", "end_to_end", MODEL, model),
        ("tune", "gpu_tune", "gpu_tune.json", []),
        ("growth", "growth", "gpu_batch_8.json", several),
        ("growth", "growth", "gpu_growth.json", layer),
    ]
    failed = []
    for part, script, file, options in parts:
        if part in args.only:
            words = [f"benchmarks/{script}.py", "--out", str(out / file), *(DRY[part] if args.dry else options)]
            failed += words[:1] if run(words, minutes=args.minutes) else []
            targets(out, "python -P benchmarks/gpu.py")  # now, as the next part may be cut off
    if failed:
        sys.exit(f"{', '.join(dict.fromkeys(failed))} failed; what was measured is in {out}")


def kernel_targets(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str, float]]:
    """What the kernels should reach, and did, wherever it was measured."""
    for batch, length in dict.fromkeys((row["batch"], row["length"]) for row in rows):
        at = {row["case"]: row for row in rows if (row["batch"], row["length"]) == (batch, length)}
        where, there = f"batch {batch}, {length} tokens", at.keys().__contains__  # a case that failed is not
        if not there("full, pages"):
            continue
        full = at["full, pages"]
        if batch >= 16 or (batch == 1 and length >= LONG):
            moved = full["of_copy"] / 2  # there bytes copied count once, but a chip's copy reads them and writes them
            wanted = f">= {0.9 if batch >= 16 else 0.67}"
            yield f"dense pages, share of a copy's reads and writes ({where})", wanted, moved
        if "flashinfer" in at:
            yield f"dense pages, over FlashInfer ({where})", ">= 1", at["flashinfer"]["ms"] / full["ms"]
        if length >= LONG and there("quest 2048"):
            yield f"quest 2048, over our dense ({where})", ">= 9", at["quest 2048"]["over_full"]
        for kivi in ("kivi 4 bits", "kivi 4 bits, groups of 64", "kivi 4 bits, groups of 128"):
            if length >= LONG and there(kivi):
                yield f"{kivi}, over our dense ({where})", ">= 3", at[kivi]["over_full"]
        if batch == 8 and length >= LONG and there("low-rank keys 2048") and there("2048 values from the host"):
            apart = at["low-rank keys 2048"]["ms"] + at["2048 values from the host"]["ms"]  # not even overlapped
            yield f"low-rank keys and values from the host, over our dense ({where})", "> 1", full["ms"] / apart


def model_targets(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str, float]]:
    """What a whole model should reach, and did."""
    for row in rows:
        if row["context"] >= LONG and row["how"].startswith("replayed") and "speedup" in row:
            yield f"{row['what']} {row['how']}, over the best stock ({row['context']} tokens)", ">= 2.2", row["speedup"]


def draw(measured: Path) -> Path | None:
    """A picture beside what the kernels took; none where there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        print("no picture is drawn: matplotlib is not installed")
        return None
    picture = measured.with_suffix(".png")
    if picture.exists() and picture.stat().st_mtime_ns >= measured.stat().st_mtime_ns:
        return picture  # drawn after an earlier part
    return None if run(["benchmarks/plot_kernels.py", str(measured), str(picture)]) else picture


def targets(out: Path, command: str) -> None:
    """Write and print what should be reached beside what is."""
    kernels, model = (
        json.loads(file.read_text()) if (file := out / name).exists() else {} for name in (KERNELS, MODEL)
    )
    found = [*kernel_targets(kernels.get("rows", [])), *model_targets(model.get("rows", []))]
    rows = [{"what": what, "wanted": wanted, "reached": reached} for what, wanted, reached in found]
    for row in rows:
        print(f"{row['what']:70} {row['wanted']:>8} {row['reached']:8.2f}")
    columns = {"on a GPU": "what", "wanted": "wanted", "reached": "reached:.2f"}
    result = {"command": command, "machine": (model or kernels).get("machine"), "columns": columns, "rows": rows}
    (out / "gpu_targets.json").write_text(json.dumps(result, indent=1) + "\n")
    if kernels:  # as a table of the documentation
        where = f"{kernels.get('machine')}, torch {kernels.get('torch')}, commit {kernels.get('commit')}; medians"
        keys = [column.partition(":")[0] for column in COLUMNS.values()]
        some = [
            row
            for row in kernels.get("rows", [])
            if row["length"] == LONG or (row["batch"], row["length"]) == (32, 4096)
        ]
        short = [{key: row.get(key) for key in keys} for row in some]  # the other shapes are in the file
        shown = {"command": f"{command} --only kernels", "machine": where, "columns": COLUMNS, "rows": short}
        if (picture := draw(out / KERNELS)) is not None:
            shown["pictures"] = {"Bandwidth against length, and speed-up beside the ratio of bytes": picture.name}
        (out / "gpu_kernels.json").write_text(json.dumps(shown, indent=1) + "\n")


def main() -> None:
    """Test, measure, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results")
    parser.add_argument("--batches", nargs="+", default=["1", "8", "32"], help="sequences")
    parser.add_argument("--lengths", nargs="+", default=["4096", "8192", "32768", str(LONG), "262144"], help="tokens")
    parser.add_argument("--contexts", default=f"{LONG},8192", help="of the whole model. Tokens, with commas")
    parser.add_argument("--only", nargs="+", choices=(*PARTS, "targets"), default=PARTS, help="parts to run")
    parser.add_argument("--minutes", type=float, help="that a script may take; what it has found by then is kept")
    parser.add_argument("--dry", action="store_true", help="every part on a CPU, small; tests are only collected")
    args = parser.parse_args()
    if args.only == ["targets"]:
        targets(args.out.resolve(), "python -P benchmarks/gpu.py")
        return
    if not args.dry and not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing was run (--dry runs every part on a CPU, small)")
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    if "tests" in args.only:
        tests(out, args.dry, args.minutes)
    if args.only != ["tests"]:
        measure(out, args)


if __name__ == "__main__":
    main()
