"""Where and with what the scripts of this folder measure."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from pathlib import Path

import torch

from kvengine.kernels import dispatch


def last_level() -> int:
    """Bytes of the processor's last-level cache; 128 MiB where the system does not say."""
    sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(file.read_text().strip().removesuffix("K")) << 10 for file in sizes), default=128 << 20)


WIDEST = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 with bfloat16", "avx512f": "AVX-512", "avx2": "AVX2"}


def processor() -> str:
    """The processor's name, and the widest of what it multiplies with, in brackets; nothing where the system does not say."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    flags = said.get("flags", "").split()
    known = [said[name] for name in ("model name",) if name in said]
    known += [label for flag, label in WIDEST.items() if flag in flags][:1]
    return f" ({', '.join(known)})" if known else ""


def machine(device: str, cpu_time: bool) -> dict[str, str]:
    """Where and with what this was measured."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip() if shutil.which("git") else ""
    cpu = processor().strip(" ()") or platform.processor()
    chip = torch.cuda.get_device_name() if device == "cuda" else f"{cpu}, {torch.get_num_threads()} threads"
    return {
        "commit": commit,
        "machine": chip,
        "clock": "processor" if cpu_time else "wall",
        "torch": torch.__version__,
        "backends": json.dumps(dispatch.info()),
    }
