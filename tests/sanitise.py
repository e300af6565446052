"""Run tests with the C kernels under gcc's sanitizers: reads and writes outside of a buffer, and what C leaves undefined.

    python tests/sanitise.py tests/kernels -k "not triton"

Tensors come from `malloc`, so the memory around each is watched too. Not seen: inline assembly, masked loads, and instructions
that ask for memory ahead. Ends with status 1 if something was found, and prints where.
"""

import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "build" / "sanitised"
# The last -O counts: at -O3 some files take gcc minutes, watched, and at -O1 nothing is multiplied and added in one.
FLAGS = "-O2 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fsanitize-recover=address,undefined"
ADDRESS = "detect_leaks=0:halt_on_error=0:detect_odr_violation=0:alloc_dealloc_mismatch=0"


def main(arguments: list[str]) -> int:
    gcc = shutil.which("gcc")
    if gcc is None:
        print("gcc is needed, for its sanitizers", file=sys.stderr)
        return 2
    shutil.rmtree(FOLDER / "found", ignore_errors=True)
    (FOLDER / "found").mkdir(parents=True)
    compiler = FOLDER / f"cc-{zlib.crc32(FLAGS.encode()):x}"  # by whose name libraries are told apart
    compiler.write_text(f'#!/bin/sh\nexec {gcc} "$@" {FLAGS}\n')
    compiler.chmod(0o755)
    own = [
        subprocess.check_output([gcc, f"-print-file-name=lib{name}.so"], text=True).strip()
        for name in ("asan", "ubsan")
    ]
    reports = f"log_path={FOLDER / 'found' / 'report'}"
    watched = os.environ | {
        "CC": str(compiler), "XDG_CACHE_HOME": str(FOLDER), "OMP_NUM_THREADS": "1", "PYTHONMALLOC": "malloc",
        "LD_PRELOAD": ":".join(own), "ASAN_OPTIONS": f"{ADDRESS}:{reports}",
        "UBSAN_OPTIONS": f"print_stacktrace=1:halt_on_error=0:{reports}",
    }  # fmt: skip
    # Built apart, as what is preloaded would watch the compiler too; without it the library then refuses to be loaded.
    load = [sys.executable, "-P", "-c", "from kvengine.kernels.cpu.library import needed; needed()"]
    subprocess.run(load, env={**watched, "LD_PRELOAD": ""}, capture_output=True)
    if subprocess.run(load, env=watched).returncode:
        print("the C kernels could not be built with sanitizers, so nothing would be watched", file=sys.stderr)
        return 2
    status = subprocess.run([sys.executable, "-P", "-m", "pytest", *arguments], env=watched).returncode
    found = [path.read_text(errors="replace") for path in sorted((FOLDER / "found").iterdir())]
    for text in found:
        print(text[:4000])
    return 1 if found else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
